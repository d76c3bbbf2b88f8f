"""Batch normalisation over the cells of all ranks of a mesh axis: that of one process on the union batch.

    n = sum_r n_r,   mean = sum_r n_r mean_r / n,   M2 = sum_r M2_r + n_r (mean_r - mean)^2,   var = M2 / n
    y = weight (x - mean) / sqrt(var + eps) + bias
    dx = weight / sqrt(var + eps) (dy - sum dy / n - (x - mean) / (var + eps) * sum dy (x - mean) / n)

Exact up to rounding for any cells per rank, zero included. Gradients of weight and bias stay the rank's own
part: the reducer averages them over ranks like all others, while dx belongs to the sum of all ranks' losses.
So an average of parameter gradients is the gradient of the average of the ranks' losses.

Collectives: forward one all-gather of 2 C + 1 numbers, backward one all-reduce of 2 C; none in eval mode, unless a
layer without running statistics is trained through, and none in the forward pass of a block that runs again, which has
the statistics of its first one. Each waits for all ranks, and there is nothing to be computed meanwhile. Passes over x,
which are what a layer takes on a CPU, are few: the sums of dy and the part of dx without the sums of all ranks are
torch's own kernel for given statistics, and what is taken off that part is one more normalisation of x.
Legend: C channels, n_r values per channel on rank r (cells times positions).
Known limits: every rank must call the layer equally often; no second derivative; a union of one value per
channel has no unbiased variance and makes the running variance nan.
"""

from collections.abc import Callable, Container
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import batch_norm

# the common base of BatchNorm1d, 2d and 3d has no public name
from lightning_amp._torch import AnyBatchNorm
from lightning_amp.errors import InstallError
from lightning_amp.footprint.forward_overrides import (
    Override,
    Position,
    add_override,
    overrides_of,
    remove_override,
)
from lightning_amp.parallel.autograd.received import once
from lightning_amp.parallel.chunk.in_chunks import InChunks
from lightning_amp.parallel.contract.batch_norms import normalises_by_batch
from lightning_amp.parallel.ranks import collectives
from lightning_amp.parallel.ranks.combine_moments import union_moments
from lightning_amp.shapes import Scalar

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
            f"batch statistics are to be shared over ranks; {own!r} are BatchNorm layers with a forward or a __call__"
            " of their own, which would be lost. Keep statistics per rank with share_batch_statistics=False"
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
        # what follows the blocks in chunks has a look of its own at what it captures
        whole = type(one.run) is InChunks and one.run.train
        inside = block.named_modules() if whole else [("", block)]
        for name, layer in inside:
            # a frozen layer is computed as its class does
            if layer in layers and (normalises_by_batch(layer) or not whole):
                where = f"{outer}.{name}" if name else outer
                raise InstallError(
                    f"{one.strategy} and {SHARE} were asked for on {outer!r}: {one.strategy} computes it, and ranks"
                    f" exchange the statistics of {where!r} ({type(layer).__name__}), which {one.strategy} does not;"
                    f" leave {one.strategy} out for it, or keep statistics per rank with {SHARE}=False"
                )


def has_batch_norms(module: nn.Module) -> bool:
    """Whether there is a BatchNorm inside a module."""
    return any(isinstance(layer, AnyBatchNorm) for layer in module.modules())


