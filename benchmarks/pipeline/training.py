"""Training as stages of a pipeline on 4 gloo ranks of this machine, beside one plain process, in float64.

    python -m benchmarks.pipeline.training [--quick] [--only MODEL ...] [--write]

A VGG-like CNN without batch norm, GPT-2 small (124 million parameters, the head tied to the embedding, texts of 16
words) and a chained decoder of ours, five steps of each with clipping, by every schedule, with even, uneven and planned
cuts, and gradients accumulated over 1 and 3 batches. Parameters of one plain process, under Lightning's own strategy,
are saved to a file, with which every rank compares what it holds. A run whose parameters are further away than 1e-10
ends the command with status 1. `--write` puts the table into docs/reports/pipeline.md. About 40 minutes on two quiet
cores and 16 GiB of memory; with --quick (small models, one schedule, no accumulation) one minute.
"""

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.page import ROOT, origin, write_as_it_grows
from benchmarks.pipeline.models import GPT, VGG, Strata
from benchmarks.tensor3d.ranks import Ranks
from benchmarks.training.whole_step import QUIET
from lightning_amp import AMPStrategy
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.pipeline.row import PipelineStages
from lightning_amp.techniques.pipeline.schedule.schedules import SCHEDULES
from tests.lightning.strategy.strategy_cases import RunningRanks

PAGE, PART = ROOT / "docs" / "reports" / "pipeline.md", "pipeline.training"
RANKS, STEPS, MICRO_BATCHES, SAMPLES, TOLERANCE = 4, 5, 4, 8, 1e-10
CLIP = {"VGG-like CNN": 0.1, "GPT-2 small": 0.1, "chained decoder": 0.01}
"""Largest norm of gradients, so small that every step is clipped; the models."""
HEADER = ["model", "schedule", "cut", "accumulation", "largest difference", "parameters and state of the ranks",
          "a step"]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Run:
    """One fit. `cut` is "planned", "even", "uneven", or "" where the plan has no stages."""

    model: str
    strategies: str = "pipeline"
    schedule: str = ""
    cut: str = ""
    accumulation: int = 1
    quick: bool = False


def runs_of(model: str, *, quick: bool) -> Iterator[Run]:
    """The fits of one model on ranks; the planned cut of a schedule makes the plan of its others."""
    one = Run(model=model, quick=quick)
    if model == "chained decoder":
        yield from (one, replace(one, strategies="strata", accumulation=1 if quick else 3))
        return
    for schedule in ("1f1b",) if quick else SCHEDULES:
        yield replace(one, schedule=schedule, cut="planned")
        for cut, accumulation in [("uneven", 1)] if quick else product(("even", "uneven"), (1, 3)):
            yield replace(one, schedule=schedule, cut=cut, accumulation=accumulation)


def made(run: Run) -> tuple[LightningModule, list[Any]]:
    """A model in float64 and its batches, the same in every process."""
    draw, batches = torch.Generator().manual_seed(1), range(STEPS * run.accumulation)
    torch.manual_seed(0)
    if run.model == "VGG-like CNN":
        images = [torch.randn(SAMPLES, 3, 32, 32, generator=draw, dtype=torch.float64) for _ in batches]
        return VGG(side=32, narrow=16 if run.quick else 2).double(), images
    if run.model == "GPT-2 small":
        words, small = (101, {"dim": 16, "heads": 2}) if run.quick else (50_257, {"dim": 768, "heads": 12})
        texts = [torch.randint(words, (SAMPLES, 16), generator=draw) for _ in batches]
        return GPT(words=words, layers=12, length=1024, tied=True, **small).double(), texts
    module = Strata().double()
    return module, [module.cells(SAMPLES, draw) for _ in batches]


def ends_of(cut: str, blocks: int, stages: int) -> tuple[int, ...]:
    """One past the last block of every stage: as many blocks each, or ever more."""
    power, ends = (1 if cut == "even" else 2), [0]
    for stage in range(1, stages + 1):
        # a block for every stage that follows
        most = blocks - (stages - stage)
        ends.append(min(most, max(ends[-1] + 1, round(blocks * (stage / stages) ** power))))
    return tuple(ends[1:])


def stages_in(plan: Plan) -> PipelineStages | None:
    """The stages of a plan, if it has any."""
    return next((rule.spec for rule in plan.rules if isinstance(rule.spec, PipelineStages)), None)


def recut(plan: Plan, ends: Iterable[int]) -> Plan:
    """The same plan with other ends of its stages."""
    listed = ",".join(map(str, ends))
    rules = tuple(
        replace(rule, spec=replace(rule.spec, ends=listed)) if isinstance(rule.spec, PipelineStages) else rule
        for rule in plan.rules
    )
    return replace(plan, rules=rules, stages=())


