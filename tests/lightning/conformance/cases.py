"""What the features of the conformance matrix are run with: a tiny module, its data, and the places to run them.

    @feature("accumulate_grad_batches", checked="losses, parameters")
    def accumulation(site: Site) -> Outcome:
        return fit(site, accumulate_grad_batches=3)

A feature is run at every `Site` in turn: plain Lightning and "ddp" say what is right, the others are "amp". All sites
train on the same cells in every step: a rank of the data axis has its half of them. An outcome is numbers, tensors and
words, the same on every rank and at every site, or the error that was raised.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.techniques.sharded_cases import Case, decoder

Batch = dict[str, Tensor]
Outcome = dict[str, Any]

CASE = Case(dim=8, anchors=11, window=3, distances=(0, 1), cells=1)
N_FEATURES = sum(map(len, CASE.nodes()))
CELLS, STEPS = 8, 4
"""Cells of all ranks together in a step, and steps of an epoch."""

WIDE, STRATA, NODES = "S1,S2,S3,S4,S5", "S1,stream,strata", "S1,nodes"
"""Plans of the model axis: the paper's with sharded parameters, strata by rank, anchors by rank."""
PIPELINE, RECOMPUTED = "S1,pipeline", "S1,recompute,pipeline"
"""Those of a module without a decoder: blocks by rank, and blocks that are computed again, or run in chunks."""
EVERY = (WIDE, STRATA, NODES)
TRAINED = "loss of every step, all parameters"


class Tiny(LightningModule):
    """An encoder that S2 shards, and a stratified decoder; plain descent, which does not scale rounding up."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.lr = lr
        self.encoder = nn.Linear(N_FEATURES, CASE.dim)
        self.decoder = decoder(CASE).float()
        self.v = nn.Parameter(torch.randn(CASE.anchors, CASE.dim))
        self.losses: list[Tensor] = []

    def encode(self, batch: Batch) -> Tensor:
        return self.encoder(batch["x"].log1p())

    def loss(self, batch: Batch) -> Tensor:
        arguments = {name: batch[name] for name in ("batch", "library", "x")}
        loss: Tensor = self.decoder(self.encode(batch), self.v, **arguments)
        return loss + 0.1 * self.v.square().mean()

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.detach().double())
        return loss

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch["x"]))

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True, batch_size=len(batch["x"]))

    def predict_step(self, batch: Batch, batch_idx: int) -> list[tuple[int, list[float]]]:
        return list(zip(batch["cell"].tolist(), self.encode(batch).tolist(), strict=True))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


@dataclass(frozen=True, kw_only=True)
class Site:
    """A place to run a feature at.

    Attributes:
        strategies: What "amp" is asked for, or "ddp", or "" for plain Lightning.
        rank, ranks: This process among those of the run.
        model_ranks: Of which so many share a model.
        folder: Empty, the same for all ranks.
    """

    strategies: str
    rank: int = 0
    ranks: int = 1
    model_ranks: int = 1
    folder: Path = Path()

    @property
    def data_ranks(self) -> int:
        return self.ranks // self.model_ranks

    @property
    def data_rank(self) -> int:
        return self.rank // self.model_ranks

    def strategy(self) -> Any:
        if not self.strategies:
            return "auto"
        if self.strategies == "ddp":
            return DDPStrategy(find_unused_parameters=True)
        return AMPStrategy(strategies=self.strategies, model_parallel_size=self.model_ranks)

    def trainer(self, **options: Any) -> Trainer:
        """A Trainer in double precision that writes nothing unless asked."""
        defaults = {"precision": "64-true", "max_epochs": 2, "max_steps": -1, "num_sanity_val_steps": 0}
        options = defaults | {"use_distributed_sampler": False, "default_root_dir": self.folder} | options
        return trainer_of(self.strategy(), rank=self.rank, ranks=self.ranks, **options)

    def part(self, batch: Batch) -> Batch:
        n = len(batch["x"]) // self.data_ranks
        return {name: value[self.data_rank * n :][:n] for name, value in batch.items()}

    def loader(self, *, steps: int = STEPS, seed: int = 6) -> DataLoader[Any]:
        parts = [self.part(batch) for batch in batches(steps, seed=seed)]
        return DataLoader(parts, batch_size=None)  # type: ignore[arg-type]

    def gather(self, value: Any) -> list[Any]:
        if self.ranks == 1:
            return [value]
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value)
        return found[:: self.model_ranks]

    def mean(self, values: list[Tensor]) -> Tensor:
        """Of this rank's values the mean over the data axis."""
        return torch.stack(self.gather(torch.stack(values))).mean(0)


def batches(steps: int = STEPS, *, seed: int = 6) -> list[Batch]:
    """Batches of all ranks together."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for step in range(steps):
        x = torch.poisson(torch.full((CELLS, N_FEATURES), 0.7), generator=generator)
        cell = step * CELLS + torch.arange(CELLS)
        found.append({"x": x, "library": x.sum(1, keepdim=True) + 1, "batch": cell % 2, "cell": cell})
    return found


def fit(site: Site, module: Tiny | None = None, **options: Any) -> Outcome:
    module = module or Tiny()
    trainer = site.trainer(**options)
    validation = site.loader(steps=2, seed=9) if "limit_val_batches" in options else None
    trainer.fit(module, site.loader(), validation)
    return trained(site, module)


def trained(site: Site, module: Any) -> Outcome:
    """The loss of every step, over all cells, and what was trained."""
    losses = site.mean(module.losses) if module.losses else torch.zeros(0)
    return {"losses": losses} | {name: value.clone() for name, value in module.state_dict().items()}


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A row of the matrix.

    Attributes:
        name: As the table shows it.
        run: What is done at a site.
        checked: What of it is compared.
        against: "plain" where one device with all cells defines the outcome, and "ddp" must agree on two ranks; "one"
            where "ddp" cannot run it; "ddp" where what its rounding gives defines it; "sampler" where two data ranks
            read what those of "ddp" read.
        plans: Those of the model axis that it is run under.
        rtol: Allowed difference, by norm, between different numbers of ranks; elsewhere it is 1e-12.
        refused: Words of the refusal by the name of a site, where it is refused.
        note: For the table.
    """

    name: str
    run: Callable[[Site], Outcome]
    checked: str = TRAINED
    against: str = "plain"
    plans: tuple[str, ...] = (WIDE,)
    rtol: float = 1e-9
    refused: Mapping[str, str]
    note: str = ""


FEATURES: dict[str, Feature] = {}


def feature(
    name: str, *, refused: Mapping[str, str] | None = None, **options: Any
) -> Callable[[Callable[[Site], Outcome]], Callable[[Site], Outcome]]:
    def add(run: Callable[[Site], Outcome]) -> Callable[[Site], Outcome]:
        assert name not in FEATURES, f"{name} is there twice"
        FEATURES[name] = Feature(name=name, run=run, refused=refused or {}, **options)
        return run

    return add


def fits(name: str, kind: Callable[[], Tiny] = Tiny, *, trainer: Any = None, **options: Any) -> None:
    """Add a row that trains a module; `trainer` are options of the Trainer, or a function that makes them."""

    def run(site: Site) -> Outcome:
        return fit(site, kind(), **(trainer() if callable(trainer) else trainer or {}))

    # the file that the row is of, by which the table is ordered
    run.__module__ = sys._getframe(1).f_globals["__name__"]
    feature(name, **options)(run)
