"""Fourier transforms: one dim after the other, so that of two transformed dims either may be split."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_amp.dist.dispatch.by_rule import by_rule
from lightning_amp.dist.registry import BY_RULE, name_of, operator
from lightning_amp.dist.sharded_tensor import ShardedTensor, dim_of, splits_of, wrap

aten = torch.ops.aten


@operator("_fft_c2c", "_fft_r2c", "_fft_c2r")
def _fourier(func: Any, x: Tensor, dim: Sequence[int], norm: int, last: Any) -> Any:
    """By rule for what is whole, or a single dim, which is moved to another one by an all-to-all."""
    dims, name = [dim_of(x, d) for d in dim], name_of(func)
    if len(dims) == 1 or not any(d in dims for d in splits_of(x).dims):
        return BY_RULE
    if name == "_fft_c2c":
        *rest, one = sorted(dims, key=lambda d: splits_of(x).at(d) is not None)
        return func(func(x, rest, norm, last), [one], norm, last)
    # real numbers are those of the last dim: before the others in one direction, after them in the other
    *rest, one = dims
    if name == "_fft_r2c":
        return aten._fft_c2c.default(func(x, [one], norm, last), rest, norm, True)
    return func(aten._fft_c2c.default(x, rest, norm, False), [one], norm, last)


@operator("view_as_real")
def _as_real(func: Any, x: Tensor) -> Any:
    """A part may be a conjugate yet to be computed, of which the wrapper does not know."""
    if not (isinstance(x, ShardedTensor) and x.held.is_conj()):
        return BY_RULE
    return by_rule(func, wrap(x.held.resolve_conj(), x.splits, True, x.strides))
