"""Install `tensor3d`: overrides of a module's steps for a dry run, sharded parameters (GridUnits) for a run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_amp._torch import is_compiled
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import InstallError
from lightning_amp.sharding._torch import skip_one_torch_function
from lightning_amp.sharding.splits import MeshAxis
from lightning_amp.techniques.contract.change import hooks_of
from lightning_amp.techniques.put_methods import refuse_scripts
from lightning_amp.techniques.ranks.collectives import Agreement
from lightning_amp.techniques.tensor3d.choose_grid import choose as choose
from lightning_amp.techniques.tensor3d.grid import Grid
from lightning_amp.techniques.tensor3d.layouts import largest_rank
from lightning_amp.techniques.tensor3d.reads_elsewhere import refuse_aliases, watch_hooks
from lightning_amp.techniques.tensor3d.row import TensorParallel3D
from lightning_amp.techniques.tensor3d.units import GridUnits, steps_of

_GRIDS: dict[Any, Grid] = {}
"""Grids by the ranks of the run; cached, because process groups are never freed."""


def install(module: LightningModule, spec: TensorParallel3D, mesh: DeviceMesh | MeshAxis) -> dict[str, Any]:
    """Return overrides of the module's methods for a dry run, or of its steps for a run.

    In a run, optimisers are created from full parameters, and `split_parameters` makes the units later. Raises an
    InstallError for modules that are not supported.
    """
    refuse(module)
    if not isinstance(mesh, MeshAxis):
        return steps_of(module)
    largest = [largest_rank(spec.layouts, axis) for axis in ("x", "y")]
    copies = mesh.size // spec.ranks
    grid = Grid.dry(spec.sizes, ranks=(largest[0], largest[1], 0), copies=copies, sent=mesh.sent)
    units: dict[int, GridUnits] = {}

    def configure_optimizers(module: LightningModule) -> Any:
        found = type(module).configure_optimizers(module)
        # by id, because the step is counted on a copy of the module
        units[id(module)] = GridUnits(module, spec, grid, begun=True)
        units[id(module)].cut(_optimizers_in(found))
        watch_hooks(module, units[id(module)].parameters)
        # waits for the gradients before the user's hook; set after `watch_hooks`, so that the wait is not watched
        vars(module)["on_after_backward"] = MethodType(on_after_backward, module)
        return found

    # Lightning looks whether a step takes the batch index
    @wraps(type(module).training_step, assigned=())
    def training_step(module: LightningModule, *args: Any, **kwargs: Any) -> Any:
        step = MethodType(type(module).training_step, module)
        return units[id(module)].run("training_step", step, *args, **kwargs)

    def on_after_backward(module: LightningModule) -> None:
        units[id(module)].end_backward()
        type(module).on_after_backward(module)

    made = (configure_optimizers, training_step, on_after_backward)
    return {function.__name__: MethodType(function, module) for function in made}


def split_parameters(
    module: nn.Module, rules: Sequence[Rule], mesh: DeviceMesh, *, groups_of: Callable[[int], DeviceMesh], fitting: bool
) -> GridUnits:
    """Shard a module's parameters, equal on all ranks, over the grid; in a fit, once optimisers exist.

    `groups_of` is not used: a grid has groups of its own.
    """
    spec, agreement = rules[0].spec, Agreement(mesh, "tensor3d")
    assert isinstance(spec, TensorParallel3D), "rules of tensor3d have this spec"

    def agree(what: str) -> None:
        agreement.on(what)
        agreement.look()

    if mesh.size() % spec.ranks:
        raise InstallError(
            f"the plan has a grid of {spec.grid} ranks for {mesh.size()} ranks, which are no multiple of it; make it"
            " anew"
        )
    key = dist.group.WORLD, spec.sizes
    if key not in _GRIDS:
        _GRIDS[key] = Grid.of(mesh.device_type, spec.sizes, mesh.size())
    units = GridUnits(module, spec, _GRIDS[key], agree=agree)
    units.wrap_steps()
    if not fitting:
        units.cut()
    return units


def refuse(module: LightningModule) -> None:
    """Raise an InstallError for a module that would not train as it does on one device."""
    if skip_one_torch_function is None:
        raise InstallError(
            f"tensor3d requires torch 2.13 or newer, found {torch.__version__}; install it, or leave tensor3d out"
        )
    refuse_aliases(module)
    refuse_scripts("tensor3d", module)
    for name, child in module.named_modules():
        if isinstance(child, nn.SyncBatchNorm):
            raise InstallError(
                f"tensor3d: {name!r} is a SyncBatchNorm, which is not supported: it would count rows twice that several"
                " ranks have; use BatchNorm1d to 3d, whose statistics are those of all ranks' rows"
            )
        if is_compiled(child):
            raise InstallError(
                f"tensor3d: torch.compile was applied to {name or type(module).__name__!r}, which is not supported;"
                " leave one of them out"
            )
        if getattr(child, "sparse", False) is True:
            raise InstallError(f"tensor3d: {name!r} has sparse gradients; make them dense (sparse=False)")
    for name, parameter in module.named_parameters():
        if hooks_of(parameter, name):
            raise InstallError(
                f"tensor3d: the parameter {name!r} has hooks, which would see a part of its gradient; remove them"
            )
        if parameter.is_complex():
            raise InstallError(f"tensor3d: the parameter {name!r} is complex; keep its real and imaginary parts")


def _optimizers_in(found: Any) -> Iterator[Optimizer]:
    """Yield the optimisers in a result of `configure_optimizers`, in any form that Lightning accepts."""
    if isinstance(found, Optimizer):
        yield found
    elif isinstance(found, Mapping):
        yield from _optimizers_in(found.get("optimizer"))
    elif isinstance(found, list | tuple):
        for one in found:
            yield from _optimizers_in(one)
