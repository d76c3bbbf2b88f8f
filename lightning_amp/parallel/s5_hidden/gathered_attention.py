"""S5 in the form of the paper's ablation without S4: attention reads keys and values of all channels.

    rows[:, I_r] = attend(prepare(q, k, values), first, last)[:, I_r]

Exact: every rank computes what one device does. Collectives: forward one all-gather of queries-and-keys and values,
2 N d numbers per rank, backward one reduce-scatter of 2 R N d; no scores are summed. What grows: the gathered tensors
[2 N, D] and the queries, keys and values [P, D] made of them stay for the backward pass on every rank, which is what
the form is measured for.
Legend: anchor (N), P = N padded to whole buckets, dim (D), own_dim (d_r), d the widest rank's channels, I_r the
channels of rank r.
"""

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_amp.parallel.contract.protocol import BucketedAttention
from lightning_amp.parallel.ranks.channel_shards import Channels, gather_channels

OwnChannels = Float[Tensor, "anchor own_dim"]


class GatheredAttention(nn.Module):
    """Bucketed attention over all channels that returns the own ones.

    Args:
        inner: Bucketed attention over all channels.
    """

    inner: BucketedAttention

    def __init__(self, inner: nn.Module, channels: Channels) -> None:
        super().__init__()
        self.inner = cast(Any, inner)
        self.channels = channels

    def n_buckets(self, n: int) -> int:
        """Buckets that n anchors fill."""
        return self.inner.n_buckets(n)

    def prepare(self, q: OwnChannels, k: OwnChannels, values: OwnChannels) -> tuple[Tensor, ...]:
        """What `attend` reads, from all ranks' channels."""
        parts = [q, values] if q is k else [q, k, values]
        whole = torch.split(gather_channels(self.channels, torch.cat(parts)), len(q))
        return self.inner.prepare(whole[0], whole[-2], whole[-1])

    def attend(self, state: tuple[Tensor, ...], first: int, last: int) -> Float[Tensor, "row own_dim"]:
        """Own channels of the rows of the buckets [first, last)."""
        return self.channels.select(self.inner.attend(state, first, last))

    def forward(self, q: OwnChannels, k: OwnChannels, values: OwnChannels) -> OwnChannels:
        """Attention over all buckets at once."""
        return self.attend(self.prepare(q, k, values), 0, self.n_buckets(len(q)))[: len(q)]
