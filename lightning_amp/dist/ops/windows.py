"""Convolution, pooling, resampling and padding along dims that are split: neighbours exchange the rows that overlap."""

from collections.abc import Callable, Sequence
from math import floor
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_amp.dist.by_rule import NO_RULE, by_rule
from lightning_amp.dist.collectives import exchange
from lightning_amp.dist.owners import Owners, Span
from lightning_amp.dist.registry import name_of, operator, shard_error
from lightning_amp.dist.sharded_tensor import in_order, local_of, redistribute, shape_of, splits_of, wrap
from lightning_amp.dist.splits import Split, Splits

aten = torch.ops.aten
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")


class _Rows(NamedTuple):
    """Rows that a rank's outputs read: those of the input, and how many lie before its first and after its last."""

    inside: Span
    before: int
    after: int


def _apply(func: Any, *args: Any) -> Tensor:
    """By rule where batch or channels are split, else the operator itself."""
    if not any(splits_of(a) for a in args):
        return func(*args)
    found = by_rule(func, name_of(func), args, {})
    if found is NO_RULE:
        raise shard_error(func, args, "no rule says what it does to a sharded tensor")
    return found


def _ordered(x: Tensor, dims: Sequence[int], n_out: Sequence[int]) -> tuple[Tensor, list[Split]]:
    """A tensor with contiguous parts along some dims; whole along those of which a rank would have no output."""
    found = list[Split]()
    for split in splits_of(x):
        if split.dim not in dims:
            continue
        if n_out[dims.index(split.dim)] < split.axis.size:
            x = redistribute(x, splits_of(x).replaced(split.axis, None))
            continue
        x = in_order(x, split.dim)
        now = splits_of(x).on(split.axis)
        assert now is not None, "it is still split"
        found.append(now)
    return x, found


def outputs_of(split: Split, n_out: int) -> Owners:
    """Owners of the outputs: in proportion to the inputs, or even parts where a rank would have none."""
    found = split.owners.proportional(n_out)
    return found if min(found.counts) else Owners.even(n_out, split.axis.size)


def ranges(owners: Owners) -> list[Span]:
    """The one range of every rank."""
    return [spans[0] for spans in owners.spans]


def with_rows(x: Tensor, split: Split, rows: Sequence[_Rows], pad: float = 0.0) -> Tensor:
    """The tensor with, along a dim, the rows that each rank reads, as if the dim were whole and had this size."""
    wanted = tuple((row.inside,) for row in rows)
    part = exchange(local_of(x), split.axis, split.dim, split.owners, wanted)
    mine = rows[split.axis.rank]
    if mine.before or mine.after:
        later = [0, 0] * (part.dim() - 1 - split.dim)
        part = F.pad(part, [*later, mine.before, mine.after], value=pad)
    return wrap(part, splits_of(x).replaced(split.axis, None))


def _read(outputs: Owners, stride: int, padding: int, span: int, n: int) -> list[_Rows]:
    """The rows that a window of `span` rows reads at each rank's outputs."""
    found = list[_Rows]()
    for first, last in ranges(outputs):
        low, high = first * stride - padding, (last - 1) * stride - padding + span
        inside = (min(max(low, 0), n), max(min(high, n), 0))
        inside = inside if inside[0] < inside[1] else (inside[0], inside[0])
        found.append(_Rows(inside, max(0, min(-low, high - low)), max(0, high - max(n, low))))
    return found


def _with_splits(y: Tensor, splits: Sequence[Split]) -> Tensor:
    return wrap(local_of(y), Splits.of([*splits_of(y), *splits]))


def _each(value: Any, n: int) -> list[int]:
    return [int(value)] * n if isinstance(value, int) else list(value) * (n if len(value) == 1 else 1)


