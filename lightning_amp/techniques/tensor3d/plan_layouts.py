"""Plan how parameters are split over the axes x and y, by one forward pass on fake tensors.

The pass runs below autograd, so that composite operators are not decomposed: `aten.linear`,
`aten.scaled_dot_product_attention`. Tensors are plain and full-size. For each tensor and axis, a grid of atoms records
which entries may be on different ranks (atoms.py). The first layer that uses a parameter decides how it is split, by
the layout of the layer's input (AxoNN, Section III):

    input features split over an axis    the axis splits the input features of the weight, which are summed
    input not split over an axis         the axis splits the outputs; for two such axes, x splits the input features

so that layers alternate. Operators without a rule count as gathered: a bad plan costs communication, never exactness.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_amp._torch import TorchDispatchMode
from lightning_amp.footprint.live_bytes import tensors_of
from lightning_amp.sharding.registry import name_of
from lightning_amp.techniques.tensor3d.atoms import AtomGrid, Atoms, collapsed, varying

Grids = dict[str, AtomGrid]
Labels = list[Any]
"""A label for each dim of a tensor: dims with the same label correspond; None for a broadcast dim of size 1."""


@dataclass(eq=False)
class Placed:
    """Layout of a parameter: atoms of its entries by axis, and whether a layer has used it."""

    grids: Grids = field(default_factory=dict)
    decided: bool = False


@dataclass(eq=False)
class View:
    """A parameter with permuted dims."""

    of: Placed
    order: list[int]

    def grids(self) -> Grids:
        """Return the parameter's grids in this order of dims."""
        return {axis: grid.transpose(self.order) for axis, grid in self.of.grids.items()}

    def split(self, axis: str, grid: AtomGrid) -> None:
        """Split the parameter over an axis, unless it is already split over it or the grid does not vary."""
        if varying(grid) and axis not in self.of.grids:
            self.of.grids[axis] = grid.transpose(np.argsort(self.order))


Rule = Callable[["LayoutPlanner", Any, Any, Any, Any], Any]
"""(planner, operator, args, kwargs, result) -> the grids of each result, or of all results, or a view."""
RULES: dict[str, Rule] = {}
"""Rules by operator; "" is the rule of all other operators (layout_rules.py)."""


