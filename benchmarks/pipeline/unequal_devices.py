"""Stages and strata on two ranks of which one has half of a core: dealt as to equals, and by measured speeds.

    python -m benchmarks.pipeline.unequal_devices [--rounds 3] [--only stages] [--quick] [--write]

Each rank has a core of its own, and beside the second rank a process that never waits takes half of it. The models have
equal blocks, or strata, and next to nothing beside them. The ideal is what the first rank takes for the whole step
alone, by what both can do together, 1 + 1/2; of stages, times (micro-batches + 1) by micro-batches, for no order of
them is without that bubble. `AMPStrategy(device_speeds="measure")`, the plan without, and that plan with every split
near the ideal one take turns; medians. Two quiet cores are needed, and five minutes; with --quick (one round of stages,
one split by hand) one minute. `--write` puts the table into docs/reports/pipeline.md.

A quota of CPU time is no slower core: what passes of it unused, while a rank waits for the other, is lost.
"""

import argparse
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks.page import origin, write_as_it_grows
from benchmarks.pipeline.models import Strata
from benchmarks.pipeline.schedule_picture import BLOCKS, SAMPLES, WIDTH, Tower
from benchmarks.pipeline.training import PAGE, Watch
from benchmarks.tensor3d.ranks import Ranks
from benchmarks.training.whole_step import QUIET
from lightning_amp import AMPStrategy
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.quantities import format_seconds
from tests.lightning.strategy.strategy_cases import RunningRanks

PART, MICRO_BATCHES, STEPS, CELLS = "pipeline.unequal_devices", 24, 4, 48
CORES = tuple(sorted(os.sched_getaffinity(0)))[:2]
BY_HAND = range(10, 15)
"""Blocks, or strata, of the first rank in splits that are tried one by one; 12 of 18 are two thirds."""
HEADER = ["what", "split", "ends", "a step", "by the best split", "ideal", "by the ideal", "by the bound"]


class Plain(Strata):
    """Equal strata, which are not chained, trained without state."""

    def configure_optimizers(self) -> Any:
        """Plain descent."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is split: options of AMPStrategy, and the least that a step can take, by the ideal."""

    settings: dict[str, Any]
    bound: float


KINDS = {
    "stages": Kind(
        settings={"strategies": "pipeline", "schedule": "gpipe", "micro_batches": MICRO_BATCHES},
        bound=(MICRO_BATCHES + 1) / MICRO_BATCHES,
    ),
    "strata": Kind(settings={"strategies": "strata"}, bound=1.0),
}


def made(kind: str) -> tuple[Any, list[Any]]:
    """A module and its batches, the same in every process."""
    torch.manual_seed(0)
    if kind == "stages":
        return Tower(), [torch.randn(SAMPLES, WIDTH) for _ in range(STEPS + 1)]
    module = Plain(anchors=3_000, strata=BLOCKS, dim=64, alike=True)
    return module, [module.cells(CELLS) for _ in range(STEPS + 1)]


