"""One fit of a module of examples/any_module in processes of its own: what it holds, a step's seconds, its numbers.

Every rank has one thread. In the second step the meter counts; later steps are timed. In float64 losses, the last
step's gradients and the parameters are kept, to be compared.
"""

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.any_module.by_hand import change_by_hand

LONGEST = 3600.0
"""Seconds of a run."""
UNTIMED = 3
"""Steps before those that are timed; the second of them is counted."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A run.

    Attributes:
        name: Of the module.
        sizes: Of its batch, all ranks together.
        strategy: Options of AMPStrategy, or a name of Lightning's.
        by_hand: What is done to the module before, as of `change_by_hand`.
        double: In float64, and its numbers are kept.
        alike: Without dropout, and noise is a function of the row: however rows are dealt, ranks draw the same.
        rows: Of the batches that a loader gives; None deals those of `sizes` to all ranks.
    """

    name: str
    ranks: int
    sizes: dict[str, int]
    strategy: dict[str, Any] | str
    by_hand: str | float | None = None
    steps: int = 3
    double: bool = False
    alike: bool = False
    rows: int | None = None


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a run has left.

    Attributes:
        peak: Bytes of the second step, of the fullest rank.
        step: Seconds, median; None where too few were timed.
        refused: The error that ended it.
        plan: Its JSON.
        numbers: Files of the ranks with losses, gradients and parameters.
    """

    peak: int = 0
    step: float | None = None
    refused: str = ""
    plan: dict[str, Any] = field(default_factory=dict)
    numbers: tuple[Path, ...] = ()

    @property
    def strategies(self) -> str:
        """The plan's."""
        return ",".join(self.plan.get("strategies", ()))


def run(wanted: Wanted, folder: Path) -> Found:
    """Start the ranks, which are forks of a process that has imported torch, and wait."""
    import pytest

    from tests.ranks import run_ranks

    own = Path(tempfile.mkdtemp(dir=folder))
    # read by that process, which the first run starts
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        found = run_ranks(fit, wanted.ranks, own, wanted, own, timeout=LONGEST, fresh=True)
    except pytest.fail.Exception as error:
        # a row that failed is in the table, and the others are measured
        printed = "".join(file.read_text()[-3000:] for file in sorted(own.glob("printed*")))
        print(f"{wanted!r} failed:\n{printed}\n{error}", file=sys.stderr)
        return Found(refused=f"FAILED: {str(error).strip().splitlines()[-1]}")
    return Found(
        peak=max(one["peak"] for one in found),
        step=found[0]["step"],
        refused=found[0]["refused"],
        plan=found[0]["plan"],
        numbers=tuple(own / f"{rank}.pt" for rank in range(wanted.ranks)) if wanted.double else (),
    )


def fit(rank: int, ranks: int, wanted: Wanted, folder: Path) -> dict[str, Any]:
    """Train as one of the ranks; what is printed goes to a file."""
    with (folder / f"printed{rank}").open("w") as printed:
        for stream in (1, 2):
            os.dup2(printed.fileno(), stream)
    import torch
    from lightning.pytorch import seed_everything

    from tests.any_module import load, make

    seed_everything(0, verbose=False)
    # the same weights in every run: `make` sets the seed
    module: Any = make(wanted.name)[0]
    if wanted.double:
        module = module.double()
    if wanted.by_hand is not None:
        change_by_hand(module, wanted.by_hand)
    if wanted.alike:
        _draw_alike(module, wanted.name)
    rows = rows_of(load(wanted.name).make_batch(**wanted.sizes), double=wanted.double)
    torch.manual_seed(1)
    trainer, probe = _trainer(wanted, rank)
    loader = torch.utils.data.DataLoader(
        rows * (wanted.steps + 1), batch_size=wanted.rows or len(rows) // wanted.ranks, shuffle=False
    )
    refused = ""
    try:
        trainer.fit(module, loader)
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    return _found(folder, trainer, module, probe, refused)


def rows_of(batch: Any, *, double: bool) -> list[Any]:
    """The rows of a batch, which a loader puts together again."""
    import torch

    from lightning_amp._torch import tree_flatten, tree_unflatten

    leaves, spec = tree_flatten(batch)
    leaves = [x.double() if double and x.is_floating_point() else x for x in leaves]
    assert all(isinstance(x, torch.Tensor) for x in leaves), "the examples' batches hold tensors only"
    return [tree_unflatten([x[i] for x in leaves], spec) for i in range(len(leaves[0]))]


def _draw_alike(module: Any, name: str) -> None:
    from torch import nn
    from torch.nn import functional as F

    from tests.lightning.strategy.fsdp_cases import without_draws

    without_draws(name)
    attend = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = lambda *args, **kwargs: attend(*args, **kwargs | {"dropout_p": 0.0})  # type: ignore[assignment]
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0


def _trainer(wanted: Wanted, rank: int) -> tuple[Any, Any]:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    import lightning_amp
    from benchmarks.chunks.measure import memory_profile, most_allocated
    from tests.any_module import Meter
    from tests.lightning.strategy.fsdp_cases import whole
    from tests.lightning.strategy.strategy_cases import RunningRanks

    class Probe(Meter):
        """Counts the second step, notes when batches end, and keeps their numbers."""

        def __init__(self) -> None:
            super().__init__()
            self.peak = 0
            self.ends: list[float] = []
            self.losses: list[float] = []
            self.gradients: dict[str, Any] = {}
            self.profile = memory_profile()

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_start(trainer, module, batch, batch_idx)
            if compiled and batch_idx == 1:
                # compiled code does not run where operators are looked at: the allocator is asked
                self.live.__exit__(None, None, None)
                self.peak = self.live.current
                self.profile.start()

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            self.ends.append(time.perf_counter())
            if not compiled:
                super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
                self.peak = self.live.peak
            elif batch_idx == 1:
                self.profile.stop()
                self.peak += most_allocated(self.profile)
            if wanted.double:
                self.losses.append(float(trainer.callback_metrics["loss"]))
                named = ((name, p.grad) for name, p in module.named_parameters())
                self.gradients = {
                    name: whole(g) for name, g in named if g is not None and g.device.type != "meta"
                }

    compiled, probe = isinstance(wanted.by_hand, float), Probe()
    strategy: Any = wanted.strategy
    if isinstance(strategy, dict):
        strategy = lightning_amp.AMPStrategy(**strategy)
    elif strategy == "fsdp2":
        strategy = ModelParallelStrategy(data_parallel_size=wanted.ranks, tensor_parallel_size=1)
    trainer = Trainer(
        strategy=strategy,
        devices=wanted.ranks,
        plugins=[] if strategy == "auto" else [RunningRanks(rank, wanted.ranks)],
        accelerator="cpu",
        max_steps=-1,
        max_epochs=1,
        limit_train_batches=wanted.steps,
        callbacks=[probe],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=True,
    )
    return trainer, probe


def _found(folder: Path, trainer: Any, module: Any, probe: Any, refused: str) -> dict[str, Any]:
    import torch

    plan, rank = getattr(trainer.strategy, "plan", None), trainer.global_rank
    steps = [b - a for a, b in zip(probe.ends, probe.ends[1:], strict=False)][UNTIMED - 1 :]
    if probe.losses and not refused:
        parameters = {name: p.detach() for name, p in module.named_parameters() if not p.is_meta}
        torch.save(
            {"losses": probe.losses, "gradients": probe.gradients, "parameters": parameters},
            folder / f"{rank}.pt",
        )
    return {
        "peak": probe.peak,
        "step": median(steps) if steps else None,
        "refused": refused,
        "plan": {} if plan is None else json.loads(plan.to_json()),
    }
