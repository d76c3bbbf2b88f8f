"""Normalise over the cells of all ranks of a mesh axis, as one process does on the union batch.

Where ranks of another axis have parts of the cells, it is over their values too (dist/normalise.py).

Collectives: forward one all-gather of 2 C + 1 numbers, backward one all-reduce of 2 C; none in eval mode, unless a
layer without running statistics is trained through, and none in the forward pass of a block that runs again, which has
the statistics of its first one. Each waits for all ranks, and there is nothing to be computed meanwhile.
Legend: C channels.
Known limits: every rank must call the layer equally often; a union of one value per
channel has no unbiased variance and makes the running variance nan.
"""

from collections.abc import Callable, Container
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp._torch import AnyBatchNorm
from lightning_amp.dist.normalise import batch_normalised
from lightning_amp.dist.splits import axis_of
from lightning_amp.errors import InstallError
from lightning_amp.footprint.forward_overrides import Override, Position, add_override, overrides_of, remove_override
from lightning_amp.techniques.contract.protocol import normalises_by_batch
from lightning_amp.techniques.ranks.received import once

SHARE = "share_batch_statistics"
"""Name of the option of AMPStrategy, for messages."""


def share_batch_statistics(module: nn.Module, mesh: DeviceMesh) -> Callable[[], None]:
    """Let every BatchNorm inside a module compute the same over all ranks.

    Args:
        module: Its layers stay where they are, with another forward; those that are SyncBatchNorm are left as they are.
        mesh: One axis.

    Returns:
        A function that undoes it; it may be called twice.

    Raises:
        InstallError: A subclass of BatchNorm that computes something else, a layer that a technique or something else
            computes already, or one that trains in a block that runs in chunks; nothing is changed.
    """
    layers = {layer: name for name, layer in module.named_modules() if is_local(layer)}
    own = {
        name: type(layer).__name__
        for layer, name in layers.items()
        if (type(layer).forward, type(layer).__call__) != (AnyBatchNorm.forward, nn.Module.__call__)
    }
    if own:
        raise InstallError(
            f"batch statistics cannot be shared over ranks: {own!r} are BatchNorm layers with an overridden"
            " forward or __call__, which would be lost. Keep statistics per rank with"
            " share_batch_statistics=False"
        )
    if mesh.size() > 1:
        for outer, block in module.named_modules():
            _refuse_computed(outer, block, layers)
    shared = Override(SHARE, SharedStatistics(mesh), Position.STATISTICS)
    with ExitStack() as undo:
        for layer, name in layers.items():
            add_override(name, layer, shared)
            undo.callback(remove_override, layer, shared)
        return undo.pop_all().close


def _refuse_computed(outer: str, block: nn.Module, layers: Container[nn.Module]) -> None:
    """Refuse layers that another technique computes: by itself, or in a block that it computes from its operators."""
    for one in overrides_of(block) or ():
        if one.position is not Position.INSTEAD:
            continue
        whole = getattr(one.run, "captures_whole", False)
        inside = block.named_modules() if whole else [("", block)]
        for name, layer in inside:
            # a frozen layer is computed as its class does
            if layer in layers and (normalises_by_batch(layer) or not whole):
                where = f"{outer}.{name}" if name else outer
                raise InstallError(
                    f"{one.strategy} and {SHARE} cannot be used together on {outer!r}: {one.strategy}"
                    f" computes it, and ranks exchange the statistics of {where!r} ({type(layer).__name__}),"
                    f" which {one.strategy} does not; leave {one.strategy} out for it, or keep statistics"
                    f" per rank with {SHARE}=False"
                )


def has_batch_norms(module: nn.Module) -> bool:
    """Whether there is a BatchNorm inside a module."""
    return any(isinstance(layer, AnyBatchNorm) for layer in module.modules())


def statistics_bytes(module: nn.Module) -> int:
    """Most bytes that shared statistics add to a training step: of every layer how many values it has seen and, where
    it runs again, its statistics until then, 2 numbers per channel; of one layer in its backward pass, per channel, 6
    numbers (2 of `sums`, their averages, `rstd`, `weight` where its type is shorter) and 2 gradients.

    Known limit: what is taken off dx, as large as the layer's input, is not among them; nothing else is made at that
    moment that is not freed by an activation's backward pass just before.
    """
    layers = [layer for layer in module.modules() if is_local(layer)]
    widths = [layer.num_features for layer in layers if isinstance(layer.num_features, int)]
    return 4 * (len(layers) + 2 * sum(widths) + 8 * max(widths, default=0))


def is_local(layer: nn.Module) -> bool:
    """Whether a module is a BatchNorm over the cells of its rank."""
    return isinstance(layer, AnyBatchNorm) and not (isinstance(layer, nn.SyncBatchNorm) or is_shared(layer))


def is_shared(layer: nn.Module) -> bool:
    """Whether a module is a BatchNorm over the cells of all ranks, by `share_batch_statistics`."""
    return any(isinstance(one.run, SharedStatistics) for one in overrides_of(layer) or ())


class SharedStatistics:
    """What a BatchNorm computes where it trains: its statistics are those of all ranks of a mesh axis.

    What was pickled has no mesh: it belongs to no ranks, and is plain.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self._mesh = mesh

    def __call__(
        self, inside: Callable[..., Any], layer: AnyBatchNorm, input: Float[Tensor, "cell channel *position"]
    ) -> Float[Tensor, "cell channel *position"]:
        """Normalise; where it is by the statistics of a batch that is trained on, a collective."""
        # outside of training ranks have unlike numbers of batches, and a layer without running statistics its own
        by_batch = normalises_by_batch(layer) and (layer.training or torch.is_grad_enabled())
        mesh = self._mesh
        if mesh is None or mesh.size() == 1 or not by_batch:
            plain: Tensor = inside(layer, input)
            return plain
        layer._check_input_dim(input)  # type: ignore[no-untyped-call]
        return batch_normalised(
            input, layer.weight, layer.bias, layer.eps, over=[axis_of(mesh)], once=once, track=partial(_track, layer)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "SharedStatistics":
        return self

    def __reduce__(self) -> Any:
        return SharedStatistics, (None,)


@torch.no_grad()
def _track(layer: AnyBatchNorm, mean: Tensor, m2: Tensor, count: Tensor) -> None:
    tracks = layer.training and layer.track_running_stats
    if not tracks or layer.running_mean is None or layer.running_var is None:
        return
    # over the values of all ranks, with the unbiased variance, as torch tracks it
    momentum = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        # no momentum means the plain average over all batches so far
        momentum = 1 / float(layer.num_batches_tracked) if momentum is None else momentum
    assert momentum is not None, "a layer that tracks statistics counts its batches"
    for running, new in ((layer.running_mean, mean), (layer.running_var, m2 / (count - 1))):
        # no new version, as of torch's kernel: a call in eval mode, whose backward pass is to come, may have saved it
        running.data.lerp_(new.to(running.dtype), momentum)
