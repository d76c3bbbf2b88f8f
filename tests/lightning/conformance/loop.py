"""Rows of the conformance matrix: the Trainer's loops, limits and precisions."""

from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from torch import Tensor

from tests.lightning.conformance.cases import (
    EVERY,
    NODES,
    TRAINED,
    WIDE,
    Batch,
    Outcome,
    Site,
    Tiny,
    feature,
    fit,
    fits,
    trained,
)

fits("fit", plans=EVERY)


@feature("validate", checked="logged loss")
def validate(site: Site) -> Outcome:
    (found,) = site.trainer().validate(Tiny(), site.loader(), verbose=False)
    return dict(found)


@feature("test", checked="logged loss")
def test(site: Site) -> Outcome:
    (found,) = site.trainer().test(Tiny(), site.loader(), verbose=False)
    return dict(found)


@feature("predict", checked="the embedding of every cell, gathered from the ranks")
def predict(site: Site) -> Outcome:
    found = site.trainer().predict(Tiny(), site.loader())
    rows = sorted(row for part in site.gather(found) for batch in part for row in batch)
    return {"cells": [cell for cell, _ in rows], "latent": torch.tensor([row for _, row in rows])}


@feature("fit, test and predict with one Trainer, then fit on", checked=TRAINED + ", logged loss", plans=EVERY)
def one_trainer(site: Site) -> Outcome:
    module, trainer = Tiny(), site.trainer(max_epochs=1)
    trainer.fit(module, site.loader())
    (found,) = trainer.test(module, site.loader(), verbose=False)
    predicted = trainer.predict(module, site.loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, site.loader())
    return trained(site, module) | found | {"batches": len(predicted or [])}


fits("fast_dev_run", trainer={"fast_dev_run": 2, "limit_val_batches": 1}, checked=TRAINED + ", steps taken")
fits("overfit_batches", trainer={"overfit_batches": 2})


