"""One fit of a module of examples/any_module in new processes: what it holds, a step's seconds, and its numbers.

Every rank has one thread. In the second step the meter counts; later steps are timed. In float64 losses, the last
step's gradients and the parameters are kept, to be compared.
"""

import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.any_module.by_hand import change_by_hand

UNTIMED = 3
"""Steps before those that are timed; the second of them is counted."""
LONGEST = 3600.0
"""Seconds of a run."""


class RunFailed(Exception):
    """A process of a run ended with an error; the text is its last line."""


def run_fresh(body: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Call `body(rank, ranks, *args)` in new processes, connected by gloo; returns the results in the order of ranks.

    The processes are forks of one that has imported torch; they have one thread until `body` says otherwise.

    Raises:
        RunFailed: a rank has raised an error, or has given no answer
    """
    import pytest

    from tests.ranks import run_ranks

    # read by the process that is forked, which the first run starts
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        try:
            return run_ranks(body, ranks, Path(folder), *args, timeout=LONGEST, fresh=True)
        except pytest.fail.Exception as error:
            # stacks of other ranks may follow the first traceback
            lines = str(error).strip().splitlines()
            raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
            raise RunFailed((raised or lines[-1:])[0]) from error


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
        numbers: In float64 the losses, the last gradients and the parameters, by name.
    """

    peak: int = 0
    step: float | None = None
    refused: str = ""
    plan: dict[str, Any] = field(default_factory=dict)
    numbers: tuple[dict[str, Any], ...] = ()

    @property
    def strategies(self) -> str:
        """The plan's."""
        return ",".join(self.plan.get("strategies", ()))


def run(wanted: Wanted) -> Found:
    """Start the ranks and wait."""
    try:
        found = run_fresh(fit, wanted.ranks, wanted)
    except RunFailed as error:
        # a row that failed is in the table, and the others are measured
        return Found(refused=f"FAILED: {error}")
    return Found(
        peak=max(one["peak"] for one in found),
        step=found[0]["step"],
        refused=found[0]["refused"],
        plan=found[0]["plan"],
        numbers=_together([one["numbers"] for one in found]) if found[0]["numbers"] else (),
    )


def _together(found: list[Any]) -> tuple[dict[str, Any], ...]:
    """Of all ranks; what a rank lacks, another has."""
    losses, *others = zip(*found, strict=True)
    # ranks have as many rows each
    mean = {str(i): sum(of_step) / len(found) for i, of_step in enumerate(zip(*losses, strict=True))}
    return mean, *({name: value for one in reversed(kind) for name, value in one.items()} for kind in others)


def fit(rank: int, ranks: int, wanted: Wanted) -> dict[str, Any]:
    """Train as one of the ranks; what Lightning prints is no result."""
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)
    import torch
    from lightning.pytorch import seed_everything
    from lightning_utilities import apply_to_collection

    from tests.any_module import load, make

    seed_everything(0, verbose=False)
    # the same weights in every run: `make` sets the seed
    module: Any = make(wanted.name)[0]
    if wanted.by_hand is not None:
        change_by_hand(module, wanted.by_hand)
    rows = rows_of(load(wanted.name).make_batch(**wanted.sizes))
    if wanted.double:
        module, rows = module.double(), apply_to_collection(rows, torch.Tensor, _as_double)
    if wanted.alike:
        _draw_alike()
    torch.manual_seed(1)
    trainer, probe = _trainer(wanted, rank)
    each = wanted.rows or len(rows) // wanted.ranks
    loader = torch.utils.data.DataLoader(rows * (wanted.steps + 1), batch_size=each, shuffle=False)
    refused = ""
    try:
        trainer.fit(module, loader)
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    return _found(trainer, module, probe, refused)


def _as_double(x: Any) -> Any:
    return x.double() if x.is_floating_point() else x


def _draw_alike() -> None:
    """Nothing is dropped, and noise is a function of its row, in this process from now on."""
    import torch
    from torch.nn import functional

    attend = functional.scaled_dot_product_attention
    vars(functional)["scaled_dot_product_attention"] = lambda *args, **kwargs: attend(
        *args, **kwargs | {"dropout_p": 0.0}
    )
    vars(functional)["dropout"] = lambda x, *_, **__: x
    vars(torch)["randn_like"] = lambda x, **_: x.flip(-1) * 0.7 + 0.1


def rows_of(batch: Any) -> list[Any]:
    """The rows of a batch, which a loader puts together again."""
    import torch

    from lightning_amp._torch import tree_flatten, tree_unflatten

    leaves, spec = tree_flatten(batch)
    assert all(isinstance(x, torch.Tensor) for x in leaves), "the examples' batches hold tensors only"
    return [tree_unflatten([x[i] for x in leaves], spec) for i in range(len(leaves[0]))]


def _trainer(wanted: Wanted, rank: int) -> tuple[Any, Any]:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    import lightning_amp
    from benchmarks.chunks.measure import memory_profile, most_allocated
    from tests.any_module import QUIET, Meter
    from tests.lightning.strategy.strategy_cases import RunningRanks
    from tests.lightning.strategy.test_fsdp import whole

    class Probe(Meter):
        """Counts the second step, and notes when batches end."""

        def __init__(self) -> None:
            super().__init__()
            self.peak = 0
            self.ends, self.losses = list[float](), list[Any]()
            self.gradients = dict[str, Any]()
            self.profile = memory_profile()

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_start(trainer, module, batch, batch_idx)
            # compiled code does not run where operators are looked at: the allocator is asked
            counted = self.stop() if compiled else None
            if counted is not None and batch_idx == 1:
                self.peak = counted.current
                self.profile.start()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.ends.append(time.perf_counter())
            if not compiled:
                super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
                self.peak = self.live.peak
            elif batch_idx == 1:
                self.profile.stop()
                self.peak += most_allocated(self.profile)
            if wanted.double:
                self.losses.append(trainer.callback_metrics["loss"].detach().double())
                here = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
                self.gradients = {name: whole(grad) for name, grad in here.items() if not grad.is_meta}

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
        use_distributed_sampler=True,
        **QUIET,
    )
    return trainer, probe


def _found(trainer: Any, module: Any, probe: Any, refused: str) -> dict[str, Any]:
    plan = getattr(trainer.strategy, "plan", None)
    steps = [b - a for a, b in zip(probe.ends, probe.ends[1:], strict=False)][UNTIMED - 1 :]
    parameters = {name: p.detach() for name, p in module.named_parameters() if not p.is_meta}
    return {
        "peak": probe.peak,
        "step": median(steps) if steps else None,
        "refused": refused,
        "plan": {} if plan is None else json.loads(plan.to_json()),
        "numbers": (probe.losses, probe.gradients, parameters) if probe.losses and not refused else (),
    }
