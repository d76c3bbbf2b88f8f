"""Define the LightningDataModule of a directory of single-cell files, or of AnnData objects in memory."""

import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from lightning_amp.data.batch import Batch, hash_integers, hash_text
from lightning_amp.data.files.directory import DataDirectory, find, write_aside
from lightning_amp.data.files.graphml import Graph, read_graph
from lightning_amp.data.files.pairs import check_pairs, is_paired, matched_rows
from lightning_amp.data.files.read_h5ad import read_header
from lightning_amp.data.files.strata_layout import FeatureLayout, read_layout
from lightning_amp.data.loading.dataset import CellTable, MultiModalDataset
from lightning_amp.data.loading.sampler import PAIRS, CellRowsOf, StepLoader, StepSampler
from lightning_amp.errors import DataError

HIC = "hic"
MANY_FEATURES = 20_000
FEW_ENTRIES = 0.1
"""Largest share of nonzero counts at which `sparse="auto"` is sparse: sparse counts take half the memory of dense ones,
and less time; at twice this share they take as much of both (64 and 256 cells of 172,800 features, one CPU core)."""


def is_sparse(n_features: int, share: float) -> bool:
    """Whether `sparse="auto"` is sparse for this many features, with a share of nonzero counts."""
    return n_features > MANY_FEATURES and share <= FEW_ENTRIES


