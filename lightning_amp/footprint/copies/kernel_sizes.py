"""Sizes, strides and dtypes of what kernels return, where torch's rules for fake tensors have others."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_amp._torch import RNN_ON_CPU, suggest_memory_format
from lightning_amp.footprint.target_device import launches_operators

_aten = torch.ops.aten
IN_MEMORY_FORMAT = {
    _aten.native_batch_norm.default: 0,
    _aten.native_batch_norm_backward.default: 1,
    _aten.native_group_norm.default: 0,
    _aten.native_group_norm_backward.default: 1,
    _aten.roll.default: 0,
}
"""Operators whose CPU kernels write their first result contiguously or channels last, with the index of the argument
that decides; torch's rules for fake tensors keep other strides, such as those of a transposed argument."""
PARAMETERS_OF = {
    _aten.native_layer_norm.default: slice(2, 4),
    _aten.native_group_norm.default: slice(1, 3),
    _aten.native_batch_norm.default: slice(1, 5),
}
"""Norms, with the places of weight, bias and running statistics, any of which may be None. Under autocast their dtype
differs from the input's; CPU kernels then return means and deviations in theirs, torch's rules in the input's."""
GROUP_NORM_BACK = _aten.native_group_norm_backward.default
CORRECTED = {*IN_MEMORY_FORMAT, *PARAMETERS_OF, GROUP_NORM_BACK}
"""Operators for which `corrections` may yield something."""

MOST_LEFT = 2**26
"""Most reserve bytes of an RNN kernel that is run to measure them."""
_left: dict[Any, int] = {}


def corrections(func: Any, args: Any, results: Sequence[Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the place of each result that a kernel returns otherwise, and how, as options of `empty_like`."""
    if func is GROUP_NORM_BACK and results[0] is not None and results[0].dtype != args[1].dtype:
        # the gradient of the input has its dtype; torch's rule promotes it to the weight's
        yield 0, {"dtype": args[1].dtype}
    if launches_operators(args[0]):
        return
    given = args[PARAMETERS_OF[func]] if func in PARAMETERS_OF else ()
    dtype = next((one.dtype for one in given if one is not None), args[0].dtype)
    if dtype != args[0].dtype:
        yield from ((place, {"dtype": dtype}) for place in (1, 2))
    if func in IN_MEMORY_FORMAT:
        layout = suggest_memory_format(args[IN_MEMORY_FORMAT[func]])
        if results[0] is not None and not results[0].is_contiguous(memory_format=layout):
            yield 0, {"memory_format": layout}


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
