"""Convolution, pooling, unfolding and padding along dims that are split: ranks exchange the rows at their borders."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_amp.dist.by_rule import by_rule
from lightning_amp.dist.collectives import exchange
from lightning_amp.dist.ops.views import view_plan
from lightning_amp.dist.owners import Owners, Run
from lightning_amp.dist.registry import BY_RULE, name_of, operator, shard_error
from lightning_amp.dist.sharded_tensor import in_order, local_of, redistribute, shape_of, splits_of, wrap
from lightning_amp.dist.splits import Split, Splits

aten = torch.ops.aten


class Rows(NamedTuple):
    """Rows that a rank's outputs read: those of the input, and how many lie before its first and after its last."""

    inside: range
    before: int = 0
    after: int = 0


def in_parts(x: Tensor, dims: Sequence[int], n_out: Sequence[int]) -> tuple[Tensor, list[tuple[Split, Owners]]]:
    """A tensor with contiguous parts along some dims, the splits of these, and the owners of the outputs.

    Outputs belong to ranks in proportion to the inputs. A dim with less outputs than ranks is gathered.
    """
    found = list[tuple[Split, Owners]]()
    for split in splits_of(x):
        if split.dim not in dims:
            continue
        axis, n = split.axis, n_out[dims.index(split.dim)]
        if n < axis.size:
            x = redistribute(x, splits_of(x).replaced(axis, None))
            continue
        x = in_order(x, split.dim)
        split = splits_of(x).at(split.dim) or split
        outputs = split.owners.proportional(n)
        found.append((split, outputs if min(outputs.counts) else Owners.even(n, axis.size)))
    return x, found


def with_rows(x: Tensor, split: Split, rows: Sequence[Rows], fill: float = 0.0) -> Tensor:
    """The tensor with, along a dim, the rows that each rank reads, as if the dim were whole and had this size."""
    part = exchange(local_of(x), split.axis, split.dim, split.owners, tuple((r.inside,) for r in rows))
    _, before, after = rows[split.axis.rank]
    if before or after:
        part = F.pad(part, [*[0, 0] * (part.dim() - 1 - split.dim), before, after], value=fill)
    return wrap(part, splits_of(x).replaced(split.axis, None))


def _read(outputs: Owners, stride: int, padding: int, span: int, n: int) -> list[Rows]:
    """The rows that a window of `span` rows reads at each rank's outputs."""
    found = list[Rows]()
    for (out,) in outputs.spans:
        low, high = out.start * stride - padding, (out.stop - 1) * stride - padding + span
        inside = range(min(max(low, 0), n), max(min(high, n), 0))
        inside = inside or range(inside.start, inside.start)
        found.append(Rows(inside, max(0, min(-low, high - low)), max(0, high - max(n, low))))
    return found


def _with_windows(
    x: Tensor,
    first: int,
    spans: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    n_out: Sequence[int],
    fill: float = 0.0,
) -> tuple[Tensor, list[int], list[Split]]:
    """The rows that windows along the dims from `first` on read, the padding left to do, and the results' splits."""
    size, padding, done = shape_of(x)[first:], list(padding), list[Split]()
    x, parts = in_parts(x, range(first, first + len(spans)), n_out)
    for split, outputs in parts:
        i = split.dim - first
        x = with_rows(x, split, _read(outputs, stride[i], padding[i], spans[i], size[i]), fill)
        padding[i] = 0
        done.append(split._replace(owners=outputs))
    return x, padding, done


def with_splits(y: Tensor, splits: Sequence[Split]) -> Tensor:
    """A tensor with further splits."""
    return wrap(local_of(y), Splits.of([*splits_of(y), *splits]))


def _each(value: Any, n: int) -> list[int]:
    return [int(value)] * n if isinstance(value, int) else list(value) * (n if len(value) == 1 else 1)


