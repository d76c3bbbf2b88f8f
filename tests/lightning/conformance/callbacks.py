"""Rows of the conformance matrix: callbacks, checkpoints, tuners and loggers."""

import csv
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BasePredictionWriter,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn

from lightning_amp.errors import AmpError
from lightning_amp.lightning.consistency import replicas as save_guard
from tests.lightning.conformance import cases


@cases.feature("EarlyStopping", checked=cases.TRAINED + ", the epoch that it stops at")
def early_stopping(site: cases.Site) -> cases.Outcome:
    stop = EarlyStopping("val_loss", mode="max", patience=1)
    found = cases.fit(site, max_epochs=6, limit_val_batches=2, callbacks=[stop])
    return found | {"stopped": stop.stopped_epoch, "best": stop.best_score}


def checkpoint(path: Path | str) -> cases.Outcome:
    """What a checkpoint file holds of the model and its optimisers."""
    read = torch.load(path, weights_only=True)
    found = {f"file {name}": value for name, value in read["state_dict"].items()}
    for number, optimizer in enumerate(read.get("optimizer_states", [])):
        for index, state in optimizer["state"].items():
            found |= {f"optimiser {number} {index} {name}": value for name, value in state.items()}
        found[f"optimiser {number} groups"] = str(optimizer["param_groups"])
    return found | {"steps": read["global_step"]}


@cases.feature("ModelCheckpoint: top-k by a monitored loss, last", checked="files, scores, contents", plans=cases.EVERY)
def top_k(site: cases.Site) -> cases.Outcome:
    saver = ModelCheckpoint(site.folder, filename="{epoch}-{step}", monitor="val_loss", save_top_k=2, save_last=True)
    cases.fit(site, max_epochs=4, limit_val_batches=2, callbacks=[saver], enable_checkpointing=True)
    files = sorted(file.name for file in site.folder.glob("*.ckpt"))
    scores = sorted(value.item() for value in saver.best_k_models.values())
    found = {"files": files, "scores": torch.tensor(scores), "best": Path(saver.best_model_path).name}
    return found | checkpoint(saver.best_model_path) | checkpoint(site.folder / "last.ckpt")


@cases.feature("resuming from ckpt_path", plans=cases.EVERY)
def resumed(site: cases.Site) -> cases.Outcome:
    saver = ModelCheckpoint(site.folder, filename="{epoch}", save_top_k=-1)
    cases.fit(site, callbacks=[saver], enable_checkpointing=True)
    module = cases.Tiny()
    site.trainer(max_epochs=4).fit(module, site.loader(), ckpt_path=site.folder / "epoch=1.ckpt")
    return cases.trained(site, module)


@cases.feature(
    "save_checkpoint on every rank, load_from_checkpoint", checked="contents, loaded parameters", plans=cases.EVERY
)
def saved_by_hand(site: cases.Site) -> cases.Outcome:
    module, trainer = cases.Tiny(), site.trainer()
    trainer.fit(module, site.loader())
    path = site.folder / "hand.ckpt"
    trainer.save_checkpoint(path)
    loaded = cases.Tiny.load_from_checkpoint(path).state_dict()
    return checkpoint(path) | {f"loaded {name}": value for name, value in loaded.items()}


ALONE = "rank 0 saves a checkpoint, and ranks [1] did not within"


@cases.feature(
    "save_checkpoint on rank 0 alone",
    checked="contents, where there is one rank",
    against="one",
    plans=cases.EVERY,
    refused={"2": ALONE, cases.WIDE: ALONE, cases.STRATA: ALONE, cases.NODES: ALONE},
    note="under ddp it waits for ever",
)
def saved_alone(site: cases.Site) -> cases.Outcome:
    trainer, patience, told = site.trainer(max_epochs=1), save_guard.PATIENCE_S, ""
    trainer.fit(cases.Tiny(), site.loader())
    save_guard.PATIENCE_S = 0.3
    try:
        if site.rank == 0:
            trainer.save_checkpoint(site.folder / "alone.ckpt")
    except AmpError as error:
        told = str(error)
    finally:
        save_guard.PATIENCE_S = patience
    told = site.gather(told)[0]
    if told:
        raise AmpError(told)
    trainer.save_checkpoint(site.folder / "together.ckpt")
    return checkpoint(site.folder / "together.ckpt")