class Watch(Callback):
    """Ends of batches; and after the last one what this rank holds, compared with what one process has left."""

    def __init__(self, expected: Path | None = None) -> None:
        self.expected, self.difference, self.held = expected, 0.0, 0
        self.ends, self.norms = list[float](), list[float]()

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        """Note what is clipped, of one process."""
        if trainer.world_size == 1:
            grads = [p.grad for p in module.parameters() if p.grad is not None]
            self.norms.append(float(torch.nn.utils.get_total_norm(grads)))

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the time, and after the last batch compare."""
        self.ends.append(time.perf_counter())
        if self.expected is None or len(self.ends) < trainer.num_training_batches:
            return
        found = {name: p.detach() for name, p in module.named_parameters() if not p.is_meta}
        state = trainer.optimizers[0].state
        kept = [v for own in state.values() for v in own.values() if isinstance(v, Tensor)]
        self.held = sum(t.nbytes for t in [*found.values(), *kept])
        # it would be made whole on every rank when the run ends: 8 GB of GPT-2's
        state.clear()
        right = torch.load(self.expected, mmap=True)
        self.difference = max(float((right[name] - p).abs().max()) for name, p in found.items())

    def step_seconds(self, accumulation: int = 1, skipped: int = 0) -> float:
        """Median of a step with its batches, without the first ones."""
        return accumulation * median(b - a for a, b in pairwise(self.ends[skipped:]))


def fit(rank: int, ranks: int, run: Run, plan: Plan | None, folder: Path) -> dict[str, Any]:
    """Train as one of the ranks; one process leaves its parameters in a file."""
    module, batches = made(run)
    file = folder / f"{run.model}_{run.accumulation}.pt"
    watch, strategy = Watch(file if ranks > 1 else None), AMPStrategy(**settings(run, plan, module))
    trainer = Trainer(
        **QUIET,
        accelerator="cpu",
        devices=ranks,
        strategy=strategy if ranks > 1 else "auto",
        plugins=[RunningRanks(rank, ranks)] if ranks > 1 else [],
        max_epochs=1,
        accumulate_grad_batches=run.accumulation,
        gradient_clip_val=CLIP[run.model],
        callbacks=[watch],
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    if ranks == 1:
        assert min(watch.norms) > CLIP[run.model], f"{run.model} is not clipped in every step: {watch.norms}"
        torch.save({name: p.detach() for name, p in module.named_parameters()}, file)
        return {}
    return {"plan": strategy.plan, "difference": watch.difference, "held": watch.held,
            "seconds": watch.step_seconds(run.accumulation)}  # fmt: skip


def settings(run: Run, plan: Plan | None, module: Any) -> dict[str, Any]:
    """Of AMPStrategy; even and uneven cuts are those of a plan that was made before."""
    if run.cut in ("even", "uneven") and plan is not None:
        stages = 2 * RANKS if run.schedule == "interleaved" else RANKS
        return {"plan": recut(plan, ends_of(run.cut, len(module.blocks), stages))}
    if run.schedule:
        return {"strategies": run.strategies, "schedule": run.schedule, "micro_batches": MICRO_BATCHES}
    return {"strategies": run.strategies, "model_parallel_size": RANKS}


def rows(models: list[str], wrong: list[str], *, quick: bool) -> Iterator[list[str]]:
    """A row for every run; those further away than `TOLERANCE` are in `wrong` too."""
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            runs, plan = list(runs_of(model, quick=quick)), None
            for one in {run.accumulation: run for run in runs}.values():
                # a process of its own gives its memory back
                alone = Ranks(1, fit, patience=3600)
                alone.results(one, None, Path(folder))
                alone.end()
            pool = Ranks(RANKS, fit, patience=3600)
            for run in runs:
                cells = [run.model, run.schedule or run.strategies, run.cut, str(run.accumulation)]
                answers = pool.ask(run, plan, Path(folder))
                if any(kind != "done" for kind, _ in answers):
                    yield [*cells, f"{answers[0][0]}: {answers[0][1].partition('. ')[0]}", "", ""]
                    wrong += [] if answers[0][0] == "refused" else [" ".join(map(str, cells))]
                    pool.end()
                    pool = Ranks(RANKS, fit, patience=3600)
                    continue
                found = [value for _, value in answers]
                plan, difference = found[0]["plan"], max(one["difference"] for one in found)
                cells[2] = f"{run.cut} {spec.ends}" if (spec := stages_in(plan)) else ""
                wrong += [] if difference <= TOLERANCE else [f"{cells}: {difference}"]
                held = ", ".join(format_bytes(one["held"]) for one in found)
                yield [*cells, f"{difference:.1e}", held, format_seconds(found[0]["seconds"])]
            pool.end()


def main() -> None:
    """Measure, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models, one schedule")
    parser.add_argument("--only", nargs="+", choices=list(CLIP), default=list(CLIP), help="these models")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reports/pipeline.md")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    command = f"python -m benchmarks.pipeline.training{' --quick' * asked.quick} --write"
    first = f"""{origin(command)} {RANKS} gloo ranks of one thread on this machine, {STEPS} steps in float64 of
        {SAMPLES} samples in {MICRO_BATCHES} micro-batches, every one clipped. The difference is the largest of any
        parameter on any rank to that of one plain process. Ranks share the cores, so that seconds of a step (median,
        with all its accumulated batches) are no speed."""
    wrong = list[str]()
    write_as_it_grows(PAGE, PART, first, HEADER, rows(asked.only, wrong, quick=asked.quick), write=asked.write)
    if wrong:
        sys.exit(f"further than {TOLERANCE} from one process, or failed: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
