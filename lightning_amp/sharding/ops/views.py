"""Reshape, expand and repeat sharded tensors; ranks only communicate if shards end inside a new dim."""

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

from lightning_amp.graph.flow import groups
from lightning_amp.sharding.dispatch.by_rule import result_shapes, splits_with_whole, view_of
from lightning_amp.sharding.dispatch.plans import TENSOR, CallPlan, plan_of_call
from lightning_amp.sharding.owners import Owners
from lightning_amp.sharding.registry import name_of, operator, shard_error
from lightning_amp.sharding.sharded_tensor import dim_of, shape_of, splits_of
from lightning_amp.sharding.splits import WHOLE, Split, Splits

Groups = list[tuple[list[int], list[int]]]


@operator(*["view", "reshape", "_unsafe_view", "view_as", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze"])
def _view(func: Any, x: Tensor, *args: Any) -> CallPlan:
    """Plan a view in another shape, with the owners of merged and split dims."""
    (new,), old = result_shapes(func, (x, *args), {}), shape_of(x)
    if func._overloadname == "dtype":
        # view(dtype): if the item size changes, values of the last dim are merged or split
        whole = [] if new == old else [len(old) - 1]
        splits = splits_with_whole(func, x, splits_of(x), whole)
        return plan_of_call(func, [splits], splits, new, Tensor.view, TENSOR, *args, view=True)
    pairs = groups(old, new)
    # an empty tensor is not sharded
    splits = splits_of(x) if prod(old) else WHOLE
    for before, _ in pairs:
        # among merged dims, only the first sharded one stays sharded: two axes would form a grid over the merged dim,
        # which one vector of owners cannot describe
        others = [d for d in before if splits.at(d)][1:]
        splits = splits_with_whole(func, x, splits, others, stay=before)
    changed = [d for before, after in pairs if len(before) > 1 or len(after) != 1 for d in before]
    for split in splits:
        if _reshaped(split, old, new, pairs) is None:
            # shards end inside a new dim: if possible, move a few rows so that they end at its borders
            other = _other_borders(split, old, new, pairs)
            splits = splits.replaced(split.axis, other or split)
            splits = splits if other else splits_with_whole(func, x, splits, [split.dim], stay=changed)
    result = Splits.of([s for split in splits if (s := _reshaped(split, old, new, pairs))])
    more = [t for t in args if isinstance(t, Tensor)]
    part = tuple(result.local_shape(new))
    call = (lambda part, shape, *_: part.reshape(shape)), TENSOR, part, *[TENSOR] * len(more)
    return plan_of_call(func, [splits, *map(splits_of, more)], result, new, *call, view=view_of(func))


def _group_of(dim: int, pairs: Groups) -> tuple[list[int], list[int]]:
    return next((pair for pair in pairs if dim in pair[0]), ([dim], []))


def _through(owners: Owners, sizes: Sequence[int], i: int, others: Sequence[int], j: int) -> Owners | None:
    """Return the owners of dim j of `others`, given those of dim i of `sizes` before a reshape; None if undefined."""
    # Through the dim that all dims of the group merge into, in row-major order: an index of dim i is a run of the dims
    # after it, repeated for each index of the dims before it. A new dim has owners only if its index alone determines
    # them.
    merged = owners.widened(prod(sizes[i + 1 :])).repeated(prod(sizes[:i]))
    found = merged.inner(prod(others[:j]))
    return found and found.outer(prod(others[j + 1 :]))


def _reshaped(split: Split, old: Sequence[int], new: Sequence[int], pairs: Groups) -> Split | None:
    """Return the split of the new shape; None if no new dim has it."""
    before, after = _group_of(split.dim, pairs)
    sizes, others = [old[d] for d in before], [new[d] for d in after]
    for i, dim in enumerate(after):
        owners = _through(split.owners, sizes, before.index(split.dim), others, i)
        if owners is not None:
            return split._replace(dim=dim, owners=owners)
    return None


def _other_borders(split: Split, old: Sequence[int], new: Sequence[int], pairs: Groups) -> Split | None:
    """Return a split of the same dim that corresponds to an even split of a new dim; None if there is none."""
    before, after = _group_of(split.dim, pairs)
    sizes, others = [old[d] for d in before], [new[d] for d in after]
    for i, n in enumerate(others):
        owners = _through(Owners.even(n, split.axis.size), others, i, sizes, before.index(split.dim))
        if owners is not None and min(owners.period_counts):
            return split._replace(owners=owners)
    return None


@operator("expand", "broadcast_to", "expand_as")
def _expand(func: Any, x: Tensor, size: Any, *, implicit: bool = False) -> CallPlan | Tensor:
    """Plan an expand: dims of size 1 are repeated without memory."""
    if isinstance(size, Tensor):
        return x.expand(shape_of(size))
    shape = shape_of(x)
    new = len(size) - len(shape)
    goal = [shape[d - new] if n == -1 else n for d, n in enumerate(size)]
    splits = splits_of(x).mapped(lambda d: d + new)
    call = Tensor.expand, TENSOR, splits.local_shape(goal)
    return plan_of_call(func, [splits_of(x)], splits, goal, *call, view=True)


@operator("repeat")
def _repeat(func: Any, x: Tensor, times: Sequence[int]) -> Tensor:
    shape = [*[1] * (len(times) - len(shape_of(x))), *shape_of(x)]
    unfolded = x.reshape([m for n in shape for m in (1, n)])
    unfolded = unfolded.expand([m for n, t in zip(shape, times, strict=True) for m in (t, n)])
    return unfolded.clone().reshape([n * t for n, t in zip(shape, times, strict=True)])


@operator("repeat_interleave")
def _repeat_interleave(func: Any, x: Tensor, repeats: Any, dim: int | None = None, **_: Any) -> Tensor:
    if not isinstance(repeats, int):
        raise shard_error(func, [x], "how often an index is repeated depends on values")
    x, dim = (x.flatten(), 0) if dim is None else (x, dim_of(x, dim))
    shape = list(shape_of(x.unsqueeze(dim + 1)))
    shape[dim + 1] = repeats
    return x.unsqueeze(dim + 1).expand(shape).clone().flatten(dim, dim + 1)


@operator("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle")
def _shuffle(func: Any, x: Tensor, factor: int) -> Tensor:
    if "channel" in name_of(func):
        return x.unflatten(1, (factor, -1)).transpose(1, 2).flatten(1, 2)
    if name_of(func) == "pixel_unshuffle":
        unfolded = x.unflatten(-1, (-1, factor)).unflatten(-3, (-1, factor))
        return unfolded.movedim((-3, -1), (-4, -3)).flatten(-5, -3)
    unfolded = x.unflatten(-3, (-1, factor, factor)).movedim((-4, -3), (-3, -1))
    return unfolded.flatten(-2).flatten(-3, -2)
