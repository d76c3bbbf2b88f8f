"""Define what surrounds the training of a model: its networks from data or a checkpoint, its losses, new cells."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_amp.data.batch import CellBatch, datamodule_of
from lightning_amp.data.files.directory import written_aside
from lightning_amp.data.loading.datamodule import SingleCellDataModule, is_sparse
from lightning_amp.data.loading.dataset import CellTable
from lightning_amp.errors import ModelError
from lightning_amp.models.draw_losses import draw_losses
from lightning_amp.models.graph_encoder import GraphEncoder
from lightning_amp.models.inputs import CHECKPOINT_KEY, HIC, ModelInputs, inputs_from
from lightning_amp.models.match_features import match_features
from lightning_amp.models.start_values import start_from
from lightning_amp.shapes import Counts, PerCell

if TYPE_CHECKING:
    from anndata import AnnData

HISTORY_KEY = "history"
"""Place of the losses in a checkpoint."""
RNA = "rna"
LOSSES = "losses.png"
AT_ONCE = 128
"""Cells that are encoded together."""
FIRST = ("train_loss", "val_loss")
"""First columns of the losses."""


def find_checkpoint(path: str | Path) -> Path:
    """Return a checkpoint file, or the newest one of a run's folder.

    Raises:
        ModelError: There is none.
    """
    path = Path(path)
    if path.is_file():
        return path
    if (path / ".metadata").is_file():
        raise ModelError(
            f"{path}: found a checkpoint in shards; write it as one file with `lightning-amp convert {path} --out"
            " FILE.ckpt`"
        )
    files = [file for file in [*path.glob("*.ckpt"), *path.glob("checkpoints/*.ckpt")] if file.is_file()]
    if not files:
        found = "a folder without a checkpoint" if path.is_dir() else "nothing"
        raise ModelError(
            f"{path}: expected a checkpoint (.ckpt), or the folder of a run with checkpoints/*.ckpt; found {found}"
        )
    return max(files, key=lambda file: file.stat().st_mtime)


class TrainedModel(pl.LightningModule):
    """Base class of the reference model: what is done with it before, beside and after its training."""

    inputs: ModelInputs | None
    encoders: nn.ModuleDict
    decoders: nn.ModuleDict
    graph_encoder: GraphEncoder

    def __init__(self) -> None:
        super().__init__()
        self._epochs: list[dict[str, float]] = []
        self.written: list[Path] = []  # pictures of the last fit, on rank 0

    # --- networks, from data and from checkpoints ---

    def build(self, inputs: ModelInputs) -> Self:
        """Create the networks for some data, without a trainer."""
        raise NotImplementedError

    def setup(self, stage: str) -> None:
        """Put the trainer's data in the order of the features that the networks were built for, by name."""
        if self.inputs is None:
            return
        data = datamodule_of(self._trainer)
        match_features(data, self.inputs, predicts=stage == "predict")
        if stage == "fit" and self.inputs.paired and isinstance(data, SingleCellDataModule) and data.pairs is None:
            raise ModelError(
                f"{data.data_dir}: the model was built for paired cells, and those of these data are not paired;"
                " prepare them with --paired, give SingleCellDataModule(paired=True), or train a new model"
            )

    def configure_model(self) -> None:
        """Build the networks from the trainer's data module, unless they exist."""
        # `self.trainer` raises without a Trainer, and Lightning has no public check
        if self.inputs is not None or self._trainer is None:
            return
        datamodule = datamodule_of(self.trainer)
        if datamodule is None:
            raise ModelError(
                f"{type(self).__name__} was given to a Trainer without a data module, so its sizes are unknown; pass "
                "datamodule=SingleCellDataModule(...), or call build(inputs) first"
            )
        self.build(inputs := inputs_from(datamodule))
        start_from(self.encoders, self.decoders, self.graph_encoder, inputs, datamodule)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the inputs, so that the networks can be built without the data, and the losses."""
        checkpoint[HISTORY_KEY] = self._epochs
        if self.inputs is not None:
            checkpoint[CHECKPOINT_KEY] = self.inputs.to_plain()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the networks from the checkpoint's inputs, or check that the existing inputs are equal."""
        inputs = ModelInputs.from_checkpoint(checkpoint, type(self).__name__)
        if self.inputs is None:
            self.build(inputs)
        elif (name := self.inputs.difference(inputs)) is not None:
            raise ModelError(
                f"the checkpoint was trained on other data: {name!r} differs; use the data it was trained on, "
                "or train anew"
            )
        self._epochs = [dict(row) for row in checkpoint.get(HISTORY_KEY, [])]

    # --- losses ---

    @property
    def history(self) -> pd.DataFrame:
        """Losses by epoch: `train_loss` and its terms, means over the epoch's cells, and `val_loss`; NaN if not run."""
        table = pd.DataFrame(self._epochs, columns=None if self._epochs else ["epoch"])
        return table.astype({"epoch": int}).set_index("epoch")

    def log_losses(self, terms: dict[str, Tensor], *, n_cells: int) -> None:
        """Log the terms of a step's loss, and each as `train_<term>`, the mean over the epoch and all ranks."""
        self.log("loss", terms["loss"], prog_bar=True, batch_size=n_cells)
        self.log_dict({name: term for name, term in terms.items() if name != "loss"}, batch_size=n_cells)
        named = {f"train_{name}": term for name, term in terms.items()}
        self.log_dict(named, on_step=False, on_epoch=True, sync_dist=True, batch_size=n_cells)

    def leave_uncounted(self, optimizer: LightningOptimizer) -> None:
        """Let a step of an optimizer not count as a training step: a batch with two optimizers is one step."""
        # the loop over batches sets both again before each of them
        optimizer._on_before_step = optimizer._on_after_step = _nothing

    def on_train_epoch_end(self) -> None:
        """Add the epoch's losses to `history`."""
        found = self.trainer.callback_metrics
        names = [*FIRST, *(name for name in found if name.startswith("train_") and name not in FIRST)]
        kept = {name: float(found[name]) for name in names if name in found}
        self._epochs = [row for row in self._epochs if row["epoch"] < self.current_epoch]
        self._epochs.append({"epoch": self.current_epoch, **kept})

    def on_fit_end(self) -> None:
        """Draw the losses into the folder of the run's logs, if it has one."""
        self.written = []
        if not self.trainer.loggers or not self._epochs:
            return
        folder = self.trainer.log_dir  # on every rank, because it is broadcast
        if folder is None or not self.trainer.is_global_zero:
            return
        path = Path(folder) / LOSSES
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(path) as aside:
            draw_losses(aside, self.history)
        self.written.append(path)

    # --- new cells ---

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load a trained model from a checkpoint, or from the newest one of a run's folder; on the CPU, in eval mode.

        Raises:
            ModelError: There is no checkpoint, or another model wrote it.
        """
        return cls.load_from_checkpoint(find_checkpoint(path), map_location="cpu", weights_only=True).eval()

    def encode(self, modality: str, cells: CellBatch) -> tuple[PerCell, PerCell]:
        """Return mean and standard deviation of the latents of some cells."""
        raise NotImplementedError

    def impute(self, modality: str, batch: CellBatch) -> Counts:
        """Return the expected data of some cells."""
        raise NotImplementedError

    @torch.no_grad()
    def embed(
        self,
        data: SingleCellDataModule | str | Path | None = None,
        *,
        rna: "AnnData | None" = None,
        hic: "AnnData | None" = None,
    ) -> dict[str, NDArray[np.float32]]:
        """Return the embedding of every cell, [cell, dim] by modality, in the order of the data.

        Features are compared by name, as in `predict`; what the model has not seen of the batches is a warning.

        Args:
            data: A data module, or a data directory, such as `lightning-amp prepare --like OLD` writes for new cells.
            rna, hic: Instead of `data`, AnnData with raw counts of the model's genes, or bins and strata.

        Raises:
            ModelError: Features are missing, or the model has no networks yet.
            DataError: The data cannot be read.
        """
        found = {}
        for name, table in self._tables(data, rna=rna, hic=hic).items():
            parts = [self.encode(name, cells)[0].float().cpu().numpy() for cells in self.batches_of(table)]
            found[name] = np.concatenate(parts)
        return found

    def get_latent_representation(self, adata: "AnnData", modality: str | None = None) -> NDArray[np.float32]:
        """Return `embed` of one AnnData, [cell, dim], for code written for scvi-tools; it is found which modality."""
        name = modality or self._modality_of(adata)
        return self.embed(**{name: adata})[name]

    @torch.no_grad()
    def get_normalized_expression(self, adata: "AnnData", *, library_size: float = 1.0) -> pd.DataFrame:
        """Return the expected expression of RNA cells, [cell, gene], where each cell sums to `library_size`."""
        table = self._tables(None, rna=adata)[RNA]
        expected = np.concatenate([self.impute(RNA, cells).float().cpu().numpy() for cells in self.batches_of(table)])
        shares = expected * (library_size / expected.sum(axis=1, keepdims=True))
        assert self.inputs is not None, "there are no tables without inputs"
        return pd.DataFrame(shares, index=adata.obs_names, columns=self.inputs.modalities[RNA].features)

    def _tables(
        self, data: SingleCellDataModule | str | Path | None, **objects: "AnnData | None"
    ) -> dict[str, CellTable]:
        """Read cells, with the features and the batches in the order of the model."""
        given = {name: value for name, value in objects.items() if value is not None}
        if (data is None) == (not given):
            raise ModelError(
                f"{type(self).__name__}.embed takes a data module or directory, or AnnData by name, rna= and hic=;"
                f" given are {'both' if given else 'neither'}"
            )
        if self.inputs is None:
            raise ModelError(f"{type(self).__name__} has no networks yet; fit it, or load a checkpoint")
        modules: list[SingleCellDataModule]
        if data is None:
            # each by itself, because the guidance graph between them is the model's
            modules = [SingleCellDataModule.from_anndata(**{name: value}) for name, value in given.items()]
        else:
            modules = [data if isinstance(data, SingleCellDataModule) else SingleCellDataModule(data)]
        found: dict[str, CellTable] = {}
        for module in modules:
            module.setup("predict")
            match_features(module, self.inputs, predicts=True)
            found |= module.tables
        return found

    def batches_of(self, table: CellTable, rows: NDArray[np.int64] | None = None) -> Iterator[CellBatch]:
        """Yield some or all cells of a table in order, on the model's device, with the model in eval mode."""
        few = is_sparse(table.n_features, table.share)
        sparse, training = table.modality == HIC and few, [part for part in self.modules() if part.training]
        self.eval()
        try:
            wanted = np.arange(table.n_cells) if rows is None else rows
            for _, cells in table.batches_of(wanted, AT_ONCE, sparse=sparse):
                yield move_data_to_device(cells, self.device)
        finally:
            for part in training:
                part.training = True

    def _modality_of(self, adata: "AnnData") -> str:
        """Return the modality of which the most names of features are in an AnnData."""
        modalities = {} if self.inputs is None else self.inputs.modalities
        shared = {name: int(adata.var_names.isin(m.features or []).sum()) for name, m in modalities.items()}
        best = max(shared, key=lambda name: shared[name], default="")
        if not shared.get(best):
            raise ModelError(
                f"no feature of this AnnData, such as {adata.var_names[:3].tolist()!r}, is one of the model's"
                f" {list(modalities)!r}; name the modality, and set var_names to the model's names"
            )
        return best


def _nothing() -> None:
    pass
