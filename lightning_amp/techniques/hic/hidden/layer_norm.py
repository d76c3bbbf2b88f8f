"""Compute LayerNorm over a hidden dimension of which every rank holds some channels (dist/normalise.py).

Collectives: forward one all-gather of 2 N + 1 numbers per rank, backward one all-reduce of 2 N, which is left out
when x needs no gradient. Kept for the backward pass: x [N, d_r] itself, mean and rstd [N].

Weight and bias stay whole; their gradients are zero outside the own channels.
Legend: N rows, d_r own channels of rank r.
"""

from jaxtyping import Float
from torch import Tensor, nn

from lightning_amp.dist.normalise import normalised
from lightning_amp.dist.splits import axis_of
from lightning_amp.techniques.ranks.channel_shards import Channels


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
