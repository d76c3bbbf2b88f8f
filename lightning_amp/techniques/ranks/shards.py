"""Shard features, anchors and channels over the ranks of a mesh axis: ownership, slicing and gathering.

**Runs** of ceil(n / R), as torch's `Shard` splits rows. The last run that is not empty may be shorter, and later ranks
have none: 5 items on 4 ranks are 2, 2, 1 and 0.

**Anchors**, of v [N, D], in full buckets of attention, so that a bucket and its two neighbours lie on at most three
ranks (full attention has no buckets: a bucket is one anchor): rank r has the buckets [r W // R, (r + 1) W // R). Ranks
may differ by one bucket; the last bucket may be short.

    take_anchors v -> own rows, forward nothing     backward one all-gather of the rows' gradients, and of the
                 u, log_weights -> the same           partial gradients of u and log_weights, which are summed

A rank sends n D + B D + K numbers; with a head for the strata's weights, n D + B D + B K.

**Channels** of the hidden dimension, of values [row, D]. Rotary mixes channel i with channel i + D/2, so one rank holds
both: rank r has the pairs [p_r, p_{r+1}), that is the channels p_r .. p_{r+1} - 1 and the same + D/2, in this order.
Pairs are sharded as evenly as possible; ranks may differ by one pair. An odd D, which only convolution keys allow, is
sharded by single channels.

    take_channels      all -> own channels         nothing            one all-gather of all gradients
    gather_channels    own channels -> all         one all-gather     one reduce-scatter

Exact: values and gradients are only moved, and partial gradients are summed once.
Legend: n items (of anchors, the most of any rank), R ranks, cell (B), anchor (N), hidden dim (D), stratum (K), W
buckets of w anchors, d the widest rank's channels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp._torch import has_no_values
from lightning_amp.errors import InstallError
from lightning_amp.footprint.copies.known_values import in_a_count, recipe_of
from lightning_amp.shapes import LogWeights, PerAnchor, PerCell
from lightning_amp.techniques.ranks import collectives


def run_length(n: int, mesh: DeviceMesh) -> int:
    """Number of items of the ranks that have most."""
    return -(-n // mesh.size())


def run_of(index: Int[Tensor, " some"]) -> slice | None:
    """Return the slice that selects the same as an index; None if there is none, or if the index has no values."""
    # a counted step knows the values of buffers
    known = in_a_count(index) and recipe_of(index) is not None
    if has_no_values(index) and not known:
        return None
    first = int(index[0]) if len(index) else 0
    run = torch.arange(first, first + len(index), dtype=index.dtype, device=index.device)
    return slice(first, first + len(index)) if torch.equal(index, run) else None


def own_run(n: int, mesh: DeviceMesh) -> slice:
    """Slice of this rank's items; may be empty."""
    run = run_length(n, mesh)
    # later ranks get an empty slice
    start = min(mesh.get_local_rank() * run, n)
    return slice(start, min(start + run, n))


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Runs:
    """Sharding of a tensor in which every rank has a run of one dimension."""

    mesh: DeviceMesh
    n: int
    dim: int

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of the full tensor; a view."""
        run = own_run(self.n, self.mesh)
        return whole.narrow(self.dim, run.start, run.stop - run.start)

    def join(self, own: Tensor) -> Tensor:
        """Gather the full tensor from every rank's shard; one all-gather, without gradients."""
        rows = own.detach().movedim(self.dim, 0)
        # explicit size, because -1 is ambiguous if this rank has no rows
        flat = rows.reshape(len(rows), prod(rows.shape[1:]))
        padded = F.pad(flat, (0, 0, 0, run_length(self.n, self.mesh) - len(rows)))
        whole = collectives.all_gather(self.mesh, padded).flatten(0, 1)[: self.n]
        return whole.reshape(self.n, *rows.shape[1:]).movedim(0, self.dim).contiguous()

    def boxes(self, own: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yield blocks of adjacent entries of this rank's shard: offsets in the full tensor, and the entries."""
        if own.numel():
            start = own_run(self.n, self.mesh).start
            yield tuple(start if dim == self.dim else 0 for dim in range(own.dim())), own


@dataclass(frozen=True, eq=False, slots=True)
class AnchorShards:
    """Anchors of all ranks of a mesh axis; `bounds` has the first anchor of every rank, and N."""

    mesh: DeviceMesh
    window: int
    bounds: tuple[int, ...]

    @property
    def sizes(self) -> list[int]:
        """Number of anchors of every rank."""
        return list(map(len, self.owned))

    @property
    def owned(self) -> list[range]:
        """Anchors of every rank."""
        return [range(start, stop) for start, stop in pairwise(self.bounds)]

    @property
    def own(self) -> range:
        """Anchors of this rank."""
        return self.owned[self.mesh.get_local_rank()]

    @property
    def n_buckets(self) -> int:
        """Number of this rank's buckets."""
        return -(-len(self.own) // self.window)

    @property
    def before(self) -> bool:
        """Whether another rank has a bucket before this rank's first."""
        return self.own.start > 0

    @property
    def after(self) -> bool:
        """Whether another rank has a bucket after this rank's last."""
        return self.own.stop < self.bounds[-1]


def shard_anchors(n_anchors: int, window: int, mesh: DeviceMesh) -> AnchorShards:
    """Shard anchors over a mesh axis in full buckets; raises an InstallError if there are more ranks than buckets."""
    ranks, buckets = mesh.size(), -(-n_anchors // window)
    if ranks > buckets:
        raise InstallError(
            f"nodes got {ranks!r} ranks on the model axis, and N={n_anchors!r} anchors fill {buckets!r}"
            f" buckets of {window!r}, which are sharded whole; use a model axis of {buckets!r} ranks or"
            " fewer"
        )
    # full buckets, so that attention needs rows of at most two other ranks
    firsts = (rank * buckets // ranks * window for rank in range(ranks))
    return AnchorShards(mesh=mesh, window=window, bounds=(*firsts, n_anchors))


def take_anchors(
    rows: AnchorShards, u: PerCell, v: PerAnchor, log_weights: LogWeights
) -> tuple[PerCell, Float[Tensor, "own_anchor dim"], LogWeights]:
    """Return what this rank's strata read, given replicated values."""

    def there(u: Tensor, v: Tensor, log_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return u.view_as(u), v[rows.own.start : rows.own.stop], log_weights.view_as(log_weights)

    def back(*grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # one all-gather for all three: rows of v are concatenated, partial gradients of u and log_weights summed
        of_u, of_v, of_weights = grads
        if of_v is not None and len(of_v) < max(rows.sizes):
            # all-gathers require equal sizes
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
    """Channels of all ranks of a mesh axis.

    `bounds`: first pair of channels of every rank, then D/2; for an odd D, first channel of every rank, then D.
    """

    mesh: DeviceMesh
    dim: int
    bounds: tuple[int, ...]

    @property
    def paired(self) -> bool:
        """Whether channels are sharded in pairs."""
        return self.dim % 2 == 0

    @property
    def pairs(self) -> slice:
        """This rank's pairs (channels for an odd D)."""
        rank = self.mesh.get_local_rank()
        return slice(self.bounds[rank], self.bounds[rank + 1])

    @property
    def widths(self) -> list[int]:
        """Number of channels of every rank."""
        # a pair is two channels
        return [(1 + self.paired) * run for run in self._runs]

    @property
    def width(self) -> int:
        """Number of this rank's channels."""
        return self.widths[self.mesh.get_local_rank()]

    @property
    def widest(self) -> int:
        """d: channels of the rank that has most, to which shards are padded."""
        return max(self.widths)

    def of(self, rank: int) -> list[int]:
        """Channels of a rank, in the order in which it holds them."""
        first = list(range(self.bounds[rank], self.bounds[rank + 1]))
        return first + [i + self.dim // 2 for i in first] if self.paired else first

    def select(self, values: Float[Tensor, "*row dim"]) -> Float[Tensor, "*row own_dim"]:
        """Copy this rank's channels of values with all channels; gradients are not exchanged."""
        rank = self.mesh.get_local_rank()
        return torch.cat([pieces[rank] for pieces in self._split(values)], dim=-1)

    def blocks(self, values: Float[Tensor, "*row dim"]) -> Float[Tensor, "rank *row most_dim"]:
        """Return every rank's channels of values with all channels, padded with zeros to the widest."""
        parts = [torch.cat(pieces, dim=-1) for pieces in zip(*self._split(values), strict=True)]
        return torch.stack([self.pad(part) for part in parts])

    def join(self, block: Float[Tensor, "rank *row most_dim"]) -> Float[Tensor, "*row dim"]:
        """Invert `blocks`."""
        parts = [part[..., :width] for part, width in zip(block, self.widths, strict=True)]
        # every rank has a piece of the first half of the channels and one of the second
        halves = zip(*(part.chunk(1 + self.paired, dim=-1) for part in parts), strict=True)
        return torch.cat([piece for half in halves for piece in half], dim=-1)

    def pad(self, part: Float[Tensor, "*row own_dim"]) -> Float[Tensor, "*row most_dim"]:
        """Pad a rank's channels with zeros to the widest; collectives require equal sizes."""
        fill = self.widest - part.shape[-1]
        return F.pad(part, (0, fill)) if fill else part

    @property
    def _runs(self) -> list[int]:
        return [stop - start for start, stop in pairwise(self.bounds)]

    def _split(self, values: Tensor) -> list[tuple[Tensor, ...]]:
        """For each half of the channels, return every rank's piece. Backward, a split is one copy for any R."""
        return [torch.split(half, self._runs, dim=-1) for half in values.chunk(1 + self.paired, dim=-1)]


def shard_channels(dim: int, mesh: DeviceMesh) -> Channels:
    """Shard the channels of a dimension over a mesh axis; raises an InstallError for more ranks than pairs."""
    ranks, things = mesh.size(), dim // 2 if dim % 2 == 0 else dim
    if ranks > things:
        raise InstallError(
            f"S5 got {ranks!r} ranks on the model axis and D={dim!r}, which has {things!r}"
            f" {'pairs of channels' if dim % 2 == 0 else 'channels'} to shard; use a model axis of"
            f" {things!r} ranks or fewer"
        )
    return Channels(mesh=mesh, dim=dim, bounds=tuple(rank * things // ranks for rank in range(ranks + 1)))


def take_channels(channels: Channels, *values: Float[Tensor, "row dim"]) -> tuple[Tensor, ...]:
    """Return this rank's channels of replicated values; backward, one all-gather of all their gradients."""

    def back(*grads: Tensor) -> tuple[Tensor, ...]:
        # before this, all ranks compute the same, so each needs the full gradient, of which every rank has its channels
        block = collectives.all_gather(channels.mesh, channels.pad(torch.cat(grads)))
        return torch.split(channels.join(block), [len(grad) for grad in grads])

    return collectives.linear(lambda *xs: tuple(map(channels.select, xs)), back, *values, behind="outside")


def gather_channels(channels: Channels, part: Float[Tensor, "row own_dim"]) -> Float[Tensor, "row dim"]:
    """Gather all channels, for a result that every rank uses differently; backward, one reduce-scatter."""
    return channels.join(collectives.gather(channels.mesh, channels.pad(part)))


def sizes_of_rank(module: nn.Module) -> tuple[object, ...]:
    """Return what determines the memory of a rank with a plan installed: ranks of equal sizes need equal memory."""
    tensors = (t.shape for t in (*module.parameters(), *module.buffers()))
    found = [value for child in module.modules() for value in vars(child).values()]
    channels = (one.width for one in found if isinstance(one, Channels))
    rows = ((len(one.own), one.before, one.after) for one in found if isinstance(one, AnchorShards))
    # strata, and numbers of edges
    counts = (one for one in found if isinstance(one, range | int))
    return (*tensors, *channels, *rows, *counts)
