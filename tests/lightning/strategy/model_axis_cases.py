"""What the ranks of test_model_axis.py run: the reference model and a small module with automatic optimisation."""

import contextlib
import logging
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.lightning.callbacks.prediction_writer import PredictionWriter
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.models.glue import GLUE
from tests.lightning.strategy import strategy_cases
from tests.optimised import Optimised
from tests.techniques.sharded_cases import Case, decoder

Found = dict[str, Any]
Batch = dict[str, Tensor]

MODEL_RANKS = 2
ALL = "S1,S2,S3,S4,S5"
GLOBAL_BATCH = 8
CASE = Case(features={2: 17})
N_FEATURES = sum(map(len, CASE.nodes()))
CELLS = [(4, 4), (5, 3), (2, 6), (7, 1), (3, 3)]
"""Cells of the two ranks of a data axis, step by step."""


class Maps(Optimised, by=torch.optim.Adam, lr=1e-2):
    """A wide encoder with batch statistics, a stratified decoder, a draw in every step, and all kinds of metrics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.encoder = nn.Sequential(nn.Linear(N_FEATURES, CASE.dim), nn.BatchNorm1d(CASE.dim), nn.Tanh())
        self.decoder = decoder(CASE)
        self.v = nn.Parameter(torch.randn(CASE.anchors, CASE.dim))
        self.cells = torchmetrics.SumMetric()
        self.contacts = torchmetrics.MeanMetric().set_dtype(torch.float64)
        self.rows = torchmetrics.CatMetric()
        self.double()
        self.losses: list[float] = []
        self.drawn: list[float] = []

    def loss(self, batch: Batch) -> Tensor:
        u = self.encoder(batch["x"].log1p())
        arguments = {name: batch[name] for name in ("batch", "library", "x")}
        loss: Tensor = self.decoder(u, self.v, **arguments)
        return loss + 0.1 * self.v.square().mean()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.drawn.append(torch.rand(()).item() + np.random.random() + random.random())
        loss = self.loss(batch) * (0.5 + self.drawn[-1] / 3)
        n = len(batch["x"])
        self.cells.update(float(n))
        self.contacts.update(batch["library"])
        self.rows.update(batch["index"])
        logged = {"cells": self.cells, "contacts": self.contacts}
        self.log_dict(logged, on_step=False, on_epoch=True)
        for reduce_fx in ("mean", "sum", "max"):
            value = batch["library"].sum() if reduce_fx == "sum" else batch["library"].mean()
            options: dict[str, Any] = {"reduce_fx": reduce_fx, "sync_dist": True, "batch_size": n}
            self.log(f"library_{reduce_fx}", value, on_step=False, on_epoch=True, **options)
        shared = loss.detach() * n
        self.log("loss", loss, on_step=True, on_epoch=False, batch_size=n)
        self.losses.append(float(self.trainer.strategy.reduce(shared, reduce_op="sum")))
        return loss

    def on_train_epoch_end(self) -> None:
        self.read = sorted(self.rows.compute().tolist())
        self.rows.reset()


class Failing(Maps):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise ArithmeticError("on purpose")
        return super().training_step(batch, batch_idx)


class DrawsOnRankZero(Callback):
    """As a picture of one's own would."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        draws = (lambda: torch.rand(3), random.random, np.random.random)
        if trainer.is_global_zero:
            draws[batch_idx % 3]()


def batches(data_rank: int | None) -> list[Batch]:
    generator = torch.Generator().manual_seed(6)
    found = []
    for step, sizes in enumerate(CELLS):
        n = sum(sizes)
        rate = torch.full((n, N_FEATURES), 0.7, dtype=torch.float64)
        x = torch.poisson(rate, generator=generator)
        index = 100 * step + torch.arange(n, dtype=torch.float64)
        whole = {"x": x, "library": x.sum(1, keepdim=True) + 1, "batch": torch.arange(n) % 2, "index": index}
        part = (0, n) if data_rank is None else ((0, sizes[0]), (sizes[0], n))[data_rank]
        found.append({name: value[slice(*part)] for name, value in whole.items()})
    return found


def loader_of(rank: int, ranks: int) -> DataLoader[Any]:
    data_rank = rank // MODEL_RANKS if ranks == 2 * MODEL_RANKS else None
    return DataLoader(batches(data_rank), batch_size=None)  # type: ignore[arg-type]