@operator(*CONVOLUTIONS)
def _convolution(
    func: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    n = len(shape_of(weight)) - 2
    first = len(shape_of(x)) - n
    stride, dilation, kernel = _each(stride, n), _each(dilation, n), shape_of(weight)[2:]
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    if isinstance(padding, str):
        x, padding = _padded_to_same(func, x, spans) if padding == "same" else (x, [0] * n)
    padding = _each(padding, n)
    size = shape_of(x)[first:]
    n_out = [(m + 2 * p - s) // t + 1 for m, p, s, t in zip(size, padding, spans, stride, strict=True)]
    x, splits = _ordered(x, range(first, first + n), n_out)
    done = list[Split]()
    for split in splits:
        i = split.dim - first
        outputs = outputs_of(split, n_out[i])
        x = with_rows(x, split, _read(outputs, stride[i], padding[i], spans[i], size[i]))
        padding[i] = 0
        done.append(split._replace(owners=outputs))
    conv = getattr(aten, name_of(func)).default
    added = bias is not None and any(s.dim == first - 1 for s in splits_of(x))
    y = _apply(conv, x, weight, None if added else bias, stride, padding, dilation, groups)
    y = _with_splits(y, done)
    return y + bias.view(-1, *[1] * n) if added and bias is not None else y


def _padded_to_same(func: Any, x: Tensor, spans: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Padding to the same size; torch pads one row more at the end where the span is even."""
    if all(span % 2 for span in spans):
        return x, [span // 2 for span in spans]
    pads = [n for span in reversed(spans) for n in ((span - 1) // 2, (span - 1) - (span - 1) // 2)]
    return F.pad(x, pads), [0] * len(spans)


@operator(*TRANSPOSED)
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
) -> Tensor:
    """Every rank computes from all inputs that reach its outputs, and keeps these."""
    n = len(shape_of(weight)) - 2
    first = len(shape_of(x)) - n
    stride, padding, more, dilation = (_each(v, n) for v in (stride, padding, output_padding, dilation))
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, shape_of(weight)[2:], strict=True)]
    size = shape_of(x)[first:]
    n_out = [(size[i] - 1) * stride[i] - 2 * padding[i] + spans[i] + more[i] for i in range(n)]
    x, splits = _ordered(x, range(first, first + n), n_out)
    done, keep = list[Split](), list[tuple[int, int, int, int]]()
    for split in splits:
        i = split.dim - first
        outputs, s, p = outputs_of(split, n_out[i]), stride[i], padding[i]
        rows = list[_Rows]()
        for low, high in ranges(outputs):
            start = min(max(0, -(-(low + p - spans[i] + 1) // s)), size[i] - 1)
            rows.append(_Rows((start, max(start + 1, min(size[i], (high - 1 + p) // s + 1))), 0, 0))
        x = with_rows(x, split, rows)
        low, high = ranges(outputs)[split.axis.rank]
        keep.append((split.dim, low + p - rows[split.axis.rank].inside[0] * s, high - low, i))
        padding[i] = more[i] = 0
        done.append(split._replace(owners=outputs))
    added = bias is not None and bool(keep)
    y = _apply(func, x, weight, None if added else bias, stride, padding, more, groups, dilation)
    part, rest = local_of(y), splits_of(y)
    for dim, start, length, _ in keep:
        # output_padding: rows that no input reaches are the bias alone
        missing = max(0, start + length - part.shape[dim])
        if missing:
            part = F.pad(part, [*[0, 0] * (part.dim() - 1 - dim), 0, missing])
        part = part.narrow(dim, start, length)
    y = _with_splits(wrap(part, rest), done)
    return y + bias.view(-1, *[1] * n) if added and bias is not None else y


POOLS = ("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d")


@operator(*POOLS)
def _pool(func: Any, x: Tensor, kernel: Any, stride: Any = (), padding: Any = 0, *rest: Any) -> Tensor:
    name = name_of(func)
    n, is_max = int(name[-2]), name.startswith("max")
    first = len(shape_of(x)) - n
    kernel, padding = _each(kernel, n), _each(padding, n)
    stride = _each(stride, n) if stride not in ((), []) else kernel
    names = ("dilation", "ceil_mode") if is_max else ("ceil_mode", "count_include_pad", "divisor_override")
    more = dict(zip(names, rest, strict=False))
    dilation = _each(more.get("dilation", 1), n)
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    size = shape_of(x)[first:]
    ceil = bool(more.get("ceil_mode"))
    n_out = [_pooled(size[i], padding[i], spans[i], stride[i], ceil) for i in range(n)]
    if not any(s.dim >= first for s in splits_of(x)):
        return _apply(func, x, kernel, stride, padding, *rest)
    uneven = ceil or (any(padding) and not more.get("count_include_pad", True))
    if not is_max and uneven and more.get("divisor_override") is None:
        return _mean_of_counted(func, x, kernel, stride, padding, n_out, more.get("count_include_pad", True))
    x, splits = _ordered(x, range(first, first + n), n_out)
    done = list[Split]()
    for split in splits:
        i = split.dim - first
        outputs = outputs_of(split, n_out[i])
        fill = float("-inf") if is_max else 0.0
        x = with_rows(x, split, _read(outputs, stride[i], padding[i], spans[i], size[i]), fill)
        padding[i] = 0
        done.append(split._replace(owners=outputs))
    return _with_splits(_apply(func, x, kernel, stride, padding, *rest), done)


def _pooled(n: int, padding: int, span: int, stride: int, ceil: bool) -> int:
    found = -(-(n + 2 * padding - span) // stride) + 1 if ceil else (n + 2 * padding - span) // stride + 1
    # the last window begins inside of the input or its left padding
    return found - 1 if ceil and (found - 1) * stride >= n + padding else found


def _mean_of_counted(
    func: Any,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    n_out: Sequence[int],
    include_pad: bool,
) -> Tensor:
    """Averages over windows of which those at the border count fewer values: mean of values by mean of ones."""
    size = shape_of(x)[-len(kernel) :]
    values, ones = x, torch.ones_like(x[:1, :1] if len(shape_of(x)) > len(kernel) + 1 else x[:1])
    inner, outer = list[int](), list[int]()
    for n, k, s, p, out in reversed(list(zip(size, kernel, stride, padding, n_out, strict=True))):
        inner += [p, p]
        outer += [0, max(0, (out - 1) * s + k - n - 2 * p)]
    values = F.pad(F.pad(values, inner), outer)
    ones = F.pad(F.pad(ones, inner, value=float(include_pad)), outer)
    zeros = [0] * len(kernel)
    return _pool(func, values, kernel, stride, zeros) / _pool(func, ones, kernel, stride, zeros)


@operator("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def _adaptive_mean(func: Any, x: Tensor, size: Sequence[int]) -> Tensor:
    """Along a split dim a product with the matrix of averages, added up over the ranks."""
    first = len(shape_of(x)) - len(size)
    size = [m if n is None else n for n, m in zip(size, shape_of(x)[first:], strict=True)]
    while split := next(
        (s for s in splits_of(x) if s.dim >= first and size[s.dim - first] != s.owners.n), None
    ):
        n, i = split.owners.n, split.dim - first
        rows = [(floor(k * n / size[i]), -(-(k + 1) * n // size[i])) for k in range(size[i])]
        weights = torch.zeros((size[i], n), dtype=local_of(x).dtype, device=local_of(x).device)
        for k, (start, stop) in enumerate(rows):
            weights[k, start:stop] = 1 / (stop - start)
        x = torch.matmul(x.movedim(split.dim, -1), weights.T).movedim(-1, split.dim)
    done = [s for s in splits_of(x) if s.dim >= first]
    inside = wrap(local_of(x), Splits.of([s for s in splits_of(x) if s.dim < first]))
    part = [s.owners.counts[s.axis.rank] for s in done]
    local = [
        part[[s.dim for s in done].index(first + i)] if any(s.dim == first + i for s in done) else n
        for i, n in enumerate(size)
    ]
    return _with_splits(_apply(func, inside, local), done)


@operator("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max(func: Any, x: Tensor, size: Sequence[int]) -> Any:
    first = len(shape_of(x)) - len(size)
    for split in splits_of(x):
        if split.dim >= first:
            x = redistribute(x, splits_of(x).replaced(split.axis, None))
    return by_rule(func, "sort", (x, size), {}) if splits_of(x) else func(x, size)


@operator("pad", "constant_pad_nd")
def _pad(
    func: Any, x: Tensor, pad: Sequence[int], mode: Any = "constant", value: float | None = None
) -> Tensor:
    """Padding of a split dim belongs to the first and the last rank, who get its values from where they lie."""
    if func is aten.constant_pad_nd.default:
        mode, value = "constant", mode if not isinstance(mode, str) else 0
    shape, rest = shape_of(x), list(pad)
    for dim in sorted(splits_of(x).dims):
        k = 2 * (len(shape) - 1 - dim)
        if k >= len(rest) or not any(rest[k : k + 2]):
            continue
        before, after = rest[k : k + 2]
        rest[k : k + 2] = [0, 0]
        if before < 0 or after < 0:
            x = x.narrow(dim, max(-before, 0), shape[dim] + min(before, 0) + min(after, 0))
            before, after = max(before, 0), max(after, 0)
            if splits_of(x).at(dim) is None:
                rest[k : k + 2] = [before, after]
                continue
        x = in_order(x, dim)
        split = splits_of(x).at(dim)
        assert split is not None, "its parts are moved, not gathered"
        x = _padded(x, split, before, after, mode, value)
    if any(rest):
        part = aten.pad.default(local_of(x), rest, mode, value)
        x = wrap(part, splits_of(x))
    return x


def _padded(x: Tensor, split: Split, before: int, after: int, mode: str, value: float | None) -> Tensor:
    axis, dim, owners = split
    sizes, n, last = list(owners.counts), owners.n, axis.size - 1
    if mode == "constant":
        own = [before if axis.rank == 0 else 0, after if axis.rank == last else 0]
        part = F.pad(local_of(x), [*[0, 0] * (x.dim() - 1 - dim), *own], value=value or 0)
    else:
        places = list(range(-before, 0)), list(range(n, n + after))
        source: dict[str, Callable[[int], int]] = {
            "reflect": lambda i: -i if i < 0 else 2 * (n - 1) - i,
            "circular": lambda i: i % n,
            "replicate": lambda i: min(max(i, 0), n - 1),
        }
        left, right = ([source[mode](i) for i in side] for side in places)
        wanted = [list(spans) for spans in owners.spans]
        wanted[0] = [*((i, i + 1) for i in left), *wanted[0]]
        wanted[last] = [*wanted[last], *((i, i + 1) for i in right)]
        part = exchange(local_of(x), axis, dim, owners, tuple(map(tuple, wanted)))
    sizes[0] += before
    sizes[last] += after
    return wrap(part, splits_of(x).replaced(axis, split._replace(owners=Owners.contiguous(sizes))))


class _Taps(NamedTuple):
    """For every output the inputs that it is a weighted sum of."""

    places: list[list[int]]
    weights: list[list[float]]


def taps(mode: str, n_in: int, n_out: int, step: float, corners: bool) -> _Taps:
    """The inputs and weights of torch's resampling of one dim.

    Args:
        mode: "nearest", "nearest-exact", "linear" or "cubic".
        step: Inputs per output.
        corners: Whether the first and the last values of both lie on each other.
    """
    places, weights = list[list[int]](), list[list[float]]()
    for o in range(n_out):
        if mode.startswith("nearest"):
            exact = 0.5 if mode == "nearest-exact" else 0.0
            places.append([min(floor((o + exact) * step), n_in - 1)])
            weights.append([1.0])
            continue
        at = o * step if corners else (o + 0.5) * step - 0.5
        if mode == "linear":
            at = max(at, 0.0)
            low = min(floor(at), n_in - 1)
            share = at - low
            places.append([low, min(low + 1, n_in - 1)])
            weights.append([1 - share, share])
        else:
            low = floor(at)
            t = at - low
            places.append([min(max(low + k, 0), n_in - 1) for k in (-1, 0, 1, 2)])
            weights.append([_cubic(1 + t, far=True), _cubic(t), _cubic(1 - t), _cubic(2 - t, far=True)])
    return _Taps(places, weights)


def _cubic(x: float, *, far: bool = False) -> float:
    a = -0.75
    if far:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return ((a + 2) * x - (a + 3)) * x * x + 1


RESAMPLING = {
    "upsample_nearest": "nearest",
    "_upsample_nearest_exact": "nearest-exact",
    "upsample_linear": "linear",
    "upsample_bilinear": "linear",
    "upsample_trilinear": "linear",
    "upsample_bicubic": "cubic",
}
"""Operators by the start of their names, and how they resample one dim."""


@operator(*(f"{start}{n}d" for start in RESAMPLING for n in (1, 2, 3)))
def _resample(func: Any, x: Tensor, size: Any, *rest: Any) -> Tensor:
    """One dim after the other: a split dim by its taps, the others by the operator itself."""
    name, shape = name_of(func), shape_of(x)
    mode = RESAMPLING[name[:-2]]
    smooth = mode in ("linear", "cubic")
    corners = bool(rest[0]) if smooth else False
    given = rest[1:] if smooth else rest
    # one overload has a scale for all dims, the other one for each
    scales = list(given[0]) if given and isinstance(given[0], list | tuple) else list(given)
    n = len(shape) - 2
    scales = scales or [None] * n
    if size is None:
        size = [floor(m * f) for m, f in zip(shape[2:], scales, strict=True)]
    x, splits = _ordered(x, range(2, len(shape)), size)
    done = list[Split]()
    for split in splits:
        i, n_in = split.dim - 2, split.owners.n
        n_out = size[i]
        if corners:
            step = (n_in - 1) / (n_out - 1) if n_out > 1 else 0.0
        else:
            step = 1 / scales[i] if scales[i] else n_in / n_out
        outputs = outputs_of(split, n_out)
        places, weights = taps(mode, n_in, n_out, step, corners)
        rows = [
            _Rows((min(map(min, places[a:b])), max(map(max, places[a:b])) + 1), 0, 0)
            for a, b in ranges(outputs)
        ]
        low, high = ranges(outputs)[split.axis.rank]
        x = with_rows(x, split, rows)
        first = rows[split.axis.rank].inside[0]
        part = _weighted(local_of(x), split.dim, first, places[low:high], weights[low:high])
        x = wrap(part, splits_of(x))
        done.append(split._replace(owners=outputs))
    kept = {s.dim: s.owners.counts[s.axis.rank] for s in done}
    local = [kept.get(i + 2, m) for i, m in enumerate(size)]
    if local != list(local_of(x).shape[2:]):
        own_scales = [None if i + 2 in kept else s for i, s in enumerate(scales)]
        plain = getattr(aten, name).default
        x = wrap(plain(local_of(x), local, *([corners] if smooth else []), *own_scales), splits_of(x))
    return _with_splits(x, done)


def _weighted(
    part: Tensor, dim: int, first: int, places: list[list[int]], weights: list[list[float]]
) -> Tensor:
    total: Tensor | None = None
    form = [-1 if d == dim else 1 for d in range(part.dim())]
    for tap in range(len(places[0]) if places else 0):
        index = torch.tensor([row[tap] - first for row in places], dtype=torch.int64, device=part.device)
        value = part.index_select(dim, index)
        if len(places[0]) > 1:
            share = torch.tensor([row[tap] for row in weights], dtype=part.dtype, device=part.device)
            value = value * share.view(form)
        total = value if total is None else total + value
    assert total is not None, "every rank has an output"
    return total
