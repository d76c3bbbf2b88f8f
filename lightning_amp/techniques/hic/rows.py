"""Define techniques for decomposed decoders: their rows in the table of techniques, specs of their rules, and sizes.

The sizes define how much of a stratum exists at a time; the memory model uses the same numbers.
"""

from dataclasses import dataclass, replace
from typing import Any

from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.diagnosis import ATTENTION_DECODER, HEAVY_DECOMPOSITION, HIGH_INPUT_DIMENSIONALITY
from lightning_amp.techniques.option_checks import whole_number
from lightning_amp.techniques.technique import Installer, Target, Technique, on_decoder

HIC = "lightning_amp.techniques.hic"
SENDS = "ranks send parts of a stratum while it is computed, which compile does not look into"
ONE_PLACEMENT = "both split the decoder over the model axis, which has room for one placement"

RETAINED, AGAIN, STREAMED = "retain", "recompute", "stream"
"""Choices on the decoder's axis `activations`: keep a stratum's tensors, recompute them, or run backward directly."""
CHUNK_QUERIES = 128
"""Queries per chunk of local attention; the paper uses 128 at 500 kb and 32 at 100 kb (Section 4)."""


def chunk_buckets(window: int, queries: int | None = None) -> int:
    """Return the buckets of `window` queries in one chunk: as many as fit into `queries`, at least one bucket."""
    return max(1, (queries or CHUNK_QUERIES) // window)


BLOCK_SCORES = 2**20
"""Scores [cells, F_k] that exist at a time on a CPU: 4 MiB per tensor of the likelihood, which fits in the cache."""


LAUNCHED_SCORES = 2**23
"""The same on an accelerator: 32 MiB per tensor, so that most batches are one block."""


def block_cells(features: int, *, anchors: int, launched: bool = False) -> int:
    """Return the cells of a block: about `BLOCK_SCORES` scores of the largest stratum, with at least 8 cells.

    `features` are its F_k; without S4 the scores of all `anchors` are computed. `launched`: on an accelerator.
    """
    return max(8, (LAUNCHED_SCORES if launched else BLOCK_SCORES) // max(features, anchors))


SPARSE_NUMBERS, SPARSE_LAUNCHED, SPARSE_COLUMNS = 2**16, 2**23, 64
"""Elements in a chunk of a sparse likelihood that fit in a CPU's cache; elements that keep an accelerator busy; and the
fewest columns of a chunk.
"""


def sparse_columns(cells: int, *, launched: bool) -> int:
    """Return the columns of a sparse likelihood that are computed at a time; `launched` as in `block_cells`."""
    return max(SPARSE_COLUMNS, (SPARSE_LAUNCHED if launched else SPARSE_NUMBERS) // max(1, cells))


KEPT_WEIGHTS = 2**24
"""Most attention weights [N, 3 w] that a streamed stratum keeps: 64 MiB."""


def keeps_weights(anchors: int, *, window: int) -> bool:
    """Whether fused attention keeps its weights for the backward pass of a streamed stratum."""
    return 3 * anchors * window <= KEPT_WEIGHTS


LATENTS_SIDE_BY_SIDE = 2**24
"""Most elements of a tensor [N, D], summed over concurrent strata: 64 MiB; a stratum has a dozen such tensors."""


def strata_side_by_side(threads: int, *, anchors: int, dim: int) -> int:
    """Return the number of streamed strata that a CPU runs concurrently."""
    return max(1, min(threads, LATENTS_SIDE_BY_SIDE // (anchors * dim)))


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkedAttention:
    """S3: local attention, a few buckets at a time."""

    buckets: int = 0  # buckets of `window` queries in one chunk; 0, in no rule: as requested, or the usual number
    # keep every chunk's probabilities for the backward pass, as in the paper, instead of recomputing them
    retain: bool = False

    @property
    def choice(self) -> tuple[str, str] | None:
        """Choice on an axis of the decoder, if it differs from that of the technique's row."""
        return ("attention", "chunked-retained") if self.retain else None


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedAttention:
    """Local attention with scores of one chunk of queries at a time, and a hand-written backward pass."""

    keep: bool = False  # keep all weights for the backward pass instead of computing them twice


@dataclass(frozen=True, kw_only=True, slots=True)
class SdpaAttention:
    """Local attention in torch's fused kernels: no scores, few operators, and 3 to 5 tensors [N, D] kept."""


def _requested_spec(spec: ChunkedAttention, request: Any) -> tuple[ChunkedAttention, bool]:
    """Check `chunk_queries` of a request, which the shape of the decoder has; return the spec without buckets."""
    whole_number("chunk_queries", getattr(request, "chunk_queries", None), least=1)
    return spec, False


def _settle(spec: ChunkedAttention, shape: ModelShape, ranks: int) -> ChunkedAttention:
    buckets = chunk_buckets(shape.decoder.window, shape.decoder.queries)
    return spec if spec.buckets else replace(spec, buckets=buckets)


S3 = Technique(
    title="chunked attention",
    shrinks="[N, 3 w] to [C, 3 w]",
    specs=(ChunkedAttention,),
    installers={ChunkedAttention: Installer(f"{HIC}.attention.install:chunked")},
    targets=on_decoder(lambda d: ChunkedAttention(buckets=chunk_buckets(d.window, d.queries)), "key.attention"),
    settle=_settle,
    option_names=("chunk_queries",),
    options=_requested_spec,
    signal=ATTENTION_DECODER,
    choice=("attention", "chunked"),
    conflicts={
        "fused": "both say how attention is computed; fused needs less memory and is faster",
        "sdpa": "both say how attention is computed",
    },
)
FUSED = Technique(
    title="fused attention",
    shrinks="[N, 3 w] to [C, 3 w], and all copies of keys and values",
    specs=(FusedAttention,),
    installers={FusedAttention: Installer(f"{HIC}.attention.install:fused")},
    targets=on_decoder(lambda _: FusedAttention(), "key.attention"),
    choice=("attention", "fused"),
    conflicts={"sdpa": "both say how attention is computed"},
)
SDPA = Technique(
    title="sdpa attention",
    shrinks="[N, 3 w] to nothing, in torch's fused kernels",
    specs=(SdpaAttention,),
    installers={SdpaAttention: Installer(f"{HIC}.attention.install:sdpa")},
    targets=on_decoder(lambda _: SdpaAttention(), "key.attention"),
    choice=("attention", "sdpa"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamStrata:
    """Forward and backward pass of one stratum after the other, inside the loss; nothing is computed twice."""

    cells: int  # cells of a batch whose scores of one stratum exist at the same time
    workers: int = 1  # strata that a CPU with as many threads runs concurrently, and that are alive at the same time


@dataclass(frozen=True, kw_only=True, slots=True)
class StrataParallel:
    """The strata of the decoder are sharded over the model axis, in runs."""

    ends: str  # one past the last stratum of each rank, separated by commas, such as "14,24,32"


STREAM = Technique(
    title="stream strata",
    shrinks="K strata to one, computed once",
    specs=(StreamStrata,),
    installers={StreamStrata: Installer(f"{HIC}.strata.stream:stream_strata", on_decoder=True)},
    targets=on_decoder(
        lambda d: StreamStrata(cells=block_cells(max(d.features), anchors=d.anchors, launched=d.launched))
    ),
    choice=("activations", STREAMED),
)
STRATA = Technique(
    title="strata parallel",
    shrinks="K strata to those of a rank",
    specs=(StrataParallel,),
    installers={StrataParallel: Installer(f"{HIC}.strata.own_strata:share_strata", on_decoder=True)},
    # the ranks' ranges depend on the mesh and on other choices, and are filled in later
    targets=on_decoder(lambda _: StrataParallel(ends="")),
    choice=("placement", "strata"),
    model_axis=True,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyFirstDecode:
    """S4: the keys of a stratum's anchors are selected before the product with the cells."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseLikelihood:
    """Likelihood of all features as if their counts were zero, with a correction for nonzero counts."""


S4 = Technique(
    title="key-first decode",
    shrinks="[B, N] to [B, F_k]",
    specs=(KeyFirstDecode,),
    installers={KeyFirstDecode: Installer(f"{HIC}.scores.s4_key_first:key_first")},
    targets=on_decoder(lambda _: KeyFirstDecode(), "decode"),
    signal=HIGH_INPUT_DIMENSIONALITY,
    choice=("decode", "key-first"),
)
SPARSE = Technique(
    title="sparse likelihood",
    shrinks="tensors [B, F_k] of the likelihood to its gradients",
    specs=(SparseLikelihood,),
    installers={SparseLikelihood: Installer(f"{HIC}.scores.sparse_likelihood:sparse_likelihood")},
    targets=on_decoder(lambda _: SparseLikelihood(), "likelihood"),
    choice=("likelihood", "sparse"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenParallel:
    """S5: the hidden dimension of the decoder is sharded over the model axis."""

    # gather keys and values over the ranks before every attention, as the paper does without S4, instead of summing
    # scores
    gather: bool = False

    @property
    def choice(self) -> tuple[str, str] | None:
        """Choice on an axis of the decoder, if it differs from that of the technique's row."""
        return ("placement", "hidden-gathered") if self.gather else None


S5 = Technique(
    title="hidden-dimension parallel",
    shrinks="[N, D] to [N, D / R]",
    specs=(HiddenParallel,),
    installers={HiddenParallel: Installer(f"{HIC}.hidden:share_hidden", on_decoder=True)},
    targets=on_decoder(lambda _: HiddenParallel()),
    signal=HEAVY_DECOMPOSITION,
    choice=("placement", "hidden"),
    conflicts={
        "fused": "under S5 the scores are sums over the ranks, which fused attention never holds; use S3",
        "sdpa": "under S5 the scores are sums over the ranks, which torch's kernels keep; use S3",
        "compile": SENDS,
        "strata": ONE_PLACEMENT,
        "nodes": ONE_PLACEMENT,
    },
    model_axis=True,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DomainParallel:
    """The anchors of the decoder are sharded over the model axis, in full buckets of attention."""

    vertices: bool = False  # v has only own rows, from a graph encoder whose vertices are sharded too


@dataclass(frozen=True, kw_only=True, slots=True)
class VertexParallel:
    """The vertices of the graph are sharded over the model axis; a rank has its own rows of embedding, noise and v."""

    modality: str  # modality whose vertices are the anchors of the sharded decoder
    window: int  # anchors of a bucket of its attention


def _node_targets(shape: ModelShape) -> list[Target]:
    vertices = shape.vertices
    found = on_decoder(lambda _: DomainParallel(vertices=vertices is not None))(shape)
    if vertices is None:
        return found
    return [*found, (vertices.fqn, VertexParallel(modality=vertices.modality, window=shape.decoder.window))]


NODES = Technique(
    title="domain parallel over nodes",
    shrinks="[N, D] and [V, D] to those of a rank",
    specs=(DomainParallel, VertexParallel),
    installers={
        DomainParallel: Installer(f"{HIC}.nodes.decoder:share_anchors", on_decoder=True),
        VertexParallel: Installer(f"{HIC}.nodes.graph_encoder:share_vertices"),
    },
    targets=_node_targets,
    choice=("placement", "nodes"),
    conflicts={"compile": SENDS, "strata": ONE_PLACEMENT},
    model_axis=True,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureParallel:
    """S2: the features of every stratum are sharded over the model axis."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowParallelLinear:
    """S2: a layer that reads all features; its weight, gradient and optimiser state are sharded over the model axis."""


S2 = Technique(
    title="feature parallel",
    shrinks="[B, F] to [B, F / R]",
    specs=(FeatureParallel, RowParallelLinear),
    installers={
        FeatureParallel: Installer(f"{HIC}.features:share_features", on_decoder=True),
        RowParallelLinear: Installer(f"{HIC}.features:share_rows"),
    },
    targets=lambda shape: [
        *on_decoder(lambda _: FeatureParallel())(shape),
        *((fqn, RowParallelLinear()) for fqn in shape.wide_layers),
    ],
    signal=HIGH_INPUT_DIMENSIONALITY,
    choice=("features", "sharded"),
    conflicts={"compile": SENDS},
    model_axis=True,
)
