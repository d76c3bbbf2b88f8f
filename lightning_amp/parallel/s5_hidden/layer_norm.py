"""LayerNorm over a hidden dimension of which every rank holds some channels.

    mean = sum_r d_r mean_r / D      M2 = sum_r M2_r + d_r (mean_r - mean)^2      y = weight (x - mean) rstd + bias
    rstd = (M2 / D + eps)^-1/2       dx = rstd (g - sum g / D - x' sum (g x') / D)
    with g = weight dy and x' = (x - mean) rstd

Exact up to rounding: the statistics are combined from deviations (Chan's formula), never from sums of squares.
Collectives: forward one all-gather of 2 N + 1 numbers per rank, backward one all-reduce of 2 N, which is left out
when x needs no gradient. Kept for the backward pass: x [N, d_r] itself, mean and rstd [N].

Weight and bias stay whole; their gradients are zero outside the own channels.
Legend: N rows, D dim, d_r own channels of rank r, R ranks.
"""

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.parallel.ranks import collectives
from lightning_amp.parallel.ranks.channel_shards import Channels
from lightning_amp.parallel.ranks.combine_moments import union_moments


class ShardedLayerNorm(nn.LayerNorm):
    """The own channels of a LayerNorm's output, from the own channels of its input.

    Args:
        whole: Its state is used, not copied: both have the same parameters, hooks and mode.
    """

    channels: Channels

    def __init__(self, whole: nn.LayerNorm, channels: Channels) -> None:
        self.__dict__.update(whole.__dict__)
        self.channels = channels

    def forward(self, input: Float[Tensor, "row own_dim"]) -> Float[Tensor, "row own_dim"]:
        """Normalise over all ranks' channels."""
        weight = None if self.weight is None else self.channels.select(self.weight)
        bias = None if self.bias is None else self.channels.select(self.bias)
        mesh, dim = self.channels.mesh, self.channels.dim
        normalized = _Normalize.apply(input, weight, bias, mesh, dim, self.eps)  # type: ignore[no-untyped-call]
        return cast(Tensor, normalized)


def combined_statistics(
    x: Float[Tensor, "row own_dim"], mesh: DeviceMesh
) -> tuple[Float[Tensor, " row"], Float[Tensor, " row"]]:
    """Mean and sum of squared deviations of every row over all ranks' channels; one all-gather."""
    var, mean = torch.var_mean(x, dim=-1, correction=0)
    packed = torch.cat([mean, var * x.shape[-1], mean.new_full((1,), x.shape[-1])])
    means, m2s, counts = torch.split(collectives.all_gather(mesh, packed), [len(x), len(x), 1], dim=1)
    mean, m2, _ = union_moments(means, m2s, counts)
    return mean, m2


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mesh: DeviceMesh,
        dim: int,
        eps: float,
    ) -> Tensor:
        # half precision is summed in single precision
        values = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, m2 = combined_statistics(values, mesh)
        rstd = (m2 / dim + eps).rsqrt()
        ctx.save_for_backward(x, mean, rstd, weight)
        ctx.mesh, ctx.dim = mesh, dim
        y = (values - mean[:, None]).mul_(rstd[:, None])
        if weight is not None:
            y.mul_(weight)
        if bias is not None:
            y.add_(bias)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight = ctx.saved_tensors
        grad = grad.to(mean.dtype)
        normalized = (x.to(mean.dtype) - mean[:, None]).mul_(rstd[:, None])
        d_weight = (grad * normalized).sum(dim=0) if ctx.needs_input_grad[1] else None
        d_bias = grad.sum(dim=0) if ctx.needs_input_grad[2] else None
        # alike on all ranks, for all have the same graph: no rank waits for an all-reduce that another leaves out
        if not ctx.needs_input_grad[0]:
            return None, d_weight, d_bias, None, None, None
        scaled = grad if weight is None else grad * weight
        sums = torch.stack([scaled.sum(dim=1), (scaled * normalized).sum(dim=1)])
        average, slope = collectives.all_reduce(ctx.mesh, sums) / ctx.dim
        dx = (scaled - average[:, None]).sub_(normalized.mul_(slope[:, None])).mul_(rstd[:, None])
        return dx.to(x.dtype), d_weight, d_bias, None, None, None
