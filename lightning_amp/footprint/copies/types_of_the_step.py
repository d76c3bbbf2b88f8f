"""Keep the default type of a step in its backward pass, in which parts of the step may run again.

Lightning's precisions "64-true", "16-true" and "bf16-true" set it for the step alone: a tensor that a block makes
without a type would be of another type when the block is computed again.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch.plugins import Precision


@contextmanager
def types_of_the_step(precision: Precision) -> Iterator[None]:
    """Around a backward pass."""
    before = torch.get_default_dtype()
    with precision.forward_context():
        of_the_step = torch.get_default_dtype()
    torch.set_default_dtype(of_the_step)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
