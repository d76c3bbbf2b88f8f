"""Profiles and shapes of known size, for tests of diagnosis and planning; no files, no torch."""

from dataclasses import replace

from lightning_amp.costs.model_shape import DecoderShape, ModelShape, reference_shape
from lightning_amp.profiling.profile import DecompositionProfile, GraphProfile, ModalityProfile, Profile


def hic(
    *, anchors: int = 5400, strata: int = 32, attention: bool = True, scale: float | None = 34.0
) -> ModalityProfile:
    features = tuple(anchors - k for k in range(strata))
    return ModalityProfile(
        name="hic",
        file="hic/hic.h5ad",
        probability_model="HiCZINB",
        cells=400,
        features=sum(features),
        nonzero=1_000_000,
        scale=scale,
        contact_spread=0.6,
        decomposition=DecompositionProfile(
            anchors=anchors, features=features, distances=tuple(range(strata)), attention=attention
        ),
    )


def with_full_attention(modality: ModalityProfile) -> ModalityProfile:
    return replace(modality, decomposition=replace(modality.decomposition, full=True, known_from="as asked"))


def rna() -> ModalityProfile:
    return ModalityProfile(
        name="rna",
        file="rna/rna.h5ad",
        probability_model="NB",
        cells=466,
        features=5000,
        nonzero=500_000,
        scale=0.03,
        contact_spread=None,
    )


def profile(*modalities: ModalityProfile) -> Profile:
    graph = GraphProfile(file="graphs/g.graphml.gz", vertices=10_400, edges=40_000)
    return Profile(data_dir="data", modalities=modalities or (hic(), rna()), graph=graph)


def shape(batch_size: int = 256, **changes: int | None) -> ModelShape:
    return reference_shape(profile(), batch_size=batch_size, **changes)


def shape_of_decoder(decoder: DecoderShape, *, batch_size: int) -> ModelShape:
    """The model of `lightning-amp plan --shape`: a decoder, and latents of cells and anchors."""
    features, strata = sum(decoder.features), len(decoder.features)
    floats = sum(decoder.strata_weights) + strata
    batch = 4 * (batch_size * (features + 1 + decoder.dim) + decoder.anchors * decoder.dim) + 8 * batch_size
    return ModelShape(
        decoder=decoder,
        batch_size=batch_size,
        parameter_bytes=4 * floats,
        buffer_bytes=8 * features,
        base_activation_bytes=batch,
    )
