"""Set torch's default dtype for a while: any, a step's in its backward pass, an optimizer's in that pass."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch.plugins import Precision

_OUTSIDE: list[torch.dtype] = []
"""Default dtypes outside of the backward passes that run."""


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set the default dtype within the block, and the former one afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def types_of_the_step(precision: Precision) -> Iterator[None]:
    """Set the step's default dtype during a backward pass, in which blocks may be recomputed.

    Lightning's precisions "64-true", "16-true" and "bf16-true" set it in the forward pass only. A tensor that a block
    creates without a dtype would otherwise have another dtype when the block is recomputed.
    """
    _OUTSIDE.append(torch.get_default_dtype())
    try:
        with precision.forward_context():
            of_the_step = torch.get_default_dtype()
        with default_dtype(of_the_step):
            yield
    finally:
        _OUTSIDE.pop()


@contextmanager
def types_of_the_update() -> Iterator[None]:
    """Set the default dtype of an optimizer's step, in which it creates its state, within a backward pass."""
    with default_dtype(_OUTSIDE[-1] if _OUTSIDE else torch.get_default_dtype()):
        yield
