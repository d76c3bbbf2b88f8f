"""nodes in the graph encoder: every rank of the model axis holds the vertices of its anchors, and some others.

    embedding      a shard on its owner: values, gradient, optimiser state (sharded_parameter.py)
    vertices       messages with ghosts, noise of the own rows, sums over ranks (sharded_vertices.py)
    rows           of the decoder's anchors the own ones, which enter it as they are; of other modalities all of them
    loc, std       row by row; whole on every rank, a rank's gradients are parts (`Change.partial`)

    collectives of a step               forward                      backward
    messages over edges                 1 all-to-all  g D            1 all-to-all  g D
    ends of sampled edges               1 all-reduce  P (2 + m) D    nothing
    every other modality                1 all-reduce  F_m D          nothing
    divergence                          1 all-reduce  1              nothing

Exact up to the order of sums. What shrinks to a part of 1 / R: everything [V, D]. The lists of edges, [E], stay whole.
Legend: V vertices, D dim, E edges, g ghosts of a rank, P sampled edges with m negatives each, F_m features of another
modality, R ranks.
Known limits: second derivatives are refused; encoders are detected by their children (protocol.py), what their
forward does with these is not checked; who indexes v by vertex and not through the leaves gets other rows.
"""

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.errors import InstallError
from lightning_amp.techniques.checks.same_function import mismatch, shown
from lightning_amp.techniques.contract.change import Change, hooks_of, hooks_within
from lightning_amp.techniques.contract.protocol import VertexEncoder, is_vertex_encoder
from lightning_amp.techniques.contract.sharded_parameter import shard_parameter
from lightning_amp.techniques.hic.nodes.sharded_vertices import (
    OwnRows,
    ReplicatedRows,
    SharedVertices,
    VertexShards,
    own_edges,
    shard_vertices,
)
from lightning_amp.techniques.hic.rows import VertexParallel
from lightning_amp.techniques.ranks.anchor_shards import shard_anchors


def share_vertices(encoder: nn.Module, spec: VertexParallel, mesh: DeviceMesh) -> Change:
    """Shard the vertices of a graph over the model axis, with the anchors of the modality that the spec names."""
    problem = _problem(encoder, spec)
    if problem or not is_vertex_encoder(encoder):
        raise InstallError(
            f"nodes does not support the graph encoder {type(encoder).__name__!r}, which {problem}; allowed"
            " is one with the leaves `vertices` and `rows` and the layers `loc` and `std` of the reference"
            " model: change it, or leave 'nodes' out"
        )
    ids = {name: cast(Tensor, child.on_host) for name, child in encoder.rows.items()}
    anchors = shard_anchors(len(ids[spec.modality]), spec.window, mesh["model"])
    rows = shard_vertices(encoder.n_vertices, anchors, ids[spec.modality], encoder.ends)
    shared = _shared(encoder, rows)
    device = encoder.embedding.device
    leaves: dict[str, nn.Module] = {name: ReplicatedRows(rows, i, device) for name, i in ids.items()}
    own = ids[spec.modality][anchors.own.start : anchors.own.stop]
    leaves[spec.modality] = OwnRows(rows.place[own], device)
    shared.add_module("rows", nn.ModuleDict(leaves))
    embedding = shard_parameter(shared, "embedding", encoder.embedding, parts=rows)
    layers = (encoder.loc, encoder.std)
    return Change(
        {"": shared}, partial=[p for layer in layers for p in layer.parameters()], sharded=[embedding]
    )


def _shared(encoder: VertexEncoder, rows: VertexShards) -> nn.Module:
    """A copy of the encoder with the same layers, which are those of the optimiser, and a leaf of the own vertices."""
    shared = copy.copy(cast(nn.Module, encoder))
    # else a child of the copy would be one of the encoder's too
    vars(shared).update({name: dict(value) for name, value in vars(shared).items() if type(value) is dict})
    with torch.no_grad():
        *_, coefficient = encoder.messages()
    leaf = SharedVertices(encoder.vertices, rows, own_edges(rows, encoder.ends), coefficient)
    shared.add_module("vertices", leaf)
    return shared


def _problem(encoder: nn.Module, spec: VertexParallel) -> str:
    """Why an encoder's vertices cannot be sharded, as what follows its name; "" if they can."""
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
    """What a leaf computes for 3 vertices and 2 edges."""
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
