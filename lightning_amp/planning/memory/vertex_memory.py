"""Bytes of the guidance graph's vertices on one rank, where `nodes` splits them with the decoder's anchors.

    fewer    embedding, its gradient and optimiser state, and what is kept of [V, D]: rows of other ranks
    more     which rows are where, and the rank's own edges, beside the lists of all

Legend: V vertices, D dim, E edges in both directions, R ranks; n own vertices, of the rank that has most anchors.
Known limits: other vertices are taken as split evenly, edges too; ghosts, rows of other ranks' vertices at the end of
own edges, are few and left out. The ends of sampled edges are whole on every rank, as on one device.
"""

from typing import NamedTuple

from lightning_amp.planning.plan.model_shape import ModelShape
from lightning_amp.planning.sizes.rank_sizes import RankSizes

INDEX_BYTES = 8


class VertexBytes(NamedTuple):
    """What the split of the vertices changes: fewer bytes of parameters and of what is kept, more of buffers."""

    parameters: int = 0
    kept: int = 0
    buffers: int = 0


def vertex_bytes(shape: ModelShape, sizes: RankSizes | None) -> VertexBytes:
    """What the split of the vertices changes on one rank; nothing where they are not split."""
    vertices = shape.vertices
    if vertices is None or sizes is None or not sizes.by_nodes:
        return VertexBytes()
    own = sizes.anchors + -(-max(0, vertices.count - sizes.decoder.anchors) // sizes.ranks)
    away = vertices.count - own
    per_edge = 2 * INDEX_BYTES + shape.element_bytes
    return VertexBytes(
        parameters=shape.element_bytes * sizes.decoder.dim * away,
        kept=shape.vertex_bytes * away // vertices.count,
        buffers=INDEX_BYTES * (vertices.count + own) + per_edge * -(-vertices.edges // sizes.ranks),
    )
