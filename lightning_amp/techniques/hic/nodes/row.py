"""Define nodes, domain parallelism over anchors and vertices: its row in the table of techniques, and its specs."""

from dataclasses import dataclass

from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.techniques.technique import Installer, Target, Technique, on_decoder


@dataclass(frozen=True, kw_only=True, slots=True)
class DomainParallel:
    """The anchors of the decoder are split over the model axis, in whole buckets of attention.

    Attributes:
        vertices: v comes with the own rows only, from a graph encoder whose vertices are split too.
    """

    vertices: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class VertexParallel:
    """The vertices of the graph are split over the model axis; a rank has its own rows of embedding, noise and v.

    Attributes:
        modality: Whose vertices are the anchors of the decoder that is split.
        window: Anchors of a bucket of its attention.
    """

    modality: str
    window: int


def _targets(shape: ModelShape) -> list[Target]:
    vertices = shape.vertices
    found = on_decoder(lambda _: DomainParallel(vertices=vertices is not None))(shape)
    if vertices is None or shape.decoder is None:
        return found
    return [*found, (vertices.fqn, VertexParallel(modality=vertices.modality, window=shape.decoder.window))]


ROW = Technique(
    title="domain parallel over nodes",
    shrinks="[N, D] and [V, D] to those of a rank",
    specs=(DomainParallel, VertexParallel),
    installers={
        DomainParallel: Installer(
            "lightning_amp.techniques.hic.nodes.decoder:share_anchors", on_decoder=True
        ),
        VertexParallel: Installer("lightning_amp.techniques.hic.nodes.graph_encoder:share_vertices"),
    },
    targets=_targets,
    choice=("placement", "nodes"),
    conflicts={
        "compile": "ranks send parts of a stratum while it is computed, which compile does not look into",
        "strata": "both split the decoder over the model axis, which has room for one placement",
    },
    model_axis=True,
)
