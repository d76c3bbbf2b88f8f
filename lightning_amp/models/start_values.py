"""Set the initial values of a new reference model from the cells that it will be trained on.

    bias of a feature          log of its share of the contacts of its stratum, or of a cell's counts
    zero inflation of Hi-C     hardly any, so that expected contacts begin with the sums of the cells
    projections of encoders    principal components (representation.py), rotated towards each other (rotate.py)
    keys of decoders           what these components say about each feature (start_keys.py)

RMSprop changes an entry of a table by about the learning rate a step, so that from zero the decay of contacts with
distance is learnt only after thousands of steps, and expected contacts are wrong until then.
"""

from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.errors import ModelError
from lightning_amp.models.decoders.likelihoods import PlainDecoder
from lightning_amp.models.decoders.stratified import StratifiedDecoder
from lightning_amp.models.decoders.stratum import Stratum
from lightning_amp.models.graph_encoder import GraphEncoder
from lightning_amp.models.inputs import HIC, ModelInputs
from lightning_amp.models.latents import Encoder
from lightning_amp.models.representation import Projection
from lightning_amp.models.rotate import rotate
from lightning_amp.models.start_keys import Cells, start_keys

STRATA_WEIGHTS = f"decoders.{HIC}.strata_weights"
FEW_DROPOUTS = -5.0
"""Logit of an additional zero, a probability of 0.7 %."""


def start_from(
    encoders: nn.ModuleDict, decoders: nn.ModuleDict, graph: GraphEncoder, inputs: ModelInputs, data: object
) -> None:
    """Set tables, projections and keys, by modality, from the training cells of a data module.

    Raises:
        ModelError: The encoders need principal components, and the data module does not have the counts of all cells.
    """
    if not isinstance(data, SingleCellDataModule) or any(t.columns is not None for t in data.tables.values()):
        if any(cast(Encoder, one).projection is not None for one in encoders.values()):
            raise ModelError(
                f"GLUE(use_rep='pca') needs the counts of all training cells, which {type(data).__name__} does not"
                " have on each rank; use SingleCellDataModule without a technique that splits the columns, or"
                " use_rep='counts'"
            )
        return
    rows = data.training_rows()
    matrices = {name: table.counts[rows[name]] for name, table in data.tables.items()}
    projections = _project(cast(dict[str, Encoder], dict(encoders.items())), matrices, inputs)
    for name, table in data.tables.items():
        counts, batch = matrices[name], table.batch[rows[name]]
        decoder = cast(StratifiedDecoder | PlainDecoder, decoders[name])
        if isinstance(decoder, PlainDecoder):
            if decoder.counts:
                bias = decoder.get_parameter("bias")
                _set(bias, log_shares(counts, batch, len(bias)))
            continue
        for module in decoder.strata:
            stratum = cast(Stratum, module)
            own = counts[:, slice(*stratum.columns)]
            _set(stratum.bias, log_shares(own, batch, len(stratum.bias)))
            _set(stratum.zi_logits, np.full(stratum.zi_logits.shape, FEW_DROPOUTS))
    start_keys(
        graph,
        decoders,
        inputs,
        {
            name: Cells(matrices[name], data.tables[name].batch[rows[name]], one, one.components(matrices[name]))
            for name, one in projections.items()
        },
    )


def _project(encoders: dict[str, Encoder], counts: dict[str, Any], inputs: ModelInputs) -> dict[str, Projection]:
    """Set the projections of the encoders that have one, rotate them towards each other, and return them."""
    projections = {name: one.projection for name, one in encoders.items() if one.projection is not None}
    for name, projection in projections.items():
        projection.fit(counts[name])
    if len(projections) > 1:
        # paired cells come in one order
        rotate(projections, counts, inputs, dim=next(iter(encoders.values())).loc.out_features)
    return projections


def log_shares(counts: Any, batch: NDArray[np.int64], n_batches: int) -> NDArray[np.float64]:
    """Return the log of each feature's share of the counts of every experimental batch, [batch, feature].

    A batch gets one more count a feature, spread as the counts of all batches, so that none has share 0.
    """
    n = counts.shape[1]
    pooled = np.asarray(counts.sum(axis=0, dtype=np.float64)).ravel() + 0.5
    of_batch = [np.asarray(counts[batch == b].sum(axis=0, dtype=np.float64)).ravel() for b in range(n_batches)]
    added = np.stack(of_batch) + n * pooled / pooled.sum()
    found: NDArray[np.float64] = np.log(added / added.sum(axis=1, keepdims=True))
    return found


def parameter_sets(named: Iterable[tuple[str, nn.Parameter]], inputs: ModelInputs | None) -> list[list[dict[str, Any]]]:
    """Return parameter groups of the discriminator's optimizer, and of the other one.

    If the strata's shares of the contacts are known, their weights have learning rate 0. The likelihood would move
    them by up to a fifth, for it counts cells of many contacts less, and sums of expected contacts with them.
    """
    known = inputs is not None and inputs.strata is not None and inputs.strata.shares is not None
    critic, rest, fixed = list[nn.Parameter](), list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in named:
        of = critic if name.startswith("discriminator.") else fixed if known and name == STRATA_WEIGHTS else rest
        of.append(parameter)
    groups: list[dict[str, Any]] = [{"params": rest}]
    return [[{"params": critic}], groups + ([{"params": fixed, "lr": 0.0}] if fixed else [])]


@torch.no_grad()
def _set(parameter: torch.Tensor, values: NDArray[np.float64]) -> None:
    parameter.copy_(torch.from_numpy(values))
