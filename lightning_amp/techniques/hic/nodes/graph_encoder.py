"""Shard the vertices of a graph encoder: each rank has the vertices of its anchors, and some others (nodes).

    an anchor         its rank under `nodes` (ranks/shards.py), so that own rows of v enter the decoder
    another vertex    the rank to which most of its edges lead; ties to the lowest, without edges in runs
    embedding         a shard on its owner: values, gradient, optimiser state (sharded_parameter.py)
    loc, std          row by row; replicated, a rank's gradients are partial (`Change.partial`)

    collectives of a step               forward                      backward
    propagate: messages over edges      1 all-to-all  g D            1 all-to-all  g D
    rows: ends of sampled edges         1 all-reduce  P (2 + m) D    nothing: gradients are equal on all ranks
    rows: every other modality          1 all-reduce  F_m D          nothing
    mean: divergence                    1 all-reduce  1              nothing
    noise                               nothing: every rank draws all, some rows at a time, and keeps its own

The guidance graph joins genes to nearby bins, so few edges cross ranks. An edge's message is summed on the rank of its
target; a *ghost* is a source on another rank. Exact up to the order in which messages are summed. Reduced to 1 / R:
everything [V, D]. The lists of edges, [E], are replicated.

Legend: vertex (V), own_vertex (n of this rank), dim (D), edge (E, both directions), end (of an edge), g ghosts of a
rank, P sampled edges with m negatives each, F_m features of another modality, anchor (N), R ranks. Known limits: second
derivatives raise an error; a call of `rows` allocates [ends, D] on every rank; encoders are detected by their children
(protocol.py), and what their forward does with these is not checked.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.errors import InstallError
from lightning_amp.shapes import PerVertex, Scalar
from lightning_amp.sharding.collectives import wait_for
from lightning_amp.techniques.checks.same_function import mismatch, shown
from lightning_amp.techniques.contract.change import Change, hooks_of, hooks_within
from lightning_amp.techniques.contract.protocol import Messages, is_vertex_encoder
from lightning_amp.techniques.contract.sharded_parameter import shard_parameter
from lightning_amp.techniques.hic.rows import VertexParallel
from lightning_amp.techniques.ranks import collectives
from lightning_amp.techniques.ranks.shards import AnchorShards, run_of, shard_anchors

Ends = tuple[Int[Tensor, " edge"], Int[Tensor, " edge"]]


@dataclass(frozen=True, eq=False, slots=True)
class VertexShards:
    """Assignment of vertices to the ranks of a mesh axis; a rank's rows are in the order of their ids."""

    technique: ClassVar[str] = "nodes"
    mesh: DeviceMesh
    owner: Int[Tensor, " vertex"]  # rank of every vertex
    ids: tuple[Int[Tensor, " own_vertex"], ...]  # vertices of every rank
    place: Int[Tensor, " vertex"]  # row of every vertex on its owner

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.mesh.get_local_rank()

    @property
    def own_ids(self) -> Int[Tensor, " own_vertex"]:
        """Vertices of this rank."""
        return self.ids[self.rank]

    def own_place(self, ids: Int[Tensor, " some"]) -> Int[Tensor, " some"]:
        """Return the own row of each vertex, -1 for vertices of other ranks."""
        return torch.where(self.owner[ids] == self.rank, self.place[ids], -1)

    def own(self, whole: Shaped[Tensor, "vertex ..."]) -> Shaped[Tensor, "own_vertex ..."]:
        """Return a copy of this rank's rows."""
        return whole[self.own_ids.to(whole.device)]

    def join(self, own: Shaped[Tensor, "own_vertex ..."]) -> Shaped[Tensor, "vertex ..."]:
        """Gather the rows of all ranks; one all-gather, without gradients."""
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
        """Yield runs of adjacent rows of this rank: offsets in the full tensor, and the rows."""
        ids = self.own_ids.cpu()
        ends = (ids.diff() != 1).nonzero().flatten() + 1
        for run, rows in zip(ids.tensor_split(ends), own.tensor_split(ends), strict=True):
            if rows.numel():
                yield (int(run[0]), *[0] * (own.dim() - 1)), rows


