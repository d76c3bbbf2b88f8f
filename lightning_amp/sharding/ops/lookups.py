"""Compute operators whose indices are tensors: index, gather, scatter, embedding and similar ones.

Along an indexed, sharded dim, each rank reads the values that it owns, and the results are all-reduced. If the index is
sharded over the same axis, it keeps its split, and the values are gathered. Accumulating writes are the adjoint: every
rank adds its values to zeros, and the sum over the ranks goes to the owners.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_amp.sharding.collectives import all_reduce, positions, reduce_scatter
from lightning_amp.sharding.registry import BY_RULE, composed, name_of, operator, shard_error
from lightning_amp.sharding.sharded_tensor import (
    axes_in,
    dim_of,
    local_of,
    part_in,
    redistribute,
    shape_of,
    splits_of,
    wrap,
)
from lightning_amp.sharding.splits import WHOLE, MeshAxis, Split, Splits

aten = torch.ops.aten


def own_positions(index: Tensor, split: Split) -> tuple[Tensor, Tensor]:
    """Map global positions along a dim to the local shard, 0 if not owned; and return which are owned."""
    axis, _, owners = split
    # an integer table over all indices: owners may be in any order, so comparing with borders is not enough
    place = torch.full((owners.n,), -1, dtype=torch.int64, device=index.device)
    own = positions(owners.spans[axis.rank], index.device)
    place[own] = torch.arange(len(own), device=index.device)
    found = place[index]
    return found.clamp(min=0), found >= 0


# --- x[indices] ---


class _Indexing:
    """How a tensor is indexed along some dims.

    Attributes:
        used: The indexed dims.
        at: First dim of the index in the result.
        indices: The index tensors, plain or sharded, broadcast to one shape.
    """

    def __init__(self, func: Any, x: Tensor, indices: Sequence[Tensor | None]) -> None:
        self.used = [d for d, index in enumerate(indices) if index is not None]
        given = [index for index in indices if index is not None]
        if any(index.dtype in (torch.bool, torch.uint8) for index in given):
            raise shard_error(func, [x, *given], "how many values a mask selects differs between ranks")
        shape = torch.broadcast_shapes(*map(shape_of, given))
        self.indices = [index if shape_of(index) == shape else index.expand(shape) for index in given]
        # torch puts the dims of the index in place of the indexed dims if these are adjacent, and first otherwise.
        adjacent = self.used == list(range(self.used[0], self.used[0] + len(self.used)))
        self.at, self.rank = self.used[0] if adjacent else 0, len(shape)
        self.splits = WHOLE
        for axis in axes_in(*given):
            # the indices are small: they follow the largest sharded one
            split = max((s for t in self.indices if (s := splits_of(t).on(axis))), key=lambda s: s.owners.n)
            if self.splits.at(split.dim) is None:
                self.splits = self.splits.replaced(axis, split)

    def own(self, splits: Splits, along: Sequence[Split]) -> tuple[list[Tensor], Tensor | None]:
        """Return local positions, and which this rank owns; None if no indexed dim is sharded."""
        own, inside = [part_in(index, splits) for index in self.indices], None
        for split in along:
            i = self.used.index(split.dim)
            own[i], mine = own_positions(own[i], split)
            inside = mine if inside is None else inside & mine
        return own, inside

    def of_result(self, d: int) -> int | None:
        """Return the dim of the result that follows a dim of the tensor."""
        if d in self.used:
            return None
        before = sum(other not in self.used for other in range(d))
        return before if before < self.at else before + self.rank

    def of_values(self, splits: Splits) -> Splits:
        """Return splits of the result, from those of the tensor and the index."""
        moved = self.splits.mapped(lambda d: d + self.at)
        return Splits.of([*splits.mapped(self.of_result), *moved])


@operator("index")
def _index(func: Any, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    how = _Indexing(func, x, indices)
    for axis in axes_in(x):
        have = splits_of(x).on(axis)
        if have is not None and how.splits.on(axis) is not None:
            # index and indexed dim are sharded over one axis: each rank needs rows of all others
            if have.dim in how.used:
                x = redistribute(x, splits_of(x).replaced(axis, None))
            else:
                how.splits = how.splits.replaced(axis, None)
    along = [s for s in splits_of(x) if s.dim in how.used]
    own, inside = how.own(how.splits, along)
    found = local_of(x)[tuple(_places(x, how.used, own, slice(None)))]
    if inside is not None:
        inside = inside.view([*inside.shape, *[1] * (found.dim() - how.at - how.rank)])
        # not torch.where, which would convert booleans to numbers
        found = found.masked_fill(~inside, 0)
        for split in along:
            found = all_reduce(found, split.axis)
    return wrap(found, how.of_values(splits_of(x)))


def _places(x: Tensor, used: Sequence[int], own: Sequence[Tensor], others: Any) -> list[Any]:
    given = dict(zip(used, own, strict=True))
    return [given.get(d, others) for d in range(len(shape_of(x)))]


@operator("index_put")
def _index_put(
    func: Any, x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    how = _Indexing(func, x, indices)
    shape = [n for d, n in enumerate(shape_of(x)) if d not in how.used]
    shape[how.at : how.at] = shape_of(how.indices[0])
    values = values.expand(shape)
    for split in splits_of(values).mapped(lambda d: d - how.at if how.at <= d < how.at + how.rank else None):
        if how.splits.on(split.axis) is None and how.splits.at(split.dim) is None:
            how.splits = how.splits.replaced(split.axis, split)
    if accumulate and how.splits:
        zeros = torch.zeros_like(redistribute(x, splits_of(x).without(*how.used)))
        for axis in axes_in(zeros):
            if how.splits.on(axis) is not None:
                zeros = redistribute(zeros, splits_of(zeros).replaced(axis, None))
        part = part_in(values, how.of_values(splits_of(zeros)))
        own = [part_in(index, how.splits) for index in how.indices]
        added = aten.index_put.default(local_of(zeros), _places(x, how.used, own, None), part, True)
        return _added(x, wrap(added, splits_of(zeros)), [s.axis for s in how.splits])
    # torch keeps the last value for a repeated position, so each owner needs all values in order
    how.splits = WHOLE
    rest = splits_of(x).without(*how.used)
    own, inside = how.own(WHOLE, [s for s in splits_of(x) if s.dim in how.used])
    part = part_in(values, how.of_values(rest))
    if inside is not None:
        # only values that this rank owns
        own = [index[inside] for index in own]
        part = part.movedim(tuple(range(how.at, how.at + how.rank)), tuple(range(how.rank)))[inside]
        part = part if how.at == 0 else part.movedim(0, how.at)
    places = _places(x, how.used, own, None)
    return wrap(aten.index_put.default(local_of(x), places, part, accumulate), splits_of(x))


def _added(x: Tensor, added: Tensor, axes: Sequence[MeshAxis]) -> Tensor:
    """Add the sum over some axes of each rank's contribution; the result is replicated or sharded as the tensor is."""
    part, splits = local_of(added), splits_of(added)
    for axis in axes:
        split = splits_of(x).on(axis)
        if split is None or splits.at(split.dim) is not None:
            part = all_reduce(part, axis)
        else:
            part, splits = reduce_scatter(part, axis, split.dim, split.owners), splits.replaced(axis, split)
    return x + wrap(part, splits)


