"""Train a few steps for a verification: on one process, or as one of several ranks, which compare themselves with it.

Rank 0 trains alone before it is connected to the other ranks. It takes the batches from the user's data once; ranks
take their parts of the same ones. Files lie in a folder that all ranks see:

    subject.pt          the module and the data, as the user gave them
    batches.pt          the global batches
    one-float64.pt      what the single process has recorded
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from lightning.pytorch.plugins.environments import (  # type: ignore[attr-defined]
    LightningEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.utilities import CombinedLoader

# the common base of BatchNorm1d, 2d and 3d has no public name
from lightning_amp._torch import AnyBatchNorm
from lightning_amp.data.files.write_aside import written_aside
from lightning_amp.errors import DataError
from lightning_amp.lightning.checkpoints.atomic_file import write_state
from lightning_amp.lightning.steps.cell_weight import count_cells
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.verification.compare import (
    DTYPES,
    Precision,
    Report,
    common_factor,
    record_errors,
)
from lightning_amp.verification.recorder import Record, Recorder
from lightning_amp.verification.split_batch import Parts, cast, first_of, sizes_of

QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What is trained: `options` are those of AMPStrategy."""

    steps: int
    precisions: Sequence[Precision]
    options: Mapping[str, Any]
    timeout: float


def train_and_compare(rank: int, ranks: int, folder: Path, run: Run) -> list[Report]:
    """Train in every precision as one of the ranks, and before that, on rank 0, as the single process."""
    if rank == 0:
        for precision in run.precisions:
            train_one(folder, precision, run.steps)
    # rank 0 removes nothing from it, so that others may come at any time
    store = dist.FileStore(str(folder / "store"), ranks)  # type: ignore[attr-defined]
    wait = timedelta(seconds=run.timeout)
    store.set_timeout(wait)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=wait)
    return [train_rank(rank, ranks, folder, precision, run) for precision in run.precisions]


def train_one(folder: Path, precision: Precision, steps: int) -> None:
    """Train on the global batches in this process, as a Trainer without this package would."""
    one, *_ = _fit(folder, precision, steps)
    _keep(one, folder / f"one-{precision}.pt")


def train_rank(rank: int, ranks: int, folder: Path, precision: Precision, run: Run) -> Report:
    """Train as one of the ranks under the plan, and compare with the single process."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="localhost")
    strategy = AMPStrategy(**run.options)
    # they are compared and named here
    strategy.own_statistics = True
    record, place, given, module = _fit(folder, precision, run.steps, ranks=ranks, strategy=strategy)
    one = torch.load(folder / f"one-{precision}.pt", weights_only=False)
    plan, sizes = strategy.plan, sizes_of(given)
    assert plan is not None, "there is a plan after a fit"
    shared = strategy.share_batch_statistics or place[1] == 1
    return Report(
        precision=precision,
        place=place,
        losses=record.losses,
        one_losses=one.losses,
        cells=record.cells,
        all_cells=count_cells(given) or 0,
        errors=record_errors(record, one),
        factor=common_factor(record.gradients, one.gradients),
        draws=one.draws,
        apart=record.apart,
        unshared=[] if shared else [n for n, m in module.named_modules() if isinstance(m, AnyBatchNorm)],
        uneven=len(sizes) > 1 and any(n % place[1] for n in sizes),
        strategies=plan.strategies,
        mesh=(plan.mesh.data, plan.mesh.model),
    )


def _fit(
    folder: Path,
    precision: Precision,
    steps: int,
    *,
    ranks: int = 1,
    strategy: AMPStrategy | None = None,
) -> tuple[Record, tuple[int, int], Any, torch.nn.Module]:
    """The record, the place of the rank, the first global batch and the module."""
    seed_everything(0, verbose=False)
    module, data = torch.load(folder / "subject.pt", map_location="cpu", weights_only=False)
    dtype = DTYPES[precision]
    module = module.to(dtype)
    used: list[Any] = []

    def place() -> tuple[int, int]:
        if strategy is None:
            return 0, 1
        kwargs = strategy.distributed_sampler_kwargs
        return kwargs["rank"], kwargs["num_replicas"]

    def loader() -> Parts:
        path = folder / "batches.pt"
        if not path.exists():
            batches: Any = data
            if isinstance(data, LightningDataModule):
                combined = CombinedLoader(given(), "max_size_cycle")
                batches = (batch for batch, _, _ in iter(combined))
            _keep(first_of(batches, steps), path)
        used.extend(torch.load(path, weights_only=False))
        return Parts([cast(batch, dtype) for batch in used], ranks=ranks, place=place)

    recorder = Recorder()
    trainer = Trainer(
        **QUIET,
        accelerator="cpu",
        devices=ranks,
        precision="64-true" if dtype is torch.float64 else "32-true",
        strategy=strategy or "auto",
        plugins=[LightningEnvironment() if strategy is None else TorchElasticEnvironment()],
        callbacks=[recorder],
        max_epochs=1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    if isinstance(data, LightningDataModule):
        given, data.train_dataloader = data.train_dataloader, loader  # type: ignore[method-assign]
        trainer.fit(module, datamodule=data)
    else:
        trainer.fit(module, loader())
    return recorder.record, place(), used[0], module


def _keep(value: Any, path: Path) -> None:
    try:
        with written_aside(path) as aside, aside.open("wb", buffering=0) as file:
            write_state(value, file)
    except DataError as error:
        raise DataError(f"{error}. TMPDIR says where verify keeps its files") from error