def shard_vertices(n_vertices: int, anchors: AnchorShards, ids: Int[Tensor, " anchor"], ends: Ends) -> VertexShards:
    """Assign the vertices of a graph to the ranks that have its anchors; edges are in both directions."""
    # a vertex has one owner, but two anchors may belong to two ranks
    twice = int((torch.bincount(ids, minlength=n_vertices) > 1).sum())
    if twice:
        raise InstallError(
            f"nodes does not support a graph in which {twice!r} vertices belong to several of {len(ids)!r}"
            " anchors, which may lie on two ranks; give every anchor a separate vertex"
        )
    ranks = anchors.mesh.size()
    owner = torch.full((n_vertices,), -1)
    # ids are in the order of the anchors, of which every rank has a run
    owner[ids] = torch.repeat_interleave(torch.arange(ranks), torch.tensor(anchors.sizes))
    others = (owner < 0).nonzero().flatten()
    source, target = ends
    # edges are listed in both directions, so edges from unowned vertices to anchors cover all pairs once
    joined = (owner[source] < 0) & (owner[target] >= 0)
    votes = torch.bincount(source[joined] * ranks + owner[target[joined]], minlength=n_vertices * ranks)
    votes = votes.view(n_vertices, ranks)[others]
    lonely = (votes.sum(1) == 0).nonzero().flatten()
    # argmax takes the lowest rank in a tie, so all ranks compute the same owners without a collective
    owner[others] = votes.argmax(1)
    owner[others[lonely]] = torch.arange(len(lonely)) * ranks // max(1, len(lonely))
    place = torch.empty_like(owner)
    found = tuple((owner == rank).nonzero().flatten() for rank in range(ranks))
    for rows in found:
        place[rows] = torch.arange(len(rows))
    return VertexShards(mesh=anchors.mesh, owner=owner, ids=found, place=place)


class SharedVertices(nn.Module):
    """This rank's vertices and their incoming edges, instead of all; buffers are on the device of `coefficient`."""

    place: Tensor  # own row of every vertex, -1 for vertices of other ranks
    ids: Tensor  # own vertices
    source: Tensor  # source of the own edges, inner edges first: an own row, or the index of a ghost
    target: Tensor  # target of the same edges, an own row
    coefficient: Tensor  # coefficient of the same edges
    sent: Tensor  # own rows that are ghosts of other ranks, by rank

    def __init__(self, inner: Any, rows: VertexShards, ends: Ends, coefficient: Float[Tensor, " edge"]) -> None:
        super().__init__()
        self.inner, self.mesh, self.n_vertices = inner, rows.mesh, len(rows.owner)
        (source, target), n, ranks = ends, self.n_vertices, rows.mesh.size()
        origin, reader = rows.owner[source], rows.owner[target]
        inner_edges = ((origin == rows.rank) & (reader == rows.rank)).nonzero().flatten()
        outer_edges = ((origin != rows.rank) & (reader == rows.rank)).nonzero().flatten()
        edges, cut = torch.cat((inner_edges, outer_edges)), origin != reader
        # sorted by sender, receiver and vertex, so that all ranks list the rows of a pair in the same order; each row
        # once per receiver, however many edges start at the vertex
        pairs = torch.unique((origin[cut] * ranks + reader[cut]) * n + source[cut])
        sender, receiver, vertex = pairs // n // ranks, pairs // n % ranks, pairs % n
        mine, theirs = sender == rows.rank, receiver == rows.rank
        # pairs are sorted by sender, which is the order in which an all-to-all returns them
        ghost = torch.full((n,), -1)
        ghost[vertex[theirs]] = torch.arange(int(theirs.sum()))
        self.n_inner = len(inner_edges)
        self.n_sent = torch.bincount(receiver[mine], minlength=ranks).tolist()
        self.n_received = torch.bincount(sender[theirs], minlength=ranks).tolist()
        named = {
            "place": rows.own_place(torch.arange(n)),
            "ids": rows.own_ids,
            "source": torch.cat((rows.place[source[inner_edges]], ghost[source[outer_edges]])),
            "target": rows.place[target[edges]],
            "sent": rows.place[vertex[mine]],
        }
        for name, values in named.items():
            self.register_buffer(name, values.to(coefficient.device), persistent=False)
        self.register_buffer("coefficient", coefficient[edges.to(coefficient.device)], persistent=False)
        # in host memory: the end of a block must be known without waiting for the device
        self.own_ids = rows.own_ids

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"vertices={len(self.own_ids)} of {self.n_vertices}, ghosts={sum(self.n_received)}"

    def propagate(self, x: PerVertex, messages: Messages) -> PerVertex:
        """Return the sum over edges of coefficient * x[source] at the own targets."""
        # `messages` is not called: coefficients depend on the graph only, and this rank's were selected once
        return collectives.linear(self._propagate, self._propagate_back, x)

    def _propagate(self, x: Tensor) -> Tensor:
        under_way = collectives.start_exchange(self.mesh, x[self.sent], self.n_received, self.n_sent)
        out = torch.zeros_like(x)
        # messages between own vertices are summed while the ghosts' rows are in transit
        self._add(out, x, slice(0, self.n_inner))
        self._add(out, wait_for(under_way), slice(self.n_inner, None))
        return out

    def _propagate_back(self, grad: Tensor) -> Tensor:
        ghosts = grad.new_zeros(sum(self.n_received), grad.shape[1])
        # gradients of ghosts first, because other ranks wait for them
        self._add(ghosts, grad, slice(self.n_inner, None), back=True)
        under_way = collectives.start_exchange(self.mesh, ghosts, self.n_sent, self.n_received)
        out = torch.zeros_like(grad)
        self._add(out, grad, slice(0, self.n_inner), back=True)
        return out.index_add_(0, self.sent, wait_for(under_way))

    def _add(self, out: Tensor, x: Tensor, edges: slice, *, back: bool = False) -> None:
        """Add the messages of some own edges; backward from targets to sources."""
        source, target = self.source[edges], self.target[edges]
        ends = {"source": target, "target": source} if back else {"source": source, "target": target}
        self.inner.add_messages(out, x, **ends, coefficient=self.coefficient[edges])

    def noise(self, like: PerVertex, generator: torch.Generator | None) -> PerVertex:
        """Return the own rows of the noise that one device would draw."""
        noise, begin = torch.empty_like(like), 0
        for first, block in self.inner.blocks(self.n_vertices, like, generator):
            # own ids ascend, so own rows within a block of all vertices are consecutive
            end = int(torch.searchsorted(self.own_ids, first + len(block)))
            noise[begin:end] = block[self.ids[begin:end] - first]
            begin = end
        return noise

    def mean(self, values: Float[Tensor, " own_vertex"]) -> Scalar:
        """Return the mean over the vertices of all ranks."""
        return collectives.leave(self.mesh, values.sum()) / self.n_vertices

    def rows(self, v: PerVertex, *ids: Int[Tensor, "*end"]) -> tuple[Tensor, ...]:
        """Return rows of any vertices by id, replicated on every rank; each [*end, dim]."""
        found = replicated_rows(self.mesh, v, self.place[torch.cat([i.reshape(-1) for i in ids])])
        parts = torch.split(found, [i.numel() for i in ids])
        return tuple(part.view(*i.shape, v.shape[1]) for part, i in zip(parts, ids, strict=True))


