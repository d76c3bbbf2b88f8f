"""Rows of the conformance matrix: the blocks of any module, as stages of a pipeline on the model axis."""

from pathlib import Path
from typing import Any

import torch
import torchmetrics
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BackboneFinetuning, EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from tests.lightning.conformance import cases
from tests.lightning.conformance.callbacks import checkpoint

ONLY: dict[str, Any] = {"plans": (cases.PIPELINE,)}


class Layered(cases.Tiny):
    """A list of blocks instead of a decoder, a layer that is used before and after them, and values of each epoch."""

    def __init__(self, *blocks: nn.Module) -> None:
        LightningModule.__init__(self)
        torch.manual_seed(4)
        self.lr, self.losses, self.seen = 0.05, [], torchmetrics.MeanMetric()
        self.encoder = nn.Linear(cases.N_FEATURES, 8)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()) for _ in range(4)), *blocks
        )

    def loss(self, batch: cases.Batch) -> Tensor:
        h = self.blocks(self.encode(batch))
        return (h @ self.encoder.weight - batch["x"]).square().mean()

    def training_step(self, batch: cases.Batch, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        self.seen(loss.detach())
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        cells, n = batch["cell"].double(), len(batch["x"])
        for reduce_fx, value in (("mean", cells.mean()), ("sum", cells.sum()), ("max", cells.max())):
            options: dict[str, Any] = {"reduce_fx": reduce_fx, "sync_dist": True, "batch_size": n}
            self.log(f"cells_{reduce_fx}", value, on_step=False, on_epoch=True, **options)
        return loss

    def predict_step(self, batch: cases.Batch, batch_idx: int) -> Any:
        return self.blocks(self.encode(batch))


class Spread(nn.Module):
    """Most of its bytes are of its samples, so that it takes less in chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x.unsqueeze(-1) * self.weight).tanh().mean(-1)


cases.fits("stages: fit", Layered, plans=(cases.PIPELINE, cases.RECOMPUTED))


@cases.feature(
    "stages: fit, validate, test and predict with one Trainer", checked=cases.TRAINED + ", logged loss", **ONLY
)
def evaluated(site: cases.Site) -> cases.Outcome:
    module, trainer = Layered(), site.trainer(max_epochs=1, num_sanity_val_steps=2)
    trainer.fit(module, site.loader(), site.loader(seed=9))
    (valid,) = trainer.validate(module, site.loader(), verbose=False)
    (tested,) = trainer.test(module, site.loader(), verbose=False)
    found = torch.cat(trainer.predict(module, site.loader()))  # type: ignore[arg-type]
    # of two ranks of the data axis each has its own cells
    predicted = torch.stack(site.gather(found.square().mean())).mean()
    return cases.trained(site, module) | valid | tested | {"predicted": predicted}


cases.fits(
    "stages: accumulation and clipping by the global norm",
    Layered,
    trainer={"accumulate_grad_batches": 3, "gradient_clip_val": 0.02},
    **ONLY,
)
cases.fits(
    "stages: clipping by value",
    Layered,
    trainer={"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"},
    **ONLY,
)


@cases.feature("stages: self.log with sync_dist, and a metric", checked="what the Trainer holds after the run", **ONLY)
def logged(site: cases.Site) -> cases.Outcome:
    trainer = site.trainer()
    trainer.fit(Layered(), site.loader())
    return {name: value.double() for name, value in trainer.callback_metrics.items()}


@cases.feature("stages: ModelCheckpoint, EarlyStopping", checked="contents, the epoch that it stops at", **ONLY)
def saved(site: cases.Site) -> cases.Outcome:
    stop = EarlyStopping("val_loss", mode="max", patience=1)
    saver = ModelCheckpoint(site.folder, monitor="val_loss", filename="best")
    callbacks = [stop, saver]
    found = cases.fit(
        site, Layered(), max_epochs=6, limit_val_batches=2, callbacks=callbacks, enable_checkpointing=True
    )
    return found | checkpoint(saver.best_model_path) | {"stopped": stop.stopped_epoch}


@cases.feature("stages: resuming from ckpt_path", **ONLY)
def resumed(site: cases.Site) -> cases.Outcome:
    saver = ModelCheckpoint(site.folder, filename="{epoch}", save_top_k=-1)
    cases.fit(site, Layered(), callbacks=[saver], enable_checkpointing=True)
    module = Layered()
    path = next(Path(site.folder).glob("epoch=0*.ckpt"))
    site.trainer().fit(module, site.loader(), ckpt_path=str(path))
    return cases.trained(site, module)


class Thawed(Layered):
    @property
    def backbone(self) -> nn.Module:
        return self.encoder


@cases.feature("stages: BackboneFinetuning", against="one", **ONLY)
def thawed(site: cases.Site) -> cases.Outcome:
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01)
    return cases.fit(site, Thawed(), callbacks=[callback], max_epochs=3)


@cases.feature("stages: precision bf16-mixed", rtol=2e-2, **ONLY)
def half(site: cases.Site) -> cases.Outcome:
    return {name: value.double() for name, value in cases.fit(site, Layered(), precision="bf16-mixed").items()}


@cases.feature(
    "stages: precision 16-mixed (loss scaling)",
    refused={cases.PIPELINE: "before the loss is scaled"},
    rtol=2e-2,
    **ONLY,
)
def scaled(site: cases.Site) -> cases.Outcome:
    module = Layered()
    site.trainer(precision=None, plugins=[MixedPrecision("16-mixed", "cpu")]).fit(module, site.loader())
    return {name: value.double() for name, value in cases.trained(site, module).items()}


cases.fits(
    "stages: BatchNorm",
    lambda: Layered(nn.BatchNorm1d(8)),
    against="one",
    refused={cases.PIPELINE: "BatchNorm layers"},
    **ONLY,
)


class ByHand(Layered):
    automatic_optimization = False

    def training_step(self, batch: cases.Batch, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


cases.fits("stages: manual optimisation", ByHand, refused={cases.PIPELINE: "automatic_optimization=False"}, **ONLY)
cases.fits(
    "stages: StochasticWeightAveraging",
    Layered,
    trainer=lambda: {"max_epochs": 3, "callbacks": [StochasticWeightAveraging(0.01)]},
    refused={cases.PIPELINE: "StochasticWeightAveraging"},
    **ONLY,
)


class Quasinewton(Layered):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


@cases.feature("stages: LBFGS", against="one", rtol=1e-7, refused={cases.PIPELINE: "depends on all parameters"}, **ONLY)
def quasinewton(site: cases.Site) -> cases.Outcome:
    return cases.fit(site, Quasinewton(), max_epochs=1)
