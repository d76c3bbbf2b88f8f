"""Register how each operator propagates which entries may be on different ranks (for plan_layouts.py)."""

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from lightning_amp.footprint.live_bytes import named_arguments, tensors_of
from lightning_amp.graph.flow import dims_of, groups, sums_of
from lightning_amp.sharding.dispatch.by_rule import call_of
from lightning_amp.sharding.registry import name_of
from lightning_amp.techniques.tensor3d.atoms import AtomGrid
from lightning_amp.techniques.tensor3d.plan_layouts import RULES, Grids, Labels, LayoutPlanner, Rule, View, along


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


@_rule("")
def _by_rule(planner: LayoutPlanner, func: Any, args: Any, kwargs: Any, found: Any) -> Any:
    """Use the library's flow rule: dims that no result follows stay on one rank. Without a rule, gather arguments."""
    name = name_of(func)
    leaves = tensors_of((args, kwargs))
    call, _ = call_of(func, args, kwargs, leaves)
    follows = None if call is None else dims_of(call)
    if call is None or follows is None:
        planner.gathered.append(name)
        return {}
    labels: list[Labels] = [[("whole", k, d) for d in range(t.dim())] for k, t in enumerate(leaves)]
    for k, tensor in enumerate(leaves):
        for d, n in enumerate(tensor.shape):
            if n == 1:
                labels[k][d] = None
    for out, sources in enumerate(follows):
        for k, d in sources:
            labels[k][d] = out
    # attention scores are not summed over ranks: each head is kept on one rank
    weights = any(t in planner.views for t in leaves)
    summed = sums_of(call) if weights or name in ("sum", "mean") else ()
    for i, group in enumerate(sums_of(call)):
        for k, d in group:
            labels[k][d] = ("sum", i)
    sums = [("sum", i) for i in range(len(summed))]
    whole = [x for row in labels for x in row if isinstance(x, tuple) and x not in sums]
    return planner.combine(name, leaves, labels, list(range(len(call.result))), whole=whole, sums=sums)


