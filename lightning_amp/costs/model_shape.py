"""Define the sizes of a model and of its decoder that the memory model requires, without tensors or torch.

Legend (as in the reference): B cells in a rank's batch, N anchors, D latent dimension, K strata, F_k features of
stratum k, w attention window, V vertices of the guidance graph.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from lightning_amp.errors import PlanError
from lightning_amp.profiling.profile import DecompositionProfile, ModalityProfile, Profile

LARGEST = 1_000_000
"""Largest number of devices, cells in a step and sizes of a model; a larger number is a typing error."""
LATENT_DIM = 64
WINDOW_PER_STRATUM = 20
"""Default attention window in bins, per stratum of the decoder: w = 20 K."""
VERTEX_ROWS_KEPT = 6
"""Tensors [V, D] that the graph's encoder and the vertices' latents keep for the backward pass."""
OTHER_DECODER_KEPT, OTHER_DECODER_MADE = 9, 5
"""Tensors [B, F] that a decoder without strata keeps for the backward pass, and its temporaries."""
TABLES_PER_FEATURE = 4
"""Tables per feature of a zero-inflated decoder: scale, bias, log_theta and zero-inflation logits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderShape:
    """A decomposed decoder; without strata it is false, and means that there is none.

    Attributes:
        fqn: Name of the module in the LightningModule.
        anchors: N.
        dim: D.
        features: F_k of every stratum.
        distances: k of every stratum; a stratum at 0 uses the anchors as keys and has no block.
        attention: Whether keys use attention (else convolution).
        window: w; 1 with full attention, whose anchors can be sharded one by one.
        chained: Whether every stratum reads the output of the previous one.
        variant: "higlue" or "paper".
        n_batches: Experimental batches, the rows of the decoder's tables.
        unsupported: Strategies that the decoder's modules do not support.
        threads: Threads of the CPU that it runs on; 1 on other devices, which run one stratum at a time.
        launched: Whether it runs on an accelerator, which launches operators.
        full: Whether attention is to all anchors (else to neighbouring buckets).
        queries: Queries per chunk that the user requests for S3; None for the usual number.
        known_from: Source of the attention range.
    """

    fqn: str
    anchors: int
    dim: int
    features: tuple[int, ...]
    distances: tuple[int, ...]
    attention: bool
    window: int
    chained: bool = False
    variant: str = "higlue"
    n_batches: int = 1
    unsupported: tuple[str, ...] = ()
    threads: int = 1
    launched: bool = False
    full: bool = False
    queries: int | None = None
    known_from: str = field(default="", compare=False)

    def __bool__(self) -> bool:
        return bool(self.features)

    @property
    def parts(self) -> dict[str, int]:
        """Most ranks of the model axis by strategy, for strategies that shard something in this decoder."""
        found = {
            # channels in pairs, which the rotation mixes; single channels if D is odd
            "S5": self.dim // 2 if self.dim % 2 == 0 else self.dim,
            # buckets of attention; the last one may not be full
            "nodes": -(-self.anchors // self.window),
            "strata": len(self.features),
        }
        return {strategy: most for strategy, most in found.items() if most}

    @property
    def block_weights(self) -> int:
        """Number of weights of a stratum's block: projections, feed-forward and norms, or the taps of a convolution."""
        norms = 2 if self.variant == "paper" else 4
        return (4 * self.dim + norms) * self.dim if self.attention else 3 * self.dim

    @property
    def strata_weights(self) -> tuple[int, int]:
        """Number of weights of all blocks, and of all tables."""
        keyed = sum(k > 0 for k in self.distances)
        return keyed * self.block_weights, TABLES_PER_FEATURE * self.n_batches * sum(self.features)


NO_DECODER = DecoderShape(fqn="", anchors=0, dim=0, features=(), distances=(), attention=False, window=1)
"""Shape for a model without a detected decoder: sums over its strata are empty, and its sizes are 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VertexShape:
    """An encoder of the guidance graph, whose vertices can be sharded with the decoder's anchors.

    Attributes:
        fqn: Name of the module in the LightningModule.
        modality: Modality whose vertices are the decoder's anchors.
        count: V.
        edges: E, in both directions.
    """

    fqn: str
    modality: str
    count: int
    edges: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkShape:
    """Default sizes of the reference model outside its strata."""

    hidden_dim: int = 128
    hidden_depth: int = 2
    edges_per_step: int = 4096
    negatives_per_edge: int = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of a model for the memory model, in bytes of one unsharded copy.

    Attributes:
        decoder: The decomposed decoder.
        batch_size: B.
        parameter_bytes: All parameters.
        buffer_bytes: All buffers, including the guidance graph.
        base_activation_bytes: Bytes alive before the first stratum: batch, encoders, graph.
        other_decoder_bytes: Peak of the decoders that run after the strata.
        edge_bytes: Gradient of the sampled edges' ends, the last and often largest temporary of a step.
        optimizer_slots: Copies of the parameters that the optimiser keeps (RMSprop 1, Adam 2).
        element_bytes: Bytes per activation element.
        wide_layers: Names of the Linear layers that read all features of the decoder's modality.
        wide_weight_bytes: Weights of these layers, which are part of the parameters.
        wide_input_bytes: Saved inputs of these layers, which are part of the base activations.
        vertices: The graph's encoder, None if no module was detected.
        vertex_bytes: Bytes that it keeps of its vertices, which are part of the base activations.
        batch_norms: Whether layers normalise by the statistics of a batch.
        blocks: Names of the blocks whose parameters can be gathered one block at a time.
        profiled: Whether the step was profiled, so that these sizes are not used for predictions.
        block_list: Name and length of the list of modules that can be stages of a pipeline, None without one.
    """

    decoder: DecoderShape = NO_DECODER
    batch_size: int
    parameter_bytes: int
    base_activation_bytes: int
    buffer_bytes: int = 0
    other_decoder_bytes: int = 0
    edge_bytes: int = 0
    optimizer_slots: int = 1
    element_bytes: int = 4
    wide_layers: tuple[str, ...] = ()
    wide_weight_bytes: int = 0
    wide_input_bytes: int = 0
    vertices: VertexShape | None = None
    vertex_bytes: int = 0
    batch_norms: bool = False
    blocks: tuple[str, ...] = ()
    profiled: bool = False
    block_list: tuple[str, int] | None = None


def reference_shape(
    profile: Profile, *, batch_size: int, latent_dim: int = LATENT_DIM, window: int | None = None
) -> ModelShape:
    """Return the reference model for a profile, to plan before a module exists.

    Raises:
        PlanError: Sizes that no model can have.
    """
    check_sizes(profile, latent_dim=latent_dim, window=window)
    decomposed = [(m, m.decomposition) for m in profile.modalities if m.decomposition is not None]
    network, decoder, wide, vertices, graph = NetworkShape(), NO_DECODER, tuple[str, ...](), None, profile.graph
    if decomposed:
        modality, parts = decomposed[0]
        decoder = DecoderShape(
            fqn=f"decoders.{modality.name}",
            anchors=parts.anchors,
            dim=latent_dim,
            features=parts.features,
            distances=parts.distances,
            attention=parts.attention,
            full=parts.full,
            known_from=parts.known_from,
            window=1 if parts.full else WINDOW_PER_STRATUM * parts.strata if window is None else window,
            n_batches=modality.batches,
        )
        wide = (f"encoders.{modality.name}.first",)
        if graph is not None:
            edges = 2 * graph.edges - graph.vertices
            vertices = VertexShape(fqn="graph_encoder", modality=modality.name, count=graph.vertices, edges=edges)
    shape = ModelShape(
        decoder=decoder,
        batch_size=batch_size,
        parameter_bytes=_parameters(network, decoder, profile, latent_dim),
        # anchors of all features (int64), and edges in both directions
        buffer_bytes=8 * sum(decoder.features) + 2 * 24 * (graph.edges if graph else 0),
        base_activation_bytes=0,
        wide_layers=wide,
        wide_weight_bytes=4 * network.hidden_dim * sum(decoder.features),
        vertices=vertices,
        batch_norms=True,
    )
    return outside_strata(shape, network, profile, latent_dim=latent_dim)


def check_sizes(profile: Profile, *, latent_dim: int, window: int | None) -> None:
    """Raise a PlanError for options of the reference model that no model of these data can have."""
    decomposed = [m.decomposition for m in profile.modalities if m.decomposition is not None]
    local = any(parts.attention and not parts.full for parts in decomposed)
    if window is not None and any(parts.full for parts in decomposed):
        raise PlanError(f"window={window!r} is not supported: full attention has no window; leave it out")
    if not 1 <= latent_dim <= LARGEST or (local and latent_dim % 2):
        even = ", even for local attention" if local else ""
        raise PlanError(
            f"latent_dim={latent_dim!r} is not supported; allowed is a whole number from 1 to {LARGEST:,}{even}"
        )
    if window is not None and not 1 <= window <= LARGEST:
        raise PlanError(f"window={window!r} is not supported; allowed is a whole number of bins from 1 to {LARGEST:,}")


def outside_strata(shape: ModelShape, network: NetworkShape, profile: Profile, *, latent_dim: int) -> ModelShape:
    """Add the bytes that the reference model keeps outside its strata, in the shape's precision."""
    cells, element = shape.batch_size, shape.element_bytes
    vertices = profile.graph.vertices if profile.graph else 0
    edges = network.edges_per_step if profile.graph else 0
    # elements per cell at the peak of the decoders without strata, which run after the strata
    features = [m.features for m in profile.modalities if m.decomposition is None]
    others = OTHER_DECODER_KEPT * sum(features) + OTHER_DECODER_MADE * max(features, default=0)
    return replace(
        shape,
        base_activation_bytes=element * _base_activations(network, profile, cells=cells, dim=latent_dim, edges=edges),
        other_decoder_bytes=element * cells * others,
        # one end of every sampled negative edge
        edge_bytes=element * edges * network.negatives_per_edge * latent_dim,
        wide_input_bytes=element * cells * sum(shape.decoder.features),
        vertex_bytes=element * VERTEX_ROWS_KEPT * vertices * latent_dim,
    )


def with_counts(shape: ModelShape) -> ModelShape:
    """Add the counts of a batch, and the inputs of the layers that read all of them, to a user's model."""
    counts = shape.element_bytes * shape.batch_size * sum(shape.decoder.features)
    inputs = counts * len(shape.wide_layers)
    kept = shape.base_activation_bytes + counts + inputs
    return replace(shape, base_activation_bytes=kept, wide_input_bytes=inputs)


def _parameters(network: NetworkShape, decoder: DecoderShape, profile: Profile, dim: int) -> int:
    """Return the bytes of the reference model's parameters."""
    h, depth = network.hidden_dim, network.hidden_depth
    floats = sum(h * m.features + (depth - 1) * h * h + 2 * h * dim + 8 * h * depth for m in profile.modalities)
    floats += sum((TABLES_PER_FEATURE if m.decomposition else 3) * m.batches * m.features for m in profile.modalities)
    floats += h * (dim + h + len(profile.modalities))
    if profile.graph is not None:
        floats += profile.graph.vertices * dim + 2 * dim * (dim + 1)
    # the tables of strata are counted with those of the other modalities
    return 4 * (floats + decoder.strata_weights[0])


def _base_activations(network: NetworkShape, profile: Profile, *, cells: int, dim: int, edges: int) -> int:
    """Return the elements alive before the first stratum, without weights: batch, encoders, vertices, sampled edges.

    The factors count what the reference model keeps; tests compare them with measured bytes.
    """
    rows = cells * len(profile.modalities)
    vertices = profile.graph.vertices if profile.graph else 0
    numbers = {
        "counts and their logarithms [B, F]": 2 * cells * sum(m.features for m in profile.modalities),
        "hidden layers [B, h]": 5 * network.hidden_depth * rows * network.hidden_dim,
        "cells' latents [B, D]": 10 * rows * dim,
        "vertices' latents [V, D]": VERTEX_ROWS_KEPT * vertices * dim,
        "ends of sampled edges [E, D]": (network.negatives_per_edge + 2) * edges * dim,
        "scores of sampled edges [E]": 4 * network.negatives_per_edge * edges,
    }
    return sum(numbers.values())


def profile_of_module(shape: ModelShape) -> Profile:
    """Return a profile from the sizes of the module, for planning without a data directory."""
    decoder, modalities = shape.decoder, tuple[ModalityProfile, ...]()
    if decoder:
        parts = DecompositionProfile(
            anchors=decoder.anchors, features=decoder.features, distances=decoder.distances, **attention_of(decoder)
        )
        hic = ModalityProfile(
            name=decoder.fqn.rpartition(".")[2],
            file="",
            probability_model="HiCZINB",
            cells=0,
            features=sum(decoder.features),
            nonzero=None,
            scale=None,
            contact_spread=None,
            decomposition=parts,
        )
        modalities = (hic,)
    return Profile(data_dir="(no data directory: planned from the module only)", modalities=modalities, graph=None)


def attention_of(decoder: DecoderShape) -> dict[str, Any]:
    """Return a profile's fields on a decoder's attention."""
    window = decoder.window if decoder.attention and not decoder.full else None
    return {"attention": decoder.attention, "full": decoder.full, "window": window, "known_from": decoder.known_from}