class ReplicatedRows(nn.Module):
    """Rows of a modality's features, replicated; `ids` are their vertices."""

    place: Tensor

    def __init__(self, rows: VertexShards, ids: Int[Tensor, " feature"], device: torch.device) -> None:
        super().__init__()
        self.mesh = rows.mesh
        self.register_buffer("place", rows.own_place(ids).to(device), persistent=False)

    def forward(self, v: PerVertex) -> Float[Tensor, "feature dim"]:
        """Return the rows of v for the modality's decoder."""
        return replicated_rows(self.mesh, v, self.place)


class OwnRows(nn.Module):
    """Rows of the own anchors, in order; a view if they are consecutive."""

    place: Tensor

    def __init__(self, place: Int[Tensor, " own_anchor"], device: torch.device) -> None:
        super().__init__()
        self.run = run_of(place)
        self.register_buffer("place", place.to(device), persistent=False)

    def forward(self, v: PerVertex) -> Float[Tensor, "own_anchor dim"]:
        """Return the rows of v that enter the decoder on this rank."""
        return v[self.place] if self.run is None else v[self.run]


def replicated_rows(mesh: DeviceMesh, v: PerVertex, place: Int[Tensor, " row"]) -> Float[Tensor, "row dim"]:
    """Return rows of all ranks as a replicated result; `place` is -1 for rows of other ranks."""
    n_own = len(v)
    # `place` never changes, so the backward pass reads the same one

    def there(v: Tensor) -> Tensor:
        # rows of other ranks are zero here, so that the sum over ranks has every row once
        return collectives.all_reduce(mesh, v[place.clamp_min(0)].masked_fill_((place < 0)[:, None], 0))

    def back(grad: Tensor) -> Tensor:
        # no collective: all ranks compute the same with the rows, so each has the full gradient of its own rows
        own = grad.masked_fill((place < 0)[:, None], 0)
        return grad.new_zeros(n_own, grad.shape[1]).index_add_(0, place.clamp_min(0), own)

    return collectives.linear(there, back, v, behind="inside")


