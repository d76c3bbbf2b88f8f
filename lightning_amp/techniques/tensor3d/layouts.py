"""Convert between a planner's layouts, their JSON in a plan, and the splits of a module's parameters over x and y."""

import json
from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from torch import nn

from lightning_amp.errors import PlanError
from lightning_amp.sharding.owners import OwnerRun, Owners
from lightning_amp.sharding.splits import Split, Splits
from lightning_amp.techniques.tensor3d.atoms import varying
from lightning_amp.techniques.tensor3d.grid import Grid
from lightning_amp.techniques.tensor3d.plan_layouts import LayoutPlanner


def written(planner: LayoutPlanner) -> str:
    """Write a planner's layouts as JSON: {parameter: {axis: [dim, [rank, entries, rank, entries, ...]]}}."""
    owners = {axis: planner.atoms.owners(axis) for axis in planner.axes}
    found: dict[str, dict[str, Any]] = {}
    for name, placed in planner.placed.items():
        for axis, grid in placed.grids.items():
            now = planner.atoms.now(axis, grid)
            dims = varying(now)
            if len(dims) != 1:
                continue
            ranks = [int(rank) for rank in owners[axis][now].ravel()]
            # skipped if a rank would have no entry, because it could not compute
            if len(set(ranks)) == planner.atoms.sizes[axis]:
                runs = [n for rank, run in groupby(ranks) for n in (rank, len(list(run)))]
                found.setdefault(name, {})[axis] = [dims[0], runs]
    return json.dumps(found, separators=(",", ":"))


def with_axes_exchanged(layouts: str) -> str:
    """Exchange the axes of layouts: those for (x, y) become layouts for a grid (y, x)."""
    other = {"x": "y", "y": "x"}
    read: Mapping[str, Mapping[str, Any]] = json.loads(layouts or "{}")
    found = {name: {other[axis]: split for axis, split in own.items()} for name, own in read.items()}
    return json.dumps(found, separators=(",", ":"))


def largest_rank(layouts: str, axis: str) -> int:
    """Return the rank of an axis that has most entries of the parameters' dims, if they are split unevenly."""
    entries = Counter[int]()
    for split in json.loads(layouts or "{}").values():
        _, runs = split.get(axis, (0, []))
        for rank, n in zip(runs[::2], runs[1::2], strict=True):
            entries[rank] += n
    return max(sorted(entries), key=entries.__getitem__, default=0)


def splits_in(layouts: str, module: nn.Module, grid: Grid) -> dict[str, Splits]:
    """Return the splits of a module's parameters by name; parameters without splits are flat over all axes.

    Raises:
        PlanError: The layouts do not fit the module.
    """
    read: Mapping[str, Mapping[str, Any]] = json.loads(layouts or "{}")
    found = {}
    for name, parameter in module.named_parameters():
        splits = list[Split]()
        for axis_name, (dim, runs) in read.get(name, {}).items():
            axis, n = getattr(grid, axis_name), sum(runs[1::2])
            if dim >= parameter.dim() or parameter.shape[dim] != n or max(runs[::2]) >= axis.size:
                raise PlanError(
                    f"the plan splits dim {dim} of {name!r} in {n} entries, which has shape"
                    f" {tuple(parameter.shape)!r}; make the plan anew for this module"
                )
            owners = Owners.of((OwnerRun(n, rank) for rank, n in zip(runs[::2], runs[1::2], strict=True)), axis.size)
            splits.append(Split(axis, dim, owners))
        found[name] = Splits.of(splits)
    return found
