"""The numbers that the memory model needs of a model: no tensors, no torch.

Legend (as in the reference): B cells in a rank's batch, N anchors, D latent dimension, K strata, F_k features of
stratum k, w attention window, V vertices of the guidance graph.
"""

from dataclasses import dataclass

from lightning_amp.profiling.profile import Profile

LATENT_DIM = 64
HIDDEN_DIM = 128
HIDDEN_DEPTH = 2
WINDOW_PER_STRATUM = 20
"""Default attention window in bins, per stratum of the decoder: w = 20 K."""
TABLES_PER_FEATURE = 4
"""scale, bias, log_theta and zero-inflation logits of a stratified zero-inflated decoder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderShape:
    """A decomposed decoder.

    Attributes:
        fqn: Name of the module in the LightningModule.
        anchors: N.
        dim: D.
        features: F_k of every stratum.
        distances: k of every stratum; a stratum at 0 uses the anchors as keys and has no block.
        attention: Attention keys (else convolution keys).
        window: w.
        chained: Every stratum reads the values of the one before.
        variant: "higlue" or "paper".
        n_batches: Experimental batches, the rows of the decoder's tables.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A model as the memory model sees it; sizes in bytes are those of one whole, unsharded copy.

    Attributes:
        decoder: The decomposed decoder, None when no module was recognised.
        batch_size: B.
        parameter_bytes: All parameters and buffers.
        base_activation_bytes: What the backward pass keeps outside the strata: batch, encoders, graph, other
            decoders.
        optimizer_slots: Copies of the parameters that the optimiser keeps (RMSprop 1, Adam 2).
        element_bytes: Bytes per activation element.
    """

    decoder: DecoderShape | None
    batch_size: int
    parameter_bytes: int
    base_activation_bytes: int
    optimizer_slots: int = 1
    element_bytes: int = 4


def decoder_shape(profile: Profile, *, latent_dim: int = LATENT_DIM, window: int | None = None) -> DecoderShape | None:
    """The reference model's decoder for a profile, None without a decomposed modality."""
    modality = next((m for m in profile.modalities if m.decomposition is not None), None)
    if modality is None or modality.decomposition is None:
        return None
    parts = modality.decomposition
    return DecoderShape(
        fqn=f"decoders.{modality.name}",
        anchors=parts.anchors,
        dim=latent_dim,
        features=parts.features,
        distances=parts.distances,
        attention=parts.attention,
        window=window or WINDOW_PER_STRATUM * parts.strata,
    )


def reference_shape(
    profile: Profile,
    *,
    batch_size: int,
    latent_dim: int = LATENT_DIM,
    window: int | None = None,
) -> ModelShape:
    """The reference model for a profile, for a plan made before there is a module."""
    vertices = profile.graph.vertices if profile.graph else sum(m.features for m in profile.modalities)
    edges = profile.graph.edges if profile.graph else 0
    decoder = decoder_shape(profile, latent_dim=latent_dim, window=window)
    encoders = sum(HIDDEN_DIM * m.features + HIDDEN_DIM * (HIDDEN_DIM + 5) * HIDDEN_DEPTH for m in profile.modalities)
    tables = sum((TABLES_PER_FEATURE if m.decomposition else 3) * m.features for m in profile.modalities)
    graph = vertices * latent_dim + 2 * latent_dim * (latent_dim + 1)
    blocks = 0
    if decoder is not None:
        per_block = 4 * latent_dim**2 + 4 * latent_dim if decoder.attention else 3 * latent_dim
        blocks = per_block * sum(k > 0 for k in decoder.distances)
    return ModelShape(
        decoder=decoder,
        batch_size=batch_size,
        parameter_bytes=4 * (encoders + tables + graph + blocks),
        base_activation_bytes=base_activations(
            features=[m.features for m in profile.modalities],
            batch_size=batch_size,
            latent_dim=latent_dim,
            vertices=vertices,
            edges=edges,
        ),
    )


def base_activations(
    *, features: list[int], batch_size: int, latent_dim: int, vertices: int, edges: int, element_bytes: int = 4
) -> int:
    """Bytes kept outside the strata: counts and normalised counts, hidden layers, vertices and edge messages."""
    counts = 2 * batch_size * sum(features)
    hidden = len(features) * batch_size * HIDDEN_DIM * 5 * HIDDEN_DEPTH
    graph = 4 * vertices * latent_dim + 2 * edges * latent_dim
    return element_bytes * (counts + hidden + graph)
