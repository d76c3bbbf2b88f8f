"""Slice, split, flip, roll, concatenate and write sharded tensors, so that each rank keeps the indices it owns."""

from collections.abc import Sequence
from itertools import accumulate
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from lightning_amp.graph.flow import RULES
from lightning_amp.sharding._torch import no_modes
from lightning_amp.sharding.collectives import exchange, pick
from lightning_amp.sharding.dispatch.plans import TENSOR, CallPlan, plan_of_call
from lightning_amp.sharding.owners import Owners
from lightning_amp.sharding.registry import BY_RULE, FUNCTIONS, LOST, function, mapped, name_of, operator, shard_error
from lightning_amp.sharding.sharded_tensor import (
    COMPUTE,
    ShardedTensor,
    dim_of,
    held_by,
    local_of,
    redistribute,
    shape_of,
    splits_of,
    wrap,
)
from lightning_amp.sharding.splits import Split, Splits


def take(func: Any, x: Tensor, dim: int, ranges: Sequence[range], view: bool = False) -> CallPlan:
    """Return a plan that takes some ranges of a dim, one after the other, on the ranks that own them."""
    shape = list(shape_of(x))
    shape[dim] = sum(map(len, ranges))
    splits, local = taken(splits_of(x), dim, ranges)
    return plan_of_call(func, [splits_of(x)], splits, shape, pick, TENSOR, dim, local, view=view)


def taken(splits: Splits, dim: int, ranges: Sequence[range]) -> tuple[Splits, list[range]]:
    """Return the splits after a dim is replaced by some ranges of it, and these ranges in the local shard."""
    split = splits.at(dim)
    if split is None:
        return splits, list(ranges)
    axis, _, have = split
    owners = Owners.joined([have.take(one) for one in ranges], axis.size)
    local = [own for one in ranges for own in have.local(axis.rank, one)]
    return splits.replaced(axis, split._replace(owners=owners)), local


