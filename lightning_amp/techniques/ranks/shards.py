"""Shard features, anchors and channels over the ranks of a mesh axis: who owns what, and how it is cut and joined.

**Runs** of ceil(n / R), as torch's `Shard` splits rows. The last run that has any may be shorter, and ranks after it
have none: 5 things on 4 ranks are 2, 2, 1 and 0.

**Anchors**, of v [N, D], in whole buckets of attention, so that a bucket and its two neighbours lie on three ranks at
most (with full attention, which has no buckets, in buckets of one): rank r has the buckets [r W // R, (r + 1) W // R).
Ranks may differ by one bucket; the last bucket may be short.

    take_anchors v -> own rows, forward nothing     backward one all-gather of the rows' gradients, and of the
                 u, log_weights -> the same           parts of those of u and log_weights, which are added up

A rank sends n D + B D + K numbers; with a head for the strata's weights, n D + B D + B K.

**Channels** of the hidden dimension, of values [row, D]. Rotary mixes channel i with channel i + D/2, so both are held
by one rank: rank r has the pairs [p_r, p_{r+1}), that is the channels p_r .. p_{r+1} - 1 and the same + D/2, in this
order. Pairs are sharded as evenly as possible; ranks may differ by one pair. An odd D, which only convolution keys
allow, is sharded by single channels.

    take_channels      whole -> own channels         nothing            one all-gather of all gradients
    gather_channels    own channels -> whole         one all-gather     one reduce-scatter

Exact: values and gradients are moved, and a gradient that every rank has a part of is summed once.
Legend: n things (of anchors the most of a rank), R ranks, cell (B), anchor (N), hidden dim (D), stratum (K), W buckets
of w anchors, d the widest rank's channels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp._torch import has_no_values
from lightning_amp.errors import InstallError
from lightning_amp.shapes import LogWeights, PerAnchor, PerCell
from lightning_amp.techniques.ranks import collectives


def run_length(n: int, mesh: DeviceMesh) -> int:
    """Things of the ranks that have most."""
    return -(-n // mesh.size())


def run_of(index: Int[Tensor, " some"]) -> slice | None:
    """The slice that selects what an index does; None if there is none, or if it has no values."""
    if has_no_values(index):
        return None
    first = int(index[0]) if len(index) else 0
    run = torch.arange(first, first + len(index), dtype=index.dtype, device=index.device)
    return slice(first, first + len(index)) if torch.equal(index, run) else None


def own_run(n: int, mesh: DeviceMesh) -> slice:
    """The things of this rank; may be empty."""
    run = run_length(n, mesh)
    # ranks after the last one that has any get an empty slice
    start = min(mesh.get_local_rank() * run, n)
    return slice(start, min(start + run, n))


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Runs:
    """A tensor of which every rank has a run of one dimension."""

    mesh: DeviceMesh
    n: int
    dim: int

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole; a view."""
        run = own_run(self.n, self.mesh)
        return whole.narrow(self.dim, run.start, run.stop - run.start)

    def join(self, own: Tensor) -> Tensor:
        """The whole from every rank's part; one all-gather, without gradients."""
        rows = own.detach().movedim(self.dim, 0)
        # the size is written out, for -1 has no meaning where this rank has no row
        flat = rows.reshape(len(rows), prod(rows.shape[1:]))
        padded = F.pad(flat, (0, 0, 0, run_length(self.n, self.mesh) - len(rows)))
        whole = collectives.all_gather(self.mesh, padded).flatten(0, 1)[: self.n]
        return whole.reshape(self.n, *rows.shape[1:]).movedim(0, self.dim).contiguous()

    def boxes(self, own: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Blocks of adjacent entries of this rank's part: offsets in the whole tensor, and the entries."""
        if own.numel():
            start = own_run(self.n, self.mesh).start
            yield tuple(start if dim == self.dim else 0 for dim in range(own.dim())), own


@dataclass(frozen=True, eq=False, slots=True)
class AnchorShards:
    """The anchors of all ranks of a mesh axis; `bounds` are the first anchor of every rank, and N."""

    mesh: DeviceMesh
    window: int
    bounds: tuple[int, ...]

    @property
    def sizes(self) -> list[int]:
        """Anchors of every rank."""
        return list(map(len, self.owned))

    @property
    def owned(self) -> list[range]:
        """The anchors of every rank."""
        return [range(start, stop) for start, stop in pairwise(self.bounds)]

    @property
    def own(self) -> range:
        """The anchors of this rank."""
        return self.owned[self.mesh.get_local_rank()]

    @property
    def n_buckets(self) -> int:
        """Own buckets."""
        return -(-len(self.own) // self.window)

    @property
    def before(self) -> bool:
        """Whether a rank has the bucket before the first of this one."""
        return self.own.start > 0

    @property
    def after(self) -> bool:
        """Whether a rank has the bucket after the last of this one."""
        return self.own.stop < self.bounds[-1]


def shard_anchors(n_anchors: int, window: int, mesh: DeviceMesh) -> AnchorShards:
    """Shard anchors over a mesh axis in whole buckets; an InstallError where there are more ranks than buckets."""
    ranks, buckets = mesh.size(), -(-n_anchors // window)
    if ranks > buckets:
        raise InstallError(
            f"nodes got {ranks!r} ranks on the model axis, and N={n_anchors!r} anchors fill {buckets!r}"
            f" buckets of {window!r}, which are sharded whole; use a model axis of {buckets!r} ranks or"
            " fewer"
        )
    # whole buckets, so that attention meets the rows of two other ranks at most
    firsts = (rank * buckets // ranks * window for rank in range(ranks))
    return AnchorShards(mesh=mesh, window=window, bounds=(*firsts, n_anchors))


def take_anchors(
    rows: AnchorShards, u: PerCell, v: PerAnchor, log_weights: LogWeights
) -> tuple[PerCell, Float[Tensor, "own_anchor dim"], LogWeights]:
    """What the strata of this rank read, of values that every rank holds whole."""

    def there(u: Tensor, v: Tensor, log_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return u.view_as(u), v[rows.own.start : rows.own.stop], log_weights.view_as(log_weights)

    def back(*grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # one all-gather for all three: v's rows are joined, of u and log_weights every rank has a part to add up
        of_u, of_v, of_weights = grads
        if of_v is not None and len(of_v) < max(rows.sizes):
            # all-gathers move parts of one size
            of_v = F.pad(of_v, (0, 0, 0, max(rows.sizes) - len(of_v)))
        padded = of_u, of_v, of_weights
        sent = [grad for grad in padded if grad is not None]
        if not sent:
            return grads
        block = collectives.all_gather(rows.mesh, torch.cat([grad.reshape(-1) for grad in sent]))
        parts = iter(torch.split(block, [grad.numel() for grad in sent], dim=1))
        blocks = [None if grad is None else next(parts).reshape(-1, *grad.shape) for grad in padded]
        of_u, of_v, of_weights = blocks
        whole = None if of_v is None else torch.cat([part[:n] for part, n in zip(of_v, rows.sizes, strict=True)])
        return None if of_u is None else of_u.sum(0), whole, None if of_weights is None else of_weights.sum(0)

    return collectives.linear(there, back, u, v, log_weights, behind="outside", unused=True)


@dataclass(frozen=True, eq=False, slots=True)
class Channels:
    """The channels of all ranks of a mesh axis.

    `bounds`: first pair of channels of every rank, then D/2; where D is odd, first channel of every rank, then D.
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
        # a pair is two channels
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
        # every rank has a piece of the first half of the channels and one of the second
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
    """Shard the channels of a dimension over a mesh axis; an InstallError where there are more ranks than pairs."""
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

    def back(*grads: Tensor) -> tuple[Tensor, ...]:
        # upstream all ranks compute the same, so each needs the whole gradient, of which every rank has its channels
        block = collectives.all_gather(channels.mesh, channels.pad(torch.cat(grads)))
        return torch.split(channels.join(block), [len(grad) for grad in grads])

    return collectives.linear(lambda *xs: tuple(map(channels.select, xs)), back, *values, behind="outside")


def gather_channels(channels: Channels, part: Float[Tensor, "row own_dim"]) -> Float[Tensor, "row dim"]:
    """All channels, for a result that every rank uses differently; backward, one reduce-scatter."""
    return channels.join(collectives.gather(channels.mesh, channels.pad(part)))
