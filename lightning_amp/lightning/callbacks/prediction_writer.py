"""Writes the predictions of all ranks as files: embeddings, imputed contact maps and a picture.

The model's part is two methods:

    predict_step(batch, batch_idx) -> {modality: {"index": int64 [cell], "embedding": float [cell, dim]}}
    impute(modality, cells: CellBatch) -> [cell, feature], expected contacts

A plain callback, not Lightning's BasePredictionWriter: that one asks the loop for the batch indices of a
batch sampler, which a loader of whole steps has not; `index` says which cells these are.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from lightning_amp import figures
from lightning_amp.data.cell_keys import hash_integers
from lightning_amp.data.files.strata_layout import FeatureLayout
from lightning_amp.data.files.write_aside import written_aside
from lightning_amp.data.files.write_results import (
    bin_table,
    celltypes,
    has_celltypes,
    write_embedding,
    write_imputed,
)
from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.data.loading.dataset import MultiModalDataset, StepIndices
from lightning_amp.data.neighbours import NEIGHBOURS, same_type_share
from lightning_amp.errors import DataError, ModelError
from lightning_amp.lightning.callbacks.collect_predictions import Embeddings, Parts, add_batch, gather

MIN_UMAP_CELLS = 5
PROJECTIONS = ("pca", "umap")
ALIGNED = 1.25
"""Times the share by chance from which on modalities are said to meet."""
MAP_BINS = 300
"""Bins in the picture of a contact map; a whole genome would be a grey square."""


class PredictionWriter(pl.Callback):
    """Writes embeddings, imputed contact maps and a picture at the end of `trainer.predict`, on rank 0.

    Files:
        embeddings_<modality>.h5ad: all cells in the file's order, obs as there, obsm["X_amp"]; NaN for a cell
            that was not predicted (`limit_predict_batches`)
        imputed.scool: expected contacts of some cells, if there is Hi-C
        embedding.png: all modalities in the plane, by PCA or by UMAP
        contact_map.png: the first imputed cell, measured beside expected

    `written` names them and `remarks` says what they do not show by themselves, on rank 0.

    Args:
        out_dir: where to write; made if absent
        contact_map_cells: names of the cells to impute, or how many (the first ones of the file); 0 for none
        projection: "pca", or "umap" with the package umap-learn, which takes half a minute to compile

    Raises:
        DataError: an argument is out of range, the trainer has no SingleCellDataModule, unknown cells are asked,
            or `out_dir` cannot be made
        ModelError: the model does not return or do what is said above
    """

    def __init__(
        self,
        out_dir: str | Path,
        *,
        contact_map_cells: int | list[str] = 4,
        projection: Literal["pca", "umap"] = "pca",
    ) -> None:
        if isinstance(contact_map_cells, int) and contact_map_cells < 0:
            raise DataError(
                f"contact_map_cells={contact_map_cells!r} was asked; give names of cells, or a number of at least 0"
            )
        if projection not in PROJECTIONS or (projection == "umap" and find_spec("umap") is None):
            raise DataError(
                f"projection={projection!r} was asked; allowed are {PROJECTIONS!r}, and 'umap' needs the package"
                " umap-learn: pip install umap-learn"
            )
        self.out_dir = Path(out_dir)
        self.projection = projection
        self.contact_map_cells = contact_map_cells
        self.written: list[Path] = []
        self.remarks: list[str] = []
        self._parts: Parts = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what cannot work before the first batch is predicted."""
        if stage != "predict":
            return
        rows = self._rows_to_impute(_data_of(trainer))
        if len(rows) and not hasattr(pl_module, "impute"):
            raise ModelError(
                f"contact_map_cells={self.contact_map_cells!r} was asked, but {type(pl_module).__name__!r} has no "
                "method impute(modality, cells); add it, or give contact_map_cells=0"
            )
        try:
            self.out_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"{self.out_dir}: cannot be made ({error.strerror}); give a directory that you may write to"
            ) from error

    def on_predict_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget an earlier run."""
        self.written, self.remarks, self._parts = [], [], {}

    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the batch's embeddings in host memory."""
        add_batch(self._parts, outputs, pl_module)

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gather over ranks and write."""
        data = _data_of(trainer)
        embeddings = gather(self._parts, data, trainer.world_size)
        # On every rank: a decoder that is spread over ranks needs them all.
        imputed = _impute(self._rows_to_impute(data), data, trainer, pl_module)
        self._parts = {}
        if trainer.is_global_zero:
            self._write(embeddings, imputed, data)

    def _rows_to_impute(self, data: SingleCellDataModule) -> NDArray[np.int64]:
        if "hic" not in data.tables:
            return np.empty(0, dtype=np.int64)
        names = data.tables["hic"].obs_names.tolist()
        if isinstance(self.contact_map_cells, int):
            return np.arange(min(self.contact_map_cells, len(names)))
        row_of = {name: row for row, name in enumerate(names)}
        unknown = [name for name in self.contact_map_cells if name not in row_of]
        if unknown:
            raise DataError(
                f"contact_map_cells: {unknown[:3]!r} are no cells of {data.tables['hic'].path}; its cells are named "
                f"like {names[:3]!r}"
            )
        return np.array([row_of[name] for name in self.contact_map_cells], dtype=np.int64)

    def _write(self, embeddings: Embeddings, imputed: Embeddings, data: SingleCellDataModule) -> None:
        tables = {modality: data.tables[modality].read_obs() for modality in embeddings}
        for modality, embedding in embeddings.items():
            path = self.out_dir / f"embeddings_{modality}.h5ad"
            write_embedding(path, obs=tables[modality], embedding=embedding)
            self.written.append(path)
        if imputed and data.layout is not None:
            self.written += write_imputed(self.out_dir, layout=data.layout, contacts=imputed)
            self.remarks += _cells_left_out(len(imputed), data.tables["hic"].n_cells)
        self.remarks += _agreement(embeddings, tables)
        if embeddings:
            path = self.out_dir / "embedding.png"
            with written_aside(path) as aside:
                _draw(aside, embeddings, tables, projection=self.projection)
            self.written.append(path)
        for cell in list(imputed)[:1]:
            path = self.out_dir / "contact_map.png"
            with written_aside(path) as aside:
                _draw_maps(aside, cell, imputed[cell], data)
            self.written.append(path)


def _cells_left_out(n_imputed: int, n_cells: int) -> list[str]:
    if n_imputed == n_cells:
        return []
    return [
        f"imputed.scool holds {n_imputed} of {n_cells} Hi-C cells; all with contact_map_cells: {n_cells} under"
        " PredictionWriter, some by a list of their names"
    ]


def _agreement(embeddings: Embeddings, tables: dict[str, pd.DataFrame]) -> list[str]:
    labelled = [modality for modality in embeddings if has_celltypes(tables[modality])]
    found = same_type_share(
        {modality: embeddings[modality] for modality in labelled},
        {modality: celltypes(tables[modality]) for modality in labelled},
    )
    if found is None:
        return []
    share, chance = found
    apart = ", so that the modalities do not meet: train for more epochs" if share < ALIGNED * chance else ""
    return [
        f"same-type share {share:.2f}: of a cell's {NEIGHBOURS} nearest neighbours in the other modality {share:.0%}"
        f" are of its type, {chance:.0%} by chance{apart}"
    ]


def project(embedding: NDArray[np.float32], *, method: str) -> tuple[NDArray[np.float64], tuple[str, str]]:
    """Return cells in the plane, and the names of its axes: too few cells for UMAP go by PCA.

    Args:
        embedding: [cell, dim]
        method: "pca" or "umap"

    Returns:
        [cell, 2] and the names, with the share of the variance where the axis is a principal component
    """
    if method == "pca" or len(embedding) < MIN_UMAP_CELLS:
        return _principal_plane(embedding.astype(np.float64))
    # late, for it compiles itself on import
    from umap import UMAP

    reducer = UMAP(n_neighbors=min(15, len(embedding) - 1), random_state=0, n_jobs=1)
    return np.asarray(reducer.fit_transform(embedding), dtype=np.float64), ("UMAP1", "UMAP2")


def _principal_plane(x: NDArray[np.float64]) -> tuple[NDArray[np.float64], tuple[str, str]]:
    centred = x - x.mean(axis=0)
    axes, variances, _ = np.linalg.svd(centred.T @ centred)
    axes = axes[:, :2] * np.sign(axes[np.abs(axes[:, :2]).argmax(axis=0), [0, 1][: axes.shape[1]]])
    plane = centred @ axes
    shares = np.pad(variances, (0, 1)) / max(variances.sum(), np.finfo(np.float64).tiny)
    return np.pad(plane, ((0, 0), (0, 2 - plane.shape[1]))), (_component(1, shares), _component(2, shares))


def _component(i: int, shares: NDArray[np.float64]) -> str:
    return f"PC{i} ({shares[i - 1]:.0%} of the variance)"


def _draw(path: Path, embeddings: Embeddings, tables: dict[str, pd.DataFrame], *, projection: str) -> None:
    together = np.concatenate(list(embeddings.values()))
    known = np.isfinite(together).all(axis=1)
    types = np.concatenate([celltypes(tables[modality]) for modality in embeddings])
    modalities = np.repeat(list(embeddings), [len(values) for values in embeddings.values()])
    xy, axis_names = project(together[known], method=projection)
    labels = {"cell type": types[known].tolist(), "modality": modalities[known].tolist()}
    title = f"Embedding of {known.sum()} cells"
    figures.embedding(path, xy=xy, labels=labels, title=title, axis_names=axis_names)


def _draw_maps(path: Path, cell: str, imputed: NDArray[np.float32], data: SingleCellDataModule) -> None:
    """Draw what was measured of one cell beside what the model expects, at the coarsest resolution."""
    table = data.tables["hic"]
    assert data.layout is not None, "a data module with Hi-C cells has their layout"
    row = int(np.flatnonzero(table.obs_names == cell)[0])
    measured = table.counts[[row]].toarray()[0]
    maps = {"measured": _map(measured, data.layout), "expected by the model": _map(imputed, data.layout)}
    bins = bin_table(data.layout, data.layout.strata[0])[: len(maps["measured"])]
    figures.contact_maps(
        path,
        maps=maps,
        chromosomes=bins["chrom"].tolist(),
        starts=bins["start"].tolist(),
        title=f"{cell}: contacts of the first {len(bins)} bins",
    )


def _map(contacts: NDArray[np.float32], layout: FeatureLayout) -> NDArray[np.float32]:
    """Return the symmetric matrix [bin, bin] of a cell's features, [feature]."""
    strata = [s for s in layout.strata if s.resolution == layout.strata[0].resolution]
    size = min(MAP_BINS, strata[0].n_features)
    matrix = np.zeros((size, size), dtype=np.float32)
    for stratum in strata:
        inside = stratum.anchors + stratum.k < size
        first = stratum.anchors[inside]
        matrix[first, first + stratum.k] = contacts[stratum.start : stratum.stop][inside]
    return np.maximum(matrix, matrix.T)


def _impute(
    rows: NDArray[np.int64], data: SingleCellDataModule, trainer: pl.Trainer, module: Any
) -> Embeddings:
    """Return the expected contacts of some Hi-C cells by name; Lightning has switched to eval without
    gradients."""
    dataset = MultiModalDataset(data.tables)
    imputed: Embeddings = {}
    for start in range(0, len(rows), data.batch_size):
        chunk = rows[start : start + data.batch_size]
        batch: Any = dataset[StepIndices(rows={"hic": chunk}, draw_key=hash_integers(data.seed))]
        batch = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))
        with trainer.precision_plugin.forward_context():
            contacts: torch.Tensor = module.impute("hic", batch["hic"])
        names = data.tables["hic"].obs_names[chunk].tolist()
        imputed.update(zip(names, contacts.float().cpu().numpy(), strict=True))
    return imputed


def _data_of(trainer: pl.Trainer) -> SingleCellDataModule:
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, SingleCellDataModule):
        raise DataError(
            f"PredictionWriter reads names of cells and bins from a SingleCellDataModule, the trainer has {data!r}; "
            "call trainer.predict(model, datamodule=SingleCellDataModule(...))"
        )
    return data