def fit(rank: int, ranks: int, kind: str, plan: Plan | None, speeds: str | None) -> tuple[float, Plan | None]:
    """Median seconds of a step, and the plan; on one rank without a strategy, micro-batch by micro-batch."""
    warnings.simplefilter("ignore")
    os.sched_setaffinity(0, {CORES[rank]})
    module, batches = made(kind)
    if ranks == 1:
        return alone(module, batches[0], MICRO_BATCHES if kind == "stages" else 1), None
    settings = {"plan": plan} if plan else {**KINDS[kind].settings, "model_parallel_size": 2, "device_speeds": speeds}
    watch, strategy = Watch(), AMPStrategy(**settings)
    trainer = pl.Trainer(
        **QUIET,
        strategy=strategy,
        devices=ranks,
        plugins=[RunningRanks(rank, ranks)],
        accelerator="cpu",
        max_epochs=1,
        callbacks=[watch],
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return watch.step_seconds(skipped=1), strategy.plan


def alone(module: Any, batch: Any, n: int) -> float:
    """Seconds of a step of n parts on this rank by itself."""
    parts: Sequence[Any] = batch.split(len(batch) // n) if n > 1 else [batch]
    optimizer, times = module.configure_optimizers(), list[float]()
    for _ in range(STEPS):
        begin = time.perf_counter()
        for part in parts:
            (module.training_step(part, 0) / n).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
    return median(times[1:])


@contextmanager
def beside(core: int) -> Iterator[None]:
    """A process that never waits, on a core that a rank has too: the system gives each of them half."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.sched_setaffinity(busy.pid, {core})
    try:
        yield
    finally:
        busy.kill()
        busy.wait()


def ends_of(plan: Plan) -> str:
    """How a plan splits."""
    return next(str(spec.ends) for rule in plan.rules if (spec := rule.spec) is not None and hasattr(spec, "ends"))


def with_ends(plan: Plan, ends: str) -> Plan:
    """The plan with another split."""
    rules: list[Any] = [
        replace(rule, spec=replace(rule.spec, ends=ends)) if hasattr(rule.spec, "ends") else rule  # type: ignore
        for rule in plan.rules
    ]
    return replace(plan, rules=tuple(rules))


def rows(kinds: Sequence[str], rounds: int, by_hand: Sequence[int]) -> Iterator[list[str]]:
    """A row for each split of each kind."""
    for kind in kinds:
        own, seconds, ends = list[float](), dict[str, list[float]](), dict[str, set[str]]()
        for _ in range(rounds):
            one = Ranks(1, fit, patience=600)
            own.append(one.results(kind, None, None)[0][0])
            one.end()
            with beside(CORES[1]):
                pool, plan = Ranks(2, fit, patience=600), None
                for name, speeds in (("ranks alike", None), ("ranks measured", "measure")):
                    took, plan = pool.results(kind, None, speeds)[0]
                    seconds.setdefault(name, []).append(took)
                    ends.setdefault(name, set()).add(ends_of(plan))
                for first in by_hand:
                    split = f"{first},{BLOCKS}"
                    took, _ = pool.results(kind, with_ends(plan, split), None)[0]
                    seconds.setdefault(split, []).append(took)
                pool.end()
        ideal = median(own) / 1.5
        best = min(median(times) for name, times in seconds.items() if name not in ends)
        for name, times in seconds.items():
            step = median(times)
            split = [name, " and ".join(sorted(ends[name]))] if name in ends else ["by hand", name]
            yield [kind, *split, format_seconds(step), f"{step / best:.2f}", format_seconds(ideal),
                   f"{step / ideal:.2f}", f"{step / ideal / KINDS[kind].bound:.2f}"]  # fmt: skip


def main() -> None:
    """Run, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS), help="these alone")
    parser.add_argument("--quick", action="store_true", help="one round of stages, one split by hand")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reports/pipeline.md")
    asked = parser.parse_args()
    if len(CORES) < 2:
        raise SystemExit(f"two cores are needed, one for each rank, found {CORES!r}")
    kinds, rounds, by_hand = (["stages"], 1, [12]) if asked.quick else (asked.only, asked.rounds, [*BY_HAND])
    first = f"""{origin("python -m benchmarks.pipeline.unequal_devices --write")} Two gloo ranks, each on a core of its
        own, of which a process that never waits takes half beside the second; {BLOCKS} equal blocks with
        {MICRO_BATCHES} micro-batches by gpipe, and {BLOCKS} equal strata; medians of {rounds} rounds in turn. The ideal
        is what the first rank takes alone, by 1.5; the bound of stages is the ideal with the schedule's bubble, one
        micro-batch more. The best split is the fastest of those by hand."""
    write_as_it_grows(PAGE, PART, first, HEADER, rows(kinds, rounds, by_hand), write=asked.write)


if __name__ == "__main__":
    main()
