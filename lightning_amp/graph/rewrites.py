"""Operators that a capture writes down as others, of the same values, because those can be cut into pieces.

several views of several tensors    each by itself: a table has one memory for all results of an operator
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _broadcast_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """As views of their arguments, one by one."""
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))  # type: ignore[no-untyped-call]
    return [tensor.expand(shape) for tensor in tensors]


REWRITES: dict[Any, Callable[..., Any]] = {
    aten.broadcast_tensors.default: _broadcast_tensors,
    aten.meshgrid.default: aten.meshgrid.default.decompose,
    aten.meshgrid.indexing: aten.meshgrid.indexing.decompose,
}
"""By operator: what is run in its place while a forward is written down."""