def trainer_of(rank: int, ranks: int, strategy: Any = None, **options: Any) -> Trainer:
    if strategy is None:
        # one process is the oracle, so nothing is sharded or fused in it
        shared = {"strategies": ALL, "model_parallel_size": MODEL_RANKS, "balance_cells": True}
        strategy = AMPStrategy(**(shared if ranks > 1 else {"strategies": "S1"}))
    defaults = {"precision": "64-true", "max_epochs": 2, "max_steps": -1, "num_sanity_val_steps": 0}
    options = defaults | {"use_distributed_sampler": False} | options
    return strategy_cases.trainer_of(strategy, rank=rank, ranks=ranks, **options)


def fitted(rank: int, ranks: int) -> Found:
    """Two epochs with clipping and accumulation."""
    seed_everything(7)
    module = Maps()
    first = module.encoder[0]
    weight = first.weight
    trainer = trainer_of(rank, ranks, gradient_clip_val=0.02, accumulate_grad_batches=2)
    trainer.fit(module, loader_of(rank, ranks))
    (optimizer,) = trainer.optimizers
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    plan = trainer.strategy.plan  # type: ignore[attr-defined]
    return {
        "state": {name: value.clone() for name, value in module.state_dict().items()},
        "losses": module.losses,
        "drawn": module.drawn,
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items() if name != "loss"},
        "read": module.read,
        "own again": module.encoder[0] is first and first.weight is weight,
        "optimizers whole": held == {id(p) for p in module.parameters()},
        "clipping back": "clip_grad_by_norm" not in vars(trainer.precision_plugin),
        "metrics back": module.cells.dist_sync_fn is None,
        "plan": (plan.strategies, plan.mesh.data, plan.mesh.model),
    }


def reference_model(rank: int, ranks: int, *, data_dir: Path, folder: Path) -> Found:
    """The reference model from files, and its predictions."""
    torch.use_deterministic_algorithms(True)
    seed_everything(3)
    data_ranks = max(1, ranks // MODEL_RANKS)
    losses: list[float] = []

    class Losses(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            losses.append(float(trainer.strategy.reduce(trainer.callback_metrics["loss"].detach().clone())))

    trainer = trainer_of(
        rank, ranks, max_epochs=2, limit_val_batches=2, callbacks=[Losses()], use_distributed_sampler=True
    )
    model = GLUE(latent_dim=8, hidden_dim=16, window=8, edges_per_step=64, align_burnin=2)
    data = SingleCellDataModule(data_dir, batch_size=GLOBAL_BATCH // data_ranks, val_fraction=0.25)
    trainer.fit(model, data)
    found = {
        "losses": losses,
        "val_loss": trainer.callback_metrics["val_loss"].item(),
        "state": {name: value.clone() for name, value in model.state_dict().items()},
    }
    writer = PredictionWriter(folder / "predictions", contact_map_cells=1, celltype_key="celltype", impute_rna=True)
    trainer = trainer_of(rank, ranks, callbacks=[writer], use_distributed_sampler=True)
    trainer.predict(model, data, return_predictions=False)
    return found | {"predictions": [str(path) for path in writer.written]}


def interrupted(rank: int, ranks: int) -> Found:
    module = Failing()
    shape = module.encoder[0].weight.shape
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(ArithmeticError):
            trainer_of(rank, ranks).fit(module, loader_of(rank, ranks))
    weight = module.encoder[0].weight
    told = [str(w.message) for w in caught if "ended early" in str(w.message)]
    return {"whole": weight.shape == shape, "lost columns": int(weight.isnan().any(0).sum()), "told": told}


def disturbed(rank: int, ranks: int) -> Found:
    """Rank 0 draws numbers of its own between the steps."""
    seed_everything(7)
    module = Maps()
    trainer_of(rank, ranks, callbacks=[DrawsOnRankZero()]).fit(module, loader_of(rank, ranks))
    return {"drawn": module.drawn, "state": module.state_dict()}


def everything(rank: int, ranks: int, data_dir: Path, folder: Path) -> Found:
    """All that one number of ranks is asked for."""
    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    found: Found = {"fit": fitted(rank, ranks), "glue": reference_model(rank, ranks, data_dir=data_dir, folder=folder)}
    if ranks > 1:
        found["disturbed"] = disturbed(rank, ranks)
        dist.barrier()
        found["interrupted"] = interrupted(rank, ranks)
    return found
