"""Gather the predictions of all ranks, as AnnData in memory or for writers."""

import json
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from lightning_amp.data.describe_embedding import describe_embedding
from lightning_amp.data.files.write_results import NO_FEATURES
from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.data.loading.dataset import CellTable
from lightning_amp.errors import DataError, ModelError

if TYPE_CHECKING:
    from anndata import AnnData

Embeddings = dict[str, NDArray[np.float32]]
Parts = dict[str, list[tuple[NDArray[np.int64], NDArray[np.float32]]]]
"""Modality -> rows and embeddings of some cells."""


def collect_predictions(outputs: list[Any] | None, data: SingleCellDataModule) -> "dict[str, AnnData]":
    """Return the predictions of all ranks as AnnData; to be called by every rank.

        outputs = trainer.predict(model, datamodule=data)
        hic.obsm["X_amp"] = collect_predictions(outputs, data)["hic"].obsm["X_amp"]

    Args:
        outputs: what `trainer.predict` returned
        data: the data module that it was given

    Returns:
        modality -> all cells in the data's order with their obs and, but for Hi-C, var, without X; obsm["X_amp"] is NaN
        for a cell that was not predicted (`limit_predict_batches`). Principal components and
        uns["lightning_amp"] are those of the files of `PredictionWriter`

    Raises:
        DataError: there are no outputs, or the data module has served no trainer
        ModelError: `predict_step` does not return {modality: {"index", "embedding"}}
    """
    if outputs is None or data.trainer is None:
        raise DataError(
            f"collect_predictions: outputs={outputs!r} of trainer={data.trainer!r} were given; call it with what"
            " trainer.predict(model, datamodule=data) returned, and the same data. Strategies that spawn or fork ranks"
            " return nothing: predict on one device, or let the callback PredictionWriter write files"
        )
    from anndata import AnnData

    parts: Parts = {}
    for batch in outputs:
        add_batch(parts, batch, data.trainer.lightning_module)
    embeddings = gather(parts, data, data.trainer.world_size)
    run = describe_run(data.trainer)
    found = {}
    for modality, values in embeddings.items():
        table, described = data.tables[modality], describe_embedding(values)
        described["uns"]["lightning_amp"] = run
        found[modality] = AnnData(obs=table.read_obs(), var=features_of(table), **described)
    return found


def features_of(table: CellTable) -> pd.DataFrame:
    """Return the table of a modality's features, such as genes; empty for Hi-C, which has a million pairs of bins."""
    return NO_FEATURES if table.modality == "hic" else table.read_var()


def describe_run(trainer: pl.Trainer) -> dict[str, Any]:
    """Return what uns["lightning_amp"] says: versions, model with its hyper-parameters as JSON, checkpoint and plan."""
    plan, module = getattr(trainer.strategy, "plan", None), trainer.lightning_module
    # Lightning's command line adds names that begin with an underscore
    settings = {name: value for name, value in module.hparams.items() if not name.startswith("_")}
    return {
        "version": import_module("lightning_amp").__version__,
        "torch": str(torch.__version__),
        "lightning": metadata.version("lightning"),
        "model": type(module).__name__,
        "hyper_parameters": json.dumps(settings, default=str),
        "checkpoint": Path(trainer.ckpt_path or "none").name,
        "strategy": type(trainer.strategy).__name__,
        "techniques": ",".join(getattr(plan, "strategies", ())),
        "ranks": trainer.world_size,
    }


def add_batch(parts: Parts, outputs: Any, module: pl.LightningModule) -> None:
    """Add one batch's embeddings, in host memory."""
    for modality, cells in _checked(outputs, module).items():
        part = cells["index"].cpu().numpy(), cells["embedding"].detach().float().cpu().numpy()
        parts.setdefault(modality, []).append(part)


def gather(mine: Parts, data: SingleCellDataModule, world_size: int) -> Embeddings:
    """Return every modality's embedding, [cell, dim]; a cell that came twice is written twice, with one value."""
    ranks = [mine]
    if world_size > 1:
        ranks = [{} for _ in range(world_size)]
        dist.all_gather_object(ranks, mine)
    embeddings: Embeddings = {}
    for parts in ranks:
        for modality, pieces in parts.items():
            whole = (data.tables[modality].n_cells, pieces[0][1].shape[1])
            target = embeddings.setdefault(modality, np.full(whole, np.nan, dtype=np.float32))
            for index, values in pieces:
                target[index] = values
    return embeddings


def _checked(outputs: Any, module: pl.LightningModule) -> dict[str, dict[str, torch.Tensor]]:
    well_formed = isinstance(outputs, dict) and all(
        isinstance(cells, dict) and {"index", "embedding"} <= set(cells) for cells in outputs.values()
    )
    if not well_formed:
        raise ModelError(
            f"{type(module).__name__!r}.predict_step must return {{modality: {{'index', 'embedding'}}}}, "
            f"found {type(outputs).__name__} {list(outputs) if isinstance(outputs, dict) else outputs!r}"
        )
    return dict(outputs)