@_rule("scaled_dot_product_attention")
def _attention(planner: LayoutPlanner, func: Any, args: Any, kwargs: Any, found: Any) -> Any:
    """Keep heads of keys, and the heads of queries that share them, on one rank."""
    given = named_arguments(func, args, kwargs)
    if given.get("enable_gqa"):
        heads = given["query"].shape[-3]
        for name in ("key", "value"):
            given[name] = _repeated(planner, given[name], heads // given[name].shape[-3])
    return _by_rule(planner, func, (), given | {"enable_gqa": False}, found)


def _repeated(planner: LayoutPlanner, x: Tensor, times: int) -> Tensor:
    """Return a tensor with each head several times, and the grids of its entries."""
    grids, dim = planner.grids(x), x.dim() - 3
    made = x.new_empty((*x.shape[:dim], x.shape[dim] * times, *x.shape[dim + 1 :]))
    planner.known[made] = {
        axis: grid.repeat(times, dim) if grid.shape[dim] > 1 else grid for axis, grid in grids.items()
    }
    return made


@_rule("linear", "addmm", "matmul", "mm")
def _product(planner: LayoutPlanner, func: Any, args: Any, kwargs: Any, found: Any) -> Any:
    name = name_of(func)
    if name == "linear":
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        return _layer(planner, name, args[0], -1, args[1], 0, 1, bias, found)
    if name == "addmm":
        return _layer(planner, name, args[1], -1, args[2], 1, 0, args[0], found)
    x, weight = args
    if weight.dim() == 2 and weight in planner.views and x.dim() > 1:
        return _layer(planner, "matmul", x, -1, weight, 1, 0, None, found)
    return _by_rule(planner, func, args, kwargs, found)


def _layer(
    planner: LayoutPlanner,
    why: str,
    x: Tensor,
    feature: int,
    weight: Tensor,
    out: int,
    inner: int,
    bias: Tensor | None,
    found: Tensor,
) -> Grids:
    """Propagate through a layer: input features are summed, other dims stay, and the bias follows the outputs."""
    planner.roles(x, feature, weight, out, inner)
    n = x.dim()
    rows: Labels = ["inner" if d == feature % n else ("row", d) for d in range(n)]
    of_weight: Labels = ["out" if d == out else "inner" if d == inner else ("kernel", d) for d in range(weight.dim())]
    result: Labels = ["out" if d == feature % n else ("row", d) for d in range(n)]
    # a convolution combines positions, so they must be on one rank
    whole = (
        [row for row in rows if row != "inner" and isinstance(row, tuple) and row[1] > 1] if weight.dim() > 2 else []
    )
    whole += [label for label in of_weight if isinstance(label, tuple)]
    grids = planner.combine(why, [x, weight], [rows, of_weight], result, whole=whole, sums=["inner"])
    if bias is None:
        return grids
    planner.known[found] = grids
    return planner.combine(why, [found, bias], [result, ["out"] if bias.dim() == 1 else result], result)


@_rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _convolution(planner: LayoutPlanner, func: Any, args: Any, kwargs: Any, found: Tensor) -> Any:
    given = named_arguments(func, args, kwargs)
    x, weight, groups = given["input"], given["weight"], given["groups"]
    if x.dim() != weight.dim():
        planner.gathered.append(name_of(func))
        return {}
    if groups > 1:
        return _in_groups(planner, name_of(func), x, weight, given["bias"], groups, found)
    outputs, inputs = (1, 0) if "transpose" in name_of(func) else (0, 1)
    return _layer(planner, name_of(func), x, 1, weight, outputs, inputs, given["bias"], found)


def _in_groups(
    planner: LayoutPlanner, why: str, x: Tensor, weight: Tensor, bias: Any, groups: int, found: Tensor
) -> Grids:
    """Keep the channels of a group on one rank; the weight is split by groups, over the axis of the channels."""
    view, grids = planner.open_view(weight), Grids()
    axes = [axis for axis in planner.axes if groups >= planner.atoms.sizes[axis]]
    split = [axis for axis in axes if (grid := planner.grids(x).get(axis)) is not None and grid.shape[1] > 1]
    for axis in (split or axes)[:1]:
        if axis in split:
            channel = planner.grids(x)[axis].take([0], 0).reshape(x.shape[1], -1)[:, 0].reshape(groups, -1)
            if not planner.atoms.unite(axis, channel, channel[:, :1]):
                break
            group = planner.atoms.now(axis, channel).reshape(groups, -1)[:, 0]
        elif view is not None:
            group = planner.atoms.fresh(axis, groups)
        else:
            continue
        if view is not None:
            view.split(axis, along(group.repeat(weight.shape[0] // groups), 0, weight.dim()))
        grids[axis] = along(group.repeat(found.shape[1] // groups), 1, found.dim())
    # only one axis splits the groups; over another axis that splits channels, they are gathered
    if len(grids) < len(split):
        planner.gathered.append(why)
    if view is not None:
        view.of.decided = True
    if bias is None:
        return grids
    planner.known[found] = grids
    result: Labels = ["out" if d == 1 else ("row", d) for d in range(found.dim())]
    return planner.combine(why, [found, bias], [result, ["out"]], result)


@_rule("embedding")
def _embedding(planner: LayoutPlanner, func: Any, args: Any, kwargs: Any, found: Tensor) -> Grids:
    """Split the rows of the table over y, as the outputs of a head that shares it, and the columns over x."""
    weight, indices = args[:2]
    view = planner.open_view(weight)
    if view is not None:
        for axis, dim in (("x", 1), ("y", 0)):
            if axis in planner.axes and weight.shape[dim] >= planner.atoms.sizes[axis]:
                view.split(axis, along(planner.atoms.fresh(axis, weight.shape[dim]), dim, 2))
        view.of.decided = True
    rows = list(range(indices.dim()))
    return planner.combine(
        "embedding", [weight, indices], [["entry", "column"], rows], [*rows, "column"], sums=["entry"]
    )


@_rule("group_norm")
def _group_norm(planner: LayoutPlanner, func: Any, args: Any, kwargs: Any, found: Tensor) -> Any:
    """Keep the channels of a group on one rank if enough sets remain; otherwise the tensor is gathered."""
    x, n_groups = args[:2]
    parameters = [t for t in (*args[2:4], kwargs.get("weight"), kwargs.get("bias")) if isinstance(t, Tensor)]
    for axis, grid in planner.grids(x).items():
        if grid.shape[1] == 1:
            continue
        channel = grid.take([0], 0).reshape(grid.shape[1], -1)[:, 0].reshape(n_groups, -1)
        if not planner.atoms.unite(axis, channel, channel[:, :1]):
            planner.gathered.append("group_norm")
            return {}
    labels: Labels = ["sample", "channel", *(("place", d) for d in range(2, x.dim()))]
    rows = [labels, *(["channel"] for _ in parameters)]
    return planner.combine("group_norm", [x, *parameters], rows, labels, whole=labels[2:])


@_rule("layer_norm", "rms_norm", "native_layer_norm", "batch_norm")
def _norm(planner: LayoutPlanner, func: Any, args: Any, kwargs: Any, found: Any) -> Any:
    """Allow features on different ranks, because statistics are summed over ranks."""
    x = args[0]
    channel = "batch" in name_of(func)
    rest = tensors_of((args[1:], kwargs))
    labels: Labels = list(range(x.dim()))
    rows = [[1] if channel else labels[x.dim() - t.dim() :] for t in rest]
    return planner.combine(name_of(func), [x, *rest], [labels, *rows], labels)


@_rule("cross_entropy_loss")
def _cross_entropy(planner: LayoutPlanner, func: Any, args: Any, kwargs: Any, found: Tensor) -> Grids:
    """Allow classes on different ranks, because only two sums per row are exchanged."""
    return {}


@_rule("t", "transpose", "permute", "detach", "alias", "_to_copy", "to")
def _reorder(planner: LayoutPlanner, func: Any, args: Any, kwargs: Any, found: Tensor) -> Any:
    x, name, order = args[0], name_of(func), list(range(args[0].dim()))
    if name == "permute":
        order = [d % x.dim() for d in args[1]]
    elif name in ("t", "transpose") and x.dim() > 1:
        a, b = (args[1] % x.dim(), args[2] % x.dim()) if name == "transpose" else (0, 1)
        order[a], order[b] = order[b], order[a]
    view = planner.views.get(x)
    if view is not None and found is not x:
        return View(view.of, [view.order[d] for d in order])
    return {axis: grid.transpose(order) for axis, grid in planner.grids(x).items()}


@_rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as")
def _reshape(planner: LayoutPlanner, func: Any, args: Any, kwargs: Any, found: Tensor) -> Grids:
    x = args[0]
    _settle(planner, x)
    return {axis: _reshaped(grid, tuple(x.shape), tuple(found.shape)) for axis, grid in planner.grids(x).items()}


def _settle(planner: LayoutPlanner, x: Tensor) -> None:
    """Leave a parameter unsplit if it is reshaped before any layer uses it."""
    view = planner.open_view(x)
    if view is not None:
        view.of.decided = True


def _reshaped(grid: AtomGrid, before: tuple[int, ...], after: tuple[int, ...]) -> AtomGrid:
    """Reshape a grid like a view; it is expanded along dims that are merged or split."""
    full, shape = list(grid.shape), [1] * len(after)
    for merged, split in groups(before, after):
        if any(grid.shape[d] > 1 for d in merged):
            for d in merged:
                full[d] = before[d]
            for d in split:
                shape[d] = after[d]
    return np.broadcast_to(grid, full).reshape(shape)


@_rule("expand", "expand_as", "broadcast_to")
def _expand(planner: LayoutPlanner, func: Any, args: Any, kwargs: Any, found: Tensor) -> Grids:
    _settle(planner, args[0])
    more = [1] * (found.dim() - args[0].dim())
    return {axis: grid.reshape([*more, *grid.shape]) for axis, grid in planner.grids(args[0]).items()}


def _taken(planner: LayoutPlanner, x: Tensor, dim: int, index: Any) -> Grids:
    _settle(planner, x)
    return {
        axis: grid.take(index if grid.shape[dim] > 1 else (0 if np.ndim(index) == 0 else [0]), dim)
        for axis, grid in planner.grids(x).items()
    }


@_rule("select")
def _select(planner: LayoutPlanner, func: Any, args: Any, kwargs: Any, found: Tensor) -> Grids:
    x, dim, index = args
    return _taken(planner, x, dim % x.dim(), int(index))


@_rule("slice", "narrow")
def _slice(planner: LayoutPlanner, func: Any, args: Any, kwargs: Any, found: Tensor) -> Grids:
    x, dim = args[0], (args[1] if len(args) > 1 else 0) % args[0].dim()
    bounds = [args[2], args[2] + args[3]] if name_of(func) == "narrow" else args[2:]
    return _taken(planner, x, dim, np.arange(x.shape[dim])[slice(*(bounds or [None]))])


@_rule("split", "split_with_sizes", "chunk", "unbind")
def _split(planner: LayoutPlanner, func: Any, args: Any, kwargs: Any, found: Any) -> list[Grids]:
    x = args[0]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) if name_of(func) != "unbind" else (*args, 0)[1]
    dim, start, grids = dim % x.dim(), 0, list[Grids]()
    for piece in found:
        n = 1 if name_of(func) == "unbind" else piece.shape[dim]
        index = start if name_of(func) == "unbind" else np.arange(start, start + n)
        grids.append(_taken(planner, x, dim, index))
        start += n
    return grids


@_rule("cat", "stack")
def _cat(planner: LayoutPlanner, func: Any, args: Any, kwargs: Any, found: Tensor) -> Grids:
    """Concatenate along a split dim if all tensors are split along it; otherwise that dim must be on one rank."""
    tensors, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    dim %= found.dim()
    if name_of(func) == "stack":
        labels: Labels = [d for d in range(found.dim()) if d != dim]
        return planner.combine("stack", tensors, [labels] * len(tensors), list(range(found.dim())))
    grids = [planner.grids(t) for t in tensors]
    # every entry keeps its atom, and so its rank
    joined = Grids()
    for axis in planner.axes:
        own = [one.get(axis) for one in grids]
        if all(grid is not None and grid.shape[dim] > 1 for grid in own):
            full = [
                np.broadcast_to(grid, [*grid.shape[:dim], t.shape[dim], *grid.shape[dim + 1 :]])
                for grid, t in zip(own, tensors, strict=True)
                if grid is not None
            ]
            joined[axis] = np.concatenate(full, dim)
    if joined:
        return joined
    each = [[("part", i) if d == dim else d for d in range(found.dim())] for i in range(len(tensors))]
    whole = [row[dim] for row in each]
    out = [("joined", 0) if d == dim else d for d in range(found.dim())]
    return planner.combine("cat", tensors, each, out, whole=whole)
