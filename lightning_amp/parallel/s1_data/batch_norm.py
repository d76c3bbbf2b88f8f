"""Batch normalisation over the cells of all ranks of a mesh axis: that of one process on the union batch.

    n = sum_r n_r,   mean = sum_r n_r mean_r / n,   M2 = sum_r M2_r + n_r (mean_r - mean)^2,   var = M2 / n
    y = weight (x - mean) / sqrt(var + eps) + bias
    dx = weight / sqrt(var + eps) (dy - sum dy / n - (x - mean) / (var + eps) * sum dy (x - mean) / n)

Exact up to rounding for any cells per rank, zero included. Gradients of weight and bias stay the rank's own
part: the reducer averages them over ranks like all others, while dx belongs to the sum of all ranks' losses.
So an average of parameter gradients is the gradient of the average of the ranks' losses.

Collectives: forward one all-gather of 2 C + 1 numbers, backward one all-reduce of 2 C; none in eval mode. What the
sums of all ranks are not needed for is computed while they travel: backward, the gradients of weight and bias and the
part of dx that is the rank's own. Forward there is nothing of this kind.
Legend: C channels, n_r values per channel on rank r (cells times positions).
Known limits: every rank must call the layer equally often; no second derivative; a union of one value per
channel has no unbiased variance and makes the running variance nan.
"""

from collections.abc import Callable
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
from lightning_amp.parallel.ranks import collectives
from lightning_amp.parallel.ranks.combine_moments import union_moments
from lightning_amp.shapes import Scalar


def share_batch_statistics(module: nn.Module, mesh: DeviceMesh) -> Callable[[], None]:
    """Replace every BatchNorm inside a module by one that computes the same over all ranks.

    Args:
        module: Changed in place; layers that are SyncBatchNorm already are left as they are.

    Returns:
        A function that puts the original layers back, with the values trained since; it may be called twice.

    Raises:
        InstallError: A subclass of BatchNorm with another forward; nothing is changed.
    """
    names = {layer: name for name, layer in module.named_modules() if is_local(layer)}
    own = [name for layer, name in names.items() if type(layer).forward is not AnyBatchNorm.forward]
    if own:
        raise InstallError(
            f"batch statistics are to be shared over ranks; {own!r} are BatchNorm layers with a forward of"
            " their own, which cannot be replaced. Keep statistics per rank with share_batch_statistics=False"
        )
    shared = {layer: SharedBatchNorm(layer, mesh) for layer in names if isinstance(layer, AnyBatchNorm)}
    # a list of places, for one layer may hang under two parents
    places = [
        (parent, name, layer)
        for parent in module.modules()
        for name, layer in parent._modules.items()
        if isinstance(layer, AnyBatchNorm) and layer in shared
    ]
    for parent, name, layer in places:
        parent._modules[name] = shared[layer]

    def undo() -> None:
        for parent, name, layer in places:
            parent._modules[name] = layer
            layer.__dict__.pop("mesh", None)

    return undo


def has_batch_norms(module: nn.Module) -> bool:
    """Whether there is a BatchNorm inside a module."""
    return any(isinstance(layer, AnyBatchNorm) for layer in module.modules())


def statistics_bytes(module: nn.Module) -> int:
    """Most bytes that shared statistics add to a training step: of every layer how many values it has seen, and of one
    in its backward pass, per channel, 9 numbers (2 of `local`, 2 of `sums`, 5 named ones) and 2 gradients.

    Known limit: the deviation from the mean, as large as the layer's input, is not among them; nothing else is made at
    that moment that is not freed by an activation's backward pass just before.
    """
    layers = [layer for layer in module.modules() if is_local(layer)]
    widths = [layer.num_features for layer in layers if isinstance(layer.num_features, int)]
    return 4 * (len(layers) + 11 * max(widths, default=0))


def is_local(layer: nn.Module) -> bool:
    """Whether a module is a BatchNorm over the cells of its rank."""
    return isinstance(layer, AnyBatchNorm) and not isinstance(layer, SharedBatchNorm | nn.SyncBatchNorm)