def share_vertices(encoder: nn.Module, spec: VertexParallel, mesh: DeviceMesh) -> Change:
    """Shard the vertices of a graph over the model axis, like the anchors of the modality that the spec names."""
    problem = _encoder_problem(encoder, spec)
    if problem or not is_vertex_encoder(encoder):
        raise InstallError(
            f"nodes does not support the graph encoder {type(encoder).__name__!r}, which {problem}; allowed"
            " is one with the leaves `vertices` and `rows` and the layers `loc` and `std` of the reference"
            " model: change it, or leave 'nodes' out"
        )
    ids = {name: cast(Tensor, child.on_host) for name, child in encoder.rows.items()}
    anchors = shard_anchors(len(ids[spec.modality]), spec.window, mesh["model"])
    rows = shard_vertices(encoder.n_vertices, anchors, ids[spec.modality], encoder.ends)
    # a copy with the same layers, whose parameters the optimiser has, and a leaf with the own vertices
    shared = copy.copy(cast(nn.Module, encoder))
    # otherwise replacing a child of the copy would also replace it in the encoder
    vars(shared).update({name: dict(value) for name, value in vars(shared).items() if type(value) is dict})
    with torch.no_grad():
        *_, coefficient = encoder.messages()
    shared.add_module("vertices", SharedVertices(encoder.vertices, rows, encoder.ends, coefficient))
    device = encoder.embedding.device
    leaves: dict[str, nn.Module] = {name: ReplicatedRows(rows, i, device) for name, i in ids.items()}
    own = ids[spec.modality][anchors.own.start : anchors.own.stop]
    leaves[spec.modality] = OwnRows(rows.place[own], device)
    shared.add_module("rows", nn.ModuleDict(leaves))
    embedding = shard_parameter(shared, "embedding", encoder.embedding, parts=rows)
    layers = (encoder.loc, encoder.std)
    return Change({"": shared}, partial=[p for layer in layers for p in layer.parameters()], sharded=[embedding])


def _encoder_problem(encoder: nn.Module, spec: VertexParallel) -> str:
    """Return why an encoder's vertices cannot be sharded, as the text after its name; "" if they can."""
    if isinstance(getattr(encoder, "vertices", None), SharedVertices):
        return "has its vertices shared already"
    if not is_vertex_encoder(encoder):
        return "is not supported"
    if spec.modality not in encoder.rows:
        return f"has the modalities {list(encoder.rows)!r}, not {spec.modality!r}"
    for name in ("loc", "std"):
        layer = getattr(encoder, name)
        # not isinstance: a subclass may mix rows
        if type(layer) is not nn.Linear:
            return f"has {name}={shown(layer)}, and not nn.Linear"
    hooks = [*hooks_within(cast(nn.Module, encoder)), *hooks_of(encoder.embedding, "embedding")]
    if hooks:
        return f"has {', '.join(hooks)}, which would see a part of the vertices"
    v = torch.arange(6.0).view(3, 2)
    summed = torch.tensor([[0.0, 0.0], [8.0, 11.0], [0.0, 0.0]])
    expected = {"add_messages": summed, "propagate": summed, "mean": v[1, 0], "rows": v[[1, 1]]}
    problem = mismatch(encoder.vertices, expected, _run, rtol=1e-6)
    return f"has a leaf `vertices` that {problem}" if problem else ""


def _run(leaf: Any) -> dict[str, Tensor]:
    """Return what a leaf computes for 3 vertices and 2 edges."""
    v, out = torch.arange(6.0).view(3, 2), torch.zeros(3, 2)
    edges = {"source": torch.tensor([0, 2]), "target": torch.tensor([1, 1])}
    edges["coefficient"] = torch.tensor([1.0, 2.0])
    leaf.add_messages(out, v, **edges)
    return {
        "add_messages": out,
        "propagate": leaf.propagate(v, lambda: tuple(edges.values())),
        "mean": leaf.mean(v[:, 0]),
        "rows": leaf.rows(v, edges["target"])[0],
    }