@operator("conv1d", "conv2d", "conv3d")
def _convolution(
    func: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    n = len(shape_of(weight)) - 2
    first = len(shape_of(x)) - n
    split_dims = [d for d in splits_of(x).dims if d >= first - 1]
    if not split_dims and not splits_of(weight).at(1):
        return BY_RULE
    stride, dilation = _each(stride, n), _each(dilation, n)
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, shape_of(weight)[2:], strict=True)]
    if padding == "same" and not all(span % 2 for span in spans):
        # torch pads one row more at the end where the span is even
        x, padding = F.pad(x, [m for s in reversed(spans) for m in ((s - 1) // 2, s // 2)]), 0
    padding = {"same": [s // 2 for s in spans], "valid": 0}.get(padding, 0) if isinstance(padding, str) else padding
    padding, size = _each(padding, n), shape_of(x)[first:]
    n_out = [(m + 2 * p - s) // t + 1 for m, p, s, t in zip(size, padding, spans, stride, strict=True)]
    x, padding, done = _with_windows(x, first, spans, stride, padding, n_out)
    # without the bias where channels are added up: it would be added by every rank
    summed = splits_of(x).at(first - 1) or splits_of(weight).at(1)
    conv = getattr(aten, name_of(func)).default
    y = with_splits(by_rule(conv, x, weight, None if summed else bias, stride, padding, dilation, groups), done)
    return y + bias.to(y.dtype).view(-1, *[1] * n) if summed and bias is not None else y


@operator("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _transposed(
    func: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    """Every rank computes from all inputs that reach its outputs, and keeps these."""
    n = len(shape_of(weight)) - 2
    first = len(shape_of(x)) - n
    if not any(d >= first - 1 for d in splits_of(x).dims) and not splits_of(weight).at(0):
        return BY_RULE
    stride, padding, more, dilation = (_each(v, n) for v in (stride, padding, output_padding, dilation))
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, shape_of(weight)[2:], strict=True)]
    size = shape_of(x)[first:]
    n_out = [(size[i] - 1) * stride[i] - 2 * padding[i] + spans[i] + more[i] for i in range(n)]
    x, parts = in_parts(x, range(first, first + n), n_out)
    done, keep = list[Split](), list[tuple[int, int, int]]()
    for split, outputs in parts:
        i = split.dim - first
        s, p, rows = stride[i], padding[i], list[Rows]()
        for (out,) in outputs.spans:
            # an output between the reach of two inputs is the bias; the one before keeps the count
            start = min(max(0, (out.start + p - spans[i] + 1) // s), size[i] - 1)
            rows.append(Rows(range(start, max(start + 1, min(size[i], (out.stop - 1 + p) // s + 1)))))
        x = with_rows(x, split, rows)
        ((own,), start) = outputs.spans[split.axis.rank], rows[split.axis.rank].inside.start
        keep.append((split.dim, own.start + p - start * s, len(own)))
        padding[i] = more[i] = 0
        done.append(split._replace(owners=outputs))
    y = by_rule(func, x, weight, None, stride, padding, more, groups, dilation)
    part = local_of(y)
    for dim, start, length in keep:
        # rows of output_padding that no input reaches are zero
        missing = max(0, start + length - part.shape[dim])
        part = F.pad(part, [*[0, 0] * (part.dim() - 1 - dim), 0, missing]) if missing else part
        part = part.narrow(dim, start, length)
    y = with_splits(wrap(part, splits_of(y)), done)
    return y if bias is None else y + bias.to(y.dtype).view(-1, *[1] * n)


@operator("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d")
def _pool(func: Any, x: Tensor, kernel: Any, stride: Any = (), padding: Any = 0, *rest: Any) -> Any:
    name = name_of(func)
    n, is_max = int(name[-2]), name.startswith("max")
    first = len(shape_of(x)) - n
    if not any(d >= first for d in splits_of(x).dims):
        return BY_RULE
    kernel, padding = _each(kernel, n), _each(padding, n)
    stride = _each(stride, n) if stride not in ((), []) else kernel
    names = ("dilation", "ceil_mode") if is_max else ("ceil_mode", "count_include_pad", "divisor")
    more = dict(zip(names, rest, strict=False))
    ceil, size = bool(more.get("ceil_mode")), shape_of(x)[first:]
    spans = [d * (k - 1) + 1 for d, k in zip(_each(more.get("dilation", 1), n), kernel, strict=True)]
    n_out = [_pooled(m, p, s, t, ceil) for m, p, s, t in zip(size, padding, spans, stride, strict=True)]
    counts_all = more.get("count_include_pad", True)
    uneven = not is_max and more.get("divisor") is None and (ceil or (any(padding) and not counts_all))
    if not uneven:
        x, padding, done = _with_windows(x, first, spans, stride, padding, n_out, -torch.inf if is_max else 0.0)
        return with_splits(by_rule(func, x, kernel, stride, padding, *rest), done)
    # windows at the border count fewer values: means of full windows, times a factor for every dim
    for i, (m, p, s, t, out) in enumerate(zip(size, padding, spans, stride, n_out, strict=True)):
        end = max(0, (out - 1) * t + s - m - p)
        x = F.pad(x, [*[0, 0] * (n - 1 - i), p, end])
    x, _, done = _with_windows(x, first, spans, stride, [0] * n, n_out)
    y = with_splits(by_rule(func, x, kernel, stride, [0] * n), done)
    for i, (m, p, s, t, out) in enumerate(zip(size, padding, spans, stride, n_out, strict=True)):
        starts = [o * t - p for o in range(out)]
        counts = [
            min(a + s, m + p) - a if counts_all else min(a + s, m) - max(a, 0) for a in starts
        ]
        factors = torch.tensor([s / count for count in counts], dtype=y.dtype, device=y.device)
        y = y * factors.view([-1, *[1] * (n - 1 - i)])
    return y


def _pooled(n: int, padding: int, span: int, stride: int, ceil: bool) -> int:
    found = -(-(n + 2 * padding - span) // stride) + 1 if ceil else (n + 2 * padding - span) // stride + 1
    # the last window begins inside of the input or its left padding
    return found - 1 if ceil and (found - 1) * stride >= n + padding else found


@operator("unfold")
def _unfold(func: Any, x: Tensor, dim: int, size: int, step: int) -> Any:
    """Windows along a dim, as a new last dim."""
    dim = range(len(shape_of(x)))[dim]
    shape = [*shape_of(x), size]
    shape[dim] = (shape[dim] - size) // step + 1
    if splits_of(x).at(dim) is None:
        return view_plan(func, x, Tensor.unfold, (dim, size, step), splits_of(x), shape)
    x, _, done = _with_windows(x, dim, [size], [step], [0], [shape[dim]])
    return wrap(local_of(x).unfold(dim, size, step), Splits.of([*splits_of(x), *done]), copied=True)


@operator("im2col")
def _im2col(func: Any, x: Tensor, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Tensor:
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    for k, d, s in zip(kernel, dilation, stride, strict=True):
        # rows first; then columns lie before the windows of rows
        x = x.unfold(-2, d * (k - 1) + 1, s)[..., ::d]
    return x.movedim((-2, -1), (-4, -3)).flatten(-5, -3).flatten(-2)


@operator("pad", "constant_pad_nd")
def _pad(func: Any, x: Tensor, pad: Sequence[int], mode: Any = "constant", value: float | None = None) -> Any:
    """Rows before a split dim go to the owner of its first index, rows after it to the owner of its last."""
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
    if not any(rest):
        return x
    return wrap(aten.pad.default(local_of(x), rest, mode, value), splits_of(x))


def _padded(func: Any, x: Tensor, split: Split, before: int, after: int, mode: str, value: float | None) -> Tensor:
    axis, dim, owners = split
    n, runs = owners.n, list(owners.expanded())
    first, last = runs[0].rank, runs[-1].rank
    if mode == "constant":
        own = [before if axis.rank == first else 0, after if axis.rank == last else 0]
        part = F.pad(local_of(x), [*[0, 0] * (len(shape_of(x)) - 1 - dim), *own], value=value or 0)
    else:
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
    padded = Owners.of([Run(before, first), *runs, Run(after, last)], axis.size)
    return wrap(part, splits_of(x).replaced(axis, split._replace(owners=padded)))