class SingleCellDataModule(pl.LightningDataModule):
    """Loads the cells of a data directory, all modalities together, on any number of ranks.

    Training cycles through the cells that are not held out; validation takes the held-out cells once, or,
    with `val_fraction=0`, all cells (the model is unsupervised, so this is still informative); test and
    predict take all cells once, in file order.

    After `setup`: `directory`, `tables` (modality -> CellTable), `layout` (of Hi-C, or None), `graph` (or
    None), `pairs` (modality -> rows of the cells that all modalities have, in one order; None if they are not paired).

    Args:
        data_dir: directory written by `lightning-amp prepare`, or one of the same form
        batch_size: cells per modality, rank and step
        setting: which of several preparations in the directory to take
        balance: give the ranks equal contacts, not only equal numbers of cells; None leaves it to the strategy
        num_workers: worker processes of the loaders
        pin_memory: return batches in pinned memory; "auto" does so if the Trainer runs on CUDA
        seed: of order, held-out cells and random draws; must be the same on every rank
        modalities: which of the directory's modalities to take, by default all
        val_fraction: share of each modality's cells that is held out for validation, in [0, 1)
        sparse: return x of Hi-C as `SparseCounts`, so that a dense [cell, feature] never exists; "auto" does so for
            many features with few nonzero counts, if the model takes such counts
        paired: whether cells of the same name in all modalities are one cell: training then takes them together, and
            leaves out those that only one modality has kept; None reads what `prepare` has noted. True also
            checks that all names are the same

    Raises:
        DataError: an argument is out of range, or, from `setup`, the directory lacks a file, or names differ
    """

    def __init__(
        self,
        data_dir: str | Path,
        *,
        batch_size: int = 64,
        setting: str | None = None,
        balance: bool | None = None,
        num_workers: int = 0,
        pin_memory: bool | Literal["auto"] = "auto",
        seed: int = 0,
        modalities: list[str] | None = None,
        val_fraction: float = 0.1,
        sparse: bool | Literal["auto"] = "auto",
        paired: bool | None = None,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise DataError(
                f"batch_size={batch_size!r} is not supported; it counts cells per rank and must be at least 1"
            )
        if not 0 <= val_fraction < 1:
            raise DataError(
                f"val_fraction={val_fraction!r} is not supported; it is a share of the cells in [0, 1), 0 for none"
            )
        for name, option in (("sparse", sparse), ("pin_memory", pin_memory)):
            if not isinstance(option, bool) and option != "auto":
                raise DataError(f"{name}={option!r} is not supported; allowed are True, False and 'auto'")
        self.data_dir = Path(data_dir)
        self.batch_size = batch_size
        self.setting = setting
        self.balance = balance
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.seed = seed
        self.modalities = modalities
        self.val_fraction = val_fraction
        self.sparse = sparse
        self.paired = paired
        self.pairs: dict[str, NDArray[np.int64]] | None = None
        self.directory: DataDirectory | None = None
        self.tables: dict[str, CellTable] = {}
        self.layout: FeatureLayout | None = None
        self.graph: Graph | None = None

    @classmethod
    def from_anndata(
        cls,
        *,
        rna: Any = None,
        hic: Any = None,
        graph: Any = None,
        genes: str | Path | pd.DataFrame | None = None,
        n_genes: int = 2000,
        loop_quantile: float = 0.98,
        **options: Any,
    ) -> "SingleCellDataModule":
        """Make a data module of AnnData objects, which are not changed.

        Raw counts are taken from layers["counts"], else from X. The objects are written to a temporary directory, which
        is removed with the data module or at the end of the process. A script that every rank runs writes one for each
        rank.

        Args:
            rna: AnnData [cell, gene]
            hic: AnnData [cell, feature], features stratum-major: var_names "chr1:0-500000" for a bin and
                "chr1:0-500000-3" for its pair with the third bin after it, or integers var["stratum"] and
                var["anchor"]; with `genes`, also var["chrom"], var["chromStart"] and var["chromEnd"] of the bins
            graph: networkx guidance graph with genes and bins as vertices; edges have weight and sign
            genes: instead of `graph`, which is then built as by `prepare` of contacts within the strata: a GTF, a BED
                or a table of positions, such as rna.var with chrom, chromStart, chromEnd and strand
            n_genes: with `genes`, number of most variable genes to keep
            loop_quantile: with `genes`, quantile above which summed contacts become edges of the graph
            options: of `SingleCellDataModule`

        Raises:
            DataError: an object does not hold raw counts or the features above, or the objects do not go together
        """
        from lightning_amp.data.prepare.from_anndata import write_objects

        home = Path(tempfile.mkdtemp(prefix="lightning-amp-"))
        try:
            data = cls(home / "data", **options)
        except BaseException:
            shutil.rmtree(home, ignore_errors=True)
            raise
        weakref.finalize(data, _remove, home, os.getpid())
        with write_aside(data.data_dir) as aside:
            write_objects(
                aside, rna=rna, hic=hic, graph=graph, genes=genes, n_genes=n_genes, loop_quantile=loop_quantile
            )
        return data

    @classmethod
    def from_mudata(cls, mdata: Any, *, rna: str = "rna", hic: str = "hic", **options: Any) -> "SingleCellDataModule":
        """Make a data module of two modalities of a MuData; see `from_anndata`.

        Args:
            mdata: MuData; its other modalities are not read
            rna: name of gene expression
            hic: name of Hi-C
            options: of `from_anndata`

        Raises:
            DataError: it lacks one of the two, or as from `from_anndata`
        """
        absent = [name for name in (rna, hic) if name not in mdata.mod]
        if absent:
            raise DataError(
                f"SingleCellDataModule.from_mudata: modalities {absent!r} do not exist, found {list(mdata.mod)!r};"
                " name them with rna= and hic=, or give one modality to from_anndata"
            )
        return cls.from_anndata(rna=mdata.mod[rna], hic=mdata.mod[hic], **options)

    def setup(self, stage: str | None = None) -> None:
        """Read everything once; counts stay sparse. Under `strategies="sequence"` a rank keeps its own columns of the
        modalities whose x is split: `sequence_dim={"rna.x": 1}` with a number as `model_parallel_size`.
        """
        # called for every stage; files are read again only where this rank has other columns than before
        if self.tables and all(t.columns == self._own(m, t.n_features) for m, t in self.tables.items()):
            return
        directory = find(self.data_dir, setting=self.setting)
        paths = self._chosen(directory)
        if directory.graph is None and len(paths) > 1:
            raise DataError(_no_graph(self.data_dir, list(paths)))
        graph = None if directory.graph is None else read_graph(directory.graph)
        if self.sparse is True and HIC not in paths:
            raise DataError(
                f"{self.data_dir}: sparse=True is for {HIC!r}; loaded are {sorted(paths)!r}: leave sparse out"
            )
        layout = read_layout(paths[HIC]) if HIC in paths else None
        own = {modality: self._own(modality, read_header(path).n_features) for modality, path in paths.items()}
        self.tables = {modality: CellTable(path, modality, own[modality]) for modality, path in paths.items()}
        vars(self).pop("on_after_batch_transfer", None)
        if any(own.values()):
            # on the instance, for Lightning leaves the module's own hook out where the class has one
            vars(self)["on_after_batch_transfer"] = self._after_transfer
        self.pairs = self._matched() if (is_paired(paths) if self.paired is None else self.paired) else None
        self.directory, self.layout, self.graph = directory, layout, graph

    def train_dataloader(self) -> StepLoader:
        """Cycle through the cells that are not held out; Lightning saves and restores the position."""
        overfit = bool(getattr(self.trainer, "overfit_batches", 0))
        sampler = self._sampler(self._split()[0], cycle=True, shuffle=not overfit)
        return StepLoader(self._dataset(), sampler, **self._reading())

    def val_dataloader(self) -> DataLoader[Batch]:
        """Take every held-out cell once, or every cell when none is held out."""
        return self._once(self._split()[1])

    def test_dataloader(self) -> DataLoader[Batch]:
        """Take every cell once."""
        return self._once(None)

    def predict_dataloader(self) -> DataLoader[Batch]:
        """Take every cell once."""
        return self._once(None)

    def training_rows(self) -> CellRowsOf:
        """Return the rows of the cells that are not held out, by modality."""
        return self._split()[0]

    def vertices(self, modality: str) -> NDArray[np.int64]:
        """Return the graph vertex of each feature, for Hi-C of each anchor.

        Returns:
            int64 [feature], for Hi-C [anchor]

        Raises:
            DataError: the modality is not loaded, there is no graph, or it lacks features
        """
        if modality not in self.tables:
            raise DataError(
                f"modality {modality!r} is not loaded; loaded are {sorted(self.tables)!r}: name one of these"
            )
        if self.graph is None:
            raise DataError(_no_graph(self.data_dir, list(self.tables)))
        row_of = {name: row for row, name in enumerate(self.graph.vertices.tolist())}
        if modality == HIC and self.layout is not None:
            names = self.layout.anchor_names.tolist()
        else:
            names = self.tables[modality].feature_names()
        missing = [name for name in names if name not in row_of]
        if missing:
            raise DataError(
                f"{self.data_dir}: {len(missing)!r} of {len(names)!r} features of modality {modality!r} are no "
                f"vertices of the guidance graph, e.g. {missing[:3]!r}; the graph belongs to other files, write "
                "all again with `lightning-amp prepare`"
            )
        return np.array([row_of[name] for name in names], dtype=np.int64)

    def _own(self, modality: str, n_features: int) -> slice | None:
        """Return the columns that this rank reads; None if it reads all."""
        parts = getattr(getattr(self.trainer, "strategy", None), "own_parts", None)
        # only where the features of x are split, and nothing else of it
        if parts is None or parts.size < 2 or parts.dims.get(f"{modality}.x") not in ((1,), (-1,)):
            return None
        if modality == HIC and self.sparse is True:
            return None
        own: slice = parts.part(n_features)
        return own

    def _after_transfer(self, batch: Batch, dataloader_idx: int) -> Any:
        """Make own columns the local shards of a sharded tensor."""
        assert self.trainer is not None, "own columns are read with a Trainer"
        parts, cells = self.trainer.strategy.own_parts, dict[str, Any](batch)  # type: ignore[attr-defined]
        for modality, part in batch.items():
            if self.tables[modality].columns is not None:
                x = parts.sharded(part["x"], dim=1, length=self.tables[modality].n_features)
                cells[modality] = {**part, "x": x}
        # a subclass may have a hook, which the instance's hides
        hook = type(self).on_after_batch_transfer
        if hook is not pl.LightningDataModule.on_after_batch_transfer:
            return hook(self, cells, dataloader_idx)
        return self.trainer.lightning_module.on_after_batch_transfer(cells, dataloader_idx)

    def _chosen(self, directory: DataDirectory) -> dict[str, Path]:
        found = directory.modalities
        if self.modalities is None:
            return found
        absent = [modality for modality in self.modalities if modality not in found]
        if absent or not self.modalities:
            raise DataError(
                f"{self.data_dir}: modalities={self.modalities!r} is not supported, found {sorted(found)!r}; "
                "choose one or more of those"
            )
        return {modality: path for modality, path in found.items() if modality in self.modalities}

    def _matched(self) -> dict[str, NDArray[np.int64]]:
        """Return the rows of the cells that all modalities have, in one order."""
        if len(self.tables) < 2:
            raise DataError(
                f"{self.data_dir}: paired=True needs two modalities or more, and loaded are {list(self.tables)!r};"
                " leave paired out"
            )
        if self.paired:
            check_pairs({str(table.path): table.obs_names.tolist() for table in self.tables.values()})
        found = matched_rows({modality: table.obs_names for modality, table in self.tables.items()})
        if not len(next(iter(found.values()))):
            raise DataError(
                f"{self.data_dir}: no cell is in all modalities; write the directory again, or paired=False"
            )
        return found

    def _split(self) -> tuple[CellRowsOf, CellRowsOf]:
        """Return the cells for training and for validation, a function of the seed alone; pairs stay together."""
        train, val = {}, {}
        for modality, table in self.tables.items():
            rows = np.arange(table.n_cells) if self.pairs is None else self.pairs[modality]
            name = modality if self.pairs is None else PAIRS
            rng = np.random.default_rng(hash_integers(self.seed, hash_text(name)))
            # one cell is always left to train on
            n_held = min(int(np.ceil(self.val_fraction * len(rows))), len(rows) - 1)
            # not from the sampler's numbers: the same cells are held out whatever the epoch, rank or batch size
            order = rng.permutation(len(rows))
            train[modality] = rows[np.sort(order[n_held:])]
            val[modality] = rows[np.sort(order[:n_held])] if n_held else train[modality]
        return train, val

    def _once(self, cells: CellRowsOf | None) -> DataLoader[Batch]:
        # A plain DataLoader: Lightning rebuilds the one for prediction from its attributes.
        return DataLoader(
            self._dataset(),
            batch_size=None,
            sampler=self._sampler(cells, cycle=False, shuffle=False),
            **self._reading(),
        )

    def _reading(self) -> dict[str, Any]:
        pins = self.pin_memory
        if pins == "auto":
            device = getattr(getattr(self.trainer, "strategy", None), "root_device", None)
            pins = getattr(device, "type", "") == "cuda"
        return {"num_workers": self.num_workers, "pin_memory": bool(pins)}

    def _dataset(self) -> MultiModalDataset:
        table, sparse = self.tables.get(HIC), self.sparse is True
        if table is not None and self.sparse == "auto":
            model = getattr(self.trainer, "lightning_module", None)
            # other models need a dense x, and so do own columns: their share differs between ranks, and they become a
            # part of a sharded tensor
            takes = getattr(model, "takes_sparse_counts", False) is True and table.columns is None
            sparse = takes and is_sparse(table.n_features, table.share)
        return MultiModalDataset(self.tables, sparse=[HIC] if table is not None and sparse else [])

    def _sampler(self, cells: CellRowsOf | None, *, cycle: bool, shuffle: bool) -> StepSampler:
        # None where the strategy has one device
        replicas = (self.trainer.distributed_sampler_kwargs if self.trainer is not None else None) or {}
        strategy = getattr(self.trainer, "strategy", None)
        by_strategy = getattr(strategy, "balance_cells", False) is True
        return StepSampler(
            {modality: table.contacts for modality, table in self.tables.items()},
            self.batch_size,
            num_replicas=replicas.get("num_replicas", 1),
            rank=replicas.get("rank", 0),
            seed=self.seed,
            shuffle=shuffle,
            balance=by_strategy if self.balance is None else self.balance,
            cycle=cycle,
            cells=cells,
            paired=cycle and self.pairs is not None,
        )


def _remove(home: Path, owner: int) -> None:
    # a forked rank or worker has a copy of the data module, which may be deleted first
    if os.getpid() == owner:
        shutil.rmtree(home, ignore_errors=True)


def _no_graph(data_dir: Path, modalities: list[str]) -> str:
    return (
        f"{data_dir}: modalities {modalities!r} are related through a guidance graph, and graphs/ holds none; "
        "`lightning-amp prepare` writes it"
    )
