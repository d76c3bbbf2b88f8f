"""Stages and strata on two ranks of which one has half of a core: dealt as to equals, and by measured speeds.

    python -m benchmarks.pipeline.unequal_devices [--rounds 3] [--only stages] [--write]

Each rank has a core of its own, and beside the second rank a process that never waits takes half of it. The models have
alike blocks, or strata, and next to nothing beside them. The ideal is what the first rank takes for the whole step
alone, by what both can do together, 1 + 1/2; of stages, times (micro-batches + 1) by micro-batches, for no order of
them is without that bubble. `AMPStrategy(device_speeds="measure")`, the plan without, and that plan with every split
near the ideal one take turns; medians. Two quiet cores are needed, and five minutes. `--write` puts the table into
docs/reports/pipeline.md.

A quota of CPU time is no slower core: what passes of it unused, while a rank waits for the other, is lost.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeGuard

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.page import ROOT, origin, paragraph, read_part, table, write_part
from benchmarks.pipeline.models import ChainedDecoder
from benchmarks.pipeline.training import PAGE, Watch
from benchmarks.training.whole_step import QUIET
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.quantities import format_seconds
from lightning_amp.techniques.hic.strata.rows import StrataParallel
from lightning_amp.techniques.pipeline.spec import PipelineStages

PART = "unequal_devices"
CORES = tuple(sorted(os.sched_getaffinity(0)))[:2]
BY_HAND = range(10, 15)
"""Blocks, or strata, of the first rank in splits that are tried one by one; 12 of 18 are two thirds."""
BLOCKS, WIDTH, SAMPLES, MICRO_BATCHES, STEPS = 18, 1024, 960, 24, 4
ANCHORS, DIM, CELLS = 3_000, 64, 48
"""Of the strata."""


class Tower(pl.LightningModule):
    """Alike blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """A mean over samples."""
        loss: Tensor = self.blocks(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        """Without state."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    @staticmethod
    def batch() -> Tensor:
        """Rows."""
        return torch.randn(SAMPLES, WIDTH)

    @staticmethod
    def parts(batch: Tensor) -> Sequence[Tensor]:
        """Of a step, one after the other."""
        return batch.split(SAMPLES // MICRO_BATCHES)


class Strata(ChainedDecoder):
    """Alike strata, which are not chained."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(anchors=ANCHORS, strata=BLOCKS, dim=DIM, alike=True)

    def configure_optimizers(self) -> Any:
        """Without state."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    @staticmethod
    def batch() -> dict[str, Tensor]:
        """Cells."""
        x = torch.poisson(torch.full((CELLS, BLOCKS * (ANCHORS - BLOCKS)), 1.5))
        experiment = torch.zeros(CELLS, dtype=torch.int64)
        return {
            "x": x,
            "u": torch.randn(CELLS, DIM),
            "batch": experiment,
            "library": x.sum(1, keepdim=True),
        }

    @staticmethod
    def parts(batch: dict[str, Tensor]) -> Sequence[dict[str, Tensor]]:
        """All at once."""
        return [batch]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is split, how, and the least that its step can take, by the ideal."""

    module: type[Any]
    settings: dict[str, Any]
    bound: float


KINDS = {
    "stages": Kind(
        module=Tower,
        settings={"strategies": "pipeline", "schedule": "gpipe", "micro_batches": MICRO_BATCHES},
        bound=(MICRO_BATCHES + 1) / MICRO_BATCHES,
    ),
    "strata": Kind(module=Strata, settings={"strategies": "strata"}, bound=1.0),
}


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


def run(rounds: int, kind: str) -> dict[str, Any]:
    """A rank on each of two cores; what rank 0 has found.

    Raises:
        SystemExit: A rank was lost.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(len(CORES)):
            environment = os.environ | {
                **{"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
                **{
                    "RANK": str(rank),
                    "LOCAL_RANK": "0",
                    "GROUP_RANK": str(rank),
                    "WORLD_SIZE": str(len(CORES)),
                },
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29733", "TORCHELASTIC_RUN_ID": "unequal"},
            }
            command = [sys.executable, "-m", "benchmarks.pipeline.unequal_devices", "--rounds", str(rounds)]
            command += ["--rank", str(rank), "--folder", folder, "--only", kind]
            ranks.append(
                subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True)
            )
        said = [rank.communicate()[1] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise SystemExit("\n".join(errors[-3000:] for errors in said))
        found: dict[str, Any] = json.loads((Path(folder) / "found").read_text())
        return found


def on_this_rank(rank: int, folder: Path, rounds: int, kind: Kind) -> None:
    """All fits; rank 0 writes what it has found."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {CORES[rank]})
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"alone": [], "alike": [], "measured": [], "ends": {}, "by hand": {}}
    for _ in range(rounds):
        if dist.get_rank() == 0:
            found["alone"].append(alone(kind))
        dist.barrier()
        for name in ("alike", "measured"):
            strategy = AMPStrategy(
                **kind.settings,
                model_parallel_size=2,
                device_speeds="measure" if name == "measured" else None,
            )
            begin = time.perf_counter()
            found[name].append(fit(kind, strategy))
            if dist.get_rank() == 0:
                took = format_seconds(time.perf_counter() - begin)
                print(f"{name}: a step {format_seconds(found[name][-1])}, the fit {took}", flush=True)
            assert strategy.plan is not None, "it was carried out"
            ends = ends_of(strategy.plan)
            found["ends"].setdefault(name, []).append(ends)
            said = [note for note in strategy.plan.notes if note.startswith("speeds of the ranks")]
            if dist.get_rank() == 0:
                print("\n".join([f"ends {ends}", *said]), flush=True)
        for first in BY_HAND:
            ends = f"{first},{BLOCKS}"
            seconds = fit(kind, AMPStrategy(plan=with_ends(strategy.plan, ends)))
            found["by hand"].setdefault(ends, []).append(seconds)
            if dist.get_rank() == 0:
                print(f"{ends}: a step {format_seconds(seconds)}", flush=True)
    if dist.get_rank() == 0:
        (folder / "found").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def is_split(spec: object) -> TypeGuard[PipelineStages | StrataParallel]:
    """Whether it has ends."""
    return isinstance(spec, PipelineStages | StrataParallel)


