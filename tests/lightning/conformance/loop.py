"""Rows of the conformance matrix: the Trainer's loops, limits and precisions."""

from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from torch import Tensor

from tests.lightning.conformance import cases

cases.fits("fit", plans=cases.EVERY)


@cases.feature("validate", checked="logged loss")
def validate(site: cases.Site) -> cases.Outcome:
    (found,) = site.trainer().validate(cases.Tiny(), site.loader(), verbose=False)
    return dict(found)


@cases.feature("test", checked="logged loss")
def test(site: cases.Site) -> cases.Outcome:
    (found,) = site.trainer().test(cases.Tiny(), site.loader(), verbose=False)
    return dict(found)


@cases.feature("predict", checked="the embedding of every cell, gathered from the ranks")
def predict(site: cases.Site) -> cases.Outcome:
    found = site.trainer().predict(cases.Tiny(), site.loader())
    rows = sorted(row for part in site.gather(found) for batch in part for row in batch)
    return {"cells": [cell for cell, _ in rows], "latent": torch.tensor([row for _, row in rows])}


@cases.feature(
    "fit, test and predict with one Trainer, then fit on", checked=cases.TRAINED + ", logged loss", plans=cases.EVERY
)
def one_trainer(site: cases.Site) -> cases.Outcome:
    module, trainer = cases.Tiny(), site.trainer(max_epochs=1)
    trainer.fit(module, site.loader())
    (found,) = trainer.test(module, site.loader(), verbose=False)
    predicted = trainer.predict(module, site.loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, site.loader())
    return cases.trained(site, module) | found | {"batches": len(predicted or [])}


cases.fits("fast_dev_run", trainer={"fast_dev_run": 2, "limit_val_batches": 1}, checked=cases.TRAINED + ", steps taken")
cases.fits("overfit_batches", trainer={"overfit_batches": 2})


class Counting(cases.Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.counts = {"val": 0, "test": 0}

    def validation_step(self, batch: cases.Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.counts["val"] += 1
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: cases.Batch, batch_idx: int) -> None:
        self.counts["test"] += 1
        super().test_step(batch, batch_idx)


@cases.feature(
    "limit_{train,val,test}_batches, whole and as a fraction", checked=cases.TRAINED + ", batches of each kind"
)
def limits(site: cases.Site) -> cases.Outcome:
    module = Counting()
    trainer = site.trainer(limit_train_batches=3, limit_val_batches=0.5, limit_test_batches=0.25)
    trainer.fit(module, site.loader(), site.loader(seed=9))
    trainer.test(module, site.loader(), verbose=False)
    return cases.trained(site, module) | module.counts


@cases.feature("sanity check", checked=cases.TRAINED + ", validation batches")
def sanity(site: cases.Site) -> cases.Outcome:
    module = Counting()
    site.trainer(num_sanity_val_steps=2, max_epochs=1).fit(module, site.loader(), site.loader(seed=9))
    return cases.trained(site, module) | module.counts


@cases.feature("val_check_interval, check_val_every_n_epoch", checked=cases.TRAINED + ", validation batches")
def validation_times(site: cases.Site) -> cases.Outcome:
    module = Counting()
    trainer = site.trainer(val_check_interval=2, check_val_every_n_epoch=2)
    trainer.fit(module, site.loader(), site.loader(seed=9))
    return cases.trained(site, module) | module.counts


cases.fits("max_steps, max_time", trainer={"max_steps": 3, "max_time": {"hours": 1}})


@cases.feature("barebones")
def barebones(site: cases.Site) -> cases.Outcome:
    options: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps"), None
    )
    return cases.fit(site, barebones=True, **options)


@cases.feature("detect_anomaly, deterministic")
def anomaly(site: cases.Site) -> cases.Outcome:
    try:
        return cases.fit(site, detect_anomaly=True, deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)


def _validated(site: cases.Site, *, inference_mode: bool) -> cases.Outcome:
    module = cases.Tiny()
    trainer = site.trainer(inference_mode=inference_mode)
    trainer.fit(module, site.loader(), site.loader(seed=9))
    return cases.trained(site, module) | {"val_loss": trainer.callback_metrics["val_loss"]}


for word, on in (("on", True), ("off", False)):
    cases.feature(f"inference_mode {word}", checked=cases.TRAINED + ", logged loss")(
        lambda site, on=on: _validated(site, inference_mode=on)
    )


