"""Gather the predictions of all ranks, as AnnData in memory or as arrays for files, and draw them."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from numpy.typing import NDArray
from torch import Tensor

from lightning_amp import figures
from lightning_amp.data.batch import CellBatch, hash_integers
from lightning_amp.data.files.strata_layout import FeatureLayout
from lightning_amp.data.files.write_results import NO_FEATURES, bin_table, describe_embedding, principal_components
from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.data.loading.dataset import CellTable
from lightning_amp.errors import DataError, ModelError

if TYPE_CHECKING:
    from anndata import AnnData


Embeddings = dict[str, NDArray[np.float32]]
Parts = dict[str, list[tuple[NDArray[np.int64], NDArray[np.float32]]]]
"""Modality -> rows and embeddings of some cells."""


def collect_predictions(
    outputs: list[Any] | None, data: SingleCellDataModule, *, impute: Collection[str] = ()
) -> "dict[str, AnnData]":
    """Return the predictions of all ranks as AnnData; every rank must call it.

        outputs = trainer.predict(model, datamodule=data)
        hic.obsm["X_amp"] = collect_predictions(outputs, data)["hic"].obsm["X_amp"]

    Args:
        outputs: result of `trainer.predict`
        data: the data module of that call
        impute: modalities, such as ["rna"], whose expected counts are computed and put into layers["imputed"]; every
            cell has a value for every feature

    Returns:
        modality -> all cells in the data's order with their obs and, except for Hi-C that is not imputed, var, without
        X; obsm["X_amp"] is
        NaN for a cell that was not predicted (`limit_predict_batches`). Principal components and
        uns["lightning_amp"] are the same as in the files of `PredictionWriter`

    Raises:
        DataError: there are no outputs, the data module has no trainer, or a modality to impute does not exist
        ModelError: `predict_step` does not return {modality: {"index", "embedding"}}, or there is no `impute`
    """
    if outputs is None or data.trainer is None:
        raise DataError(
            f"collect_predictions: outputs={outputs!r} of trainer={data.trainer!r} were given; call it with what"
            " trainer.predict(model, datamodule=data) returned, and the same data. Strategies that spawn or fork ranks"
            " return nothing: predict on one device, or let the callback PredictionWriter write files"
        )
    if absent := sorted(set(impute) - set(data.tables)):
        raise DataError(f"collect_predictions: impute has {absent!r}, and the data have {sorted(data.tables)!r}")
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
        imputes = modality in impute
        var = table.read_var() if imputes else features_of(table)
        found[modality] = AnnData(obs=table.read_obs(), var=var, **described)
        if imputes:
            found[modality].layers["imputed"] = _impute_all(data.trainer.lightning_module, modality, data)
    return found


@torch.no_grad()
def _impute_all(module: Any, modality: str, data: SingleCellDataModule) -> NDArray[np.float32]:
    """Return the expected counts of all cells, [cell, feature], after the trainer has ended."""
    if not hasattr(module, "impute"):
        raise ModelError(
            f"impute={modality!r} is not supported: {type(module).__name__!r} has no method impute; add it"
        )
    module.eval()

    def imputed(cells: CellBatch) -> Tensor:
        expected: Tensor = module.impute(modality, move_data_to_device(cells, module.device))
        return expected

    rows = np.arange(data.tables[modality].n_cells)
    return np.concatenate([values for _, values in impute_in_parts(imputed, modality, rows, data)])


def impute_in_parts(
    impute: Callable[[CellBatch], Tensor], modality: str, rows: NDArray[np.int64], data: SingleCellDataModule
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Yield rows of a modality and what `impute` returns for these cells, [cell, feature], by batch."""
    if not len(rows):
        # of a modality that may not exist
        return
    for part, cells in data.tables[modality].batches_of(rows, data.batch_size, draw_key=hash_integers(data.seed)):
        yield part, impute(cells).float().cpu().numpy()


def features_of(table: CellTable) -> pd.DataFrame:
    """Return the table of a modality's features, such as genes; empty for Hi-C, which has millions of bin pairs."""
    return NO_FEATURES if table.modality == "hic" else table.read_var()


def describe_run(trainer: pl.Trainer) -> dict[str, Any]:
    """Return uns["lightning_amp"]: versions, model with its hyper-parameters as JSON, checkpoint and plan."""
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
    """Add one batch's embeddings, in host memory; raise a ModelError if outputs have another form."""
    well_formed = isinstance(outputs, dict) and all(
        isinstance(cells, dict) and {"index", "embedding"} <= set(cells) for cells in outputs.values()
    )
    if not well_formed:
        raise ModelError(
            f"{type(module).__name__!r}.predict_step must return {{modality: {{'index', 'embedding'}}}}, "
            f"found {type(outputs).__name__} {list(outputs) if isinstance(outputs, dict) else outputs!r}"
        )
    for modality, cells in outputs.items():
        part = cells["index"].cpu().numpy(), cells["embedding"].detach().float().cpu().numpy()
        parts.setdefault(modality, []).append(part)


