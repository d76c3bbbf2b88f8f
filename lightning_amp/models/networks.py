"""The networks of the reference model, made from its inputs."""

from typing import cast

import torch
from torch import nn

from lightning_amp.models.cell_encoder import Encoder
from lightning_amp.models.decoders.per_feature import PLAIN_DECODERS, PlainDecoder
from lightning_amp.models.decoders.stratified import KeyKind, StratifiedDecoder
from lightning_amp.models.decoders.stratum_keys import Variant
from lightning_amp.models.graph_encoder import GraphEncoder
from lightning_amp.models.inputs import HIC, LIKELIHOODS, TOTALS, ModelInputs

STREAMS_PER_MODALITY = 64
"""Streams of random numbers: dropout layers from the first on, latent and burn-in noise at the end."""

DataDecoder = StratifiedDecoder | PlainDecoder


def first_stream(inputs: ModelInputs, modality: str) -> int:
    """First of the streams of random numbers that a modality may use."""
    return STREAMS_PER_MODALITY * list(inputs.modalities).index(modality)


def make_encoders(
    inputs: ModelInputs, dim: int, *, hidden_dim: int, hidden_depth: int, dropout: float
) -> nn.ModuleDict:
    """One encoder per modality."""
    return nn.ModuleDict(
        {
            name: Encoder(
                modality.n_features,
                dim,
                hidden_dim=hidden_dim,
                hidden_depth=hidden_depth,
                dropout=dropout,
                total=TOTALS[name],
                stream=first_stream(inputs, name),
            )
            for name, modality in inputs.modalities.items()
        }
    )


def make_decoders(
    inputs: ModelInputs, dim: int, *, key: str, variant: str, chained: bool, window: int | None
) -> nn.ModuleDict:
    """One decoder per modality."""
    decoders: dict[str, nn.Module] = {}
    for name, modality in inputs.modalities.items():
        if name != HIC:
            decoders[name] = PLAIN_DECODERS[LIKELIHOODS[name]](modality.n_features, modality.n_batches)
            continue
        assert inputs.strata is not None, "ModelInputs checks that Hi-C comes with strata"
        decoders[name] = StratifiedDecoder(
            dim,
            inputs.strata.nodes,
            stratum_index=inputs.strata.distances,
            n_anchors=inputs.strata.n_anchors,
            n_batches=modality.n_batches,
            key=cast(KeyKind, key),
            variant=cast(Variant, variant),
            chained=chained,
            window=window,
        )
    return nn.ModuleDict(decoders)


def make_graph_encoder(inputs: ModelInputs, dim: int) -> GraphEncoder:
    """Encoder of the guidance graph."""
    graph = inputs.graph
    return GraphEncoder(
        graph.n_vertices,
        dim,
        source=torch.from_numpy(graph.source),
        target=torch.from_numpy(graph.target),
        weight=torch.from_numpy(graph.weight),
        sign=torch.from_numpy(graph.sign),
        modalities={name: torch.from_numpy(m.vertices) for name, m in inputs.modalities.items()},
    )