def statistics_bytes(module: nn.Module) -> int:
    """Most bytes that shared statistics add to a training step: of every layer how many values it has seen and, where
    it runs again, its statistics until then, 2 numbers per channel; of one layer in its backward pass, per channel, 6
    numbers (2 of `sums`, `rstd`, `per_value`, 2 products) and 2 gradients.

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

    Args:
        mesh: The axis; None in what was pickled, which belongs to no ranks and is plain.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self._mesh = mesh

    def __call__(
        self,
        inside: Callable[..., Any],
        layer: AnyBatchNorm,
        input: Float[Tensor, "cell channel *position"],
    ) -> Float[Tensor, "cell channel *position"]:
        """Normalise; where it is by the statistics of a batch that is trained on, a collective."""
        # outside of training ranks have unlike numbers of batches, and a layer without running statistics its own
        by_batch = normalises_by_batch(layer) and (layer.training or torch.is_grad_enabled())
        mesh = self._mesh
        if mesh is None or mesh.size() == 1 or not by_batch:
            plain: Tensor = inside(layer, input)
            return plain
        layer._check_input_dim(input)  # type: ignore[no-untyped-call]
        mean, m2, count = once(lambda: _union_statistics(input, mesh))
        if layer.training and layer.track_running_stats:
            _track(layer, mean, m2, count)
        output: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, layer.weight, layer.bias, mean, m2 / count, count, layer.eps, mesh
        )
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> "SharedStatistics":
        return self

    def __reduce__(self) -> Any:
        return SharedStatistics, (None,)


@torch.no_grad()
def _track(layer: AnyBatchNorm, mean: Tensor, m2: Tensor, count: Tensor) -> None:
    if layer.running_mean is None or layer.running_var is None:
        return
    momentum = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        # no momentum means the plain average over all batches so far
        momentum = 1 / float(layer.num_batches_tracked) if momentum is None else momentum
    assert momentum is not None, "a layer that tracks statistics counts its batches"
    for running, new in ((layer.running_mean, mean), (layer.running_var, m2 / (count - 1))):
        # no new version, as of torch's kernel: a call in eval mode, whose backward pass is to come, may have saved it
        running.data.lerp_(new.to(running.dtype), momentum)


@torch.no_grad()
def _union_statistics(
    x: Float[Tensor, "cell channel *position"], mesh: DeviceMesh
) -> tuple[Float[Tensor, " channel"], Float[Tensor, " channel"], Scalar]:
    """Mean, sum of squared deviations and number of values per channel over all ranks, by Chan's formula."""
    x = x.to(_precise(x.dtype))
    channels, n = x.shape[1], x.numel() // x.shape[1]
    packed = torch.cat([*_moments(x), x.new_full((1,), n)]) if n else x.new_zeros(2 * channels + 1)
    means, m2s, counts = torch.split(collectives.all_gather(mesh, packed), [channels, channels, 1], dim=1)
    return union_moments(means, m2s, counts)


def _moments(
    x: Float[Tensor, "cell channel *position"],
) -> tuple[Float[Tensor, " channel"], Float[Tensor, " channel"]]:
    """Mean and sum of squared deviations of this rank's values."""
    if x.device.type == "cpu":
        # torch.var over these dims takes five times as long there
        mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
    else:
        var, mean = torch.var_mean(x, dim=[0, *range(2, x.dim())], correction=0)
    return mean, var * (x.numel() // x.shape[1])


class _Normalize(torch.autograd.Function):
    """Normalise by the union's statistics; the backward pass knows that they depend on every rank's x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        count: Tensor,
        eps: float,
        mesh: DeviceMesh,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, var, count)
        ctx.eps, ctx.mesh = eps, mesh
        return batch_norm(x.to(mean.dtype), mean, var, weight, bias, eps=eps).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var, count = ctx.saved_tensors
        own = x.to(mean.dtype)
        factor = None if weight is None else weight.to(mean.dtype)
        dx, tilt, total = _with_given_statistics(grad.to(mean.dtype), own, factor, mean, var, ctx.eps)
        sums = torch.cat([tilt, total])
        collectives.wait_in_all_reduce(all_reduce(sums, group=ctx.mesh.get_group(), async_op=True))
        tilts, totals = sums.chunk(2)
        rstd = torch.rsqrt(var + ctx.eps)
        per_value = (rstd if factor is None else rstd * factor) / count
        dx.sub_(batch_norm(own, mean, var, per_value * tilts, per_value * totals, eps=ctx.eps))
        d_weight = d_bias = None
        if weight is not None:
            d_weight, d_bias = tilt.to(weight.dtype), total.to(weight.dtype)
        return dx.to(x.dtype), d_weight, d_bias, *[None] * 5


def _with_given_statistics(
    dy: Float[Tensor, "cell channel *position"],
    x: Float[Tensor, "cell channel *position"],
    weight: Float[Tensor, " channel"] | None,
    mean: Float[Tensor, " channel"],
    var: Float[Tensor, " channel"],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias as if mean and var did not depend on x; of one rank's cells."""
    if not x.numel():
        # torch's kernel divides by their number
        return dy.clone(), torch.zeros_like(mean), torch.zeros_like(mean)
    dx, d_weight, d_bias = torch.ops.aten.native_batch_norm_backward(
        dy, x, weight, mean, var, None, None, False, eps, [True, True, True]
    )
    return dx, d_weight, d_bias


def _precise(dtype: torch.dtype) -> torch.dtype:
    """Half precision is summed in single precision."""
    return torch.promote_types(dtype, torch.float32)