def _at(x: Tensor, dim: int, index: Tensor) -> list[Tensor | None]:
    return [*[None] * dim_of(x, dim), index]


composed(
    index_select=lambda x, dim, i: _index(aten.index.Tensor, x, _at(x, dim, i.reshape(-1))),
    index_add=lambda x, dim, i, y, *, alpha=1: _index_put(aten.index_put, x, _at(x, dim, i), y * alpha, True),
    index_copy=lambda x, dim, i, y: _index_put(aten.index_put, x, _at(x, dim, i), y),
    index_fill=lambda x, dim, i, y: _index_put(
        aten.index_put, x, _at(x, dim, i), torch.as_tensor(y, dtype=x.dtype, device=x.device)
    ),
    take=lambda x, i: _index(aten.index.Tensor, x.flatten(), [i]),
)


@operator("embedding")
def _embedding(
    func: Any, weight: Tensor, index: Tensor, padding_idx: int = -1, scale: bool = False, sparse: bool = False
) -> Any:
    """Compute by rule, except for a table with sharded rows."""
    rows = splits_of(weight).at(0)
    if (scale and (rows or splits_of(index))) or (sparse and rows):
        raise shard_error(func, [weight, index], "its gradient is scaled by counts of positions, or sparse")
    if rows is None:
        return BY_RULE
    found = _index(func, weight, [index])
    if padding_idx >= 0:
        found = torch.where((index == padding_idx)[..., None], found.detach(), found)
    return found


# --- gather and scatter along a dim ---


