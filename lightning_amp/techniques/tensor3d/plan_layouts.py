"""Plan how parameters are split over the axes x and y, by one forward pass on fake tensors.

The pass runs below autograd, so operators arrive whole: `aten.linear`, `aten.scaled_dot_product_attention`. Tensors
are plain and whole; for each of them and each axis a grid of atoms says which entries may be apart (atoms.py). The
first layer that uses a parameter decides its roles, by how the layer's input is split (AxoNN, Section III):

    input split along its features over an axis    that axis splits the features that are added up
    input not split over an axis                   that axis splits the outputs; of two such axes x adds up

so that layers alternate by themselves. What has no rule counts as gathered: a bad plan costs communication, and never
makes a result wrong.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_amp._torch import TorchDispatchMode
from lightning_amp.dist.by_rule import call_of
from lightning_amp.dist.registry import name_of, tensors_in
from lightning_amp.graph.flow import dims_of, sums_of
from lightning_amp.graph.flow_rules import groups
from lightning_amp.techniques.tensor3d.atoms import Atoms, Grid, collapsed, varying

Grids = dict[str, Grid]
Labels = list[Any]
"""A name for each dim of a tensor: dims of one name go together; None where a dim of size 1 is broadcast."""


@dataclass(eq=False)
class Placed:
    """What was decided of a parameter.

    Attributes:
        shape: Of the parameter.
        grids: For each axis that splits it the atoms of its entries.
        decided: Whether a layer has used it.
    """

    shape: tuple[int, ...]
    grids: Grids = field(default_factory=dict)
    decided: bool = False


@dataclass(eq=False)
class _View:
    """A parameter with its dims in another order."""

    of: Placed
    order: list[int]

    def grids(self) -> Grids:
        return {axis: grid.transpose(self.order) for axis, grid in self.of.grids.items()}

    def split(self, axis: str, grid: Grid) -> None:
        """Split the parameter, unless it is split over the axis already or the grid does not vary."""
        if varying(grid) and axis not in self.of.grids:
            self.of.grids[axis] = grid.transpose(np.argsort(self.order))


class LayoutPlanner(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows a forward pass; `placed` has what was decided, and `gathered` the operators that need whole tensors.

    Args:
        parameters: By name; a shared one counts once.
        sizes: Ranks of the axes "x" and "y".
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], sizes: Mapping[str, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.axes = [axis for axis in ("x", "y") if sizes[axis] > 1]
        self.atoms = Atoms({axis: sizes[axis] for axis in self.axes})
        self.placed: dict[str, Placed] = {}
        self.gathered: list[str] = []
        self._views: Any = WeakTensorKeyDictionary()
        self._grids: Any = WeakTensorKeyDictionary()
        for name, parameter in parameters:
            self.placed[name] = Placed(tuple(parameter.shape))
            self._views[parameter] = _View(self.placed[name], list(range(parameter.dim())))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operator, and follow what it does."""
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        if any(t in self._views or self._grids.get(t) for t in given):
            rule = _RULES.get(name_of(func), _by_rule)
            self._keep(found, rule(self, func, args, kwargs, found))
        return found

    def _keep(self, found: Any, grids: Any) -> None:
        if isinstance(grids, _View):
            self._views[found] = grids
            return
        results = tensors_in(found)
        own = grids if isinstance(grids, list) else [grids] * len(results)
        for tensor, one in zip(results, own, strict=True):
            one = {axis: collapsed(grid) for axis, grid in one.items()}
            self._grids[tensor] = {axis: grid for axis, grid in one.items() if varying(grid)}

    def grids(self, x: Any) -> Grids:
        """The grids of a tensor, by the sets as they are now."""
        view = self._views.get(x) if isinstance(x, Tensor) else None
        found = view.grids() if view is not None else self._grids.get(x, {}) if isinstance(x, Tensor) else {}
        return {axis: self.atoms.now(axis, grid) for axis, grid in found.items()}

    def open_view(self, x: Any) -> _View | None:
        """The view of a parameter that no layer has used before."""
        view: _View | None = self._views.get(x) if isinstance(x, Tensor) else None
        return view if view is not None and not view.of.decided else None

    def roles(self, x: Tensor, feature: int, weight: Tensor, out: int, inner: int) -> None:
        """Decide how a layer's weight is split, by how its input is.

        Args:
            x, feature: The input, and its dim of features.
            weight, out, inner: The weight, its dim of outputs and the one that is added up.
        """
        view = self.open_view(weight)
        if view is None:
            return
        grids, free = self.grids(x), list[str]()
        for axis in self.axes:
            grid = grids.get(axis)
            if grid is None:
                free.append(axis)
            elif grid.shape[feature] > 1:
                others = tuple(d for d in range(grid.ndim) if d != feature % grid.ndim)
                for dim in others:
                    grid = grid.take([0], dim)
                view.split(axis, _along(grid.ravel(), inner, weight.dim()))
        if len(free) == 2 and weight.shape[inner] >= self.atoms.sizes["x"]:
            view.split("x", _along(self.atoms.fresh("x", weight.shape[inner]), inner, weight.dim()))
            free = ["y"]
        for axis in free[:1]:
            if weight.shape[out] >= self.atoms.sizes[axis]:
                view.split(axis, _along(self.atoms.fresh(axis, weight.shape[out]), out, weight.dim()))
        view.of.decided = True

    def combine(
        self,
        why: str,
        tensors: Sequence[Tensor],
        labels: Sequence[Labels],
        out: Labels,
        *,
        whole: Iterable[Any] = (),
        sums: Iterable[Any] = (),
    ) -> Grids:
        """The grids of a result, after the atoms that it needs together were united.

        Args:
            why: The operator, for `gathered`.
            tensors, labels, out: The arguments, and the labels of their dims and of the result's.
            whole: Labels whose entries have to be on one rank.
            sums: Labels that are added up, each rank's entries by itself.
        """
        whole, sums = set(whole), set(sums)
        names = list(dict.fromkeys(label for row in labels for label in row if label is not None))
        views = [self.open_view(t) for t in tensors]
        found, taken = Grids(), set[Any]()
        sizes = {a: max((t.numel() for t in tensors if a in self.grids(t)), default=0) for a in self.axes}
        for axis in sorted(self.axes, key=lambda a: (-sizes[a], a)):
            now = self._together(why, axis, tensors, labels, names)
            if now is None:
                continue
            apart = {name for name, n in zip(names, now.shape, strict=True) if n > 1}
            adding = apart & sums
            # what is added up over ranks has no other dim apart on the axis
            for name in sorted(
                apart & (whole if not adding else whole | (set(names) - sums)), key=names.index
            ):
                first = now.take([0], names.index(name))
                if not self.atoms.unite(axis, now, first):
                    now = None
                    break
                now = self.atoms.now(axis, now)
            if now is None or any(n > 1 and name in taken for name, n in zip(names, now.shape, strict=True)):
                self.gathered.append(why)
                continue
            taken |= {name for name, n in zip(names, now.shape, strict=True) if n > 1}
            for view, row in zip(views, labels, strict=True):
                if view is not None:
                    view.split(axis, _in_order(now, names, row))
            if not adding:
                found[axis] = _in_order(now, names, out)
        for view in views:
            if view is not None:
                view.of.decided = True
        return found

    def _together(
        self, why: str, axis: str, tensors: Sequence[Tensor], labels: Sequence[Labels], names: list[Any]
    ) -> Grid | None:
        """One grid over all labels for what the arguments have; those that cannot go together are gathered."""
        now: Grid | None = None
        for tensor, row in zip(tensors, labels, strict=True):
            grid = self.grids(tensor).get(axis)
            if grid is None:
                continue
            own = [name if name is not None else ("none", d) for d, name in enumerate(row)]
            one = _in_order(grid, own, names)
            if now is None:
                now = one
            elif self.atoms.unite(axis, now, one):
                now = self.atoms.now(axis, np.broadcast_arrays(now, one)[0])
            else:
                self.gathered.append(why)
        return now


