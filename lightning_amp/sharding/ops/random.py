"""Draw random numbers of sharded tensors as hashes of a key and the global position, equal for any number of ranks.

The key is drawn from torch's generator, whose state is the same on all ranks of an axis; activation checkpointing
therefore draws the same numbers again. They differ from torch's numbers for the tensor in one process.
"""

from collections.abc import Sequence
from math import pi
from typing import Any

import torch
from torch import Tensor

from lightning_amp.sharding.redistribute import own_part
from lightning_amp.sharding.registry import name_of, operator, shard_error
from lightning_amp.sharding.sharded_tensor import local_of, part_in, shape_of, splits_of, wrap
from lightning_amp.sharding.splits import Splits

_STEP, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
"""Constants of the generator splitmix64 (Steele, Lea and Flood, 2014), as signed 64-bit integers."""
_RANGE = 2**53


def drawn(shape: Sequence[int], splits: Splits, device: torch.device, n: int = 1) -> Tensor:
    """Return the local shard of integers in [0, 2 ** 53) of a global shape; `n` independent ones in a new first dim."""
    position = torch.zeros([1] * max(len(shape), 1), dtype=torch.int64, device=device)
    stride = 1
    for d in reversed(range(len(shape))):
        index = torch.arange(shape[d], device=device)
        split = splits.at(d)
        if split is not None:
            index = own_part(index, 0, split.owners, split.axis.rank)
        position = position + index.view([-1 if k == d else 1 for k in range(len(shape))]) * stride
        stride *= shape[d]
    # one draw for every shape: the generators of all ranks keep the same state
    key = torch.randint(2**62, (n, *[1] * position.dim()), device=device)
    bits = position * _STEP + key
    # `>>` of signed integers copies the sign bit; the mask clears the copies
    bits = bits.bitwise_xor_((bits >> 30).bitwise_and_(2**34 - 1)).mul_(_FIRST)
    bits = bits.bitwise_xor_((bits >> 27).bitwise_and_(2**37 - 1)).mul_(_SECOND)
    bits = bits.bitwise_xor_((bits >> 31).bitwise_and_(2**33 - 1))
    return bits.bitwise_right_shift_(11).bitwise_and_(_RANGE - 1)


def kept(shape: Sequence[int], splits: Splits, p: float, device: torch.device) -> Tensor:
    """Return the local shard of a mask that is False with probability `p`."""
    return drawn(shape, splits, device)[0] >= int(p * _RANGE)


def _uniform(x: Tensor, n: int = 1) -> Tensor:
    """Draw uniform numbers in [0, 1) for a tensor, in float64."""
    return drawn(shape_of(x), splits_of(x), local_of(x).device, n).double() / _RANGE


def _normal(x: Tensor) -> Tensor:
    """Draw standard normal numbers by the Box-Muller method."""
    radius, angle = _uniform(x, 2)
    return (-2 * torch.log1p(-radius)).sqrt() * torch.cos(2 * pi * angle)


@operator("dropout", "feature_dropout")
def _dropout(func: Any, x: Tensor, p: float, train: bool) -> Tensor:
    """Compute dropout; in `feature_dropout`, all positions share the draw of their sample and channel."""
    if not train or p == 0:
        return x
    # the mask has the first n dims, and is broadcast over the others
    n = 2 if "feature" in name_of(func) else len(shape_of(x))
    splits = Splits.of([split for split in splits_of(x) if split.dim < n])
    keep = kept(shape_of(x)[:n], splits, p, local_of(x).device)
    keep = keep.view([*keep.shape, *[1] * (len(shape_of(x)) - n)])
    return wrap(local_of(x) * keep * (1 / (1 - p) if p < 1 else 0.0), splits_of(x))


@operator("rand_like", "randn_like")
def _random_like(func: Any, x: Tensor, *, dtype: torch.dtype | None = None, generator: Any = None, **_: Any) -> Tensor:
    _refuse_generator(func, x, generator)
    draw = _normal if name_of(func) == "randn_like" else lambda x: _uniform(x)[0]
    return wrap(_rounded(draw(x), dtype or local_of(x).dtype), splits_of(x))


def _refuse_generator(func: Any, x: Tensor, generator: Any) -> None:
    if generator is not None:
        raise shard_error(func, [x], f"a generator {generator!r} is given, from which parts cannot be drawn")


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round numbers to a shorter dtype; numbers below 1 stay below 1."""
    found = x.to(dtype)
    return torch.where((x < 1) & (found == 1), 1 - torch.finfo(dtype).eps / 2, found).to(dtype)


@operator("bernoulli", "bernoulli_", "uniform_", "normal_", "exponential_")
def _filled(func: Any, x: Tensor, *args: Any, generator: Any = None) -> Tensor:
    _refuse_generator(func, x, generator)
    name, local = name_of(func), local_of(x)
    if name == "bernoulli":
        return wrap((_uniform(x)[0] < (args[0] if args else local)).to(local.dtype), splits_of(x))
    if name == "normal_":
        mean, std = args
        found = _normal(x) * std + mean
    elif name == "uniform_":
        low, high = args
        found = _rounded(_uniform(x)[0] * (high - low) + low, local.dtype)
    elif name == "bernoulli_":
        p = part_in(args[0].expand(shape_of(x)), splits_of(x)) if isinstance(args[0], Tensor) else args[0]
        found = _uniform(x)[0] < p
    else:
        found = -torch.log1p(-_uniform(x)[0]) / args[0]
    # the previous values get a gradient of zero
    local.copy_(found)
    return x


@operator("rrelu")
def _rrelu(func: Any, x: Tensor, low: float, high: float, training: bool, *_: Any) -> Tensor:
    return _refused(func, x, training) if training else torch.nn.functional.leaky_relu(x, (low + high) / 2)


@operator("alpha_dropout", "feature_alpha_dropout", "randint_like", "multinomial", "poisson", "native_dropout")
def _refused(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if "alpha" in name_of(func) and not args[1]:
        return x
    raise shard_error(func, [x], "it draws numbers in a way that depends on the whole tensor")
