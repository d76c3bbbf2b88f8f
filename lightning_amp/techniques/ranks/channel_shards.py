"""Assign channels of the hidden dimension to ranks, and cut values [row, D] accordingly.

Rotary mixes channel i with channel i + D/2, so both are held by one rank: rank r has the pairs [p_r, p_{r+1}), that is
the channels p_r .. p_{r+1} - 1 and the same + D/2, in this order. Pairs are sharded as evenly as possible; ranks may
differ by one pair. An odd D, which only convolution keys allow, is sharded by single channels.

    take_channels      whole -> own channels         nothing            one all-gather of all gradients
    gather_channels    own channels -> whole         one all-gather     one reduce-scatter

Exact: values and gradients are moved, and a gradient that every rank has a part of is summed once.
Legend: D hidden dimension, R ranks, d the widest rank's channels.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.errors import InstallError
from lightning_amp.techniques.ranks import collectives


@dataclass(frozen=True, eq=False, slots=True)
class Channels:
    """The channel sets of all ranks of a mesh axis.

    Attributes:
        bounds: First pair of every rank, and D/2; of an odd D first channel of every rank, and D.
    """

    mesh: DeviceMesh
    dim: int
    bounds: tuple[int, ...]

    @property
    def paired(self) -> bool:
        """Whether channels are held in pairs."""
        return self.dim % 2 == 0

    @property
    def pairs(self) -> slice:
        """The own pairs (the own channels of an odd D)."""
        rank = self.mesh.get_local_rank()
        return slice(self.bounds[rank], self.bounds[rank + 1])

    @property
    def widths(self) -> list[int]:
        """Channels of every rank."""
        return [(1 + self.paired) * run for run in self._runs]

    @property
    def width(self) -> int:
        """Own channels."""
        return self.widths[self.mesh.get_local_rank()]

    @property
    def widest(self) -> int:
        """d: channels of the rank that has most, to which parts are padded."""
        return max(self.widths)

    def of(self, rank: int) -> list[int]:
        """Channels of a rank, in the order in which it holds them."""
        first = list(range(self.bounds[rank], self.bounds[rank + 1]))
        return first + [i + self.dim // 2 for i in first] if self.paired else first

    def select(self, values: Float[Tensor, "*row dim"]) -> Float[Tensor, "*row own_dim"]:
        """A copy of the own channels of values that have all; gradients stay the rank's own."""
        rank = self.mesh.get_local_rank()
        return torch.cat([pieces[rank] for pieces in self._split(values)], dim=-1)

    def blocks(self, values: Float[Tensor, "*row dim"]) -> Float[Tensor, "rank *row most_dim"]:
        """Every rank's channels of values that have all, padded with zeros to the widest."""
        parts = [torch.cat(pieces, dim=-1) for pieces in zip(*self._split(values), strict=True)]
        return torch.stack([self.pad(part) for part in parts])

    def join(self, block: Float[Tensor, "rank *row most_dim"]) -> Float[Tensor, "*row dim"]:
        """The inverse of `blocks`."""
        parts = [part[..., :width] for part, width in zip(block, self.widths, strict=True)]
        halves = zip(*(part.chunk(1 + self.paired, dim=-1) for part in parts), strict=True)
        return torch.cat([piece for half in halves for piece in half], dim=-1)

    def pad(self, part: Float[Tensor, "*row own_dim"]) -> Float[Tensor, "*row most_dim"]:
        """A rank's part with zeros up to the widest; collectives move parts of one size."""
        fill = self.widest - part.shape[-1]
        return F.pad(part, (0, fill)) if fill else part

    @property
    def _runs(self) -> list[int]:
        return [stop - start for start, stop in pairwise(self.bounds)]

    def _split(self, values: Tensor) -> list[tuple[Tensor, ...]]:
        """For each half of the pairs, every rank's piece. Backward, a split is one copy whatever R is."""
        return [torch.split(half, self._runs, dim=-1) for half in values.chunk(1 + self.paired, dim=-1)]


def shard_channels(dim: int, mesh: DeviceMesh) -> Channels:
    """Shard the channels of a dimension over a mesh axis.

    Raises:
        InstallError: More ranks than there are pairs of channels to shard.
    """
    ranks, things = mesh.size(), dim // 2 if dim % 2 == 0 else dim
    if ranks > things:
        raise InstallError(
            f"S5 got {ranks!r} ranks on the model axis and D={dim!r}, which has {things!r}"
            f" {'pairs of channels' if dim % 2 == 0 else 'channels'} to shard; use a model axis of"
            f" {things!r} ranks or fewer"
        )
    return Channels(mesh=mesh, dim=dim, bounds=tuple(rank * things // ranks for rank in range(ranks + 1)))


def take_channels(channels: Channels, *values: Float[Tensor, "row dim"]) -> tuple[Tensor, ...]:
    """The own channels of values that every rank holds whole; one all-gather of all their gradients backward."""
    return cast(tuple[Tensor, ...], _TakeChannels.apply(channels, *values))  # type: ignore[no-untyped-call]


def gather_channels(channels: Channels, part: Float[Tensor, "row own_dim"]) -> Float[Tensor, "row dim"]:
    """All channels, for a result that every rank uses differently; backward, one reduce-scatter."""
    return channels.join(collectives.gather(channels.mesh, channels.pad(part)))


class _TakeChannels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, channels: Channels, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.channels, ctx.behind = channels, "outside"
        return tuple(channels.select(value) for value in values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        channels: Channels = ctx.channels
        block = collectives.all_gather(channels.mesh, channels.pad(torch.cat(grads)))
        return None, *torch.split(channels.join(block), [len(grad) for grad in grads])