def _along(ids: Grid, dim: int, n: int) -> Grid:
    return ids.reshape([-1 if d == dim % n else 1 for d in range(n)])


def _in_order(grid: Grid, have: Sequence[Any], want: Sequence[Any]) -> Grid:
    """A grid with its dims in another order; a dim that is not wanted loses its variation, one that is new has none."""
    for dim, name in enumerate(have):
        if name not in want:
            grid = grid.take([0], dim)
    kept = [have.index(name) for name in want if name in have]
    rest = [dim for dim in range(len(have)) if dim not in kept]
    grid = grid.transpose([*kept, *rest])
    shape = iter(grid.shape)
    return grid.reshape([next(shape) if name in have else 1 for name in want])


Rule = Callable[[LayoutPlanner, Any, Any, Any, Any], Any]
_RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


def _by_rule(planner: LayoutPlanner, func: Any, args: Any, kwargs: Any, found: Any) -> Any:
    """Dims follow as the rules of the library say; what follows none has to be whole."""
    name = name_of(func)
    leaves = tensors_in((args, kwargs))
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
    # scores of attention are not added up over ranks: their heads are kept together
    weights = any(t in planner._views for t in leaves)
    summed = sums_of(call) if weights or name in ("sum", "mean") else ()
    for i, group in enumerate(sums_of(call)):
        for k, d in group:
            labels[k][d] = ("sum", i)
    sums = [("sum", i) for i in range(len(summed))]
    whole = [x for row in labels for x in row if isinstance(x, tuple) and x not in sums]
    return planner.combine(name, leaves, labels, list(range(len(call.result))), whole=whole, sums=sums)


