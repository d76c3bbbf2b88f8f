"""What test_resume.py runs: a small module under every strategy, saved after three steps and after six.

A `Kind` is a way to train; a `Job` trains all six steps, or the last three of them from a checkpoint. Step three lies
in mid-epoch. Global batches, dropout and the numbers drawn are the same whatever the kind.
"""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_amp.data.batch import draw_keys
from lightning_amp.data.loading.dataset import StepIndices
from lightning_amp.data.loading.sampler import StepLoader, StepSampler
from lightning_amp.errors import AmpError
from lightning_amp.lightning.checkpoints.read_directory import fill, open_directory
from lightning_amp.lightning.checkpoints.write_checkpoint import Part, convert_checkpoint, write_directory
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.models.keyed_noise import KeyedDropout
from lightning_amp.techniques.hic.nodes.graph_encoder import VertexShards
from tests.lightning.strategy import strategy_cases
from tests.techniques.sharded_cases import Case, decoder

Batch = dict[str, Tensor]
Found = dict[str, Any]

CASE = Case(features={2: 17})
N_FEATURES = sum(map(len, CASE.nodes()))
N_CELLS, GLOBAL_BATCH = 32, 8
HALF, WHOLE = 3, 6


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A way to train: ranks, ranks of the data axis, and the strategy."""

    ranks: int
    data_ranks: int
    strategy: Callable[[], Any]
    sharded: bool = False


def amp(**options: Any) -> Callable[[], AMPStrategy]:
    return lambda: AMPStrategy(**options)


KINDS = {
    "plain": Kind(ranks=1, data_ranks=1, strategy=lambda: "auto"),
    "ddp": Kind(ranks=2, data_ranks=2, strategy=lambda: DDPStrategy(find_unused_parameters=True)),
    "S2 + S5": Kind(ranks=2, data_ranks=1, strategy=amp(strategies="S1,S2,S5", model_parallel_size=2)),
    "strata": Kind(ranks=2, data_ranks=1, strategy=amp(strategies="strata", model_parallel_size=2)),
    "nodes": Kind(ranks=2, data_ranks=1, strategy=amp(strategies="nodes", model_parallel_size=2)),
    "2 x 2": Kind(ranks=4, data_ranks=2, strategy=amp(strategies="S1,S2,S3,S4,S5", model_parallel_size=2)),
    "S2 in shards": Kind(
        ranks=2,
        data_ranks=1,
        strategy=amp(strategies="S1,S2", model_parallel_size=2, save_distributed_checkpoint=True),
        sharded=True,
    ),
    "2 x 2 in shards": Kind(
        ranks=4,
        data_ranks=2,
        strategy=amp(strategies="S1,S2,S5", model_parallel_size=2, save_distributed_checkpoint=True),
        sharded=True,
    ),
}


class Steps(Dataset[Batch]):
    """Counts of some cells; an item is a whole step."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(6)
        rate = torch.full((N_CELLS, N_FEATURES), 0.7, dtype=torch.float64)
        self.x = torch.poisson(rate, generator=generator)

    def __getitem__(self, step: StepIndices) -> Batch:
        rows = step.rows["hic"]
        x = self.x[torch.from_numpy(rows)]
        draw = torch.from_numpy(draw_keys(step.draw_key, "hic", rows))
        batch = torch.from_numpy(rows) % CASE.n_batches
        return {"x": x, "library": x.sum(1, keepdim=True) + 1, "batch": batch, "draw": draw}


def loader_of(kind: Kind, rank: int) -> StepLoader:
    """The rank's share of the same global batches; four steps are an epoch."""
    per_rank = kind.ranks // kind.data_ranks
    sampler = StepSampler(
        {"hic": np.ones(N_CELLS)},
        GLOBAL_BATCH // kind.data_ranks,
        num_replicas=kind.data_ranks,
        rank=rank // per_rank,
        seed=11,
    )
    return StepLoader(Steps(), sampler)  # type: ignore[arg-type]