@cases.feature("checkpoints in the middle of an epoch", checked="files, contents of the last", plans=cases.EVERY)
def saved_within(site: cases.Site) -> cases.Outcome:
    saver = ModelCheckpoint(site.folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    cases.fit(site, callbacks=[saver], enable_checkpointing=True)
    files = sorted(file.name for file in site.folder.glob("*.ckpt"))
    return {"files": files} | checkpoint(site.folder / files[-1])


@cases.feature("AsyncCheckpointIO", checked="contents")
def saved_aside(site: cases.Site) -> cases.Outcome:
    saver = ModelCheckpoint(site.folder, filename="{epoch}", save_top_k=-1)
    cases.fit(site, callbacks=[saver], enable_checkpointing=True, plugins=[AsyncCheckpointIO()])
    site.gather(None)
    return checkpoint(site.folder / "epoch=1.ckpt")


def _double() -> cases.Tiny:
    """Lightning copies the module for averaging before it converts it to the Trainer's precision."""
    return cases.Tiny().double()


BUFFERS = "it copies buffers too, and the plan has replaced some"
AVERAGED = "is not supported: it averages whole parameters, and S2 has sharded"


cases.fits(
    "StochasticWeightAveraging",
    _double,
    trainer=lambda: {"max_epochs": 4, "callbacks": [StochasticWeightAveraging(1e-2, swa_epoch_start=1)]},
    checked=cases.TRAINED + ", averaged",
    plans=cases.EVERY,
    refused={cases.WIDE: AVERAGED},
)
cases.fits(
    "WeightAveraging",
    _double,
    trainer=lambda: {"callbacks": [WeightAveraging()]},
    checked=cases.TRAINED + ", averaged",
    plans=cases.EVERY,
    refused={cases.WIDE: AVERAGED, cases.NODES: BUFFERS},
)


@cases.feature(
    "EMAWeightAveraging, with validation and checkpoints",
    checked=cases.TRAINED + ", averaged; contents of the file",
    plans=cases.EVERY,
    refused={cases.WIDE: AVERAGED, cases.NODES: BUFFERS},
)
def ema(site: cases.Site) -> cases.Outcome:
    saver = ModelCheckpoint(site.folder, filename="{epoch}", save_top_k=-1)
    options: dict[str, Any] = {"limit_val_batches": 2, "enable_checkpointing": True}
    found = cases.fit(site, _double(), callbacks=[EMAWeightAveraging(decay=0.8), saver], **options)
    return found | checkpoint(site.folder / "epoch=1.ckpt")


class Backbone(cases.Tiny):
    """With a layer under the name that BackboneFinetuning wants."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(cases.CASE.dim, cases.CASE.dim)

    def encode(self, batch: cases.Batch) -> Tensor:
        return self.backbone(super().encode(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


@cases.feature("BackboneFinetuning: layers unfrozen in the middle", against="one")
def finetuning(site: cases.Site) -> cases.Outcome:
    thaw = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01, verbose=False)
    return cases.fit(site, Backbone(), max_epochs=3, callbacks=[thaw])


cases.fits(
    "ModelPruning",
    _double,
    trainer=lambda: {"callbacks": [ModelPruning("l1_unstructured", amount=0.3)]},
    plans=cases.EVERY,
    refused=dict.fromkeys(cases.EVERY, "ModelPruning is not supported: it has chosen its layers already"),
)


def logged(folder: Path) -> list[dict[str, str]]:
    (file,) = folder.rglob("metrics.csv")
    with file.open() as lines:
        return list(csv.DictReader(lines))


@cases.feature("LearningRateMonitor, CSVLogger", checked="every rate in the file")
def rates(site: cases.Site) -> cases.Outcome:
    logger = CSVLogger(site.folder)
    cases.fit(site, callbacks=[LearningRateMonitor("step")], logger=logger, log_every_n_steps=1)
    site.gather(None)
    return {"rates": [row["lr-SGD"] for row in logged(site.folder)]}


@cases.feature("DeviceStatsMonitor", checked=cases.TRAINED + "; the file has the host's memory")
def device_stats(site: cases.Site) -> cases.Outcome:
    logger = CSVLogger(site.folder)
    found = cases.fit(site, callbacks=[DeviceStatsMonitor(cpu_stats=True)], logger=logger, log_every_n_steps=1)
    site.gather(None)
    return found | {"memory": any("cpu_vm_percent" in name for name in logged(site.folder)[0])}


@cases.feature(
    "LR finder: Tuner.lr_find",
    checked="rates tried, losses, the suggestion; the module is as before",
    against="ddp",
    note="the losses are those of a rank's own cells, as under ddp",
)
def lr_find(site: cases.Site) -> cases.Outcome:
    module, trainer = cases.Tiny(), site.trainer()
    options: dict[str, Any] = {"num_training": 12, "min_lr": 1e-3, "max_lr": 0.3, "early_stop_threshold": None}
    found = Tuner(trainer).lr_find(module, site.loader(), **options)
    assert found is not None
    losses = torch.tensor(found.results["loss"], dtype=torch.float64)
    suggestion = found.suggestion(skip_begin=1, skip_end=1)
    start = cases.Tiny().state_dict()
    same = all(torch.equal(value, start[name].to(value.dtype)) for name, value in module.state_dict().items())
    rates = torch.tensor(found.results["lr"], dtype=torch.float64)
    return {"rates": rates, "losses": losses, "suggestion": suggestion, "as before": same}


@cases.feature("LR finder: LearningRateFinder", checked=cases.TRAINED + ", the rate that was found")
def lr_finder(site: cases.Site) -> cases.Outcome:
    module = cases.Tiny()
    finder = LearningRateFinder(min_lr=1e-3, max_lr=0.3, num_training_steps=14, early_stop_threshold=None)
    return cases.fit(site, module, callbacks=[finder]) | {"lr": module.lr}


TUNED = "Tuning the batch size is currently not supported with distributed strategies"


@cases.feature(
    "batch-size scaler: Tuner.scale_batch_size",
    checked="the refusal",
    against="one",
    refused={"1": TUNED, "2": TUNED, cases.WIDE: TUNED},
    note="Lightning's own refusal of all distributed strategies; `lightning_amp.plan(...).largest_batch()` answers it",
)
def scale_batch_size(site: cases.Site) -> cases.Outcome:
    Tuner(site.trainer()).scale_batch_size(cases.Tiny(), site.loader(), max_trials=1)
    return {}


class Writer(BasePredictionWriter):
    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        torch.save(predictions, Path(trainer.default_root_dir) / f"part{trainer.global_rank}.pt")


@cases.feature("BasePredictionWriter", checked="what the ranks of the data axis have written")
def writer(site: cases.Site) -> cases.Outcome:
    site.trainer(callbacks=[Writer("epoch")]).predict(cases.Tiny(), site.loader(), return_predictions=False)
    site.gather(None)
    files = sorted(site.folder.glob("part*.pt"))[:: site.model_ranks]
    rows = sorted(row for file in files for batch in torch.load(file) for row in batch)
    return {"cells": [cell for cell, _ in rows], "latent": torch.tensor([row for _, row in rows])}


class Fails(Callback):
    def __init__(self, error: type[BaseException]) -> None:
        self.error = error
        self.told: list[str] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            raise self.error("on purpose")

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.told.append(type(exception).__name__)


@cases.feature("OnExceptionCheckpoint", checked="contents")
def saved_on_exception(site: cases.Site) -> cases.Outcome:
    saver = OnExceptionCheckpoint(site.folder, "failed")
    try:
        cases.fit(site, callbacks=[Fails(ArithmeticError), saver], enable_checkpointing=True)
    except ArithmeticError:
        return checkpoint(site.folder / "failed.ckpt")
    return {"failed": False}