@_rule("linear")
def _linear(planner: LayoutPlanner, func: Any, args: Any, kwargs: Any, found: Any) -> Grids:
    x, weight = args[:2]
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    planner.roles(x, -1, weight, 0, 1)
    return _layer(planner, "linear", x, -1, weight, 0, 1, bias, found)


@_rule("addmm")
def _addmm(planner: LayoutPlanner, func: Any, args: Any, kwargs: Any, found: Any) -> Grids:
    bias, x, weight = args[:3]
    planner.roles(x, -1, weight, 1, 0)
    return _layer(planner, "addmm", x, -1, weight, 1, 0, bias, found)


@_rule("matmul", "mm")
def _matmul(planner: LayoutPlanner, func: Any, args: Any, kwargs: Any, found: Any) -> Any:
    x, weight = args
    if weight.dim() == 2 and weight in planner._views and x.dim() > 1:
        planner.roles(x, -1, weight, 1, 0)
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
    """A product with a weight: features of the input are added up, other dims stay, the bias follows the outputs."""
    n = x.dim()
    rows: Labels = ["inner" if d == feature % n else ("row", d) for d in range(n)]
    of_weight: Labels = [
        "out" if d == out else "inner" if d == inner else ("kernel", d) for d in range(weight.dim())
    ]
    result: Labels = ["out" if d == feature % n else ("row", d) for d in range(n)]
    # positions of a convolution change, so they have to be whole
    whole = (
        [row for row in rows if row != "inner" and isinstance(row, tuple) and row[1] > 1]
        if weight.dim() > 2
        else []
    )
    whole += [label for label in of_weight if isinstance(label, tuple)]
    grids = planner.combine(why, [x, weight], [rows, of_weight], result, whole=whole, sums=["inner"])
    if bias is None:
        return grids
    planner._grids[found] = grids
    return planner.combine(why, [found, bias], [result, ["out"] if bias.dim() == 1 else result], result)


