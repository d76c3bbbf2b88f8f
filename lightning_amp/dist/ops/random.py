"""Random numbers of sharded tensors: hashes of a key and of the global position, the same for any number of ranks.

The key is drawn from torch's generator, which all ranks of an axis have in one state, so that activation checkpointing
draws the same numbers again. Numbers differ from those that torch draws for the whole tensor in one process.
"""

from math import pi
from typing import Any

import torch
from torch import Tensor

from lightning_amp.dist.redistribute import own_part
from lightning_amp.dist.registry import operator, shard_error
from lightning_amp.dist.sharded_tensor import local_of, shape_of, splits_of, wrap
from lightning_amp.dist.splits import Splits

_STEP, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
"""Constants of the generator splitmix64 (Steele, Lea and Flood, 2014), as signed 64-bit integers."""


def uniform(
    shape: tuple[int, ...], splits: Splits, dtype: torch.dtype, device: torch.device, n: int = 1
) -> Tensor:
    """This rank's part of uniform numbers in [0, 1) of a global shape; `n` independent ones along a new first dim."""
    position = torch.zeros([1] * max(len(shape), 1), dtype=torch.int64, device=device)
    stride = 1
    for d in reversed(range(len(shape))):
        index = torch.arange(shape[d], device=device)
        split = splits.at(d)
        if split is not None:
            index = own_part(index, 0, split.owners, split.axis.rank)
        position = position + index.view([-1 if k == d else 1 for k in range(len(shape))]) * stride
        stride *= shape[d]
    key = torch.randint(2**62, (n, *[1] * position.dim()), device=device)
    bits = position * _STEP + key
    bits = (bits ^ ((bits >> 30) & (2**34 - 1))) * _FIRST
    bits = (bits ^ ((bits >> 27) & (2**37 - 1))) * _SECOND
    bits = bits ^ ((bits >> 31) & (2**33 - 1))
    found = ((bits >> 11) & (2**53 - 1)).double() * 2.0**-53
    # rounding to a shorter type may give 1
    return found.to(dtype).clamp_(max=1 - torch.finfo(dtype).eps / 2) if dtype != torch.float64 else found


def _uniform_like(x: Tensor, n: int = 1, dtype: torch.dtype | None = None) -> Tensor:
    local = local_of(x)
    dtype = dtype or (local.dtype if local.is_floating_point() else torch.get_default_dtype())
    return uniform(shape_of(x), splits_of(x), dtype, local.device, n)


def _normal_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Standard normal numbers, by the method of Box and Muller."""
    radius, angle = _uniform_like(x, 2, torch.float64)
    found = (-2 * torch.log1p(-radius)).sqrt() * torch.cos(2 * pi * angle)
    return found.to(dtype or local_of(x).dtype)


@operator("dropout", "dropout_", "native_dropout")
def _dropout(func: Any, x: Tensor, p: float, train: bool = True) -> Any:
    if not train or p == 0:
        return x
    keep = (_uniform_like(x, dtype=torch.float64) >= p)[0]
    scale = 0.0 if p == 1 else 1 / (1 - p)
    if func._schema.is_mutable:
        local_of(x).mul_(keep).mul_(scale)
        return x
    return wrap(local_of(x) * keep * scale, splits_of(x))


@operator("feature_dropout")
def _feature_dropout(func: Any, x: Tensor, p: float, train: bool = True) -> Tensor:
    """Whole channels of samples are dropped: positions share their draw."""
    if not train or p == 0:
        return x
    channels = shape_of(x)[:2]
    splits = Splits.of([s for s in splits_of(x) if s.dim < 2])
    keep = uniform(channels, splits, torch.float64, local_of(x).device)[0] >= p
    form = [*keep.shape, *[1] * (len(shape_of(x)) - 2)]
    return wrap(local_of(x) * keep.view(form) * (0.0 if p == 1 else 1 / (1 - p)), splits_of(x))


@operator("rand_like")
def _rand_like(func: Any, x: Tensor, *, dtype: Any = None, **_: Any) -> Tensor:
    return wrap(_uniform_like(x, dtype=dtype)[0], splits_of(x))


@operator("randn_like")
def _randn_like(func: Any, x: Tensor, *, dtype: Any = None, **_: Any) -> Tensor:
    return wrap(_normal_like(x, dtype), splits_of(x))


@operator("bernoulli")
def _bernoulli(func: Any, x: Tensor, *args: Any, generator: Any = None) -> Tensor:
    _own_generator(func, x, generator)
    p = args[0] if args else local_of(x)
    return wrap((_uniform_like(x, dtype=torch.float64)[0] < p).to(local_of(x).dtype), splits_of(x))


@operator("bernoulli_", "uniform_", "normal_", "exponential_")
def _fill(func: Any, x: Tensor, *args: Any, generator: Any = None) -> Tensor:
    _own_generator(func, x, generator)
    local, kind = local_of(x), func._schema.name[6:]
    with torch.no_grad():
        if kind == "normal_":
            mean, std = _two(args)
            local.copy_(_normal_like(x, torch.float64) * std + mean)
            return x
        drawn = _uniform_like(x, dtype=torch.float64)[0]
        if kind == "bernoulli_":
            p = args[0] if args else 0.5
            local.copy_(drawn < (local_of(p) if isinstance(p, Tensor) else p))
        elif kind == "uniform_":
            low, high = _two(args)
            local.copy_(drawn * (high - low) + low)
        else:
            local.copy_(-torch.log1p(-drawn) / (args[0] if args else 1.0))
    return x


def _two(given: tuple[float, ...]) -> tuple[float, float]:
    """Two arguments whose defaults are 0 and 1."""
    both = (*given, 0.0, 1.0)[:1] + (*given[1:], 1.0)[:1]
    return both[0], both[1]


def _own_generator(func: Any, x: Tensor, generator: Any) -> None:
    if generator is not None:
        raise shard_error(func, [x], f"a generator {generator!r} is given, from which parts cannot be drawn")


@operator("randint_like", "multinomial", "alpha_dropout", "feature_alpha_dropout", "rrelu", "poisson")
def _refused(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    raise shard_error(func, [x], "it draws numbers in a way that depends on the whole tensor")