def gather(mine: Parts, data: SingleCellDataModule, world_size: int) -> Embeddings:
    """Return every modality's embedding [cell, dim]; a repeated cell has the same value each time."""
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


Labels = Mapping[str, NDArray[np.str_]]
"""Modality -> [cell]."""
MIN_UMAP_CELLS = 5
MAP_BINS = 300
"""Bins in the picture of a contact map; a complete genome would be a grey square."""


def project(embedding: NDArray[np.float32], *, method: str) -> tuple[NDArray[np.float64], tuple[str, str]]:
    """Project an embedding [cell, dim] to [cell, 2] by "pca" or "umap"; return it with the names of the axes.

    Names of principal components include the share of the variance. With too few cells for UMAP, PCA is used.
    """
    if method == "pca" or len(embedding) < MIN_UMAP_CELLS:
        scores, variances = principal_components(embedding.astype(np.float64))
        shares = np.pad(variances, (0, 1)) / max(variances.sum(), np.finfo(np.float64).tiny)
        plane = np.pad(scores[:, :2], ((0, 0), (0, max(0, 2 - scores.shape[1]))))
        return plane, (f"PC1 ({shares[0]:.0%} of the variance)", f"PC2 ({shares[1]:.0%} of the variance)")
    # imported late: umap compiles itself on import
    from umap import UMAP

    reducer = UMAP(n_neighbors=min(15, len(embedding) - 1), random_state=0, n_jobs=1)
    return np.asarray(reducer.fit_transform(embedding), dtype=np.float64), ("UMAP1", "UMAP2")


def draw_cells(
    path: Path, embeddings: Embeddings, labels: Mapping[str, Labels], *, projection: Literal["pca", "umap"]
) -> None:
    """Draw the cells of all modalities in two dims, in one panel by modality and one per kind of label.

    `labels`: heading of a panel -> modality -> [cell].
    """
    together = np.concatenate(list(embeddings.values()))
    known = np.isfinite(together).all(axis=1)
    xy, axis_names = project(together[known], method=projection)
    by_modality = {name: np.full(len(values), name) for name, values in embeddings.items()}
    panels = {**labels, "modality": by_modality}
    shown = {
        heading: np.concatenate([of[modality] for modality in embeddings])[known].tolist()
        for heading, of in panels.items()
    }
    title = f"Embedding of {known.sum()} cells"
    figures.embedding(path, xy=xy, labels=shown, title=title, axis_names=axis_names)


def draw_maps(
    path: Path, rows: Mapping[str, Mapping[str, NDArray[Any]]], data: SingleCellDataModule, *, title: str
) -> None:
    """Draw contacts [feature] as maps of the coarsest resolution; `rows`: name of a row, or "" -> heading -> contacts.

    Pairs of bins that are not features, and bins without a contact in any cell, stay empty.
    """
    assert data.layout is not None, "a data module with Hi-C cells has their layout"
    layout = data.layout
    empty = np.nansum(_map(np.asarray(data.tables["hic"].counts.sum(axis=0)).ravel(), layout), axis=0) == 0
    drawn = {
        name: {heading: _map(contacts, layout, empty=empty) for heading, contacts in maps.items()}
        for name, maps in rows.items()
    }
    bins = bin_table(layout, layout.strata[0])[: len(empty)]
    chromosomes, starts = bins["chrom"].tolist(), bins["start"].tolist()
    few = len(bins) < layout.strata[0].n_features
    title = f"{title} of the first {len(bins)} bins" if few else f"{title} of {len(bins)} bins"
    figures.contact_maps(path, rows=drawn, chromosomes=chromosomes, starts=starts, title=title)


def _map(
    contacts: NDArray[Any], layout: FeatureLayout, *, empty: NDArray[np.bool_] | None = None
) -> NDArray[np.float32]:
    """Return the symmetric matrix [bin, bin] of a cell's features [feature]; NaN for pairs that are not features, and
    for the empty bins.
    """
    strata = [s for s in layout.strata if s.resolution == layout.strata[0].resolution]
    size = min(MAP_BINS, strata[0].n_features)
    matrix = np.full((size, size), np.nan, dtype=np.float32)
    for stratum in strata:
        inside = stratum.anchors + stratum.k < size
        first = stratum.anchors[inside]
        matrix[first, first + stratum.k] = contacts[stratum.start : stratum.stop][inside]
    whole: NDArray[np.float32] = np.fmax(matrix, matrix.T)
    if empty is not None:
        whole[empty] = whole[:, empty] = np.nan
    return whole