@operator("gather")
def _gather(func: Any, x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Any:
    dim = dim_of(x, dim)
    for d, n in enumerate(shape_of(index)):
        if d != dim and shape_of(x)[d] != n:
            x = x.narrow(d, 0, n)
    # the result keeps splits of dims other than `dim`, else that of the index: it has the shape of the index
    splits = WHOLE
    for axis in axes_in(x, index):
        have = splits_of(x).on(axis)
        split = have if have is not None and have.dim != dim else splits_of(index).on(axis) or have
        assert split is not None, "one of them is split"
        if splits.at(split.dim) is None and not (split is have and split.dim == dim):
            splits = splits.replaced(axis, split)
    along = [s for s in splits_of(x) if s.dim == dim and splits.on(s.axis) is None and splits.at(dim) is None]
    own = part_in(index, splits)
    x = redistribute(x, Splits.of([*splits.without(dim), *along]))
    if not along:
        return wrap(torch.gather(local_of(x), dim, own), splits)
    own, inside = own_positions(own, along[0])
    found = torch.gather(local_of(x), dim, own).masked_fill(~inside, 0)
    return wrap(all_reduce(found, along[0].axis), splits)


@operator("scatter", "scatter_add", "scatter_reduce")
def _scatter(func: Any, x: Tensor, dim: int, index: Tensor, source: Any, *args: Any, **kwargs: Any) -> Tensor:
    dim, shape = dim_of(x, dim), shape_of(index)
    if isinstance(source, Tensor):
        for d, n in enumerate(shape):
            source = source if shape_of(source)[d] == n else source.narrow(d, 0, n)
    given = [x, index, source] if isinstance(source, Tensor) else [x, index]
    # splits of dims with the same size in all tensors
    splits = WHOLE
    for axis in axes_in(*given):
        split = next((s for t in given if (s := splits_of(t).on(axis)) and s.dim != dim), None)
        if split is not None and shape[split.dim] == shape_of(x)[split.dim] and splits.at(split.dim) is None:
            splits = splits.replaced(axis, split)
    # sharded values to add: each rank adds its own to zeros, and the sums are all-reduced
    over = next((s for t in given[1:] for s in splits_of(t) if s.dim == dim and splits.on(s.axis) is None), None)
    if name_of(func) == "scatter_add" and over is not None:
        own = splits.replaced(over.axis, over)
        zeros = torch.zeros_like(part_in(x, splits))
        added = func(zeros, dim, part_in(index, own), part_in(source, own))
        return _added(x, wrap(added, splits), [over.axis])
    along = next((s for s in splits_of(x) if s.dim == dim and splits.on(s.axis) is None), None)
    x = redistribute(x, Splits.of([*splits, *([along] if along else [])]))
    own_index, local = part_in(index, splits), local_of(x)
    own_source = part_in(source, splits) if isinstance(source, Tensor) else source
    if along is None:
        return wrap(func(local, dim, own_index, own_source, *args, **kwargs), splits_of(x))
    # positions that this rank does not own go to an extra row, which is cut off
    n = local.shape[dim]
    own_index, inside = own_positions(own_index, along)
    own_index = torch.where(inside, own_index, n)
    more = torch.cat([local, local.narrow(dim, 0, 1).detach()], dim)
    return wrap(func(more, dim, own_index, own_source, *args, **kwargs).narrow(dim, 0, n), splits_of(x))


@operator("bincount")
def _bincount(func: Any, x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    n = max(int(x.max()) + 1, minlength)
    ones = torch.ones_like(x) if weights is None else weights
    return torch.zeros(n, dtype=ones.dtype, device=ones.device).index_add(0, x, ones)


@operator("diagonal", "diagonal_copy")
def _diagonal(func: Any, x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Compute by rule, unless rows or columns are sharded: then gather one column of each row."""
    n = len(shape_of(x))
    dim1, dim2 = range(n)[dim1], range(n)[dim2]
    if splits_of(x).at(dim1) is None and splits_of(x).at(dim2) is None:
        return BY_RULE
    rows, columns = shape_of(x)[dim1], shape_of(x)[dim2]
    first = max(-offset, 0)
    length = max(min(rows - first, columns - max(offset, 0)), 0)
    x = x.movedim((dim1, dim2), (-2, -1)).narrow(-2, first, length)
    columns_at = torch.arange(length, device=x.device) + max(offset, 0)
    found = x.gather(-1, columns_at[:, None].expand(*shape_of(x)[:-1], 1)).squeeze(-1)
    return wrap(local_of(found), splits_of(found), copied=name_of(func) == "diagonal")


@operator("slice_scatter", "select_scatter")
def _scatter_slice(func: Any, x: Tensor, source: Tensor, dim: int = 0, *args: Any) -> Tensor:
    dim, found = dim_of(x, dim), x.clone()
    found[(*[slice(None)] * dim, slice(*args) if name_of(func) == "slice_scatter" else args[0])] = source
    return found
