"""Install `sequence`: steps of a LightningModule run on batches whose tensors are sharded over the model axis."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from types import MethodType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import lightning_amp.sharding.ops  # noqa: F401  (registers the operators)
from lightning_amp.errors import InstallError
from lightning_amp.sharding._torch import skip_one_torch_function
from lightning_amp.sharding.splits import MeshAxis, axis_of
from lightning_amp.techniques.contract.change import hooks_of
from lightning_amp.techniques.put_methods import STEPS, refuse_scripts
from lightning_amp.techniques.sequence.row import SequenceParallel, written_dims
from lightning_amp.techniques.sequence.split_batch import HowToSplit, read_dims, read_grid
from lightning_amp.techniques.sharded_step import RUNNING, run_sharded, tensors


def step_of(step: Callable[..., Any], name: str, how: HowToSplit) -> Callable[..., Any]:
    """Return a step of a LightningModule that shards its batch, and returns replicated tensors."""

    @wraps(step)
    def split(module: nn.Module, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if RUNNING.get():
            # called by another step, possibly with something other than a batch
            return step(module, batch, *args, **kwargs)
        return run_sharded(name, lambda: step(module, how.batch(batch), *args, **kwargs), module, how.axes)

    return split


MOST_TRIED = 6
"""Number of ways to shard a batch that are counted, at about a second each."""


def install(module: LightningModule, spec: SequenceParallel, mesh: DeviceMesh | MeshAxis) -> dict[str, Any]:
    """Return the replacements of the module's steps, by name.

    Args:
        module: The LightningModule.
        spec: Dims that are sharded.
        mesh: The ranks of the model axis.

    Raises:
        InstallError: A step is set on the instance, a parameter has hooks, or torch is too old.
    """
    if skip_one_torch_function is None:
        raise InstallError(
            f"sequence requires torch 2.13 or newer, found {torch.__version__}; install it, or leave sequence out"
        )
    refuse_scripts("sequence", module)
    for name, parameter in module.named_parameters():
        if hooks_of(parameter, name):
            raise InstallError(
                f"sequence: the parameter {name!r} has hooks, which would see a rank's share of its gradient; change"
                " gradients in on_before_optimizer_step, and leave out what watches parameters, as a logger's `watch`"
            )
    how = HowToSplit(
        dims=read_dims(spec.dims),
        sizes=spec.sizes if spec.sizes in ("even", "causal") else tuple(map(int, spec.sizes.split(","))),
        axes=axes_of(mesh, spec.grid),
    )
    changed = dict[str, Any]()
    for name in STEPS:
        if name in vars(module):
            raise InstallError(
                f"sequence: {name!r} of {type(module).__name__!r} is set on the instance, which is not supported;"
                " define it in the class"
            )
        if getattr(type(module), name, None) is not getattr(LightningModule, name, None):
            # bound to this module; copies of the module rebind it
            changed[name] = MethodType(step_of(getattr(type(module), name), name, how), module)
    return changed


def axes_of(mesh: DeviceMesh | MeshAxis, grid: str) -> tuple[MeshAxis, ...]:
    """Return the axes that dims are sharded over: the mesh, or the two axes of a grid of its ranks."""
    sizes = read_grid(grid, mesh.size if isinstance(mesh, MeshAxis) else mesh.size())
    if len(sizes) == 1:
        return (axis_of(mesh),)
    if isinstance(mesh, MeshAxis):
        # in a dry run
        ranks = divmod(mesh.rank, sizes[1])
        return tuple(
            MeshAxis(f"{mesh.name}{i}", n, rank, None, sent=mesh.sent)
            for i, (n, rank) in enumerate(zip(sizes, ranks, strict=True))
        )
    both = mesh._unflatten(0, sizes, ("rows", "columns"))
    return tuple(axis_of(both[name]) for name in ("rows", "columns"))


def options(batch: Any, spec: SequenceParallel, ranks: int, look: object = None) -> list[SequenceParallel]:
    """Return specs that shard a batch over `ranks` ranks: all tensors with a dim of one length, longest first.

    The first dim of a tensor is that of the samples, and is used only if no other dim is long enough.
    """
    found = dict[str, None]()
    shapes = [(path, tuple(tensor.shape)) for path, tensor in tensors(batch)]
    for first in (1, 0):
        # equal lengths in several tensors are treated as the same dim, such as the tokens of ids and labels
        lengths = {n for _, shape in shapes for n in shape[first:] if n >= ranks}
        for n in sorted(lengths, reverse=True):
            places = {path: [d for d in range(first, len(shape)) if shape[d] == n] for path, shape in shapes}
            # for a square image, one dim or the other
            for k in range(max(map(len, places.values()))):
                dims = ((path, own[min(k, len(own) - 1)]) for path, own in places.items() if own)
                found[written_dims({path: (dim,) for path, dim in dims})] = None
        if found:
            break
    return [replace(spec, dims=dims) for dims in [*found][:MOST_TRIED]]