class Counting(Tiny):
    """Counts validation and test batches."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"val": 0, "test": 0}

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.counts["val"] += 1
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.counts["test"] += 1
        super().test_step(batch, batch_idx)


@feature("limit_{train,val,test}_batches, whole and as a fraction", checked=TRAINED + ", batches of each kind")
def limits(site: Site) -> Outcome:
    module = Counting()
    trainer = site.trainer(limit_train_batches=3, limit_val_batches=0.5, limit_test_batches=0.25)
    trainer.fit(module, site.loader(), site.loader(seed=9))
    trainer.test(module, site.loader(), verbose=False)
    return trained(site, module) | module.counts


@feature("sanity check", checked=TRAINED + ", validation batches")
def sanity(site: Site) -> Outcome:
    module = Counting()
    site.trainer(num_sanity_val_steps=2, max_epochs=1).fit(module, site.loader(), site.loader(seed=9))
    return trained(site, module) | module.counts


@feature("val_check_interval, check_val_every_n_epoch", checked=TRAINED + ", validation batches")
def validation_times(site: Site) -> Outcome:
    module = Counting()
    trainer = site.trainer(val_check_interval=2, check_val_every_n_epoch=2)
    trainer.fit(module, site.loader(), site.loader(seed=9))
    return trained(site, module) | module.counts


fits("max_steps, max_time", trainer={"max_steps": 3, "max_time": {"hours": 1}})


@feature("barebones")
def barebones(site: Site) -> Outcome:
    options: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps"), None
    )
    return fit(site, barebones=True, **options)


@feature("detect_anomaly, deterministic")
def anomaly(site: Site) -> Outcome:
    try:
        return fit(site, detect_anomaly=True, deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)


def _validated(site: Site, *, inference_mode: bool) -> Outcome:
    module = Tiny()
    trainer = site.trainer(inference_mode=inference_mode)
    trainer.fit(module, site.loader(), site.loader(seed=9))
    return trained(site, module) | {"val_loss": trainer.callback_metrics["val_loss"]}


for word, on in (("on", True), ("off", False)):
    feature(f"inference_mode {word}", checked=TRAINED + ", logged loss")(
        lambda site, on=on: _validated(site, inference_mode=on)
    )


def _profiled(site: Site, profiler: Any, word: str = "training_step") -> Outcome:
    found = fit(site, profiler=profiler, max_epochs=1, limit_train_batches=3)
    texts = [file.read_text() for file in sorted(site.folder.glob("*profile*"))]
    return found | {"recorded": any(word in text for text in texts)}


RECORDED = TRAINED + "; the file has the training steps"


for kind in (SimpleProfiler, AdvancedProfiler):
    feature(kind.__name__, checked=RECORDED)(
        lambda site, kind=kind: _profiled(site, kind(dirpath=site.folder, filename="profile"))
    )


@feature(
    "PyTorchProfiler",
    checked=TRAINED + "; the file has operators",
    refused={WIDE: "it has PyTorchProfiler's hooks"},
    note="it hangs hooks on every module, also on those that a plan replaces: see the next row",
)
def pytorch_profiler(site: Site) -> Outcome:
    return _profiled(site, _pytorch_profiler(site, names=True), "aten::linear")


@feature(
    "PyTorchProfiler(record_module_names=False)", checked=TRAINED + "; the file has operators", plans=(WIDE, NODES)
)
def pytorch_profiler_without_names(site: Site) -> Outcome:
    return _profiled(site, _pytorch_profiler(site, names=False), "aten::linear")


def _pytorch_profiler(site: Site, *, names: bool) -> PyTorchProfiler:
    return PyTorchProfiler(
        dirpath=str(site.folder), filename="profile", export_to_chrome=False, row_limit=-1, record_module_names=names
    )


def _precision(name: str, precision: str, **options: Any) -> None:
    def run(site: Site) -> Outcome:
        return {name: value.double() for name, value in fit(site, precision=precision).items()}

    feature(f"precision {name}", plans=EVERY, **options)(run)


_precision("32", "32-true", rtol=1e-4)


@feature("precision 64-true", checked=TRAINED + ", types", plans=EVERY)
def precision_64(site: Site) -> Outcome:
    module = Tiny()
    site.trainer(precision="64-true").fit(module, site.loader())
    return trained(site, module) | {"types": sorted({str(p.dtype) for p in module.parameters()})}


_precision("bf16-mixed", "bf16-mixed", rtol=2e-2, note="which is the rounding of bfloat16")
_precision("bf16-true", "bf16-true", rtol=5e-2, note="which is the rounding of bfloat16")


@feature(
    "precision 16-mixed (loss scaling)",
    plans=EVERY,
    rtol=2e-2,
    refused={WIDE: "precision='16-mixed' is not supported: its loss scaling skips steps rank by rank"},
    note="with the CPU's gradient scaler; S2 refuses, for an overflow in one shard would part the ranks",
)
def precision_16_mixed(site: Site) -> Outcome:
    # made by hand, for on a CPU Lightning takes bfloat16 instead
    plugin = MixedPrecision("16-mixed", "cpu")
    module = Tiny()
    site.trainer(precision=None, plugins=[plugin]).fit(module, site.loader())
    found = {name: value.double() for name, value in trained(site, module).items()}
    return found | {"scale": plugin.scaler.get_scale()}  # type: ignore[union-attr]


class Logging(Tiny):
    """Logs what is reduced over ranks in every way."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        n = len(batch["x"])
        cells = batch["cell"].double()
        for reduce_fx, value in (("mean", cells.mean()), ("sum", cells.sum()), ("max", cells.max())):
            options: dict[str, Any] = {"reduce_fx": reduce_fx, "sync_dist": True, "batch_size": n}
            self.log(f"cells_{reduce_fx}", value, on_step=False, on_epoch=True, **options)
        return super().training_step(batch, batch_idx)


@feature("self.log with sync_dist: mean, sum, max", checked="what the Trainer holds after the run", plans=EVERY)
def logging(site: Site) -> Outcome:
    trainer = site.trainer()
    trainer.fit(Logging(), site.loader())
    return {name: value.double() for name, value in trainer.callback_metrics.items()}
