"""Operators that select, cut and join along a dim."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_amp.dist.collectives import all_reduce, exchange, pick, reduce_now
from lightning_amp.dist.owners import Owners
from lightning_amp.dist.registry import function, operator, shard_error
from lightning_amp.dist.sharded_tensor import (
    ShardedTensor,
    in_order,
    local_of,
    part_in,
    redistribute,
    settled,
    shape_of,
    splits_of,
    wrap,
)
from lightning_amp.dist.splits import Split, Splits

aten = torch.ops.aten


@operator("select")
def select(func: Any, x: Tensor, dim: int, index: int) -> Tensor:
    """One index of a dim; of a split dim its owner sends it to every rank."""
    shape, splits = shape_of(x), splits_of(x)
    dim %= len(shape)
    split, copied = splits.at(dim), x.copied  # type: ignore[attr-defined]
    rest = splits.without(dim).mapped(lambda d: d - (d > dim))
    if split is None:
        return wrap(local_of(x).select(dim, index), rest, copied=copied)
    index %= shape[dim]
    row = exchange(local_of(x), split.axis, dim, split.owners, (((index, index + 1),),) * split.axis.size)
    return wrap(row.select(dim, 0), rest, copied=True)


@operator("slice")
def slice_of(
    func: Any, x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """A slice; of a split dim every rank keeps what it owns, unless some would have nothing."""
    shape = shape_of(x)
    dim %= len(shape)
    indices = range(shape[dim])[slice(start, end, step)]
    if indices == range(shape[dim]):
        return wrap(local_of(x), splits_of(x), copied=x.copied)  # type: ignore[attr-defined]
    return settled(*unsettled_slice(x, dim, indices))


def unsettled_slice(x: Tensor, dim: int, indices: range) -> tuple[Tensor, Splits, bool]:
    """The part of a slice, its splits, in which ranks may have nothing, and whether it is a copy."""
    split, local = splits_of(x).at(dim), local_of(x)
    copied = bool(getattr(x, "copied", False))
    if split is None:
        part = local[(slice(None),) * dim + (slice(indices.start, indices.stop, indices.step),)]
        return part, splits_of(x), copied
    axis, _, owners = split
    splits = splits_of(x).replaced(axis, split._replace(owners=owners.take(indices)))
    spans = owners.own_of(axis.rank, range(indices.start, indices.stop))
    if indices.step == 1:
        return pick(local, dim, spans), splits, copied or len(spans) > 1
    positions = [owners.at(i)[1] for i in indices if owners.at(i)[0] == axis.rank]
    steps = {b - a for a, b in pairwise(positions)}
    if len(steps) <= 1 and positions:
        cut = slice(positions[0], positions[-1] + 1, *steps)
        return local[(slice(None),) * dim + (cut,)], splits, copied
    return (
        local.index_select(dim, torch.tensor(positions, dtype=torch.int64, device=local.device)),
        splits,
        True,
    )


@operator("narrow")
def _narrow(func: Any, x: Tensor, dim: int, start: int, length: int) -> Tensor:
    start = start % shape_of(x)[dim] if start < 0 else start
    return slice_of(func, x, dim, start, start + length)


@operator("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk", "tensor_split")
def _split(func: Any, x: Tensor, sizes: int | Sequence[int], dim: int = 0) -> list[Tensor]:
    n = shape_of(x)[dim]
    meta = func(torch.empty(n, device="meta"), sizes, 0)
    ends, start = list[tuple[int, int]](), 0
    for piece in meta:
        ends.append((start, start + len(piece)))
        start += len(piece)
    return [slice_of(func, x, dim, *ends) for ends in ends]


@operator("unbind")
def _unbind(func: Any, x: Tensor, dim: int = 0) -> list[Tensor]:
    return [select(func, x, dim, index) for index in range(shape_of(x)[dim])]


@operator("cat", "concat", "concatenate")
def cat(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors end to end; parts of a split dim stay where they are, and nothing is sent."""
    tensors = [t for t in tensors if shape_of(t) != (0,)]
    dim %= len(shape_of(tensors[0]))
    split = next((s for t in tensors if (s := splits_of(t).at(dim))), None)
    rest = _layout_but(tensors, dim)
    if split is None:
        return wrap(torch.cat([part_in(t, rest) for t in tensors], dim), rest)
    axis = split.axis
    rest = rest.replaced(axis, None)
    parts, owners = list[Tensor](), list[Owners]()
    for i, t in enumerate(tensors):
        have, n = splits_of(t).on(axis), shape_of(t)[dim]
        own = have.owners if have and have.dim == dim else _owners_between(tensors, i, dim, split)
        owners.append(own)
        splits = rest.replaced(axis, Split(axis, dim, own))
        # of a whole tensor ranks that own nothing of it take an empty part: its gradient is zero there, not missing
        parts.append(part_in(t, splits) if n else part_in(t, rest))
    joined = Owners.joined(owners, axis.size)
    return settled(torch.cat(parts, dim), rest.replaced(axis, Split(axis, dim, joined)))