class Maps(LightningModule):
    """A wide layer that S2 splits, with two names, keyed dropout, a stratified decoder, a buffer that counts; by hand
    Adam with two groups of parameters and a schedule, and descent without a state.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.automatic_optimization = False
        self.encoder = nn.Sequential(nn.Linear(N_FEATURES, CASE.dim), nn.Tanh())
        self.alias = self.encoder
        self.dropout = KeyedDropout(0.2, stream=1)
        self.decoder = decoder(CASE)
        self.v = nn.Parameter(torch.randn(CASE.anchors, CASE.dim))
        self.register_buffer("seen", torch.zeros(2))
        self.double()
        self.losses: list[float] = []
        self.whole: set[bool] = set()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Note whether this rank has the values of the wide layer, and its averages, as full tensors."""
        values = checkpoint["optimizer_states"][0]["state"][2]["exp_avg"], checkpoint["state_dict"]["alias.0.weight"]
        self.whole |= {isinstance(value, Tensor) and not value.is_meta for value in values}

    def loss(self, batch: Batch) -> Tensor:
        u = self.dropout(self.encoder(batch["x"].log1p()), batch["draw"])
        arguments = {name: batch[name] for name in ("batch", "library", "x")}
        loss: Tensor = self.decoder(u, self.v, **arguments)
        return loss + 0.1 * self.v.square().mean()

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        self.seen += 1
        loss = self.loss(batch)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        if batch_idx % 2:
            self.lr_schedulers().step()  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        wide = self.encoder[0].weight
        groups = [{"params": [self.v, self.encoder[0].bias]}, {"params": [wide], "lr": 2e-2}]
        adam = torch.optim.Adam(groups, lr=1e-2)
        descent = torch.optim.SGD(self.decoder.parameters(), lr=1e-2)
        return [adam, descent], [torch.optim.lr_scheduler.StepLR(adam, 2, gamma=0.7)]


def trainer_of(kind: Kind, rank: int, **options: Any) -> Trainer:
    options = {"max_epochs": -1, "max_steps": -1, "num_sanity_val_steps": 0, "enable_checkpointing": True} | options
    return strategy_cases.trainer_of(kind.strategy(), rank=rank, ranks=kind.ranks, **options)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Train by a kind: from the start, or from what a kind has saved after three steps."""

    kind: str
    saved_by: str = ""

    @property
    def name(self) -> str:
        return self.kind + (f" from {self.saved_by}" if self.saved_by else "")

    @property
    def source(self) -> str:
        """The kind that has saved; that of a job which starts anew is its own."""
        return self.saved_by or self.kind

    @property
    def reads_file(self) -> bool:
        """Whether it needs a directory converted, for its strategy is none of ours."""
        strategy = KINDS[self.kind].strategy()
        return bool(self.saved_by) and KINDS[self.saved_by].sharded and not isinstance(strategy, AMPStrategy)

    def checkpoint(self, folder: Path) -> Path | None:
        file = "converted.ckpt" if self.reads_file else "3.ckpt"
        return folder / self.source / file if self.saved_by else None


def fit(job: Job, rank: int, folder: Path) -> Found:
    """Six steps, saved after three and after six; or the last three, from a checkpoint."""
    seed_everything(7)
    model, per_step = Maps(), 2
    # Lightning counts a step for every optimizer
    saver = ModelCheckpoint(
        folder / job.name,
        filename="{step}",
        every_n_train_steps=HALF * per_step,
        save_top_k=-1,
        auto_insert_metric_name=False,
    )
    saver.format_checkpoint_name = lambda metrics, *_, **__: str(  # type: ignore[method-assign]
        folder / job.name / f"{int(metrics['step']) // per_step}.ckpt"
    )
    trainer = trainer_of(KINDS[job.kind], rank, max_steps=WHOLE * per_step, callbacks=[saver])
    trainer.fit(model, loader_of(KINDS[job.kind], rank), ckpt_path=job.checkpoint(folder))
    values = np.concatenate([value.numpy().ravel() for value in model.state_dict().values()])
    return {"values": values, "losses": model.losses, "whole": model.whole}


def quietly() -> None:
    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def several(rank: int, world_size: int, folder: Path, phases: list[tuple[int, list[Job]]]) -> Found:
    """The jobs of all phases, each among as many ranks as it needs; then what two ranks find out about directories."""
    quietly()
    found: Found = {}
    for phase, (ranks, jobs) in enumerate(phases):
        if not regroup(rank, ranks, folder / f"phase{phase}"):
            continue
        for job in jobs:
            found[job.name] = fit(job, rank, folder)
        if ranks == 2 and phase == 1:
            found["directories"] = directories(rank, folder / "directories")
        if rank == 0:
            convert_all(folder)
    return found


def regroup(rank: int, ranks: int, meet: Path) -> bool:
    """Let the first ranks be all there are; whether this is one of them."""
    if rank >= ranks:
        return False
    dist.destroy_process_group()
    store = dist.FileStore(str(meet), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    return True


def convert_all(folder: Path) -> None:
    for directory in folder.glob("*/3.ckpt"):
        if directory.is_dir() and not directory.with_name("converted.ckpt").exists():
            convert_checkpoint(directory, directory.with_name("converted.ckpt"))


class Validated(Maps):
    """Logs what a checkpoint is chosen by: every second epoch is better."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("quality", (-1.0) ** self.current_epoch, sync_dist=True, batch_size=len(batch["x"]))
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch["x"]))


