"""Which channels of the hidden dimension each rank holds, and how values [row, D] become parts of them.

Rotary mixes channel i with channel i + D/2, so both are held by one rank: rank r has the pairs [p_r, p_{r+1}), that is
the channels p_r .. p_{r+1} - 1 and the same + D/2, in this order. Pairs are dealt as evenly as possible; ranks may
differ by one pair. An odd D, which only convolution keys allow, is dealt by single channels.

Legend: D hidden dimension, R ranks, d the widest rank's channels.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.errors import InstallError
from lightning_amp.parallel import collectives


@dataclass(frozen=True, eq=False, slots=True)
class Channels:
    """The channel sets of all ranks of a mesh axis.

    Attributes:
        mesh: The mesh axis.
        dim: D.
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
    def width(self) -> int:
        """Own channels."""
        return len(self.of(self.mesh.get_local_rank()))

    @property
    def widest(self) -> int:
        """d: channels of the rank that has most, to which parts are padded."""
        return max(len(self.of(rank)) for rank in range(len(self.bounds) - 1))

    def of(self, rank: int) -> list[int]:
        """Channels of a rank, in the order in which it holds them."""
        first = list(range(self.bounds[rank], self.bounds[rank + 1]))
        return first + [i + self.dim // 2 for i in first] if self.paired else first

    @property
    def own(self) -> list[int]:
        """Channels of this rank."""
        return self.of(self.mesh.get_local_rank())

    def select(self, values: Float[Tensor, "*row dim"]) -> Float[Tensor, "*row own_dim"]:
        """The own channels of values that have all: one or two slices, joined; gradients stay the rank's own."""
        p = self.pairs
        if not self.paired:
            return values[..., p]
        half = self.dim // 2
        return torch.cat((values[..., p], values[..., p.start + half : p.stop + half]), dim=-1)

    def blocks(self, values: Float[Tensor, "*row dim"]) -> Float[Tensor, "rank *row own_dim"]:
        """Every rank's channels of values that have all, padded with zeros to the widest."""
        index, short = [], False
        for rank in range(len(self.bounds) - 1):
            own = self.of(rank)
            index += own + [self.dim] * (self.widest - len(own))
            short = short or len(own) < self.widest
        padded = F.pad(values, (0, 1)) if short else values
        rows = padded[..., torch.tensor(index, device=values.device)]
        return rows.reshape(*values.shape[:-1], -1, self.widest).movedim(-2, 0)

    def join(self, block: Float[Tensor, "rank *row own_dim"]) -> Float[Tensor, "*row dim"]:
        """The inverse of `blocks`."""
        place = [0] * self.dim
        for rank in range(len(self.bounds) - 1):
            for column, channel in enumerate(self.of(rank)):
                place[channel] = rank * self.widest + column
        rows = block.movedim(0, -2).flatten(-2)
        return rows[..., torch.tensor(place, device=block.device)]


def deal_channels(dim: int, mesh: DeviceMesh) -> Channels:
    """Deal the channels of a dimension to the ranks of a mesh axis.

    Raises:
        InstallError: More ranks than there are pairs of channels to deal.
    """
    ranks, things = mesh.size(), dim // 2 if dim % 2 == 0 else dim
    if ranks > things:
        raise InstallError(
            f"S5 was asked for with {ranks!r} ranks on the model axis and D={dim!r}, which has {things!r}"
            f" {'pairs of channels' if dim % 2 == 0 else 'channels'} to deal; use a model axis of {things!r} ranks"
            " or fewer"
        )
    bounds = tuple(rank * things // ranks for rank in range(ranks + 1))
    assert all(a < b for a, b in pairwise(bounds)), "every rank has a pair"
    return Channels(mesh=mesh, dim=dim, bounds=bounds)


def take_channels(channels: Channels, *values: Float[Tensor, "row dim"]) -> tuple[Tensor, ...]:
    """The own channels of values that every rank holds whole; one all-gather of all their gradients backward."""
    return cast(tuple[Tensor, ...], _Take.apply(channels, *values))  # type: ignore[no-untyped-call]


def gather_channels(channels: Channels, part: Float[Tensor, "row own_dim"]) -> Float[Tensor, "row dim"]:
    """All channels, for what every rank goes on with in its own way; backward, one reduce-scatter."""
    fill = channels.widest - part.shape[-1]
    return channels.join(collectives.gather(channels.mesh, F.pad(part, (0, fill)) if fill else part))


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, channels: Channels, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.channels = channels
        return tuple(channels.select(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        channels: Channels = ctx.channels
        part = torch.cat(grads)
        fill = channels.widest - channels.width
        block = collectives.all_gather(channels.mesh, F.pad(part, (0, fill)) if fill else part)
        return None, *torch.split(channels.join(block), [len(grad) for grad in grads])
