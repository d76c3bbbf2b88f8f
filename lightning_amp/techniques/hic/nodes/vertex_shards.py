"""Assign vertices of the guidance graph to ranks, and list the rows that ranks need of each other.

    an anchor         its rank under `nodes` (ranks/anchor_shards.py), so that own rows of v enter the decoder as they
                      are
    another vertex    the rank that most of its edges lead to; ties to the lowest, without edges in runs

The guidance graph joins genes to bins nearby, so few edges lead from rank to rank. An edge's message is added up where
its target is; a *ghost* is a source that another rank holds.

Everything is counted once, from the whole lists of edges in the host's memory, replicated.
Legend: vertex (V), own_vertex (n of this rank), edge (E, both directions), anchor (N), R ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Int, Shaped
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.errors import InstallError
from lightning_amp.techniques.ranks import collectives
from lightning_amp.techniques.ranks.anchor_shards import AnchorShards

Ends = tuple[Int[Tensor, " edge"], Int[Tensor, " edge"]]


@dataclass(frozen=True, eq=False, slots=True)
class VertexShards:
    """The vertices of all ranks of a mesh axis; a rank's rows are in the order of their ids.

    Attributes:
        owner: Rank of every vertex.
        ids: Vertices of every rank.
        place: Row of every vertex on its owner.
    """

    mesh: DeviceMesh
    owner: Int[Tensor, " vertex"]
    ids: tuple[Int[Tensor, " own_vertex"], ...]
    place: Int[Tensor, " vertex"]

    @property
    def rank(self) -> int:
        """This rank."""
        return self.mesh.get_local_rank()

    @property
    def own_ids(self) -> Int[Tensor, " own_vertex"]:
        """Vertices of this rank."""
        return self.ids[self.rank]

    def own_place(self, ids: Int[Tensor, " some"]) -> Int[Tensor, " some"]:
        """Own row of each vertex, -1 of those of other ranks."""
        return torch.where(self.owner[ids] == self.rank, self.place[ids], -1)

    def own(self, whole: Shaped[Tensor, "vertex ..."]) -> Shaped[Tensor, "own_vertex ..."]:
        """This rank's rows, as a copy."""
        return whole[self.own_ids.to(whole.device)]

    def join(self, own: Shaped[Tensor, "own_vertex ..."]) -> Shaped[Tensor, "vertex ..."]:
        """All rows from every rank's; one all-gather, without gradients."""
        rows = own.detach()
        fill = max(map(len, self.ids)) - len(rows)
        block = collectives.all_gather(self.mesh, F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, fill)))
        whole = block.new_empty(len(self.owner), *rows.shape[1:])
        for ids, part in zip(self.ids, block, strict=True):
            whole[ids.to(whole.device)] = part[: len(ids)]
        return whole

    def boxes(
        self, own: Shaped[Tensor, "own_vertex ..."]
    ) -> Iterator[tuple[tuple[int, ...], Shaped[Tensor, "some ..."]]]:
        """Runs of adjacent rows of this rank: offsets in the whole tensor, and the rows."""
        ids = self.own_ids.cpu()
        ends = (ids.diff() != 1).nonzero().flatten() + 1
        for run, rows in zip(ids.tensor_split(ends), own.tensor_split(ends), strict=True):
            if rows.numel():
                yield (int(run[0]), *[0] * (own.dim() - 1)), rows


def shard_vertices(
    n_vertices: int, anchors: AnchorShards, ids: Int[Tensor, " anchor"], ends: Ends
) -> VertexShards:
    """Shard the vertices of a graph over the ranks that hold its anchors.

    Args:
        ends: Source and target of the edges in both directions, in the host's memory.

    Raises:
        InstallError: A vertex is two anchors.
    """
    twice = int((torch.bincount(ids, minlength=n_vertices) > 1).sum())
    if twice:
        raise InstallError(
            f"nodes does not support a graph in which {twice!r} vertices belong to several of {len(ids)!r}"
            " anchors, which may lie on two ranks; give every anchor a separate vertex"
        )
    ranks = anchors.mesh.size()
    owner = torch.full((n_vertices,), -1)
    owner[ids] = torch.repeat_interleave(torch.arange(ranks), torch.tensor(anchors.sizes))
    others = (owner < 0).nonzero().flatten()
    source, target = ends
    # edges are listed in both directions, so that those from an unowned vertex to an anchor are all that vote
    joined = (owner[source] < 0) & (owner[target] >= 0)
    votes = torch.bincount(source[joined] * ranks + owner[target[joined]], minlength=n_vertices * ranks)
    votes = votes.view(n_vertices, ranks)[others]
    lonely = (votes.sum(1) == 0).nonzero().flatten()
    # argmax takes the lowest of equals, so that every rank finds the same owners without a collective
    owner[others] = votes.argmax(1)
    owner[others[lonely]] = torch.arange(len(lonely)) * ranks // max(1, len(lonely))
    place = torch.empty_like(owner)
    found = tuple((owner == rank).nonzero().flatten() for rank in range(ranks))
    for rows in found:
        place[rows] = torch.arange(len(rows))
    return VertexShards(mesh=anchors.mesh, owner=owner, ids=found, place=place)


@dataclass(frozen=True, eq=False, slots=True)
class OwnEdges:
    """The edges whose target a rank holds, and the rows that ranks send each other for them.

    Attributes:
        edges: Places of these edges in the whole list: between own vertices, then from ghosts.
        n_inner: How many are between own vertices.
        source: Own row of the source, of a ghost its place among the ghosts.
        target: Own row of the target.
        sent: Own rows that are others' ghosts, in the order of the ranks.
        n_sent: How many go to each rank.
        n_received: Ghosts from each rank.
    """

    edges: Int[Tensor, " own_edge"]
    n_inner: int
    source: Int[Tensor, " own_edge"]
    target: Int[Tensor, " own_edge"]
    sent: Int[Tensor, " sent"]
    n_sent: list[int]
    n_received: list[int]


def own_edges(rows: VertexShards, ends: Ends) -> OwnEdges:
    """The edges of this rank.

    Args:
        ends: Source and target of the edges in both directions, in the host's memory.
    """
    (source, target), n, ranks = ends, len(rows.owner), rows.mesh.size()
    origin, reader = rows.owner[source], rows.owner[target]
    inner = ((origin == rows.rank) & (reader == rows.rank)).nonzero().flatten()
    outer = ((origin != rows.rank) & (reader == rows.rank)).nonzero().flatten()
    cut = origin != reader
    # sorted by who sends, who receives, and the vertex: every rank lists a pair's rows in one order
    pairs = torch.unique((origin[cut] * ranks + reader[cut]) * n + source[cut])
    sender, receiver, vertex = pairs // n // ranks, pairs // n % ranks, pairs % n
    mine, theirs = sender == rows.rank, receiver == rows.rank
    # pairs are sorted by sender first, which is the order in which an all-to-all hands out what each rank has sent
    ghost = torch.full((n,), -1)
    ghost[vertex[theirs]] = torch.arange(int(theirs.sum()))
    return OwnEdges(
        edges=torch.cat((inner, outer)),
        n_inner=len(inner),
        source=torch.cat((rows.place[source[inner]], ghost[source[outer]])),
        target=rows.place[target[torch.cat((inner, outer))]],
        sent=rows.place[vertex[mine]],
        n_sent=torch.bincount(receiver[mine], minlength=ranks).tolist(),
        n_received=torch.bincount(sender[theirs], minlength=ranks).tolist(),
    )