class SharedBatchNorm(AnyBatchNorm):
    """A BatchNorm whose training statistics are those of all ranks of a mesh axis."""

    mesh: DeviceMesh

    def __init__(self, local: AnyBatchNorm, mesh: DeviceMesh) -> None:
        """Take over a layer.

        Args:
            local: Its state is used, not copied: both have the same parameters, buffers, hooks and mode.
            mesh: One axis; a mesh can be deep-copied with the module, a process group cannot.
        """
        object.__setattr__(self, "__dict__", local.__dict__)
        self.mesh = mesh

    def forward(
        self, input: Float[Tensor, "cell channel *position"]
    ) -> Float[Tensor, "cell channel *position"]:
        """Normalise; in training mode a collective."""
        if not self.training or self.mesh.size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        mean, m2, count = _union_statistics(input, self.mesh)
        self._track(mean, m2, count)
        output: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, mean, m2 / count, count, self.eps, self.mesh
        )
        return output

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"expected input of 2 or more dimensions (cell, channel, ...), found {input.dim()}"
            )

    @torch.no_grad()
    def _track(self, mean: Tensor, m2: Tensor, count: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            # no momentum means the plain average over all batches so far
            momentum = 1 / float(self.num_batches_tracked) if momentum is None else momentum
        assert momentum is not None, "a layer that tracks statistics counts its batches"
        for running, new in ((self.running_mean, mean), (self.running_var, m2 / (count - 1))):
            running.lerp_(new.to(running.dtype), momentum)


@torch.no_grad()
def _union_statistics(
    x: Float[Tensor, "cell channel *position"], mesh: DeviceMesh
) -> tuple[Float[Tensor, " channel"], Float[Tensor, " channel"], Scalar]:
    """Mean, sum of squared deviations and number of values per channel over all ranks, by Chan's formula."""
    x = x.to(_precise(x.dtype))
    channels, n = x.shape[1], x.numel() // x.shape[1]
    if n:
        var, mean = torch.var_mean(x, dim=_all_but_channel(x), correction=0)
        packed = torch.cat([mean, var * n, x.new_full((1,), n)])
    else:
        packed = x.new_zeros(2 * channels + 1)
    means, m2s, counts = torch.split(collectives.all_gather(mesh, packed), [channels, channels, 1], dim=1)
    return union_moments(means, m2s, counts)


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
        dims = _all_but_channel(x)
        dy = grad.to(mean.dtype)
        deviation = x.to(mean.dtype) - _along(mean, x)
        local = torch.cat([dy.sum(dim=dims), (dy * deviation).sum(dim=dims)])
        sums = local.clone()
        travelling = all_reduce(sums, group=ctx.mesh.get_group(), async_op=True)
        rstd = torch.rsqrt(var + ctx.eps)
        scale = rstd if weight is None else rstd * weight
        d_weight = d_bias = None
        if weight is not None:
            d_bias, d_scaled = local.chunk(2)
            # a copy: the view would keep both halves alive as the bias's gradient
            d_weight, d_bias = (d_scaled * rstd).to(weight.dtype), d_bias.to(weight.dtype, copy=True)
        dx = dy * _along(scale, x)
        per_value = scale / count
        slope = per_value * rstd.square()
        collectives.wait_in_all_reduce(travelling)
        total, tilt = sums.chunk(2)
        dx.sub_(_along(total * per_value, x)).sub_(deviation.mul_(_along(tilt * slope, x)))
        return dx.to(x.dtype), d_weight, d_bias, *[None] * 5


def _precise(dtype: torch.dtype) -> torch.dtype:
    """Half precision is summed in single precision."""
    return torch.promote_types(dtype, torch.float32)


def _all_but_channel(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _along(channel: Tensor, x: Tensor) -> Tensor:
    return channel.view(1, -1, *[1] * (x.dim() - 2))
