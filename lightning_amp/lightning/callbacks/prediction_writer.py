"""Write predictions of all ranks to files: embeddings, imputed contacts and expression, and pictures.

The model must define `predict_step`, and `impute` if cells are imputed:

    predict_step(batch, batch_idx) -> {modality: {"index": int64 [cell], "embedding": float [cell, dim]}}
    impute(modality, cells: CellBatch) -> [cell, feature], expected counts

PredictionWriter does not inherit from Lightning's BasePredictionWriter, which requires the batch indices of a batch
sampler: a loader of complete steps has none. `index` gives the rows of the cells instead.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from lightning_amp.data.batch import CellBatch, datamodule_of
from lightning_amp.data.files.directory import written_aside
from lightning_amp.data.files.write_results import (
    NEIGHBOURS,
    UNKNOWN,
    cells_of_types,
    celltype_column,
    check_maps,
    describe_embedding,
    labels_of,
    read_assembly,
    same_type_share,
    write_embedding,
    write_imputed,
    write_pseudobulk,
)
from lightning_amp.data.loading.datamodule import HIC, SingleCellDataModule
from lightning_amp.errors import DataError, ModelError
from lightning_amp.lightning.callbacks.predictions import (
    Embeddings,
    Parts,
    add_batch,
    describe_run,
    draw_cells,
    draw_maps,
    features_of,
    gather,
    impute_in_parts,
)

RNA = "rna"
NO_ROWS = np.empty(0, dtype=np.int64)
Imputed = Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]
"""Batches of rows of a modality and their expected counts [row, feature]."""
CellContacts = Iterator[tuple[str, NDArray[np.float32]]]
"""Names of cells and their expected contacts [feature]."""
Chosen = Literal["by_label", "all"]
DRAWN = 4
"""Cells in the picture of contact maps."""
PROJECTIONS = ("pca", "umap")
OURS = ("embeddings_*.h5ad", "imputed*.scool", "pseudobulk/*.cool", "embedding.png", "contact_map.png")
ALIGNED = 1.25
"""The share of neighbours of the same type, relative to chance, from which modalities count as aligned."""


class PredictionWriter(pl.Callback):
    """Write embeddings, imputed data and pictures at the end of `trainer.predict`, on rank 0.

    Files:
        embeddings_<modality>.h5ad: all cells in the file's order, its obs, its var except for Hi-C, no X;
            obsm["X_amp"], NaN for a cell that was not predicted (`limit_predict_batches`), and its principal components
            obsm["X_pca"]; uns["lightning_amp"], versions, model, plan and settings
        imputed.scool: expected contacts of some cells, if there is Hi-C
        pseudobulk/<type>.cool: sum of the expected contacts of a type's cells, with `celltype_key`, if
            there is Hi-C that has this column and the model has `impute`; every rank imputes all cells
        embedding.png: all modalities in two dims, by PCA or by UMAP
        contact_map.png: up to four imputed cells, measured and expected

    `written` lists the files, and `remarks` has notes that the files do not show; both on rank 0.

    Args:
        out_dir: folder for the files; created if absent
        contact_map_cells: which cells to impute: "by_label", one of each type, of median depth (the first four where
            cells have no types); "all"; a list of names; or the number of first cells of the file, 0 for none
        projection: "pca", or "umap" with the package umap-learn, which takes half a minute to compile
        celltype_key: column of obs with the cells' types, for colours and pseudobulk; by default "celltype" or
            "cell_type", for colours alone
        batch_key: column of obs with the cells' experimental batches, for colours
        impute_rna: write layers["imputed"] of RNA cells, the expected counts at each cell's own depth and batch

    Raises:
        DataError: an argument is out of range, the trainer has no SingleCellDataModule, no modality has the column or
            the requested cells, or `out_dir` cannot be created
        ModelError: the model lacks a required method, or a method returns another form
    """

    def __init__(
        self,
        out_dir: str | Path,
        *,
        contact_map_cells: Chosen | int | list[str] = "by_label",
        projection: Literal["pca", "umap"] = "pca",
        celltype_key: str | None = None,
        batch_key: str | None = None,
        impute_rna: bool = False,
    ) -> None:
        named = isinstance(contact_map_cells, str) and contact_map_cells not in get_args(Chosen)
        if named or (isinstance(contact_map_cells, int) and contact_map_cells < 0):
            raise DataError(
                f"contact_map_cells={contact_map_cells!r} is not supported; give 'by_label', 'all', a list of names of"
                " cells, or a number of at least 0"
            )
        if projection not in PROJECTIONS or (projection == "umap" and find_spec("umap") is None):
            raise DataError(
                f"projection={projection!r} is not supported; allowed are {PROJECTIONS!r}, and 'umap' needs"
                " the package umap-learn: pip install umap-learn"
            )
        self.out_dir = Path(out_dir)
        self.projection: Literal["pca", "umap"] = projection
        self.celltype_key, self.batch_key, self.impute_rna = celltype_key, batch_key, impute_rna
        self.contact_map_cells = contact_map_cells
        self.written: list[Path] = []
        self.remarks: list[str] = []
        self._parts: Parts = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check options, data and model before the first batch is predicted."""
        if stage != "predict":
            return
        data = _data_of(trainer)
        columns = self._check_columns(data)
        if self.impute_rna and RNA not in data.tables:
            raise DataError(
                f"impute_rna=True requires RNA cells; loaded are {sorted(data.tables)!r}: leave impute_rna out"
            )
        rows = self._rows_to_impute(data)
        by_type = self.celltype_key in columns.get(HIC, ())
        if data.layout is not None and (len(rows) or (by_type and hasattr(pl_module, "impute"))):
            check_maps(data.layout, data.tables[HIC].obs_names[np.unique(rows)].tolist())
        options = {f"contact_map_cells={self.contact_map_cells!r}": len(rows) > 0, "impute_rna=True": self.impute_rna}
        for option, is_set in options.items():
            if is_set and not hasattr(pl_module, "impute"):
                raise ModelError(
                    f"{option} is not supported: {type(pl_module).__name__!r} has no method impute(modality,"
                    " cells); add it, or give contact_map_cells=0 and leave impute_rna out"
                )
        try:
            self.out_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"{self.out_dir}: cannot be made ({error.strerror}); give a directory that you may write to"
            ) from error

    def on_predict_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reset the results of an earlier run."""
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
        """Store the batch's embeddings in host memory."""
        add_batch(self._parts, outputs, pl_module)

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gather the embeddings over the ranks and write the files."""
        data = _data_of(trainer)
        embeddings = gather(self._parts, data, trainer.world_size)
        self._parts = {}
        tables = {modality: data.tables[modality].read_obs() for modality in embeddings}
        known = {name: np.flatnonzero(np.isfinite(x).all(axis=1)) for name, x in embeddings.items()}
        # on all ranks: a decoder that is sharded over ranks requires them
        maps: Embeddings = {}
        chosen = self._rows_to_impute(data)
        contacts = _of_cells(_impute(HIC, chosen, data, trainer, pl_module), data, maps)
        if trainer.is_global_zero:
            self._write_maps(contacts, len(chosen), data)
        for _ in contacts:
            pass
        # for each label: number of cells, and sum [feature]
        sums: dict[str, tuple[int, NDArray[np.float64]]] = {}
        if self.celltype_key in tables.get(HIC, ()) and hasattr(pl_module, "impute"):
            labels = labels_of(tables[HIC], self.celltype_key)
            for rows, values in _impute(HIC, known[HIC], data, trainer, pl_module):
                for label in np.unique(labels[rows]).tolist():
                    mine = values[labels[rows] == label]
                    n_cells, total = sums.get(label, (0, np.zeros(values.shape[1])))
                    sums[label] = n_cells + len(mine), total + mine.sum(axis=0, dtype=np.float64)
            sums = dict(sorted(sums.items()))
        rows = known.get(RNA, NO_ROWS) if self.impute_rna else NO_ROWS
        expression = _impute(RNA, rows, data, trainer, pl_module)
        if not trainer.is_global_zero:
            # rank 0 imputes while it writes, and a sharded decoder requires all ranks
            for _ in expression:
                pass
            return
        self._write_cells(embeddings, tables, expression, trainer, data)
        self._write_sums(sums, data)
        self._draw(embeddings, tables, maps, data)
        others = {path for files in OURS for path in self.out_dir.glob(files)} - set(self.written)
        if others:
            names = sorted(str(path.relative_to(self.out_dir)) for path in others)
            self.remarks.append(f"{self.out_dir} has files that this run did not write, as of another model: {names!r}")

    def _check_columns(self, data: SingleCellDataModule) -> dict[str, list[Any]]:
        """Return the columns of obs by modality; raise a DataError if a key is in none of them."""
        columns = {modality: list(table.read_obs().columns) for modality, table in data.tables.items()}
        for option, key in (("celltype_key", self.celltype_key), ("batch_key", self.batch_key)):
            if key is not None and not any(key in found for found in columns.values()):
                raise DataError(
                    f"{option}={key!r} is no column of obs; found {columns!r}. Name one of these or leave {option} out"
                )
        return columns

    def _rows_to_impute(self, data: SingleCellDataModule) -> NDArray[np.int64]:
        if HIC not in data.tables:
            return NO_ROWS
        names = data.tables[HIC].obs_names.tolist()
        if self.contact_map_cells == "all":
            return np.arange(len(names))
        if self.contact_map_cells == "by_label":
            obs = data.tables[HIC].read_obs()
            types = labels_of(obs, celltype_column(obs, self.celltype_key))
            if set(types) == {UNKNOWN}:
                return np.arange(min(DRAWN, len(names)))
            rows = cells_of_types(types, data.tables[HIC].contacts, np.unique(types).tolist())
            return np.array(rows, dtype=np.int64)
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

    def _write_cells(
        self,
        embeddings: Embeddings,
        tables: dict[str, pd.DataFrame],
        expression: Imputed,
        trainer: pl.Trainer,
        data: SingleCellDataModule,
    ) -> None:
        columns = {"celltype_key": self.celltype_key, "batch_key": self.batch_key}
        settings = {name: key for name, key in columns.items() if key is not None}
        about = {**describe_run(trainer), "settings": settings}
        for modality, embedding in embeddings.items():
            parts = describe_embedding(embedding)
            parts["uns"]["lightning_amp"] = about
            path = self.out_dir / f"embeddings_{modality}.h5ad"
            write_embedding(
                path,
                obs=tables[modality],
                var=features_of(data.tables[modality]),
                parts=parts,
                imputed=expression if modality == RNA else (),
            )
            self.written.append(path)

    def _write_maps(self, contacts: CellContacts, n_written: int, data: SingleCellDataModule) -> None:
        if data.layout is None or not n_written:
            return
        assembly, n_cells = read_assembly(data.tables[HIC].path), data.tables[HIC].n_cells
        self.written += write_imputed(
            self.out_dir, layout=data.layout, contacts=contacts, n_cells=n_written, assembly=assembly
        )
        if n_written < n_cells:
            self.remarks.append(
                f"imputed.scool holds {n_written} of {n_cells} Hi-C cells; all with contact_map_cells: all under"
                " PredictionWriter, chosen ones with a list of their names"
            )

    def _write_sums(self, sums: dict[str, tuple[int, NDArray[np.float64]]], data: SingleCellDataModule) -> None:
        if data.layout is None or self.celltype_key is None:
            return
        if not sums:
            self.remarks.append(
                f"no pseudobulk is written: it requires a model with impute, and {self.celltype_key!r} in obs of Hi-C"
            )
            return
        folder, assembly = self.out_dir / "pseudobulk", read_assembly(data.tables[HIC].path)
        folder.mkdir(exist_ok=True)
        self.written += write_pseudobulk(
            folder, layout=data.layout, sums=sums, key=self.celltype_key, assembly=assembly
        )

    def _draw(
        self, embeddings: Embeddings, tables: dict[str, pd.DataFrame], maps: Embeddings, data: SingleCellDataModule
    ) -> None:
        self.remarks += _agreement(embeddings, tables, self.celltype_key)
        labels = {self.celltype_key or "cell type": _types(tables, self.celltype_key)}
        if self.batch_key is not None:
            key = self.batch_key
            labels[key] = {name: labels_of(obs, key if key in obs else None) for name, obs in tables.items()}
        if embeddings:
            path = self.out_dir / "embedding.png"
            with written_aside(path) as aside:
                draw_cells(aside, embeddings, labels, projection=self.projection)
            self.written.append(path)
        if maps:
            table, path = data.tables[HIC], self.out_dir / "contact_map.png"
            rows = {
                cell: {"measured": table.counts[table.obs_names == cell].toarray()[0], "expected": values}
                for cell, values in maps.items()
            }
            with written_aside(path) as aside:
                draw_maps(aside, rows, data, title="Contacts, measured and expected by the model,")
            self.written.append(path)


def _types(tables: dict[str, pd.DataFrame], key: str | None) -> dict[str, NDArray[np.str_]]:
    return {name: labels_of(obs, celltype_column(obs, key)) for name, obs in tables.items()}


def _agreement(embeddings: Embeddings, tables: dict[str, pd.DataFrame], key: str | None = None) -> list[str]:
    labelled = [name for name in embeddings if celltype_column(tables[name], key) is not None]
    found = same_type_share({name: embeddings[name] for name in labelled}, _types(tables, key))
    if found is None:
        return []
    share, chance = found
    apart = ", so that the modalities do not meet: train for more epochs" if share < ALIGNED * chance else ""
    return [
        f"same-type share {share:.2f}: of a cell's {NEIGHBOURS} nearest neighbours in the other modality {share:.0%}"
        f" are of its type, {chance:.0%} by chance{apart}"
    ]


def _impute(
    modality: str, rows: NDArray[np.int64], data: SingleCellDataModule, trainer: pl.Trainer, module: Any
) -> Imputed:
    """Yield rows and their expected counts [row, feature], by batch; Lightning has set eval mode, without gradients."""

    def imputed(cells: CellBatch) -> torch.Tensor:
        batch: Any = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input({modality: cells}))
        with trainer.precision_plugin.forward_context():
            expected: torch.Tensor = module.impute(modality, batch[modality])
        return expected

    return impute_in_parts(imputed, modality, rows, data)


def _of_cells(imputed: Imputed, data: SingleCellDataModule, first: Embeddings) -> CellContacts:
    """Yield name and contacts of each cell; the first ones are also put into `first`."""
    for rows, contacts in imputed:
        for name, values in zip(data.tables[HIC].obs_names[rows].tolist(), contacts, strict=True):
            if len(first) < DRAWN:
                first[name] = values
            yield name, values


def _data_of(trainer: pl.Trainer) -> SingleCellDataModule:
    data = datamodule_of(trainer)
    if not isinstance(data, SingleCellDataModule):
        raise DataError(
            f"PredictionWriter reads names of cells and bins from a SingleCellDataModule, the trainer has {data!r}; "
            "call trainer.predict(model, datamodule=SingleCellDataModule(...))"
        )
    return data