def _profiled(site: cases.Site, profiler: Any, word: str = "training_step") -> cases.Outcome:
    found = cases.fit(site, profiler=profiler, max_epochs=1, limit_train_batches=3)
    texts = [file.read_text() for file in sorted(site.folder.glob("*profile*"))]
    return found | {"recorded": any(word in text for text in texts)}


RECORDED = cases.TRAINED + "; the file has the training steps"


for kind in (SimpleProfiler, AdvancedProfiler):
    cases.feature(kind.__name__, checked=RECORDED)(
        lambda site, kind=kind: _profiled(site, kind(dirpath=site.folder, filename="profile"))
    )


@cases.feature(
    "PyTorchProfiler",
    checked=cases.TRAINED + "; the file has operators",
    refused={cases.WIDE: "it has PyTorchProfiler's hooks"},
    note="it hangs hooks on every module, also on those that a plan replaces: see the next row",
)
def pytorch_profiler(site: cases.Site) -> cases.Outcome:
    return _profiled(site, _pytorch_profiler(site, names=True), "aten::linear")


@cases.feature(
    "PyTorchProfiler(record_module_names=False)",
    checked=cases.TRAINED + "; the file has operators",
    plans=(cases.WIDE, cases.NODES),
)
def pytorch_profiler_without_names(site: cases.Site) -> cases.Outcome:
    return _profiled(site, _pytorch_profiler(site, names=False), "aten::linear")


def _pytorch_profiler(site: cases.Site, *, names: bool) -> PyTorchProfiler:
    return PyTorchProfiler(
        dirpath=str(site.folder), filename="profile", export_to_chrome=False, row_limit=-1, record_module_names=names
    )


def _precision(name: str, precision: str, **options: Any) -> None:
    def run(site: cases.Site) -> cases.Outcome:
        return {name: value.double() for name, value in cases.fit(site, precision=precision).items()}

    cases.feature(f"precision {name}", plans=cases.EVERY, **options)(run)


_precision("32", "32-true", rtol=1e-4)


@cases.feature("precision 64-true", checked=cases.TRAINED + ", types", plans=cases.EVERY)
def precision_64(site: cases.Site) -> cases.Outcome:
    module = cases.Tiny()
    site.trainer(precision="64-true").fit(module, site.loader())
    return cases.trained(site, module) | {"types": sorted({str(p.dtype) for p in module.parameters()})}


_precision("bf16-mixed", "bf16-mixed", rtol=2e-2, note="which is the rounding of bfloat16")
_precision("bf16-true", "bf16-true", rtol=5e-2, note="which is the rounding of bfloat16")


@cases.feature(
    "precision 16-mixed (loss scaling)",
    plans=cases.EVERY,
    rtol=2e-2,
    refused={cases.WIDE: "precision='16-mixed' is not supported: its loss scaling skips steps rank by rank"},
    note="with the CPU's gradient scaler; S2 refuses, for an overflow in one shard would part the ranks",
)
def precision_16_mixed(site: cases.Site) -> cases.Outcome:
    # made by hand, for on a CPU Lightning takes bfloat16 instead
    plugin = MixedPrecision("16-mixed", "cpu")
    module = cases.Tiny()
    site.trainer(precision=None, plugins=[plugin]).fit(module, site.loader())
    found = {name: value.double() for name, value in cases.trained(site, module).items()}
    return found | {"scale": plugin.scaler.get_scale()}  # type: ignore[union-attr]


class Logging(cases.Tiny):
    def training_step(self, batch: cases.Batch, batch_idx: int) -> Tensor:
        n = len(batch["x"])
        cells = batch["cell"].double()
        for reduce_fx, value in (("mean", cells.mean()), ("sum", cells.sum()), ("max", cells.max())):
            options: dict[str, Any] = {"reduce_fx": reduce_fx, "sync_dist": True, "batch_size": n}
            self.log(f"cells_{reduce_fx}", value, on_step=False, on_epoch=True, **options)
        return super().training_step(batch, batch_idx)


@cases.feature(
    "self.log with sync_dist: mean, sum, max", checked="what the Trainer holds after the run", plans=cases.EVERY
)
def logging(site: cases.Site) -> cases.Outcome:
    trainer = site.trainer()
    trainer.fit(Logging(), site.loader())
    return {name: value.double() for name, value in trainer.callback_metrics.items()}
