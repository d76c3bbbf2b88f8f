"""Compute everything in float64 in a context, whatever types the code names.

A forward that makes a softmax in float32, or generated code that has the types of a capture, then computes the same
function without their rounding. Numbers that Python has written down (`torch.tensor(0.1)`) are those of their own type.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_amp._torch import TorchDispatchMode, tree_map

WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


class InFloat64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Below autograd, so that gradients have 64 bits too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_type, (args, kwargs or {}))
        before = torch.get_default_dtype()
        # what is made without a type, or of whole numbers, has the default's
        torch.set_default_dtype(torch.float64)
        try:
            return tree_map(widened, func(*args, **kwargs))
        finally:
            torch.set_default_dtype(before)


def widened(value: Any) -> Any:
    """A tensor of floating point in 64 bits; anything else as it is."""
    return value.to(WIDER[value.dtype]) if isinstance(value, Tensor) and value.dtype in WIDER else value


def _type(value: Any) -> Any:
    return WIDER.get(value, value) if isinstance(value, torch.dtype) else value