def ends_of(plan: Plan) -> str:
    """How a plan splits."""
    return next(rule.spec.ends for rule in plan.rules if is_split(rule.spec))


def with_ends(plan: Plan, ends: str) -> Plan:
    """The plan with another split."""
    rules = (
        replace(rule, spec=replace(rule.spec, ends=ends)) if is_split(rule.spec) else rule
        for rule in plan.rules
    )
    return replace(plan, rules=tuple(rules))


def alone(kind: Kind) -> float:
    """Seconds of a step on this rank by itself, median."""
    module = kind.module()
    parts = module.parts(module.batch())
    optimizer = module.configure_optimizers()
    times = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        for part in parts:
            (module.training_step(part, 0) / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
    return median(times[1:])


def fit(kind: Kind, strategy: AMPStrategy) -> float:
    """Seconds of a step, median."""
    watch = Watch(None)
    trainer = pl.Trainer(
        **{
            "strategy": strategy,
            "devices": 1,
            "num_nodes": 2,
            "accelerator": "cpu",
            "max_epochs": 1,
            **QUIET,
        },
        plugins=[TorchElasticEnvironment()],
        callbacks=[watch],
        use_distributed_sampler=False,
    )
    # all ranks have the same
    torch.manual_seed(1)
    batches = [kind.module.batch() for _ in range(STEPS + 1)]
    trainer.fit(kind.module(), DataLoader(batches, batch_size=None))
    return median(b - a for a, b in zip(watch.ends[1:], watch.ends[2:], strict=False))


def written(rows: list[list[str]], rounds: int) -> list[str]:
    """The page's part, with as many rows as there are."""
    return [
        *paragraph(
            f"""{origin("python -m benchmarks.pipeline.unequal_devices --write")} Two gloo ranks, each on a core of its
            own, of which a process that never waits takes half beside the second; {BLOCKS} alike blocks with
            {MICRO_BATCHES} micro-batches by gpipe, and {BLOCKS} alike strata; medians of {rounds} rounds in turn. The
            ideal is what the first rank takes alone, by 1.5; the bound of stages is the ideal with the schedule's
            bubble, one micro-batch more. The best split is the fastest of those by hand."""
        ),
        *table(
            ["what", "split", "ends", "a step", "by the best split", "ideal", "by the ideal", "by the bound"],
            rows,
        ),
    ]


def main() -> None:
    """Run, and print or write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), help="these alone")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reports/pipeline.md")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        on_this_rank(asked.rank, asked.folder, asked.rounds, KINDS[asked.only[0]])
        return
    if asked.write:
        read_part(PAGE, PART)  # a page without markers is refused before anything is measured
    rows = []
    for kind in asked.only:
        with beside(CORES[1]):
            found = run(asked.rounds, kind)
        ideal = median(found["alone"]) / 1.5
        bound = ideal * KINDS[kind].bound
        hand = {ends: median(times) for ends, times in found["by hand"].items()}
        tried = [
            (f"ranks {name}", " and ".join(sorted(set(found["ends"][name]))), median(found[name]))
            for name in ("alike", "measured")
        ]
        rows += [
            [
                *(kind, split, ends, format_seconds(seconds), f"{seconds / min(hand.values()):.2f}"),
                *(format_seconds(ideal), f"{seconds / ideal:.2f}", f"{seconds / bound:.2f}"),
            ]
            for split, ends, seconds in [*tried, *(("by hand", *row) for row in hand.items())]
        ]
        lines = written(rows, asked.rounds)
        if asked.write:
            write_part(PAGE, PART, lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
