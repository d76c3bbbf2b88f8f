"""Operators that merge, split, add or drop dims. They send nothing, unless borders lie inside of a new dim."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_amp.dist.owners import Owners
from lightning_amp.dist.registry import operator, shard_error
from lightning_amp.dist.sharded_tensor import is_view, local_of, redistribute, shape_of, splits_of, wrap
from lightning_amp.dist.splits import Split, Splits
from lightning_amp.graph.flow_rules import groups

aten = torch.ops.aten


@operator("view", "reshape", "_unsafe_view")
def view(func: Any, x: Tensor, size: Sequence[int]) -> Tensor:
    """A view in another shape, with the owners of the merged and split dims."""
    old, new = shape_of(x), _without_minus_one(shape_of(x), size)
    pairs = groups(old, tuple(new))
    x = _one_split_per_group(func, x, pairs)
    splits = splits_of(x)
    for split in splits:
        found = _reshaped(split, old, new, pairs)
        if found is None:
            x = _other_borders(func, x, split, new, pairs)
    splits = Splits.of([s for split in splits_of(x) if (s := _reshaped(split, old, new, pairs))])
    local = local_of(x)
    part = local.reshape(splits.local_shape(new))
    return wrap(part, splits, copied=_copied(x) or not is_view(part, local))


def _without_minus_one(old: Sequence[int], size: Sequence[int]) -> list[int]:
    known = -prod(size)
    return [prod(old) // known if n == -1 else n for n in size] if -1 in size else list(size)


Groups = list[tuple[list[int], list[int]]]


def _group_of(dim: int, pairs: Groups) -> tuple[list[int], list[int]]:
    return next(pair for pair in pairs if dim in pair[0])


def _one_split_per_group(func: Any, x: Tensor, pairs: Groups) -> Tensor:
    """Dims that are merged keep one split of theirs."""
    seen: dict[int, Split] = {}
    for split in splits_of(x):
        first = _group_of(split.dim, pairs)[0][0]
        if first in seen:
            other = seen[first]
            if split.axis.unknown == "error":
                why = f"it merges dim {other.dim} with dim {split.dim}, and both are split"
                raise shard_error(func, [x], why, remedy="split one of them only")
            x = redistribute(x, splits_of(x).replaced(split.axis, None))
        else:
            seen[first] = split
    return x


def _reshaped(split: Split, old: Sequence[int], new: Sequence[int], pairs: Groups) -> Split | None:
    """A split of the new shape; None where no new dim has it."""
    before, after = _group_of(split.dim, pairs)
    at = before.index(split.dim)
    merged = split.owners.widened(prod(old[d] for d in before[at + 1 :]))
    merged = merged.repeated(prod(old[d] for d in before[:at]))
    for i, dim in enumerate(after):
        found = merged.inner(prod(new[d] for d in after[:i]))
        found = found and found.outer(prod(new[d] for d in after[i + 1 :]))
        if found is not None:
            return split._replace(dim=dim, owners=found)
    return None


def _other_borders(func: Any, x: Tensor, split: Split, new: Sequence[int], pairs: Groups) -> Tensor:
    """The tensor with borders that one of the new dims can have, whole, or split along a dim that does not change."""
    old, axis = shape_of(x), split.axis
    before, after = _group_of(split.dim, pairs)
    at = before.index(split.dim)
    for i, dim in enumerate(after):
        if new[dim] < axis.size:
            continue
        merged = Owners.even(new[dim], axis.size).widened(prod(new[d] for d in after[i + 1 :]))
        merged = merged.repeated(prod(new[d] for d in after[:i]))
        own = merged.inner(prod(old[d] for d in before[:at]))
        own = own and own.outer(prod(old[d] for d in before[at + 1 :]))
        if own is not None and min(own.period_counts):
            return redistribute(x, splits_of(x).replaced(axis, split._replace(owners=own)))
    alone = [b[0] for b, a in pairs if len(b) == len(a) == 1 and splits_of(x).at(b[0]) is None]
    if alone and max(old[d] for d in alone) >= axis.size:
        dim = max(alone, key=lambda d: old[d])
        even = Split(axis, dim, Owners.even(old[dim], axis.size))
        return redistribute(x, splits_of(x).replaced(axis, even))
    if axis.unknown == "gather":
        return redistribute(x, splits_of(x).replaced(axis, None))
    why = f"to shape {tuple(new)} it splits dim {split.dim} inside of a rank's part"
    raise shard_error(func, [x], why, remedy="choose other sizes, or reshape before the tensor is split")


@operator("flatten")
def _flatten(func: Any, x: Tensor, start: int = 0, end: int = -1) -> Tensor:
    shape = shape_of(x)
    n = max(len(shape), 1)
    start, end = start % n, end % n
    merged = [prod(shape[start : end + 1])]
    return view(aten.reshape.default, x, [*shape[:start], *merged, *shape[end + 1 :]])


@operator("unflatten")
def unflatten(func: Any, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """One dim as several."""
    shape = shape_of(x)
    dim %= len(shape)
    sizes = _without_minus_one([shape[dim]], sizes)
    return view(aten.reshape.default, x, [*shape[:dim], *sizes, *shape[dim + 1 :]])


@operator("view_as", "reshape_as")
def _view_as(func: Any, x: Tensor, other: Tensor) -> Tensor:
    return view(aten.reshape.default, x, shape_of(other))


@operator("unsqueeze")
def _unsqueeze(func: Any, x: Tensor, dim: int) -> Tensor:
    dim %= len(shape_of(x)) + 1
    return wrap(func(local_of(x), dim), splits_of(x).mapped(lambda d: d + (d >= dim)), copied=_copied(x))


@operator("squeeze")
def _squeeze(func: Any, x: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    shape = shape_of(x)
    asked = range(len(shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = sorted({d % len(shape) for d in asked if shape[d] == 1})
    part = local_of(x)
    for d in reversed(gone):
        part = part.squeeze(d)
    splits = splits_of(x).mapped(lambda d: d - sum(other < d for other in gone))
    return wrap(part, splits, copied=_copied(x))


@operator("expand", "broadcast_to")
def expand(func: Any, x: Tensor, size: Sequence[int], *, implicit: bool = False) -> Tensor:
    """Dims of size 1 repeated without memory."""
    shape = shape_of(x)
    new = len(size) - len(shape)
    goal = [shape[d - new] if n == -1 else n for d, n in enumerate(size)]
    splits = splits_of(x).mapped(lambda d: d + new)
    return wrap(local_of(x).expand(splits.local_shape(goal)), splits, copied=_copied(x))


@operator("expand_as")
def _expand_as(func: Any, x: Tensor, other: Tensor) -> Tensor:
    return expand(func, x, shape_of(other))


@operator("movedim", "moveaxis")
def _movedim(func: Any, x: Tensor, source: Any, destination: Any) -> Tensor:
    n = len(shape_of(x))
    a = [d % n for d in ([source] if isinstance(source, int) else source)]
    b = [d % n for d in ([destination] if isinstance(destination, int) else destination)]
    rest = iter([d for d in range(n) if d not in a])
    order = [a[b.index(d)] if d in b else next(rest) for d in range(n)]
    splits = splits_of(x).mapped(order.index)
    return wrap(local_of(x).permute(order), splits, copied=_copied(x))


def _copied(x: Tensor) -> bool:
    return bool(getattr(x, "copied", False))
