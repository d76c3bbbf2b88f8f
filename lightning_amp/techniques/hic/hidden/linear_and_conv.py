"""Compute linear layers, depthwise convolutions and LayerNorm over a hidden dimension that is split over ranks.

    linear         y[:, I_r] = sum_q x[:, I_q] W[I_r, I_q]^T + bias[I_r]
    convolution    y[I_r] = conv(x[I_r], weight[I_r]) + bias[I_r]: channels do not meet

Rank q makes its products with all output channels in blocks, one per receiving rank, and the blocks are summed where
they belong. An output of 2 D channels (gate and value of a GEGLU) gives both of every own channel, value first, so
that halving the result works on a part as it does on the whole.

Exact up to the order of the sum over ranks. Collectives of the linear layer: forward one reduce-scatter of R N d
numbers, backward one all-gather of N d per rank (twice that for 2 D outputs); none of the convolution.
Kept for the backward pass: x [N, d_r] itself and the own columns of W. Transient: the products [R, N, d].

Weights stay whole; their gradients are zero outside the input channels (linear) or channels (convolution) of the rank.
Legend: N rows, D dim, d_r own channels of rank r, d the widest rank's, I_r the channels of rank r, R ranks.

Compute LayerNorm over a hidden dimension of which every rank holds some channels (dist/normalise.py).

Collectives: forward one all-gather of 2 N + 1 numbers per rank, backward one all-reduce of 2 N, which is left out
when x needs no gradient. Kept for the backward pass: x [N, d_r] itself, mean and rstd [N].

Weight and bias stay whole; their gradients are zero outside the own channels.
Legend: N rows, d_r own channels of rank r.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lightning_amp.dist.normalise import normalised
from lightning_amp.dist.splits import axis_of
from lightning_amp.techniques.ranks import collectives
from lightning_amp.techniques.ranks.channel_shards import Channels


class ShardedLinear(nn.Linear):
    """The own channels of a Linear's output, from the own channels of its input.

    Args:
        whole: A layer from D to a multiple of D. Its state is used, not copied: both have the same parameters, hooks
            and mode.
    """

    channels: Channels

    def __init__(self, whole: nn.Linear, channels: Channels) -> None:
        self.__dict__.update(whole.__dict__)
        self.channels = channels

    def forward(self, input: Float[Tensor, "row own_dim"]) -> Float[Tensor, "row own_out"]:
        """Own channels of every group of D outputs, one group after the other."""
        columns = self.channels.select(self.weight).T
        blocks = torch.cat([self.channels.blocks(group) for group in self._groups(columns)], dim=-1)
        products = torch.bmm(input.expand(len(blocks), *input.shape), blocks)
        own = self._cut(collectives.scatter(self.channels.mesh, products))
        if self.bias is None:
            return own
        return own + torch.cat([self.channels.select(group) for group in self._groups(self.bias)])

    def _groups(self, values: Tensor) -> tuple[Tensor, ...]:
        return torch.split(values, self.channels.dim, dim=-1)

    def _cut(self, own: Tensor) -> Tensor:
        width, widest = self.channels.width, self.channels.widest
        if width == widest:
            return own
        return torch.cat([group[:, :width] for group in torch.split(own, widest, dim=-1)], dim=-1)


class ShardedConv1d(nn.Conv1d):
    """The own channels of a depthwise convolution.

    Args:
        whole: A layer with D groups of one channel and zero padding. Its state is used, not copied: both have the
            same parameters, hooks and mode.
    """

    channels: Channels

    def __init__(self, whole: nn.Conv1d, channels: Channels) -> None:
        self.__dict__.update(whole.__dict__)
        self.channels = channels

    def forward(self, input: Float[Tensor, "batch own_dim anchor"]) -> Float[Tensor, "batch own_dim to"]:
        """Convolve the own channels."""
        weight = self.channels.select(self.weight.movedim(0, -1)).movedim(-1, 0)
        bias = None if self.bias is None else self.channels.select(self.bias)
        return F.conv1d(input, weight, bias, self.stride, self.padding, self.dilation, self.channels.width)


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
        # weight and bias as rows, of one dim more
        return normalised(
            input,
            None if weight is None else weight[None],
            None if bias is None else bias[None],
            dims=(1,),
            axes=(axis_of(self.channels.mesh),),
            eps=self.eps,
        )
