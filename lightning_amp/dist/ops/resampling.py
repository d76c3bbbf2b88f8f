"""Interpolation and adaptive pooling: along a split dim every output is a weighted sum of a few inputs."""

from collections.abc import Sequence
from functools import lru_cache, reduce
from math import floor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_amp.dist.by_rule import by_rule
from lightning_amp.dist.ops.windows import Rows, in_parts, with_rows
from lightning_amp.dist.owners import Owners
from lightning_amp.dist.registry import BY_RULE, name_of, operator
from lightning_amp.dist.sharded_tensor import local_of, redistribute, shape_of, splits_of, wrap
from lightning_amp.dist.splits import Split, Splits

aten = torch.ops.aten


class Taps(NamedTuple):
    """For every output the inputs that it is a weighted sum of, as many for each."""

    places: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[float, ...], ...]


@lru_cache(maxsize=256)
def taps(mode: str, n_in: int, n_out: int, step: float, corners: bool) -> Taps:
    """The inputs and weights of torch's resampling of one dim.

    Args:
        mode: "nearest", "nearest-exact", "linear", "cubic", or "mean" for adaptive averages.
        n_in, n_out: Inputs and outputs.
        step: Inputs per output.
        corners: Whether the first and the last values of both lie on each other.
    """
    places, weights, most = list[list[int]](), list[list[float]](), -(-n_in // n_out) + 1
    for o in range(n_out):
        at = o * step if corners else (o + 0.5) * step - 0.5
        if mode.startswith("nearest"):
            # torch computes it in float32
            exact = 0.5 if mode == "nearest-exact" else 0.0
            places.append([floor(np.float32(o + exact) * np.float32(step))])
            weights.append([1.0])
        elif mode == "mean":
            start, stop = o * n_in // n_out, -(-(o + 1) * n_in // n_out)
            places.append([*range(start, stop), *[start] * (most - stop + start)])
            weights.append([1 / (stop - start)] * (stop - start) + [0.0] * (most - stop + start))
        elif mode == "linear":
            low = floor(max(at, 0.0))
            share = max(at, 0.0) - low
            places.append([low, low + 1])
            weights.append([1 - share, share])
        else:
            low, t = floor(at), at - floor(at)
            places.append([low - 1, low, low + 1, low + 2])
            weights.append([_far(1 + t), _near(t), _near(1 - t), _far(2 - t)])
    inside = [tuple(min(max(place, 0), n_in - 1) for place in row) for row in places]
    return Taps(tuple(inside), tuple(map(tuple, weights)))


def _near(x: float, a: float = -0.75) -> float:
    """The cubic weight of an input at most one step away."""
    return ((a + 2) * x - (a + 3)) * x * x + 1


def _far(x: float, a: float = -0.75) -> float:
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a


def resampled(part: Tensor, split: Split, outputs: Owners, found: Taps) -> Tensor:
    """A part with a split dim resampled, in own outputs."""
    spans, rank = [own for (own,) in outputs.spans], split.axis.rank
    places = [found.places[own.start : own.stop] for own in spans]
    rows = [Rows(range(min(map(min, own)), max(map(max, own)) + 1)) for own in places]
    part = with_rows(part, split, rows)
    index = torch.tensor(places[rank], device=part.device) - rows[rank].inside.start
    shares = torch.tensor(
        found.weights[spans[rank].start : spans[rank].stop], dtype=part.dtype, device=part.device
    )
    shares = shares.view(*shares.shape, *[1] * (part.dim() - 1 - split.dim))
    taken = [part.index_select(split.dim, tap) for tap in index.unbind(1)]
    if len(taken) == 1:
        return taken[0]
    return reduce(torch.add, map(torch.mul, taken, shares.unbind(1)))


MODES = {
    "upsample_nearest": "nearest",
    "_upsample_nearest_exact": "nearest-exact",
    "upsample_linear": "linear",
    "upsample_bilinear": "linear",
    "upsample_trilinear": "linear",
    "upsample_bicubic": "cubic",
}
"""Operators by the start of their names, and how they resample one dim."""


@operator(*(f"{start}{n}d" for start in MODES for n in (1, 2, 3)))
def _resample(func: Any, x: Tensor, size: Any, *rest: Any) -> Any:
    """One dim after the other: a split dim by its taps, the others by the operator itself."""
    name, shape = name_of(func), shape_of(x)
    if not any(d >= 2 for d in splits_of(x).dims):
        return BY_RULE
    mode = MODES[name[:-2]]
    corners = [bool(rest[0])] if mode in ("linear", "cubic") else []
    given = rest[len(corners) :]
    # one overload has a scale for all dims, the other one for each
    scales = list(given[0]) if given and isinstance(given[0], list | tuple) else list(given)
    scales = scales if any(scales) else [None] * (len(shape) - 2)
    if size is None:
        size = [floor(m * f) for m, f in zip(shape[2:], scales, strict=True)]
    x, parts = in_parts(x, range(2, len(shape)), size)
    part, local = local_of(x), list(size)
    for split, outputs in parts:
        i, n_in, n_out = split.dim - 2, split.owners.n, outputs.n
        step = 1 / scales[i] if scales[i] else n_in / n_out
        if any(corners):
            step = (n_in - 1) / max(n_out - 1, 1)
        part = resampled(part, split, outputs, taps(mode, n_in, n_out, step, any(corners)))
        local[i], scales[i] = outputs.counts[split.axis.rank], None
    if local != list(part.shape[2:]):
        part = getattr(aten, name).default(part, local, *corners, *scales)
    return with_outputs(part, x, parts)


def with_outputs(part: Tensor, x: Tensor, parts: Sequence[tuple[Split, Owners]]) -> Tensor:
    """A result's part, split as a tensor is, with the owners of outputs along some dims."""
    rest = splits_of(x).without(*[split.dim for split, _ in parts])
    return wrap(part, Splits.of([*rest, *[split._replace(owners=outputs) for split, outputs in parts]]))


@operator("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def _adaptive_mean(func: Any, x: Tensor, size: Sequence[int]) -> Any:
    """Along a split dim with few outputs a product with the matrix of averages, added up over the ranks."""
    first = len(shape_of(x)) - len(size)
    if not any(d >= first for d in splits_of(x).dims):
        return BY_RULE
    size = [m if n is None else n for n, m in zip(size, shape_of(x)[first:], strict=True)]
    for split in splits_of(x):
        if split.dim >= first and size[split.dim - first] < split.axis.size:
            found = taps("mean", split.owners.n, size[split.dim - first], 1.0, False)
            matrix = local_of(x).new_zeros((len(found.places), split.owners.n))
            for row, places, weights in zip(matrix, *found, strict=True):
                row.index_add_(0, torch.tensor(places, device=row.device), row.new_tensor(weights))
            x = torch.matmul(x.movedim(split.dim, -1), matrix.T).movedim(-1, split.dim)
    x, parts = in_parts(x, range(first, len(shape_of(x))), size)
    part, local = local_of(x), list(size)
    for split, outputs in parts:
        if split.owners.n != outputs.n:
            part = resampled(part, split, outputs, taps("mean", split.owners.n, outputs.n, 1.0, False))
        local[split.dim - first] = outputs.counts[split.axis.rank]
    return with_outputs(func(part, local), x, parts)


@operator("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max(func: Any, x: Tensor, size: Sequence[int]) -> Any:
    """Positions of largest values are those of the whole: split positions are gathered."""
    first = len(shape_of(x)) - len(size)
    return by_rule(func, redistribute(x, splits_of(x).without(*range(first, first + len(size)))), size)