@_rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _convolution(planner: LayoutPlanner, func: Any, args: Any, kwargs: Any, found: Tensor) -> Any:
    names = [a.name for a in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    x, weight = given["input"], given["weight"]
    if given.get("groups", 1) != 1 or x.dim() != weight.dim():
        planner.gathered.append(name_of(func))
        return {}
    outputs, inputs = (1, 0) if "transpose" in name_of(func) else (0, 1)
    planner.roles(x, 1, weight, outputs, inputs)
    return _layer(planner, name_of(func), x, 1, weight, outputs, inputs, given.get("bias"), found)


@_rule("embedding")
def _embedding(planner: LayoutPlanner, func: Any, args: Any, kwargs: Any, found: Tensor) -> Grids:
    """Rows of the table over y, as a head that shares it has its outputs; columns over x."""
    weight, indices = args[:2]
    view = planner.open_view(weight)
    if view is not None:
        for axis, dim in (("x", 1), ("y", 0)):
            if axis in planner.axes and weight.shape[dim] >= planner.atoms.sizes[axis]:
                view.split(axis, _along(planner.atoms.fresh(axis, weight.shape[dim]), dim, 2))
        view.of.decided = True
    rows = list(range(indices.dim()))
    return planner.combine(
        "embedding", [weight, indices], [["entry", "column"], rows], [*rows, "column"], sums=["entry"]
    )


@_rule("group_norm")
def _group_norm(planner: LayoutPlanner, func: Any, args: Any, kwargs: Any, found: Tensor) -> Any:
    """Channels of a group go together where that leaves enough sets, else the tensor is gathered."""
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
    """Features may be apart: statistics are added up over ranks."""
    x = args[0]
    channel = "batch" in name_of(func)
    rest = tensors_in((args[1:], kwargs))
    labels: Labels = list(range(x.dim()))
    rows = [[1] if channel else labels[x.dim() - t.dim() :] for t in rest]
    return planner.combine(name_of(func), [x, *rest], [labels, *rows], labels)


@_rule("cross_entropy_loss")
def _cross_entropy(planner: LayoutPlanner, func: Any, args: Any, kwargs: Any, found: Tensor) -> Grids:
    """Classes may be apart: two sums per row are sent."""
    return {}


@_rule("t", "transpose", "permute", "detach", "alias", "_to_copy", "to")
def _reorder(planner: LayoutPlanner, func: Any, args: Any, kwargs: Any, found: Tensor) -> Any:
    x, name, order = args[0], name_of(func), list(range(args[0].dim()))
    if name == "permute":
        order = [d % x.dim() for d in args[1]]
    elif name in ("t", "transpose") and x.dim() > 1:
        a, b = (args[1] % x.dim(), args[2] % x.dim()) if name == "transpose" else (0, 1)
        order[a], order[b] = order[b], order[a]
    view = planner._views.get(x)
    if view is not None and found is not x:
        return _View(view.of, [view.order[d] for d in order])
    return {axis: grid.transpose(order) for axis, grid in planner.grids(x).items()}


@_rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as")
def _reshape(planner: LayoutPlanner, func: Any, args: Any, kwargs: Any, found: Tensor) -> Grids:
    x = args[0]
    _settle(planner, x)
    return {
        axis: _reshaped(grid, tuple(x.shape), tuple(found.shape)) for axis, grid in planner.grids(x).items()
    }


def _settle(planner: LayoutPlanner, x: Tensor) -> None:
    """A parameter that is looked at in another shape first is not split."""
    view = planner.open_view(x)
    if view is not None:
        view.of.decided = True


def _reshaped(grid: Grid, before: tuple[int, ...], after: tuple[int, ...]) -> Grid:
    """The grid of a view, full along the dims that are merged or split."""
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
    """End to end along a split dim where all tensors are split along it; else that dim has to be whole."""
    tensors, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    dim %= found.dim()
    if name_of(func) == "stack":
        labels: Labels = [d for d in range(found.dim()) if d != dim]
        return planner.combine("stack", tensors, [labels] * len(tensors), list(range(found.dim())))
    grids = [planner.grids(t) for t in tensors]
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