def _layout_but(tensors: Sequence[Tensor], dim: int) -> Splits:
    """The splits of the largest tensor on the dims but one, that all tensors are brought to."""
    lead = max((t for t in tensors if splits_of(t)), key=lambda t: shape_of(t)[dim])
    return splits_of(lead).without(dim)


def _owners_between(tensors: Sequence[Tensor], i: int, dim: int, split: Split) -> Owners:
    """Owners of a whole tensor in a concatenation: all ranks, or the neighbour's where it has few indices."""
    n, axis = shape_of(tensors[i])[dim], split.axis
    if n >= axis.size:
        return Owners.even(n, axis.size)
    cut = [(j, s.owners) for j, t in enumerate(tensors) if (s := splits_of(t).on(axis)) and s.dim == dim]
    before = [owners.expanded() for j, owners in cut if j < i]
    after = [owners.expanded() for j, owners in cut if j > i]
    rank = list(before[-1])[-1].rank if before else next(after[0]).rank
    return Owners.from_vector([rank] * n, axis.size)


@operator("stack")
def _stack(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    lead = max((t for t in tensors if splits_of(t)), key=lambda t: t.numel())
    splits = splits_of(lead)
    dim %= len(shape_of(lead)) + 1
    part = torch.stack([part_in(t, splits) for t in tensors], dim)
    return wrap(part, splits.mapped(lambda d: d + (d >= dim)))


@operator("flip")
def _flip(func: Any, x: Tensor, dims: Sequence[int]) -> Tensor:
    n = len(shape_of(x))
    gone = {d % n for d in dims}
    splits = Splits.of([s._replace(owners=s.owners.reversed()) if s.dim in gone else s for s in splits_of(x)])
    return wrap(local_of(x).flip(sorted(gone)), splits)


@operator("roll")
def _roll(func: Any, x: Tensor, shifts: Any, dims: Any = ()) -> Tensor:
    dims = [dims] if isinstance(dims, int) else list(dims)
    if not dims:
        flat = torch.flatten(x)
        return torch.roll(flat, shifts, 0).reshape(shape_of(x))
    for shift, dim in zip([shifts] if isinstance(shifts, int) else shifts, dims, strict=True):
        n, d = shape_of(x)[dim], dim % len(shape_of(x))
        if splits_of(x).at(d) is None:
            x = wrap(local_of(x).roll(shift, d), splits_of(x))
        elif at := -shift % n:
            x = cat(
                func, [ShardedTensor(*unsettled_slice(x, d, r)[:2]) for r in (range(at, n), range(at))], d
            )
    return x


@operator("repeat")
def _repeat(func: Any, x: Tensor, times: Sequence[int]) -> Tensor:
    new = len(times) - len(shape_of(x))
    splits = splits_of(x).mapped(lambda d: d + new)
    splits = Splits.of([s._replace(owners=s.owners.repeated(times[s.dim])) for s in splits])
    return wrap(local_of(x).repeat(times), splits)


@operator("repeat_interleave")
def _repeat_interleave(
    func: Any, x: Tensor, repeats: Any, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    if dim is None:
        return torch.repeat_interleave(torch.flatten(x), repeats, 0)
    dim %= len(shape_of(x))
    if not isinstance(repeats, int):
        raise shard_error(func, [x], "how often an index is repeated depends on values")
    splits = Splits.of(
        [s._replace(owners=s.owners.widened(repeats)) if s.dim == dim else s for s in splits_of(x)]
    )
    return wrap(local_of(x).repeat_interleave(repeats, dim), splits)


@operator("index_select")
def _index_select(func: Any, x: Tensor, dim: int, index: Tensor) -> Tensor:
    dim %= len(shape_of(x))
    return _index(func, x, [*[None] * dim, index])


@operator("index")
def _index(func: Any, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Values looked up by positions. Of a split dim each rank gives what it owns, and the results are added up."""
    used = [d for d, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in given):
        raise shard_error(func, [x, *given], "how many values a mask selects differs between ranks")
    lookup = _lookup(func, x, given, used)
    if lookup is not None:
        return lookup
    split = [s for s in splits_of(x) if s.dim in used]
    if any(splits_of(index) for index in given) or used != list(range(used[0], used[0] + len(used))):
        # both are split: looked up values lie on other ranks than their positions
        x = redistribute(x, Splits.of([s for s in splits_of(x) if s.dim not in used]))
        split = []
    if any(splits_of(index) for index in given):
        return _by_split_positions(func, x, given, used)
    rank = max(len(shape_of(index)) for index in given)
    local, own = local_of(x), [index % shape_of(x)[d] for d, index in zip(used, given, strict=True)]
    mine = None
    for axis, dim, owners in split:
        x = in_order(x, dim)
        local, (_, _, owners) = local_of(x), splits_of(x).at(dim) or (axis, dim, owners)
        i, sizes = used.index(dim), owners.counts
        at = own[i] - sum(sizes[: axis.rank])
        inside = (at >= 0) & (at < sizes[axis.rank])
        own[i], mine = at.clamp(0, sizes[axis.rank] - 1), inside if mine is None else mine & inside
    found = local[(*[slice(None)] * used[0], *own)]
    if mine is not None:
        shape = [*mine.shape, *[1] * (found.dim() - used[0] - mine.dim())]
        found = torch.where(mine.view(shape), found, torch.zeros((), dtype=found.dtype, device=found.device))
        for axis, _, _ in split:
            found = all_reduce(found, axis) if found.is_floating_point() else reduce_now(found, axis)
    rest = Splits.of([s for s in splits_of(x) if s.dim not in used])
    return wrap(found, rest.mapped(lambda d: d if d < used[0] else d - len(used) + rank))


def _lookup(func: Any, x: Tensor, given: Sequence[Tensor], used: Sequence[int]) -> Tensor | None:
    """A table that is whole, looked up by one tensor of split positions; None where it is something else."""
    if len(given) != 1 or used != [0] or splits_of(x) or not splits_of(given[0]):
        return None
    return wrap(local_of(x)[local_of(given[0])], splits_of(given[0]))


def _by_split_positions(func: Any, x: Tensor, given: Sequence[Tensor], used: Sequence[int]) -> Tensor:
    shape = torch.broadcast_shapes(*map(shape_of, given))
    lead = max((t for t in given if splits_of(t)), key=lambda t: t.numel())
    splits = splits_of(lead).mapped(lambda d: d + len(shape) - len(shape_of(lead)))
    own = [part_in(torch.broadcast_to(index, shape), splits) for index in given]
    found = local_of(x)[(*[slice(None)] * used[0], *own)]
    rest = splits_of(x).mapped(lambda d: d if d < used[0] else d - len(used) + len(shape))
    if {s.axis for s in rest} & {s.axis for s in splits}:
        raise shard_error(func, [x, *given], "positions and values are split over one axis")
    return wrap(found, Splits.of([*rest, *splits.mapped(lambda d: d + used[0])]))


@function(Tensor.__setitem__)
def _setitem(x: Tensor, index: Any, value: Any) -> None:
    """Write into a part of a tensor; every rank writes what it owns."""
    if not splits_of(x):
        raise shard_error(
            Tensor.__setitem__, [x], "it writes sharded values into a tensor that every rank has whole"
        )
    index = list(index) if isinstance(index, tuple) else [index]
    if not all(i is None or i is Ellipsis or isinstance(i, int | slice) for i in index):
        if isinstance(index[0], Tensor) and len(index) == 1 and index[0].dtype == torch.bool:
            x.masked_fill_(index[0], value)  # a tensor of values is refused by it
            return
        raise shard_error(Tensor.__setitem__, [x], "it writes to positions that depend on values")
    taken = sum(i is not None and i is not Ellipsis for i in index)
    place = next((k for k, i in enumerate(index) if i is Ellipsis), len(index))
    index[place : place + 1] = [slice(None)] * (x.dim() - taken)
    part, dim = x, 0
    for k, i in enumerate(index):
        if i is None:
            part = part.unsqueeze(dim)
        elif isinstance(i, int) and splits_of(part).at(dim) is None:
            part = part.select(dim, i)
            continue
        else:
            n = shape_of(part)[dim]
            indices = range(n)[i] if isinstance(i, slice) else range(i % n, i % n + 1)
            local, splits, copied = unsettled_slice(part, dim, indices)
            if copied:
                raise shard_error(Tensor.__setitem__, [x], "a rank owns several ranges of what is written")
            part = ShardedTensor(local, splits)
            after = sum(not isinstance(other, int) for other in index[k + 1 :])
            if isinstance(i, int) and isinstance(value, Tensor) and len(shape_of(value)) > after:
                # only its owner writes the one index, so the dim stays, with nothing in it on other ranks
                value = value.unsqueeze(-1 - after)
        dim += 1
    if isinstance(value, Tensor):
        part.copy_(value)
    else:
        part.fill_(value)
