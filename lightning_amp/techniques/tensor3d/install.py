"""Install `tensor3d`: overrides of a module's steps for a dry run, sharded parameters (GridUnits) for a run."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

import lightning_amp.techniques.tensor3d.layout_rules  # noqa: F401  (registers the rules)
from lightning_amp._torch import in_transform, is_compiled
from lightning_amp.errors import InstallError, ModelError
from lightning_amp.footprint.live_bytes import tensors_of
from lightning_amp.sharding._torch import (
    AUTOGRAD_AND_AUTOCAST,
    excluded_keys,
    force_dispatch_keys,
    included_keys,
    skip_one_torch_function,
)
from lightning_amp.sharding.registry import shard_error
from lightning_amp.sharding.splits import MeshAxis
from lightning_amp.techniques.contract.change import hooks_of
from lightning_amp.techniques.put_methods import refuse_scripts
from lightning_amp.techniques.tensor3d.grid import Grid
from lightning_amp.techniques.tensor3d.in_step import STRAY
from lightning_amp.techniques.tensor3d.layouts import largest_rank, with_axes_exchanged, written
from lightning_amp.techniques.tensor3d.plan_layouts import LayoutPlanner
from lightning_amp.techniques.tensor3d.reads_elsewhere import refuse_aliases, watch_hooks
from lightning_amp.techniques.tensor3d.row import TensorParallel3D
from lightning_amp.techniques.tensor3d.units import GridUnits

NO_GRADIENT = "does not require grad"
"""Part of torch's error message for a backward pass without anything to differentiate."""
_GRIDS: dict[Any, Grid] = {}
"""Grids by the ranks of the run; cached, because process groups are never freed."""
Pair = tuple[int, int]


class LookedAt(ModelError):
    """Raised once layouts are computed, because the rest of the step need not run; caught in this file."""


def install(module: LightningModule, spec: TensorParallel3D, mesh: DeviceMesh | MeshAxis) -> dict[str, Any]:
    """Return overrides of the module's methods for a dry run; {} in a run, where `split_parameters` is called later.

    In a run, optimisers are created from full parameters. Raises an InstallError for modules that are not supported.
    """
    refuse(module)
    if not isinstance(mesh, MeshAxis):
        return {}
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


def layouts(pairs: Sequence[Pair], look: Callable[[Mapping[str, Callable[..., Any]]], None]) -> dict[Pair, str]:
    """Compute layouts for numbers of ranks of x and y, by one forward pass of a copy of the step.

    `look` runs the step once with overrides of the module's methods.
    """
    found = dict[Pair, str]()

    def training_step(module: LightningModule, *args: Any, **kwargs: Any) -> Any:
        step = MethodType(type(module).training_step, module)
        planners = {(x, y): LayoutPlanner(list(module.named_parameters()), {"x": x, "y": y}) for x, y in pairs}
        # the backward pass of a step with manual optimisation is skipped
        vars(module)["manual_backward"] = lambda *args, **kwargs: None
        try:
            with ExitStack() as stack:
                stack.enter_context(_Unhooked())
                for planner in planners.values():
                    stack.enter_context(planner)
                stack.enter_context(force_dispatch_keys(included_keys(), excluded_keys() | AUTOGRAD_AND_AUTOCAST))
                step(*args, **kwargs)
        except RuntimeError as error:
            if NO_GRADIENT not in str(error):
                raise
            raise ModelError(STRAY) from error
        finally:
            del vars(module)["manual_backward"]
        found.update({pair: written(planner) for pair, planner in planners.items()})
        raise LookedAt

    with suppress(LookedAt):
        look({"training_step": training_step})
    return found


class _Unhooked(TorchFunctionMode):
    """Ignore registrations of hooks on tensors, because nothing is differentiated in this pass."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.register_hook, Tensor.retain_grad):
            return RemovableHandle(OrderedDict())
        if in_transform() and any(isinstance(t, nn.Parameter) for t in tensors_of((args, kwargs))):
            raise shard_error(func, [args], "it is called inside a transform of torch.func, such as vmap")
        return func(*args, **(kwargs or {}))


def on_grid(spec: TensorParallel3D, sizes: tuple[int, int, int], layouts: str, *, exchanged: bool) -> TensorParallel3D:
    """Return the spec for a grid, with layouts for (x, y), or for (y, x) if they are exchanged."""
    return replace(spec, grid="x".join(map(str, sizes)), layouts=with_axes_exchanged(layouts) if exchanged else layouts)


def split_parameters(
    module: nn.Module, spec: TensorParallel3D, mesh: DeviceMesh, *, fitting: bool, agree: Callable[[str], None]
) -> GridUnits:
    """Shard a module's parameters, equal on all ranks, over the grid; in a fit, once optimisers exist."""
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
