"""Read the shape of a module's decoder for planning, and find which techniques it does not support.

Techniques without a mesh are installed and undone; for the others, the decoder is checked for the parts that they
replace. If a module does not support one of those after all, installing raises an InstallError and undoes the plan.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_amp._torch import is_compiled
from lightning_amp.costs.model_shape import DecoderShape, ModelShape, VertexShape
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import AmpError
from lightning_amp.installing.install import install_rules, overlap
from lightning_amp.planning.policies.auto import AXES
from lightning_amp.techniques.checks.decoder import walk_of
from lightning_amp.techniques.checks.key import Reach, channels_problem, reach_of, rows_problem
from lightning_amp.techniques.contract.protocol import (
    ATTENTION_KEY,
    CONVOLUTION_KEY,
    DecomposedDecoder,
    ShardableAttention,
    find_decoders,
    in_place_of,
    is_vertex_encoder,
    part,
)
from lightning_amp.techniques.table import STRATEGIES, on_axis, targets_of

PARTS = ("key", "feature_anchor", "scale", "decode")


def with_decoder(shape: ModelShape, module: nn.Module, decoders: Mapping[str, DecomposedDecoder]) -> ModelShape:
    """Add the largest of a module's decoders to its shape; others count only as parameters."""
    found = [
        _decoder_shape(module, fqn, decoder)
        for fqn, decoder in decoders.items()
        # a decoder without the parts that the memory model and techniques require is ignored
        if _is_of_units(decoder) or (decoder.strata and all(_has(stratum, PARTS) for stratum in decoder.strata))
    ]
    if not found:
        return shape
    decoder = max(found, key=lambda s: s.anchors * len(s.features))
    # layers that read all features are the first of an encoder; layers of the decoder read its channels
    inside, n_features = f"{decoder.fqn}." if decoder.fqn else "", sum(decoder.features)
    linear = {fqn: child for fqn, child in module.named_modules() if type(child) is nn.Linear}
    wide = {fqn: one for fqn, one in linear.items() if one.in_features == n_features and not fqn.startswith(inside)}
    return replace(
        shape,
        decoder=decoder,
        wide_layers=tuple(wide),
        wide_weight_bytes=sum(layer.weight.nbytes for layer in wide.values()),
        vertices=_vertices(module, decoder),
        # a decoder's strata have separate techniques
        blocks=(),
    )


def _vertices(module: nn.Module, decoder: DecoderShape) -> VertexShape | None:
    """Return the graph encoder that has rows for the decoder's modality, one per anchor; None without one."""
    modality = decoder.fqn.rpartition(".")[2]
    for fqn, child in module.named_modules():
        rows = child.rows[modality] if is_vertex_encoder(child) and modality in child.rows else None
        if fqn and rows is not None and len(rows.get_buffer("ids")) == decoder.anchors:
            edges = len(child.ends[0])
            return VertexShape(fqn=fqn, modality=modality, count=child.n_vertices, edges=edges)
    return None


def unpredicted(module: nn.Module, shape: ModelShape) -> list[str]:
    """Return notes for a plan on parts of the decoder that the module's shape does not describe."""
    return [
        f"what the units of {type(decoder).__name__} keep is not predicted, for they have not the parts of a stratum"
        f" ({', '.join(PARTS)}); only their scores are"
        for fqn, decoder in find_decoders(module).items()
        if fqn == shape.decoder.fqn and _is_of_units(decoder)
    ]


def _is_of_units(decoder: DecomposedDecoder) -> bool:
    """Whether the strata are units that report their number of features, and have no parts for techniques."""
    return len(decoder.strata) > 0 and all(hasattr(s, "n_features") and not hasattr(s, "key") for s in decoder.strata)