@operator("slice")
def _slice(func: Any, x: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> CallPlan:
    dim = dim_of(x, dim)
    return take(func, x, dim, [range(shape_of(x)[dim])[slice(start, end, step)]], True)


@operator("narrow")
def _narrow(func: Any, x: Tensor, dim: int, start: int, length: int) -> CallPlan:
    dim = dim_of(x, dim)
    indices = range(shape_of(x)[dim])[start:][:length]
    if len(indices) < length:
        raise IndexError(f"narrow of {length} indices from {start} on, of {shape_of(x)[dim]}")
    return take(func, x, dim, [indices], True)


def _at_numbers(func: Any) -> Any:
    """Wrap a function so that indices given as plain tensors become numbers: a plan must not depend on values."""

    def call(*args: Any, **kwargs: Any) -> Any:
        given = mapped((args, kwargs), lambda t: t if type(t) is ShardedTensor else t.tolist())
        return COMPUTE["function"](func, *given)

    return call


FUNCTIONS.update(
    {func: _at_numbers(func) for func in (Tensor.narrow, torch.narrow, Tensor.tensor_split, torch.tensor_split)}
)


@operator("select")
def _select(func: Any, x: Tensor, dim: int, index: int) -> Any:
    """Select one index of a dim; the owner of a sharded dim sends it to every rank."""
    dim = dim_of(x, dim)
    index = range(shape_of(x)[dim])[index]
    split, splits = splits_of(x).at(dim), splits_of(x).without(dim).mapped(lambda d: d - (d > dim))
    if split is None:
        return BY_RULE
    wanted = ((range(index, index + 1),),) * split.axis.size
    row = exchange(local_of(x), split.axis, dim, split.owners, wanted)
    return wrap(row.select(dim, 0), splits, copied=True)


@operator("unbind")
def _unbind(func: Any, x: Tensor, dim: int = 0) -> Any:
    """Unbind a dim; a sharded dim is gathered once, because every rank needs all indices."""
    dim = dim_of(x, dim)
    if splits_of(x).at(dim) is None:
        return BY_RULE
    whole = redistribute(x, splits_of(x).without(dim))
    return [wrap(local_of(t), splits_of(t), copied=True) for t in torch.unbind(whole, dim)]


@operator("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk")
def _split(func: Any, x: Tensor, sizes: Any, dim: int = 0) -> Any:
    dim = dim_of(x, dim)
    if splits_of(x).at(dim) is None and name_of(func) in RULES:
        return BY_RULE
    with no_modes():
        lengths = [len(piece) for piece in func(torch.empty(shape_of(x)[dim], device="meta"), sizes, 0)]
    return [x.narrow(dim, end - n, n) for n, end in zip(lengths, accumulate(lengths), strict=True)]


@operator("flip")
def _flip(func: Any, x: Tensor, dims: Sequence[int]) -> Any:
    if not dims:
        return x.clone()
    *others, dim = [dim_of(x, d) for d in dims]
    return x.flip(dim).flip(others) if others else take(func, x, dim, [range(shape_of(x)[dim])[::-1]])


@operator("roll")
def _roll(func: Any, x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    if not dims:
        return x.flatten().roll(list(shifts), 0).reshape(shape_of(x))
    if len(dims) > 1:
        return x.roll(shifts[0], dims[0]).roll(list(shifts[1:]), list(dims[1:]))
    dim = dim_of(x, dims[0])
    n = shape_of(x)[dim]
    # the indices from `at` on wrap around to the front
    at = -shifts[0] % max(n, 1)
    return take(func, x, dim, [range(at, n), range(at)])


@operator("cat", "concat", "concatenate")
def _cat(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Concatenate tensors; shards stay on their ranks, and nothing is sent."""
    # torch ignores empty tensors with one dim
    kept = [t for t in tensors if shape_of(t) != (0,)]
    if len(kept) < len(tensors):
        return torch.cat(kept, dim)
    dim = range(len(shape_of(tensors[0])))[dim]
    split = next((s for t in tensors if (s := splits_of(t).at(dim))), None)
    if split is None:
        return BY_RULE
    axis = split.axis
    lead = max(tensors, key=lambda t: (len(splits_of(t)), shape_of(t)[dim]))
    rest = splits_of(lead).without(dim).replaced(axis, None)
    arguments, owners = list[Splits](), list[Owners]()
    for i, t in enumerate(tensors):
        have, n = splits_of(t).on(axis), shape_of(t)[dim]
        owners.append(have.owners if have and have.dim == dim else _owners_between(tensors, i, dim, split))
        # ranks that own nothing of a replicated tensor take an empty shard: its gradient is then zero, not missing
        arguments.append(rest.replaced(axis, Split(axis, dim, owners[-1])) if n else rest)
    splits = rest.replaced(axis, Split(axis, dim, Owners.joined(owners, axis.size)))
    shape = list(shape_of(lead))
    shape[dim] = sum(shape_of(t)[dim] for t in tensors)
    return plan_of_call(func, arguments, splits, shape, torch.cat, [TENSOR] * len(tensors), dim)


def _owners_between(tensors: Sequence[Tensor], i: int, dim: int, split: Split) -> Owners:
    """Return owners of a replicated tensor in a concatenation: all ranks, or a neighbour's if it has few indices."""
    n, axis = shape_of(tensors[i])[dim], split.axis
    if n >= axis.size:
        return Owners.even(n, axis.size)
    cut = [(j, s.owners) for j, t in enumerate(tensors) if (s := splits_of(t).on(axis)) and s.dim == dim]
    before = [owners.runs[-1].rank for j, owners in cut if j < i]
    after = [owners.runs[0].rank for j, owners in cut if j > i]
    return Owners.from_vector([(before[-1:] + after)[0]] * n, axis.size)


@function(Tensor.__getitem__)
def _getitem(x: Tensor, index: Any) -> Any:
    """Convert lists of positions in an index to tensors; for plain tensors, torch does this in C++."""
    given = index if isinstance(index, tuple) else (index,)
    if any(isinstance(i, list | tuple) for i in given):
        device = held_by(x).device
        index = tuple(torch.tensor(i, device=device) if isinstance(i, list | tuple) and len(i) else i for i in given)
    return COMPUTE["function"](Tensor.__getitem__, (x, index), {})


@function(Tensor.__setitem__)
def _setitem(x: Tensor, index: Any, value: Any) -> None:
    """Write into some indices of a tensor; each rank writes the indices that it owns."""
    if not splits_of(x):
        raise shard_error(Tensor.__setitem__, [x], "it writes sharded values into a tensor that every rank has whole")
    if x.copied:  # type: ignore[attr-defined]
        raise shard_error(Tensor.__setitem__, [x], LOST, remedy="write into the tensor itself, or use where")
    index = list(index) if isinstance(index, tuple) else [index]
    # a bool is a mask without dims
    looked_up = [i for i in index if isinstance(i, bool) or not isinstance(i, int | slice | EllipsisType | None)]
    if looked_up:
        _put(x, index, looked_up, value)
        return
    n_indexed = sum(i is not None and i is not Ellipsis for i in index)
    place = next((k for k, i in enumerate(index) if i is Ellipsis), len(index))
    index[place : place + 1] = [slice(None)] * (x.dim() - n_indexed)
    if isinstance(value, Tensor):
        # torch ignores leading dims of size 1
        while len(shape_of(value)) > sum(not isinstance(i, int) for i in index) and shape_of(value)[0] == 1:
            value = value.squeeze(0)
    part, splits = local_of(x), splits_of(x)
    for dim, i in enumerate(index):
        if i is None:
            part = part.unsqueeze(dim)
            splits = Splits.of([split._replace(dim=split.dim + (split.dim >= dim)) for split in splits])
            continue
        if isinstance(i, slice) and (i.step or 1) < 1:
            # indexing in reverse makes a copy, so that a write to it would be lost
            raise ValueError("step must be greater than zero")
        n = splits.global_shape(part.shape)[dim]
        indices = range(n)[i] if isinstance(i, slice) else range(n)[range(n)[i] :][:1]
        split, (splits, local) = splits.at(dim), taken(splits, dim, [indices])
        if split and any(len(split.owners.local(rank, indices)) > 1 for rank in range(split.axis.size)):
            raise shard_error(Tensor.__setitem__, [x], "a rank owns several ranges of what is written")
        part = pick(part, dim, local)
        after = sum(not isinstance(other, int) for other in index[dim + 1 :])
        if isinstance(i, int) and isinstance(value, Tensor) and len(shape_of(value)) > after:
            # the dim is kept, and is empty on ranks that do not own the index
            value = value.unsqueeze(-1 - after)
    written = wrap(part, splits)
    if isinstance(value, Tensor):
        written.copy_(value)
    else:
        written.fill_(value)


def _put(x: Tensor, index: Sequence[Any], looked_up: Sequence[Any], value: Any) -> None:
    """Write to positions that depend on values: a mask of leading dims, or positions along leading dims."""
    if len(index) == 1 and isinstance(index[0], Tensor) and index[0].dtype == torch.bool:
        if isinstance(value, Tensor) and value.dim():
            raise shard_error(Tensor.__setitem__, [x], "how many values a mask selects differs between ranks")
        mask = index[0]
        x.masked_fill_(mask.reshape([*shape_of(mask), *[1] * (x.dim() - mask.dim())]), value)
        return
    leading = [i for i in index if i is not Ellipsis and i != slice(None)]
    if len(leading) != len(looked_up) or any(i is Ellipsis for i in index[:-1]):
        raise shard_error(Tensor.__setitem__, [x], "it writes to slices of positions that depend on values")
    own = [None if isinstance(i, slice) else torch.as_tensor(i) for i in index if i is not Ellipsis]
    value = value if isinstance(value, Tensor) else torch.tensor(value, dtype=local_of(x).dtype, device=x.device)
    torch.ops.aten.index_put_.default(x, own, value)