def directories(rank: int, folder: Path) -> Found:
    """What a run leaves in its folder, what is loaded from there, and writing that fails."""
    kind = KINDS["S2 in shards"]
    saver = ModelCheckpoint(folder / "best", filename="{epoch}", monitor="quality", save_top_k=1, save_last=True)
    trainer = trainer_of(kind, rank, max_epochs=3, limit_val_batches=1, callbacks=[saver])
    model = Validated()
    trainer.fit(model, loader_of(kind, rank), loader_of(kind, rank))
    losses = {}
    for which in ("last", "best", None):
        with torch.no_grad():
            model.v.zero_()
        (logged,) = trainer.validate(model, loader_of(kind, rank), ckpt_path=which, verbose=False)
        losses[which] = logged["val_loss"]
    trainer.save_checkpoint(folder / "after.ckpt")
    left = sorted(str(p.relative_to(folder)) for p in folder.glob("*/*")) if rank == 0 else []
    refused = _refusal(lambda: trainer.save_checkpoint(folder / "after.ckpt", storage_options={"mode": 3}))
    return {
        "left": left,
        "best": Path(saver.best_model_path).name,
        "losses": losses,
        "options": refused,
        "scattered": scattered(rank, folder / "scattered.ckpt"),
        **failures(rank, folder),
    }


WHOLE_ROWS = torch.arange(21.0).view(7, 3)


def part_of(rows: list[int], add: float = 0.0) -> Part:
    """A part of rows that do not follow each other, as those of a graph."""
    shards = VertexShards(SimpleNamespace(get_local_rank=lambda: 0), None, (torch.tensor(rows),), None)  # type: ignore[arg-type]
    return Part(WHOLE_ROWS.shape, torch.float, dict(shards.boxes(shards.own(WHOLE_ROWS) + add)))


def broadcast(value: Any) -> Any:
    held = [value]
    dist.broadcast_object_list(held)
    return held[0]


def scattered(rank: int, path: Path) -> bool:
    """Whether rows that do not follow each other come back in their places."""
    saved = {"state_dict": {"w": part_of([[0, 2, 3, 6], [1, 4, 5]][rank]), "b": torch.ones(2)}}
    write_directory(saved, path, rank=rank, broadcast=broadcast)
    found = fill(open_directory(path)["state_dict"])
    return torch.equal(found["w"], WHOLE_ROWS) and torch.equal(found["b"], torch.ones(2))


class Broken(dict[Any, Tensor]):
    def __getitem__(self, offsets: Any) -> Tensor:
        raise OSError(28, "No space left on device")


def failures(rank: int, folder: Path) -> Found:
    """What both ranks are told when one cannot write, and what is left."""
    path, part = folder / "scattered.ckpt", part_of([[0, 1, 2, 3], [4, 5, 6]][rank], add=1)
    broken = Part(part.shape, part.dtype, Broken(part.boxes)) if rank == 1 else part
    cases = {
        "full": ({"state_dict": {"w": broken}}, path),
        "piece": ({"state_dict": {"w": part}, "of a hook": part}, path),
        "no folder": ({"state_dict": {"w": part}}, path / "meta.pt" / "inside.ckpt"),
        "gap": ({"state_dict": {"w": part if rank == 0 else torch.ones(0)}}, path),
    }
    told = {}
    for name, (checkpoint, target) in cases.items():
        told[name] = _refusal(lambda c=checkpoint, t=target: write_directory(c, t, rank=rank, broadcast=broadcast))
    dist.barrier()
    intact = torch.equal(fill(open_directory(path)["state_dict"])["w"], WHOLE_ROWS)
    return {"told": told, "intact": intact, "aside": sorted(p.name for p in folder.glob(".*"))}


def _refusal(action: Callable[[], Any]) -> str:
    try:
        action()
    except AmpError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"
