"""Sizes of what two kernels return, where torch's rules for fake tensors have others."""

from typing import Any

import torch
from torch import Tensor

from lightning_amp._torch import RNN_ON_CPU

MOST_LEFT = 2**26
"""Most reserve bytes of an RNN kernel that is run to measure them."""
_left: dict[Any, int] = {}


def grouped_layout(one: Tensor, other: Tensor, ends: Tensor | None = None) -> tuple[list[int], list[int]]:
    """Return shape and strides of a grouped product; the kernels align its rows to 16 bytes."""
    rows, columns = one.shape[-2], other.shape[-1]
    wide = -(-columns * one.itemsize // 16) * 16 // one.itemsize
    if one.dim() != other.dim():
        # groups are ranges of rows of `one`, or of columns of `other`
        return [rows, columns], [wide, 1]
    groups = one.shape[0] if one.dim() == 3 or ends is None else ends.shape[0]
    return [groups, rows, columns], [rows * wide, wide, 1]


def left_by_rnn(args: Any) -> int:
    """Return the reserve bytes that an RNN kernel leaves to its backward pass: the kernel runs, because its library
    decides.

    Above `MOST_LEFT` bytes, it runs for fewer samples. Each further sample adds the same number of bytes, up to pages.
    """
    key = RNN_ON_CPU, *((a.shape, a.dtype) if isinstance(a, Tensor) else str(a) for a in args)
    found = _left.get(key)
    if found is None:
        samples = args[0].shape[-2]
        few = max(1, MOST_LEFT // 2 // _run_rnn(args, 1))
        found = _run_rnn(args, min(samples, 2 * few))
        if samples > 2 * few:
            found += (found - _run_rnn(args, few)) * (samples - 2 * few) // few
        _left[key] = found
    return found


def _run_rnn(args: Any, samples: int) -> int:
    # modes are disabled within an operator
    given = [torch.zeros(a.shape, dtype=a.dtype, device="meta") if isinstance(a, Tensor) else a for a in args]
    for place in (0, 5, 6):
        # inputs, hidden and cell states
        given[place] = given[place][..., :samples, :]
    given = [torch.zeros(a.shape, dtype=a.dtype) if isinstance(a, Tensor) else a for a in given]
    return int(RNN_ON_CPU(*given)[3].nbytes)
