"""Synchronize BatchNorm over the ranks of a mesh axis, so that it computes as one process does on the union batch.

If ranks of another axis hold shards of the cells, their values count too (dist/normalise.py).

Collectives: forward one all-gather of 2 C + 1 numbers, backward one all-reduce of 2 C. In eval mode there are none,
unless a layer without running statistics is part of a training step. When a block is recomputed, the forward pass has
none: it uses the statistics of the first forward pass. No computation overlaps with these collectives.

Legend: C channels.
Known limits: every rank must call the layer equally often. A union batch with one value per channel has no unbiased
variance, and makes the running variance nan.
"""

from collections.abc import Callable, Container
from contextlib import ExitStack
from functools import partial
from itertools import islice
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
"""Name of the option of AMPStrategy, for error messages."""
SHOWN = 3
"""Largest number of layers named in a message."""


def share_batch_statistics(module: nn.Module, mesh: DeviceMesh) -> Callable[[], None]:
    """Synchronize the statistics of every BatchNorm inside a module over the ranks.

    Args:
        module: Its BatchNorm layers get another forward and are not replaced; SyncBatchNorm layers do not change.
        mesh: One axis.

    Returns:
        A function that undoes it; it may be called twice.

    Raises:
        InstallError: A BatchNorm has an overridden forward, is already computed by a technique or something else, or
            trains in a block that runs in chunks; nothing is changed.
    """
    layers = {layer: name for name, layer in module.named_modules() if is_local(layer)}
    own = {
        name: type(layer).__name__
        for layer, name in layers.items()
        if (type(layer).forward, type(layer).__call__) != (AnyBatchNorm.forward, nn.Module.__call__)
    }
    if own:
        shown = ", ".join(f"{name!r} ({kind})" for name, kind in islice(own.items(), SHOWN))
        more = f" and {len(own) - SHOWN} more" if len(own) > SHOWN else ""
        raise InstallError(
            f"batch statistics cannot be shared over ranks: {shown}{more}: BatchNorm layers with an overridden forward"
            " or __call__, which would be lost. Keep statistics per rank with share_batch_statistics=False"
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
    """Raise if another technique computes one of the layers: alone, or as part of a block whose operators it runs."""
    for one in overrides_of(block) or ():
        if one.position is not Position.INSTEAD:
            continue
        whole = getattr(one.run, "captures_whole", False)
        inside = block.named_modules() if whole else [("", block)]
        for name, layer in inside:
            # a frozen layer in such a block needs no batch statistics
            if layer in layers and (normalises_by_batch(layer) or not whole):
                where = f"{outer}.{name}" if name else outer
                raise InstallError(
                    f"{one.strategy} and {SHARE} cannot be used together on {outer!r}: {one.strategy}"
                    f" computes it, and ranks exchange the statistics of {where!r} ({type(layer).__name__}),"
                    f" which {one.strategy} does not; leave {one.strategy} out for it, or keep statistics"
                    f" per rank with {SHARE}=False"
                )


def has_batch_norms(module: nn.Module) -> bool:
    """Whether a module contains a BatchNorm."""
    return any(isinstance(layer, AnyBatchNorm) for layer in module.modules())


def statistics_bytes(module: nn.Module) -> int:
    """Upper bound of the bytes that shared statistics add to a training step.

    For every layer: the number of values and, if it is recomputed, its statistics until then, 2 numbers per channel.
    For one layer in its backward pass, per channel: 6 numbers (2 of `sums`, their averages, `rstd`, `weight` if its
    dtype is shorter) and 2 gradients.

    Known limit: the correction that is subtracted from dx, as large as the layer's input, is not counted. Other
    temporaries of that moment replace memory that an activation's backward pass has just freed.
    """
    layers = [layer for layer in module.modules() if is_local(layer)]
    widths = [layer.num_features for layer in layers if isinstance(layer.num_features, int)]
    return 4 * (len(layers) + 2 * sum(widths) + 8 * max(widths, default=0))


def is_local(layer: nn.Module) -> bool:
    """Whether a module is a BatchNorm with statistics of this rank only."""
    return isinstance(layer, AnyBatchNorm) and not (isinstance(layer, nn.SyncBatchNorm) or is_shared(layer))


def is_shared(layer: nn.Module) -> bool:
    """Whether a module is a BatchNorm synchronized by `share_batch_statistics`."""
    return any(isinstance(one.run, SharedStatistics) for one in overrides_of(layer) or ())


class SharedStatistics:
    """Forward override of a BatchNorm: in training, its statistics are those of all ranks of a mesh axis.

    An unpickled instance has no mesh and computes the layer's plain forward.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self._mesh = mesh

    def __call__(
        self, inside: Callable[..., Any], layer: AnyBatchNorm, input: Float[Tensor, "cell channel *position"]
    ) -> Float[Tensor, "cell channel *position"]:
        """Normalise the input; with batch statistics in a training step, this is a collective."""
        # outside of training, ranks have different numbers of batches, so layers without running statistics stay local
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
    # over the values of all ranks, with the unbiased variance, as in torch
    momentum = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        # no momentum means the plain average over all batches so far
        momentum = 1 / float(layer.num_batches_tracked) if momentum is None else momentum
    assert momentum is not None, "a layer that tracks statistics counts its batches"
    for running, new in ((layer.running_mean, mean), (layer.running_var, m2 / (count - 1))):
        # .data, without a new version, as torch's kernel: a call in eval mode may have saved it for its backward pass
        running.data.lerp_(new.to(running.dtype), momentum)