class LayoutPlanner(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Plan layouts during a forward pass: `placed` has the layouts, `gathered` the operators that need full tensors."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], sizes: Mapping[str, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.axes = [axis for axis in ("x", "y") if sizes[axis] > 1]
        self.atoms = Atoms({axis: sizes[axis] for axis in self.axes})
        self.placed: dict[str, Placed] = {}
        self.gathered: list[str] = []
        self.views: Any = WeakTensorKeyDictionary()
        self.known: Any = WeakTensorKeyDictionary()
        for name, parameter in parameters:
            self.placed[name] = Placed()
            self.views[parameter] = View(self.placed[name], list(range(parameter.dim())))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        given = tensors_of((args, kwargs))
        if any(t in self.views or self.known.get(t) for t in given):
            rule = RULES.get(name_of(func), RULES[""])
            before = set(self.grids(args[0]) if func._schema.is_mutable else self.axes)
            grids = rule(self, func, args, kwargs, found)
            if func._schema.is_mutable and isinstance(grids, dict) and not set(grids) <= set(before):
                # a tensor that is written to keeps its memory: values that are split otherwise are gathered
                self.gathered.append(name_of(func))
                grids = {axis: grid for axis, grid in grids.items() if axis in before}
            self._keep(found, grids)
        return found

    def _keep(self, found: Any, grids: Any) -> None:
        if isinstance(grids, View):
            self.views[found] = grids
            return
        results = tensors_of(found)
        own = grids if isinstance(grids, list) else [grids] * len(results)
        for tensor, one in zip(results, own, strict=True):
            one = {axis: collapsed(grid) for axis, grid in one.items()}
            self.known[tensor] = {axis: grid for axis, grid in one.items() if varying(grid)}

    def grids(self, x: Any) -> Grids:
        """Return the grids of a tensor, with atoms replaced by their current sets."""
        view = self.views.get(x) if isinstance(x, Tensor) else None
        found = view.grids() if view is not None else self.known.get(x, {}) if isinstance(x, Tensor) else {}
        return {axis: self.atoms.now(axis, grid) for axis, grid in found.items()}

    def open_view(self, x: Any) -> View | None:
        """Return the view of a parameter if no layer has used the parameter before."""
        view: View | None = self.views.get(x) if isinstance(x, Tensor) else None
        return view if view is not None and not view.of.decided else None

    def roles(self, x: Tensor, feature: int, weight: Tensor, out: int, inner: int) -> None:
        """Decide how a layer's weight is split along `out` and `inner`, from the split of the input's features."""
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
                view.split(axis, along(grid.ravel(), inner, weight.dim()))
        if len(free) == 2 and weight.shape[inner] >= self.atoms.sizes["x"]:
            view.split("x", along(self.atoms.fresh("x", weight.shape[inner]), inner, weight.dim()))
            free = ["y"]
        for axis in free[:1]:
            if weight.shape[out] >= self.atoms.sizes[axis]:
                view.split(axis, along(self.atoms.fresh(axis, weight.shape[out]), out, weight.dim()))
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
        """Unite the atoms that an operator needs on one rank, and return the grids of its result.

        Args:
            why: Name of the operator, for `gathered`.
            tensors, labels, out: The arguments, the labels of their dims, and those of the result's dims.
            whole: Labels whose entries must be on one rank.
            sums: Labels that are summed, over each rank's entries first.
        """
        whole, sums = set(whole), set(sums)
        names = list(dict.fromkeys(label for row in labels for label in row if label is not None))
        views = [self.open_view(t) for t in tensors]
        found, taken = Grids(), set[Any]()
        # if two axes want one dim, the axis of the largest argument splits it; over the other one it is gathered
        sizes = {a: max((t.numel() for t in tensors if a in self.grids(t)), default=0) for a in self.axes}
        for axis in sorted(self.axes, key=lambda a: (-sizes[a], a)):
            now = self._together(why, axis, tensors, labels, names)
            if now is None:
                continue
            split = {name for name, n in zip(names, now.shape, strict=True) if n > 1}
            adding = split & sums
            # if a summed dim is split over the axis, no other dim may be
            for name in sorted(split & (whole if not adding else whole | (set(names) - sums)), key=names.index):
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
                    view.split(axis, in_order(now, names, row))
            if not adding:
                found[axis] = in_order(now, names, out)
        for view in views:
            if view is not None:
                view.of.decided = True
        return found

    def _together(
        self, why: str, axis: str, tensors: Sequence[Tensor], labels: Sequence[Labels], names: list[Any]
    ) -> AtomGrid | None:
        """Join the arguments' grids to one grid over all labels; arguments that do not fit are gathered."""
        now: AtomGrid | None = None
        for tensor, row in zip(tensors, labels, strict=True):
            grid = self.grids(tensor).get(axis)
            if grid is None:
                continue
            own = [name if name is not None else ("none", d) for d, name in enumerate(row)]
            one = in_order(grid, own, names)
            if now is None:
                now = one
            elif self.atoms.unite(axis, now, one):
                now = self.atoms.now(axis, np.broadcast_arrays(now, one)[0])
            else:
                self.gathered.append(why)
        return now


def along(ids: AtomGrid, dim: int, n: int) -> AtomGrid:
    """Reshape atoms to the grid of a tensor with n dims that varies along one of them."""
    return ids.reshape([-1 if d == dim % n else 1 for d in range(n)])


def in_order(grid: AtomGrid, have: Sequence[Any], want: Sequence[Any]) -> AtomGrid:
    """Reorder the dims of a grid by labels; missing dims are reduced to their first entry, new ones have size 1."""
    for dim, name in enumerate(have):
        if name not in want:
            grid = grid.take([0], dim)
    kept = [have.index(name) for name in want if name in have]
    rest = [dim for dim in range(len(have)) if dim not in kept]
    grid = grid.transpose([*kept, *rest])
    shape = iter(grid.shape)
    return grid.reshape([next(shape) if name in have else 1 for name in want])
