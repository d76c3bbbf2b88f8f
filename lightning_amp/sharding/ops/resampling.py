"""Compute interpolation (each output along a sharded dim is a weighted sum of a few inputs) and global mean pooling."""

from collections.abc import Sequence
from functools import lru_cache, reduce
from math import floor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_amp.sharding.ops.windows import WindowRows, in_parts, with_rows
from lightning_amp.sharding.owners import Owners
from lightning_amp.sharding.registry import BY_RULE, name_of, operator, shard_error
from lightning_amp.sharding.sharded_tensor import local_of, shape_of, splits_of, wrap
from lightning_amp.sharding.splits import Split, Splits

aten = torch.ops.aten


class Taps(NamedTuple):
    """Indices and weights of the inputs of every output; the number of inputs is the same for all."""

    places: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[float, ...], ...]


@lru_cache(maxsize=256)
def taps(mode: str, n_in: int, n_out: int, step: float, corners: bool) -> Taps:
    """Return the inputs and weights of torch's resampling of one dim.

    Args:
        mode: "nearest", "nearest-exact", "linear" or "cubic".
        n_in, n_out: Numbers of inputs and outputs.
        step: Inputs per output.
        corners: torch's `align_corners`.
    """
    places, weights = list[list[int]](), list[list[float]]()
    for o in range(n_out):
        at = o * step if corners else (o + 0.5) * step - 0.5
        if mode.startswith("nearest"):
            # in float32, as in torch
            exact = 0.5 if mode == "nearest-exact" else 0.0
            places.append([floor(np.float32(o + exact) * np.float32(step))])
            weights.append([1.0])
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
    """Return the cubic weight of an input that is at most one step away."""
    return ((a + 2) * x - (a + 3)) * x * x + 1


def _far(x: float, a: float = -0.75) -> float:
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a


def resampled(part: Tensor, split: Split, outputs: Owners, found: Taps) -> Tensor:
    """Resample a sharded dim of a local shard, and return the local outputs."""
    spans, rank = [own for (own,) in outputs.spans], split.axis.rank
    places = [found.places[own.start : own.stop] for own in spans]
    rows = [WindowRows(range(min(map(min, own)), max(map(max, own)) + 1)) for own in places]
    part = with_rows(part, split, rows)
    index = torch.tensor(places[rank], device=part.device) - rows[rank].inside.start
    shares = torch.tensor(found.weights[spans[rank].start : spans[rank].stop], dtype=part.dtype, device=part.device)
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
"""Prefixes of operator names, and how they resample one dim."""


@operator(*(f"{start}{n}d" for start in MODES for n in (1, 2, 3)))
def _resample(func: Any, x: Tensor, size: Any, *rest: Any) -> Any:
    """Resample sharded dims by taps, and then all other dims by the operator itself."""
    name, shape = name_of(func), shape_of(x)
    if not any(d >= 2 for d in splits_of(x).dims):
        return BY_RULE
    mode = MODES[name[:-2]]
    corners = [bool(rest[0])] if mode in ("linear", "cubic") else []
    given = rest[len(corners) :]
    # one overload has one list of scales, the other one argument per dim
    scales = list(given[0]) if given and isinstance(given[0], list | tuple) else list(given)
    scales = scales if any(scales) else [None] * (len(shape) - 2)
    if size is None:
        size = [floor(m * f) for m, f in zip(shape[2:], scales, strict=True)]
    if any(f not in (None, 1.0) and n == m for f, n, m in zip(scales, size, shape[2:], strict=True)):
        # some torch kernels copy such a dim, others interpolate
        why = f"scale_factor={scales!r} leaves a dim of {tuple(shape[2:])!r} as long as it is"
        raise shard_error(func, [x], why, remedy="give the size, or recompute_scale_factor=True")
    x, parts = in_parts(x, range(2, len(shape)), size)
    part, local = local_of(x), list(size)
    for split, outputs in parts:
        i, n_in, n_out = split.dim - 2, split.owners.n, outputs.n
        step = 1 / scales[i] if scales[i] else n_in / n_out
        if any(corners):
            step = (n_in - 1) / max(n_out - 1, 1)
        part = resampled(part, split, outputs, taps(mode, n_in, n_out, step, any(corners)))
        local[i], scales[i] = outputs.counts[split.axis.rank], None
    # sharded dims have their final size by now, and no scale: the operator leaves them unchanged
    if local != list(part.shape[2:]):
        part = getattr(aten, name).default(part, local, *corners, *scales)
    others = splits_of(x).without(*[split.dim for split, _ in parts])
    return wrap(part, Splits.of([*others, *[split._replace(owners=outputs) for split, outputs in parts]]))


@operator("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def _adaptive_mean(func: Any, x: Tensor, size: Sequence[int]) -> Any:
    return torch.mean(x, [*range(-len(size), 0)], True) if set(size) == {1} else BY_RULE
