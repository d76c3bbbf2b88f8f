"""Plans of operators that merge, split, reorder, add or drop dims; they send nothing, unless borders lie inside a new dim."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_amp.dist.by_rule import result_shapes, splits_with_whole, view_of
from lightning_amp.dist.owners import Owners
from lightning_amp.dist.plans import MAY_COPY, TENSOR, Plan
from lightning_amp.dist.registry import name_of, operator, shard_error
from lightning_amp.dist.sharded_tensor import shape_of, splits_of
from lightning_amp.dist.splits import WHOLE, Split, Splits
from lightning_amp.graph.flow_rules import groups

Groups = list[tuple[list[int], list[int]]]


def view_plan(
    func: Any, x: Tensor, call: Any, args: tuple[Any, ...], splits: Splits, shape: Sequence[int]
) -> Plan:
    """The plan of a view of one tensor, which keeps its splits, as a tensor of a global shape with some splits."""
    return Plan(
        name=name_of(func),
        arguments=(splits_of(x),),
        result=splits,
        shapes=(tuple(splits.local_shape(shape)),),
        call=call,
        args=(TENSOR, *args),
        view="always",
    )


@operator(
    *(
        "view",
        "reshape",
        "_unsafe_view",
        "view_as",
        "reshape_as",
        "flatten",
        "unflatten",
        "squeeze",
        "unsqueeze",
    )
)
def _view(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Plan:
    """A view in another shape, with the owners of the merged and split dims."""
    if func._overloadname == "dtype":
        raise shard_error(func, [x], "it reads the bytes of a tensor as another type")
    (new,) = result_shapes(func, (x, *args), kwargs)
    old = shape_of(x)
    pairs = groups(old, new)
    # of an empty tensor nothing is to be split
    splits = _one_split_per_group(func, x, pairs) if prod(old) else WHOLE
    changed = [
        d for d in range(len(old)) if len(_group_of(d, pairs)[0]) != 1 or len(_group_of(d, pairs)[1]) != 1
    ]
    for split in splits:
        if _reshaped(split, old, new, pairs) is None:
            other = _other_borders(split, old, new, pairs)
            if other is not None:
                splits = splits.replaced(split.axis, other)
            else:
                splits = splits_with_whole(func, x, splits, [split.dim], stay=changed)
    result = Splits.of([s for split in splits if (s := _reshaped(split, old, new, pairs))])
    shape = tuple(result.local_shape(new))
    name = name_of(func)
    return Plan(
        name=name,
        arguments=(splits, *[splits_of(t) for t in args if isinstance(t, Tensor)]),
        result=result,
        shapes=(shape,),
        call=lambda part, *_: part.reshape(shape),
        args=(TENSOR, *[TENSOR for t in args if isinstance(t, Tensor)]),
        view="maybe" if name in MAY_COPY else "always",
    )


def _group_of(dim: int, pairs: Groups) -> tuple[list[int], list[int]]:
    return next((pair for pair in pairs if dim in pair[0]), ([dim], []))


def _one_split_per_group(func: Any, x: Tensor, pairs: Groups) -> Splits:
    """Of dims that are merged the first that is split stays so."""
    splits = splits_of(x)
    for before, _ in pairs:
        more = [d for d in before if splits.at(d)][1:]
        splits = splits_with_whole(func, x, splits, more, stay=before)
    return splits


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


def _other_borders(split: Split, old: Sequence[int], new: Sequence[int], pairs: Groups) -> Split | None:
    """The split of the old shape that one of the new dims can have, with as few indices moved as an even split has."""
    axis, (before, after) = split.axis, _group_of(split.dim, pairs)
    at = before.index(split.dim)
    for i, dim in enumerate(after):
        merged = Owners.even(new[dim], axis.size).widened(prod(new[d] for d in after[i + 1 :]))
        merged = merged.repeated(prod(new[d] for d in after[:i]))
        own = merged.inner(prod(old[d] for d in before[:at]))
        own = own and own.outer(prod(old[d] for d in before[at + 1 :]))
        if own is not None and min(own.period_counts):
            return split._replace(owners=own)
    return None


@operator("permute", "transpose", "t", "movedim", "moveaxis", "swapaxes", "swapdims")
def _reorder(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Plan:
    """Dims in another order."""
    n = len(shape_of(x))
    strides = func(torch.empty([2] * n, device="meta"), *args, **kwargs).stride()
    order = [n - stride.bit_length() for stride in strides]
    splits = splits_of(x).mapped(order.index)
    return view_plan(func, x, torch.permute, (order,), splits, [shape_of(x)[d] for d in order])


@operator("expand", "broadcast_to", "expand_as")
def _expand(func: Any, x: Tensor, size: Any, *, implicit: bool = False) -> Plan | Tensor:
    """Dims of size 1 repeated without memory."""
    if isinstance(size, Tensor):
        return x.expand(shape_of(size))
    shape = shape_of(x)
    new = len(size) - len(shape)
    goal = [shape[d - new] if n == -1 else n for d, n in enumerate(size)]
    splits = splits_of(x).mapped(lambda d: d + new)
    return view_plan(func, x, Tensor.expand, (splits.local_shape(goal),), splits, goal)


@operator("repeat")
def _repeat(func: Any, x: Tensor, times: Sequence[int]) -> Tensor:
    shape = [*[1] * (len(times) - len(shape_of(x))), *shape_of(x)]
    apart = x.reshape([m for n in shape for m in (1, n)])
    apart = apart.expand([m for n, t in zip(shape, times, strict=True) for m in (t, n)])
    return apart.clone().reshape([n * t for n, t in zip(shape, times, strict=True)])


@operator("repeat_interleave")
def _repeat_interleave(
    func: Any, x: Tensor, repeats: Any, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    if not isinstance(repeats, int):
        raise shard_error(func, [x], "how often an index is repeated depends on values")
    x, dim = (x.flatten(), 0) if dim is None else (x, dim % len(shape_of(x)))
    apart = x.unsqueeze(dim + 1)
    shape = shape_of(apart)
    return apart.expand([*shape[: dim + 1], repeats, *shape[dim + 2 :]]).clone().flatten(dim, dim + 1)


@operator("pixel_shuffle")
def _pixel_shuffle(func: Any, x: Tensor, factor: int) -> Tensor:
    *_, c, h, w = shape_of(x)
    apart = x.unflatten(-3, (c // factor**2, factor, factor))
    return apart.movedim((-4, -3), (-3, -1)).reshape(
        [*shape_of(x)[:-3], c // factor**2, h * factor, w * factor]
    )


@operator("pixel_unshuffle")
def _pixel_unshuffle(func: Any, x: Tensor, factor: int) -> Tensor:
    *_, c, h, w = shape_of(x)
    apart = x.unflatten(-1, (-1, factor)).unflatten(-3, (-1, factor))
    return apart.movedim((-3, -1), (-4, -3)).reshape(
        [*shape_of(x)[:-3], c * factor**2, h // factor, w // factor]
    )
