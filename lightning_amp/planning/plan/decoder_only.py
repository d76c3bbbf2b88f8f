"""Define a decoder alone, as profile and as model, for plans from sizes without data.

Legend: model_shape.py.
"""

from typing import Any

from lightning_amp.costs.model_shape import DecoderShape, ModelShape
from lightning_amp.profiling.profile import DecompositionProfile, ModalityProfile, Profile


def profile_of_module(shape: ModelShape) -> Profile:
    """A profile of what the module itself says, when no data directory is known."""
    modalities = () if shape.decoder is None else (_modality(shape.decoder),)
    return Profile(data_dir="(no data directory: planned from the module only)", modalities=modalities, graph=None)


def attention_of(decoder: DecoderShape) -> dict[str, Any]:
    """What a profile says of a decoder's attention, by name of the field."""
    window = decoder.window if decoder.attention and not decoder.full else None
    return {"attention": decoder.attention, "full": decoder.full, "window": window, "known_from": decoder.known_from}


def shape_of_decoder(decoder: DecoderShape, *, batch_size: int) -> ModelShape:
    """The model that `lightning-amp simulate --shape` builds: a decoder, and latents of cells and anchors."""
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


def _modality(decoder: DecoderShape) -> ModalityProfile:
    return ModalityProfile(
        name=decoder.fqn.rpartition(".")[2],
        file="",
        probability_model="HiCZINB",
        cells=0,
        features=sum(decoder.features),
        nonzero=None,
        scale=None,
        contact_spread=None,
        decomposition=DecompositionProfile(
            anchors=decoder.anchors, features=decoder.features, distances=decoder.distances, **attention_of(decoder)
        ),
    )