def _decoder_shape(module: nn.Module, fqn: str, decoder: DecomposedDecoder) -> DecoderShape:
    strata: list[Any] = list(decoder.strata)
    keys: list[Any] = [stratum.key for stratum in strata if hasattr(getattr(stratum, "key", None), "attention")]
    reaches = [reach_of(key.attention) for key in keys]
    # a key with local attention decides: it requires the techniques of local attention
    reach = min(reaches, default=Reach(False, ""), key=lambda reach: reach.full)
    known_from, outer = reach.known_from, module.get_submodule(fqn)
    if keys and in_place_of(outer) is not outer:
        known_from = f"detected: {type(outer).__name__} computes what our decoder does with it"
    return DecoderShape(
        fqn=fqn,
        anchors=decoder.n_anchors,
        dim=decoder.dim,
        features=tuple(s.n_features if _is_of_units(decoder) else len(s.feature_anchor) for s in strata),
        distances=tuple(0 if getattr(s, "key", None) is None else k for k, s in enumerate(strata)),
        attention=bool(keys),
        full=reach.full,
        known_from=known_from,
        window=1 if reach.full else int(getattr(decoder, "window", 0)) or 1,
        chained=decoder.chained,
        variant=str(getattr(decoder, "variant", "higlue")),
        # one batch of cells if a stratum has no `scale`: the default is a string of length 1
        n_batches=max(len(getattr(stratum, "scale", "1")) for stratum in strata),
    )


LOCAL = on_axis(*AXES)


def with_unsupported(module: nn.Module, shape: ModelShape) -> ModelShape:
    """Return the shape with the techniques that the decoder does not support; the module does not change."""
    if not shape.decoder:
        return shape
    compiled = [name for name, child in module.named_modules() if is_compiled(child)]
    if any(not name or overlap(name, shape.decoder.fqn) for name in compiled):
        # compiled code would ignore an installed technique
        every = tuple(strategy for strategy, row in STRATEGIES.items() if row.choice is not None)
        return replace(shape, decoder=replace(shape.decoder, unsupported=every))
    refused = set() if shape.decoder.attention else {*on_axis("attention")}
    for strategy in (name for name in LOCAL if name not in refused):
        try:
            targets = targets_of(strategy, shape)
            rules = [Rule(fqn=fqn, spec=spec, strategy=strategy, why="tried") for fqn, spec in targets]
            install_rules(module, rules).undo()
        except AmpError:
            refused.add(strategy)
    refused |= {strategy for strategy, parts in _needed(part(module, shape.decoder.fqn)).items() if not parts}
    unsupported = tuple(strategy for strategy in STRATEGIES if strategy in refused)
    return replace(shape, decoder=replace(shape.decoder, unsupported=unsupported))


def _needed(decoder: Any) -> dict[str, bool]:
    """Return for each technique with a mesh whether the decoder has the parts that it replaces."""
    strata = list(decoder.strata)
    region = hasattr(decoder, "region")
    features = region and all(hasattr(stratum, "features") for stratum in strata)
    keys = [key for key in (getattr(stratum, "key", None) for stratum in strata) if key is not None]
    walks = region
    if region:
        try:
            walk_of(decoder, "strata")
        except AmpError:
            walks = False
    return {
        "S2": features,
        "S5": region
        and all(_has(stratum, ("key", "decode")) for stratum in strata)
        and all(_has_channels(key) for key in keys)
        and not any(channels_problem(key, decoder.dim, [0], [decoder.dim - 1]) for key in keys),
        "nodes": features
        and bool(keys)
        and all(_has(key, ATTENTION_KEY) for key in keys)
        and not any(rows_problem(key, decoder.dim) for key in keys),
        "strata": walks,
    }


def _has(module: nn.Module, names: Iterable[str]) -> bool:
    return all(hasattr(module, name) for name in names)


def _has_channels(key: Any) -> bool:
    if not _has(key, ATTENTION_KEY):
        return _has(key, CONVOLUTION_KEY)
    return any(isinstance(part, ShardableAttention) for part in key.attention.modules())
