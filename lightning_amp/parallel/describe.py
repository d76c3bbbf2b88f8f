"""Module -> ModelShape: what the memory model needs to know of a module, read from its structure."""

from typing import Any

from torch import nn

from lightning_amp.parallel.protocol import DecomposedDecoder, find_decoders
from lightning_amp.planning.shape import DecoderShape, ModelShape


def describe(
    module: nn.Module, *, batch_size: int, base_activation_bytes: int = 0, optimizer_slots: int = 1
) -> ModelShape:
    """Read a module's shape; the largest recognised decoder is described, the others count as parameters.

    Args:
        module: The whole LightningModule.
        batch_size: Cells per rank and modality.
        base_activation_bytes: What the backward pass keeps outside the decoder.
        optimizer_slots: Copies of the parameters that the optimiser keeps.
    """
    found = {fqn: decoder for fqn, decoder in find_decoders(module).items() if _describable(decoder)}
    shapes = [_decoder_shape(fqn, decoder) for fqn, decoder in found.items()]
    decoder = max(shapes, key=lambda s: s.anchors * len(s.features), default=None)
    wide = {} if decoder is None else _wide_layers(module, decoder)
    sizes = [p.element_size() for p in module.parameters() if p.is_floating_point()]
    return ModelShape(
        decoder=decoder,
        batch_size=batch_size,
        parameter_bytes=sum(p.numel() * p.element_size() for p in module.parameters()),
        buffer_bytes=sum(b.numel() * b.element_size() for b in module.buffers()),
        base_activation_bytes=base_activation_bytes,
        optimizer_slots=optimizer_slots,
        element_bytes=max(sizes, default=4),
        wide_layers=tuple(wide),
        wide_weight_bytes=sum(layer.weight.nbytes for layer in wide.values()),
    )


def _wide_layers(module: nn.Module, decoder: DecoderShape) -> dict[str, nn.Linear]:
    """Linear layers that read all features: the first of an encoder. Those of the decoder read its channels."""
    layers = {fqn: child for fqn, child in module.named_modules() if type(child) is nn.Linear}
    inside, features = f"{decoder.fqn}." if decoder.fqn else "", sum(decoder.features)
    return {
        fqn: layer
        for fqn, layer in layers.items()
        if layer.in_features == features and not fqn.startswith(inside)
    }


def _describable(decoder: DecomposedDecoder) -> bool:
    """Whether all strata have the parts that a memory model and techniques need; else it counts as unrecognised."""
    parts = ("key", "nodes", "scale", "decode")
    return len(decoder.strata) > 0 and all(hasattr(s, part) for s in decoder.strata for part in parts)


def _decoder_shape(fqn: str, decoder: DecomposedDecoder) -> DecoderShape:
    strata: list[Any] = list(decoder.strata)
    attention = any(hasattr(getattr(stratum, "key", None), "attention") for stratum in strata)
    return DecoderShape(
        fqn=fqn,
        anchors=decoder.n_anchors,
        dim=decoder.dim,
        features=tuple(len(stratum.nodes) for stratum in strata),
        distances=tuple(0 if stratum.key is None else k for k, stratum in enumerate(strata)),
        attention=attention,
        window=int(getattr(decoder, "window", 0)) or 1,
        chained=decoder.chained,
        variant=str(getattr(decoder, "variant", "higlue")),
        n_batches=max(len(stratum.scale) for stratum in strata),
    )
