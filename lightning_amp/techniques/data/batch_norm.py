"""Synchronize BatchNorm over the ranks of a mesh axis, so that it computes as one process does on the union batch.

If ranks of another axis hold shards of the cells, their values count too (sharding/normalise.py).

Collectives: forward one all-gather of 2 C + 1 numbers, backward one all-reduce of 2 C. In eval mode there are none,
unless a layer without running statistics is part of a training step. When a block is recomputed, the forward pass has
none: it uses the statistics of the first forward pass. No computation overlaps with these collectives.

Legend: C channels.
Known limits: every rank must call the layer equally often. A union batch with one value per channel has no unbiased
variance, and makes the running variance nan.
"""

import copy
from collections.abc import Callable, Container
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from lightning_amp._torch import AnyBatchNorm, unseen
from lightning_amp.errors import InstallError
from lightning_amp.footprint.forward_overrides import Override, Position, add_override, overrides_of, remove_override
from lightning_amp.holding import replacing
from lightning_amp.random_streams import isolated_random_streams
from lightning_amp.sharding.normalise import batch_normalised
from lightning_amp.sharding.splits import DryAxis, axis_of
from lightning_amp.techniques.contract.protocol import normalises_by_batch
from lightning_amp.techniques.ranks.received import once

SHARE = "share_batch_statistics"
"""Name of the option of AMPStrategy, for error messages."""
SHOWN = 3
"""Largest number of layers named in a message."""


def share_batch_statistics(module: nn.Module, mesh: DeviceMesh | DryAxis) -> Callable[[], None]:
    """Synchronize the statistics of every BatchNorm inside a module over the ranks.

    Args:
        module: Its BatchNorm layers get another forward and are not replaced; SyncBatchNorm layers do not change.
        mesh: One axis.

    Returns:
        A function that undoes it; it may be called twice.

    Raises:
        InstallError: A BatchNorm has a forward of its own that does more than normalise once, is already computed by a
            technique or something else, or trains in a block that runs in chunks; nothing is changed.
    """
    layers = {layer: name for name, layer in module.named_modules() if is_local(layer)}
    own = {
        name: type(layer).__name__
        for layer, name in layers.items()
        if type(layer).__call__ is not nn.Module.__call__ or not (_is_plain(layer) or normalises_once(layer))
    }
    if own:
        shown = ", ".join(f"{name!r} ({kind})" for name, kind in islice(own.items(), SHOWN))
        more = f" and {len(own) - SHOWN} more" if len(own) > SHOWN else ""
        raise InstallError(
            f"batch statistics cannot be shared over ranks: {shown}{more}: BatchNorm layers with an overridden forward"
            " or __call__, which would be lost. A forward must call torch.nn.functional.batch_norm once, and compute a"
            " sample from the sample alone otherwise, as timm's layers with an activation do. Keep statistics per rank"
            " with share_batch_statistics=False"
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
    For one layer in its backward pass, per channel: 8 numbers (2 of `sums`, their averages, `rstd`, a line of 2,
    `weight` if its dtype is shorter) and 2 gradients.

    Known limit: with an input of half precision, copies of it and of its gradient in single precision are not counted.
    """
    layers = [layer for layer in module.modules() if is_local(layer)]
    widths = [layer.num_features for layer in layers if isinstance(layer.num_features, int)]
    return 4 * (len(layers) + 2 * sum(widths) + 10 * max(widths, default=0))


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

    def __init__(self, mesh: DeviceMesh | DryAxis | None) -> None:
        self._mesh = mesh

    def __call__(
        self, inside: Callable[..., Any], layer: AnyBatchNorm, *args: Any, **kwargs: Any
    ) -> Float[Tensor, "cell channel *position"]:
        """Normalise the input; with batch statistics in a training step, this is a collective."""
        # outside of training, ranks have different numbers of batches, so layers without running statistics stay local
        by_batch = normalises_by_batch(layer) and (layer.training or torch.is_grad_enabled())
        mesh = self._mesh
        if mesh is None or mesh.size() == 1 or not by_batch:
            plain: Tensor = inside(layer, *args, **kwargs)
            return plain
        shared = partial(batch_normalised, over=[axis_of(mesh)], once=once)
        if not _is_plain(layer):
            with replacing(F, batch_norm=partial(_batch_norm, F.batch_norm, shared)):
                found: Tensor = inside(layer, *args, **kwargs)
            return found
        (input,) = (*args, *kwargs.values())
        layer._check_input_dim(input)  # type: ignore[no-untyped-call]
        return shared(input, layer.weight, layer.bias, layer.eps, track=partial(_track, layer))

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
    _update(layer.running_mean, layer.running_var, momentum, mean, m2, count)


@torch.no_grad()
def _update(
    running_mean: Tensor | None, running_var: Tensor | None, momentum: float, mean: Tensor, m2: Tensor, count: Tensor
) -> None:
    for running, new in ((running_mean, mean), (running_var, m2 / (count - 1))):
        # .data, without a new version, as torch's kernel: a call in eval mode may have saved it for its backward pass
        if running is not None:
            running.data.lerp_(new.to(running.dtype), momentum)


def _batch_norm(
    plain: Callable[..., Tensor],
    shared: Callable[..., Tensor],
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Replace torch's function in the forward of a layer: with batch statistics, they are those of all ranks."""
    if not training:
        return plain(input, running_mean, running_var, weight, bias, training, momentum, eps)
    return shared(input, weight, bias, eps, track=partial(_update, running_mean, running_var, momentum))


def _is_plain(layer: nn.Module) -> bool:
    return type(layer).forward is AnyBatchNorm.forward


def normalises_once(layer: AnyBatchNorm) -> bool:
    """Whether the forward of a layer calls torch's `batch_norm` once, and otherwise computes each sample by itself.

    A small copy runs twice, on samples and on some of them, with given statistics. It must also leave its running
    statistics to torch.
    """
    plain, calls = F.batch_norm, list[bool]()

    def counted(
        input: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None, *_: Any, **__: Any
    ) -> Tensor:
        calls.append(running_mean is twin.running_mean and weight is twin.weight and bias is twin.bias)
        zeros = torch.zeros(input.shape[1], dtype=torch.float64)
        return plain(input, zeros, zeros + 1, weight, bias)

    with torch.no_grad(), isolated_random_streams(), unseen(), replacing(F, batch_norm=counted):
        try:
            # a module that was made without memory has no values
            twin = copy.deepcopy(layer).to_empty(device="cpu").double()
        except Exception:
            return False
        for part in twin.modules():
            part.training = part is twin
        for place, tensor in enumerate([*twin.parameters(), *twin.buffers()]):
            tensor.fill_(1 + place)
        kept = [(b, b.clone()) for b in twin.buffers() if b.is_floating_point()]
        for positions in range(4):
            calls.clear()
            x = torch.linspace(-2, 3, 4 * twin.num_features * 3**positions, dtype=torch.float64)
            x = x.view(4, twin.num_features, *[3] * positions)
            try:
                # some activations change their input
                whole, some = (type(twin).forward(twin, part.clone()) for part in (x, x[1:3]))
            except Exception:
                # it may take tensors of more dims
                continue
            same = isinstance(whole, Tensor) and whole.shape == x.shape and torch.equal(whole[1:3], some)
            return same and calls == [True, True] and all(torch.equal(b, before) for b, before in kept)
    return False
