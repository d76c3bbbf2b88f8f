"""Compute convolution, pooling, unfold and padding along sharded dims: ranks exchange the rows at their borders."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_amp.sharding.collectives import all_reduce, exchange
from lightning_amp.sharding.dispatch.by_rule import by_rule, plan_without
from lightning_amp.sharding.dispatch.plans import TENSOR, CallPlan, plan_of_call
from lightning_amp.sharding.owners import OwnerRun, Owners
from lightning_amp.sharding.registry import BY_RULE, name_of, operator, shard_error
from lightning_amp.sharding.sharded_tensor import (
    dim_of,
    in_order,
    local_of,
    part_in,
    redistribute,
    shape_of,
    splits_of,
    wrap,
)
from lightning_amp.sharding.splits import MeshAxis, Split, Splits

aten = torch.ops.aten


class WindowRows(NamedTuple):
    """Rows that a rank's outputs read: rows of the input, and numbers of padding rows before and after them."""

    inside: range
    before: int = 0
    after: int = 0


class Window(NamedTuple):
    """Windows along one dim: the rows that one window spans, the stride between windows, and the padding rows."""

    span: int
    stride: int
    padding: int

    def outputs(self, n: int, ceil: bool = False) -> int:
        """Return the number of windows over n rows."""
        left = n + 2 * self.padding - self.span
        found = -(-left // self.stride) + 1 if ceil else left // self.stride + 1
        # the last window must start inside the input or its left padding
        return found - 1 if ceil and (found - 1) * self.stride >= n + self.padding else found


def in_parts(x: Tensor, dims: Sequence[int], n_out: Sequence[int]) -> tuple[Tensor, list[tuple[Split, Owners]]]:
    """Return the tensor with contiguous shards along `dims`, and the splits of these dims with the outputs' owners.

    Outputs are owned in proportion to the inputs. A dim with fewer outputs than ranks is gathered.
    """
    found = list[tuple[Split, Owners]]()
    for split in splits_of(x):
        n = n_out[dims.index(split.dim)] if split.dim in dims else None
        if n is not None and n < split.axis.size:
            x = redistribute(x, splits_of(x).replaced(split.axis, None))
        elif n is not None:
            x = in_order(x, split.dim)
            split = splits_of(x).at(split.dim) or split
            outputs = split.owners.proportional(n)
            found.append((split, outputs if min(outputs.counts) else Owners.even(n, split.axis.size)))
    return x, found


def with_rows(part: Tensor, split: Split, rows: Sequence[WindowRows], fill: float = 0.0) -> Tensor:
    """Return the shard with all rows along a dim that this rank reads."""
    part = exchange(part, split.axis, split.dim, split.owners, tuple((r.inside,) for r in rows))
    _, before, after = rows[split.axis.rank]
    return padded(part, split.dim, before, after, fill)


def padded(part: Tensor, dim: int, before: int, after: int, fill: float | None = 0.0) -> Tensor:
    """Pad a shard with rows of one value before and after, along a dim."""
    # F.pad would first fill all rows, and its backward pass copies the gradient
    sizes = [[n if d == dim else size for d, size in enumerate(part.shape)] for n in (before, after)]
    first, last = (part.new_full(size, fill or 0.0) if size[dim] else None for size in sizes)
    found = [rows for rows in (first, part, last) if rows is not None]
    return part if len(found) == 1 else torch.cat(found, dim)


def _read(outputs: Owners, window: Window, n: int) -> list[WindowRows]:
    """Return the rows of n input rows that windows read for each rank's outputs."""
    found = list[WindowRows]()
    for (out,) in outputs.spans:
        # negative rows are before the input; rows outside are padding, which each rank adds itself
        low = out.start * window.stride - window.padding
        high = (out.stop - 1) * window.stride - window.padding + window.span
        inside = range(min(max(low, 0), n), max(min(high, n), 0))
        inside = inside or range(inside.start, inside.start)
        found.append(WindowRows(inside, max(0, min(-low, high - low)), max(0, high - max(n, low))))
    return found


def _with_windows(
    x: Tensor, parts: Sequence[tuple[Split, Owners]], first: int, windows: Sequence[Window], fill: float = 0.0
) -> tuple[Tensor, list[int], list[Split]]:
    """Return the rows that the local outputs read, the remaining padding of each dim, and the splits of the outputs."""
    part, size, padding, done = local_of(x), shape_of(x), [w.padding for w in windows], list[Split]()
    for split, outputs in parts:
        rows = _read(outputs, windows[split.dim - first], size[split.dim])
        part = with_rows(part, split, rows, fill)
        padding[split.dim - first] = 0
        done.append(split._replace(owners=outputs))
    return part, padding, done


def each(value: Any, n: int) -> list[int]:
    """Expand an argument of one number for all dims to one number per dim."""
    return [int(value)] * n if isinstance(value, int) else list(value) * (n if len(value) == 1 else 1)


@operator("conv1d", "conv2d", "conv3d")
def _convolution(
    func: Any, x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Any:
    kernel = shape_of(weight)[2:]
    n, first = len(kernel), len(shape_of(x)) - len(kernel)
    of_groups = _own_groups(x, weight, bias, groups, first - 1)
    if of_groups is not None:
        *of_rank, count, split = of_groups
        return _with(split, func(*of_rank, stride, padding, dilation, count))
    stride, dilation = each(stride, n), each(dilation, n)
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    if padding == "same" and not all(span % 2 for span in spans):
        # torch pads one more row at the end if the span is even
        x, padding = F.pad(x, [m for s in reversed(spans) for m in ((s - 1) // 2, s // 2)]), 0
    padding = [s // 2 for s in spans] if padding == "same" else each(0 if padding == "valid" else padding, n)
    # the bias is added after a sum over sharded channels: otherwise every rank would add it
    summed = splits_of(x).at(first - 1) or splits_of(weight).at(1)
    given = weight, None if summed else bias, stride, padding, dilation, groups
    dims, conv = range(first, first + n), getattr(aten, name_of(func)).default
    pointwise = set(stride) == set(spans) == {1} and not any(padding)
    if pointwise or not any(d in dims for d in splits_of(x).dims):
        y = by_rule(conv, x, *given)
    else:
        windows = [Window(*w) for w in zip(spans, stride, padding, strict=True)]
        n_out = [w.outputs(m) for w, m in zip(windows, shape_of(x)[first:], strict=True)]
        x, parts = in_parts(x, dims, n_out)
        # weights are replicated over an axis that shards positions, which therefore cannot shard the output channels.
        # Its ranks compute different positions with the same weight: each gets its share of the weight's gradient, and
        # averaging over the ranks adds the shares.
        spatial = [split.axis for split, _ in parts]
        given = (*(_whole_over(spatial, t) for t in given[:2]), *given[2:])
        plan = plan_without(conv, x, dims, *given)
        x = redistribute(x, Splits.of([*plan.arguments[0], *[split for split, _ in parts]]))
        part, padding, done = _with_windows(x, parts, first, windows)
        y = _computed(plan, lambda w, b: conv(part, w, b, stride, padding, dilation, groups), *given[:2])
        y = wrap(y, Splits.of([*plan.result, *done]))
    return y + bias.to(y.dtype).view(-1, *[1] * n) if summed and bias is not None else y


def _whole_over(axes: Iterable[MeshAxis], x: Tensor | None) -> Tensor | None:
    """Return the tensor replicated over some axes."""
    if x is None or not any(splits_of(x).on(axis) for axis in axes):
        return x
    splits = splits_of(x)
    for axis in axes:
        splits = splits.replaced(axis, None)
    return redistribute(x, splits)


def _own_groups(
    x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, at: int, transposed: bool = False
) -> tuple[Any, ...] | None:
    """Return this rank's channels, weight, bias and number of groups, and the split of the result; None if the channels
    cannot be sharded by groups.
    """
    split = splits_of(x).at(at) or splits_of(weight).at(0)
    if groups == 1 or split is None or groups < split.axis.size or splits_of(x).on(split.axis) not in (None, split):
        return None
    axis = split.axis
    of_groups = split.owners.outer(split.owners.n // groups) or Owners.even(groups, axis.size)
    if not all(of_groups.counts):
        return None
    inputs, per = shape_of(x)[at], shape_of(weight)[1 if transposed else 0]
    outputs = per * groups if transposed else per
    into, out = (Split(axis, at, of_groups.widened(n // groups)) for n in (inputs, outputs))
    part = part_in(x, splits_of(x).replaced(axis, into))
    whole = wrap(part, splits_of(x).replaced(axis, None))
    own = part_in(weight, Splits.of([(into if transposed else out)._replace(dim=0)]))
    shift = None if bias is None else part_in(bias, Splits.of([out._replace(dim=0)]))
    return whole, own, shift, of_groups.counts[axis.rank], out


def _with(split: Split, x: Tensor) -> Tensor:
    """Mark a tensor's local shards as sharded by one more split."""
    return wrap(local_of(x), splits_of(x).replaced(split.axis, split))


def _computed(plan: CallPlan, call: Any, *parameters: Tensor | None) -> Tensor:
    """Return the local shard of a result by a plan, from parameters in any splits."""
    splits = iter(plan.arguments[1:])
    part = call(*[None if p is None else part_in(p, next(splits)) for p in parameters])
    for axis in plan.sums:
        part = all_reduce(part, axis)
    return part


@operator("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _transposed(
    func: Any, x: Any, w: Any, bias: Any, stride: Any, padding: Any, more: Any, groups: int, dilation: Any
) -> Any:
    """Compute the transposed convolution of all inputs that reach this rank's outputs, and keep these outputs."""
    kernel = shape_of(w)[2:]
    n, first = len(kernel), len(shape_of(x)) - len(kernel)
    of_groups = _own_groups(x, w, bias, groups, first - 1, transposed=True)
    if of_groups is not None:
        *of_rank, count, split = of_groups
        return _with(split, func(*of_rank, stride, padding, more, count, dilation))
    stride, padding, more, dilation = (each(v, n) for v in (stride, padding, more, dilation))
    given, dims = (stride, padding, more, groups, dilation), range(first, first + n)
    if not any(d in dims for d in splits_of(x).dims):
        y = by_rule(func, x, w, None, *given)
    else:
        spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
        size = shape_of(x)[first:]
        n_out = [(size[i] - 1) * stride[i] - 2 * padding[i] + spans[i] + more[i] for i in range(n)]
        x, parts = in_parts(x, dims, n_out)
        w = _whole_over([split.axis for split, _ in parts], w)
        plan = plan_without(func, x, dims, w, None, *given)
        x = redistribute(x, Splits.of([*plan.arguments[0], *[split for split, _ in parts]]))
        part, keep = local_of(x), list[tuple[int, int, int]]()
        for split, outputs in parts:
            i, rows = split.dim - first, list[WindowRows]()
            s, p = stride[i], padding[i]
            for (out,) in outputs.spans:
                # an output that no input reaches is zero, computed from the input before it. Input i reaches outputs (i
                # * s - p) to (i * s - p + span - 1). Rounding down may include one input too many, whose outputs before
                # `own` are cut off below
                start = min(max(0, (out.start + p - spans[i] + 1) // s), size[i] - 1)
                rows.append(WindowRows(range(start, max(start + 1, min(size[i], (out.stop - 1 + p) // s + 1)))))
            part = with_rows(part, split, rows)
            ((own,), start) = outputs.spans[split.axis.rank], rows[split.axis.rank].inside.start
            keep.append((split.dim, own.start + p - start * s, len(own)))
            padding[i] = more[i] = 0
        y = _computed(plan, lambda w: func(part, w, None, *given), w)
        for dim, start, length in keep:
            # rows of output_padding that no input reaches are zero
            y = padded(y, dim, 0, max(0, start + length - y.shape[dim])).narrow(dim, start, length)
        y = wrap(y, Splits.of([*plan.result, *[split._replace(owners=outputs) for split, outputs in parts]]))
    return y if bias is None else y + bias.to(y.dtype).view(-1, *[1] * n)


@operator("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d")
def _pool(func: Any, x: Tensor, kernel: Any, stride: Any = (), padding: Any = 0, *rest: Any) -> Any:
    name = name_of(func)
    n, is_max = int(name[-2]), name.startswith("max")
    first = len(shape_of(x)) - n
    if not any(d >= first for d in splits_of(x).dims):
        return BY_RULE
    names = ("dilation", "ceil_mode") if is_max else ("ceil_mode", "count_include_pad", "divisor")
    more = dict(zip(names, rest, strict=False))
    ceil = bool(more.get("ceil_mode"))
    kernel, dilation = each(kernel, n), each(more.get("dilation", 1), n)
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    strides = each(stride, n) if stride not in ((), []) else kernel
    windows = [Window(*w) for w in zip(spans, strides, each(padding, n), strict=True)]
    sizes = shape_of(x)[first:]
    n_out = [w.outputs(m, ceil) for w, m in zip(windows, sizes, strict=True)]
    # With ceil_mode the last window may extend beyond the padding; its mean is then over fewer values.
    over = any((k - 1) * w.stride + w.span > m + 2 * w.padding for k, w, m in zip(n_out, windows, sizes, strict=True))
    pads = any(w.padding for w in windows) and not more.get("count_include_pad", True)
    if not is_max and more.get("divisor") is None and (over or pads):
        # windows at the border average fewer values
        return BY_RULE
    x, parts = in_parts(x, range(first, first + n), n_out)
    part, left, done = _with_windows(x, parts, first, windows, -torch.inf if is_max else 0.0)
    rest_of_x = splits_of(x).without(*range(first, first + n))
    return wrap(func(part, kernel, strides, left, *rest), Splits.of([*rest_of_x, *done]))


@operator("unfold")
def _unfold(func: Any, x: Tensor, dim: int, size: int, step: int) -> Any:
    """Return windows along a dim as a new last dim."""
    dim = dim_of(x, dim)
    shape = [*shape_of(x), size]
    shape[dim] = (shape[dim] - size) // step + 1
    if splits_of(x).at(dim) is None:
        call = Tensor.unfold, TENSOR, dim, size, step
        return plan_of_call(func, [splits_of(x)], splits_of(x), shape, *call, view=True)
    x, parts = in_parts(x, [dim], [shape[dim]])
    part, _, done = _with_windows(x, parts, dim, [Window(size, step, 0)])
    return wrap(part.unfold(dim, size, step), Splits.of([*splits_of(x).without(dim), *done]), copied=True)


@operator("im2col")
def _im2col(func: Any, x: Tensor, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Tensor:
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    for k, d, s in zip(kernel, dilation, stride, strict=True):
        # rows first: their windows become the last dim, so that -2 is then the dim of columns
        x = x.unfold(-2, d * (k - 1) + 1, s)[..., ::d]
    return x.movedim((-2, -1), (-4, -3)).flatten(-5, -3).flatten(-2)


@operator("pad", "constant_pad_nd")
def _pad(func: Any, x: Tensor, pad: Sequence[int], mode: Any = "constant", value: float | None = None) -> Any:
    """Pad a sharded dim: the owner of its first index gets the rows before it, the owner of its last those after it."""
    if name_of(func) == "constant_pad_nd":
        mode, value = "constant", 0 if mode == "constant" else mode
    rest, n_dims = list(pad), len(shape_of(x))
    for dim in sorted(splits_of(x).dims):
        k = 2 * (n_dims - 1 - dim)
        before, after = (*rest[k : k + 2], 0, 0)[:2]
        if min(before, after) < 0:
            n = shape_of(x)[dim]
            x = x.narrow(dim, max(-before, 0), n + min(before, 0) + min(after, 0))
            before, after = max(before, 0), max(after, 0)
        split = splits_of(x).at(dim)
        if k < len(rest):
            rest[k : k + 2] = [0, 0] if split else [before, after]
        if split and (before or after):
            x = _padded(func, x, split, before, after, mode, value)
    return wrap(aten.pad.default(local_of(x), rest, mode, value), splits_of(x))


def _padded(func: Any, x: Tensor, split: Split, before: int, after: int, mode: str, value: float | None) -> Tensor:
    axis, dim, owners = split
    n, runs = owners.n, list(owners.expanded())
    first, last = runs[0].rank, runs[-1].rank
    if mode == "constant":
        own = before * (axis.rank == first), after * (axis.rank == last)
        part = padded(local_of(x), dim, *own, value or 0)
    else:
        # rows that each mode copies before and after the dim
        sources = {
            "reflect": ([range(before, 0, -1)], [range(n - 2, n - 2 - after, -1)]),
            "circular": ([range(n - before, n)], [range(after)]),
            "replicate": ([range(1)] * before, [range(n - 1, n)] * after),
        }
        if mode != "replicate" and max(before, after) > n - (mode == "reflect"):
            raise shard_error(func, [x], f"padding {before}, {after} in mode {mode!r} is wider than the dim")
        wanted = list(map(list, owners.spans))
        wanted[first] = [*sources[mode][0], *wanted[first]]
        wanted[last] = [*wanted[last], *sources[mode][1]]
        part = exchange(local_of(x), axis, dim, owners, tuple(map(tuple, wanted)))
    wider = Owners.of([OwnerRun(before, first), *runs, OwnerRun(after, last)], axis.size)
    return wrap(part, splits_of(x).replaced(axis, split._replace(owners=wider)))
