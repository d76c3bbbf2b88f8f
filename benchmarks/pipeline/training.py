"""Training as stages of a pipeline on 4 gloo ranks of this machine, beside one plain process, in float64.

    python -m benchmarks.pipeline.training [--quick] [--only MODEL ...] [--write | --add]

A VGG-like CNN without batch norm, GPT-2 small (124 million parameters, the head tied to the embedding, texts of 16
words) and a chained decoder of ours, five steps of each with clipping, by every schedule, with even, uneven and planned
cuts, and gradients accumulated over 1 and 3 batches. Parameters of one plain process, under Lightning's own strategy,
are saved to a file, with which every rank compares what it holds. `--write` puts the table into
docs/reports/pipeline.md, `--add` those of its rows that the page has not (and those of
the planned cuts whose plans these need). A run whose
parameters are further away than 1e-10 ends the command with an error. About 40 minutes on two quiet cores and 16 GiB
of memory, with --quick (small models, the CNN and the GPT in one way each) one minute.
"""

import argparse
import gc
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.page import ROOT, origin, paragraph, read_part, table, write_part
from benchmarks.pipeline.models import GPT, VGG, ChainedDecoder
from benchmarks.training.whole_step import QUIET
from lightning_amp.errors import PlanError
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.pipeline.row import PipelineStages

RANKS, STEPS, MICRO_BATCHES, SAMPLES, TOLERANCE = 4, 5, 4, 8, 1e-10
SCHEDULES = ("gpipe", "1f1b", "interleaved")
ACCUMULATIONS = (1, 3)
CLIP = {"vgg": 0.1, "gpt2": 0.1, "chained": 0.01}
"""Largest norm of gradients, so small that every step is clipped."""
PAGE, PART = ROOT / "docs" / "reports" / "pipeline.md", "pipeline.training"
HEADER = [
    *("model", "schedule", "cut", "accumulation", "largest difference"),
    *("parameters and state of the ranks", "a step"),
]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One fit. `cut` is "planned", "even", "uneven", or "" where the plan has no stages."""

    model: str
    strategies: str = "pipeline"
    schedule: str | None = None
    cut: str = ""
    accumulation: int = 1

    @property
    def named(self) -> list[str]:
        """First cells of its row."""
        return [NAMES[self.model], self.schedule or self.strategies, self.cut, str(self.accumulation)]

    @property
    def key(self) -> str:
        """The same in one, of the row on the page too."""
        return key_of(self.named)


NAMES = {"vgg": "VGG-like CNN", "gpt2": "GPT-2 small", "chained": "chained decoder"}


def key_of(cells: list[str]) -> str:
    """Of a row: model, schedule, kind of cut and accumulation."""
    return " | ".join([*cells[:2], cells[2].split(" ")[0], cells[3]])


def make(name: str, batches: int, *, quick: bool) -> tuple[LightningModule, list[Any]]:
    """A model in float64 and its batches, the same in every process."""
    draw = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    data: list[Any]
    if name == "vgg":
        module: LightningModule = VGG(side=32, narrow=16 if quick else 2)
        images = (torch.randn(SAMPLES, 3, 32, 32, generator=draw, dtype=torch.float64) for _ in range(batches))
        return module.double(), list(images)
    if name == "gpt2":
        words, small = (101, {"dim": 16, "heads": 2}) if quick else (50_257, {"dim": 768, "heads": 12})
        module = GPT(words=words, layers=12, length=1024, tied=True, **small)
        data = [torch.randint(words, (SAMPLES, 16), generator=draw) for _ in range(batches)]
        return module.double(), data
    module = ChainedDecoder()
    data = []
    for _ in range(batches):
        x = torch.poisson(torch.full((SAMPLES, module.decoder.n_features), 1.5, dtype=torch.float64), generator=draw)
        u = torch.randn(SAMPLES, module.decoder.dim, generator=draw, dtype=torch.float64)
        experiment = torch.zeros(SAMPLES, dtype=torch.int64)
        data.append({"x": x, "u": u, "batch": experiment, "library": x.sum(1, keepdim=True)})
    return module.double(), data


def all_runs(model: str, *, quick: bool) -> Iterator[Run]:
    """The fits of one model on ranks."""
    if model == "chained":
        yield Run(model=model)
        yield Run(model=model, strategies="strata", accumulation=3)
        return
    for schedule in ("1f1b",) if quick else SCHEDULES:
        # the first one makes the plan of which the others are
        yield Run(model=model, schedule=schedule, cut="planned")
        for cut, accumulation in product(("even", "uneven"), ACCUMULATIONS):
            if not quick or (cut, accumulation) == ("uneven", 3):
                yield Run(model=model, schedule=schedule, cut=cut, accumulation=accumulation)


def runs_of(model: str, has: Collection[str], *, quick: bool) -> list[Run]:
    """Those of which a page has no row yet, after the planned ones that make their plans."""
    runs = list(all_runs(model, quick=quick))
    missing = [run for run in runs if run.key not in has]
    return [r for r in runs if r in missing or (r.cut == "planned" and r.schedule in {m.schedule for m in missing})]


def ends_of(cut: str, blocks: int, stages: int) -> tuple[int, ...]:
    """One past the last block of every stage: as many blocks each, or ever more."""
    power, ends = (1 if cut == "even" else 2), [0]
    for stage in range(1, stages + 1):
        # a block for every stage that follows
        most = blocks - (stages - stage)
        ends.append(min(most, max(ends[-1] + 1, round(blocks * (stage / stages) ** power))))
    return tuple(ends[1:])


def recut(plan: Plan, ends: Iterable[int]) -> Plan:
    """The same plan with other ends of its stages."""
    listed = ",".join(map(str, ends))
    rules = tuple(
        replace(rule, spec=replace(rule.spec, ends=listed)) if isinstance(rule.spec, PipelineStages) else rule
        for rule in plan.rules
    )
    return replace(plan, rules=rules, stages=())


class Watch(Callback):
    """Seconds of batches, and at the end what this rank holds, compared with what one process has found."""

    def __init__(self, expected: Path | None) -> None:
        self.expected, self.difference, self.held = expected, 0.0, 0
        self.ends: list[float] = []
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        """Of one process, note what is clipped."""
        if self.expected is None:
            grads = [p.grad for p in module.parameters() if p.grad is not None]
            self.norms.append(float(torch.nn.utils.get_total_norm(grads)))

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the time, and after the last batch compare."""
        self.ends.append(time.perf_counter())
        if self.expected is None or len(self.ends) < trainer.num_training_batches:
            return
        found = {name: p for name, p in module.named_parameters() if not p.is_meta}
        state = [v for own in trainer.optimizers[0].state.values() for v in own.values() if isinstance(v, Tensor)]
        self.held = sum(p.nbytes for p in found.values()) + sum(v.nbytes for v in state)
        # it would be made whole on every rank when the run ends: 8 GB of GPT-2's
        trainer.optimizers[0].state.clear()
        expected = torch.load(self.expected, mmap=True)
        self.difference = max(float((expected[name] - p.detach()).abs().max()) for name, p in found.items())


def fit(run: Run, strategy: Any, watch: Watch, *, devices: int, quick: bool) -> LightningModule:
    """Train for five steps of the optimiser."""
    module, batches = make(run.model, STEPS * run.accumulation, quick=quick)
    options = {"accumulate_grad_batches": run.accumulation, "gradient_clip_val": CLIP[run.model]}
    trainer = Trainer(
        **{"strategy": strategy, "devices": devices, "accelerator": "cpu", "max_epochs": 1, **options, **QUIET},
        callbacks=[watch],
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return module


def on_this_rank(model: str, folder: Path, has: Collection[str], *, quick: bool) -> None:
    """All fits of one model on this rank; rank 0 writes what came of each, of all ranks."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    # kept between the fits
    dist.init_process_group("gloo")
    plan: Plan | None = None
    for run in runs_of(model, has, quick=quick):
        watch, said = Watch(reference_file(folder, run)), ""
        strategy: AMPStrategy | None = AMPStrategy(**settings(run, plan))
        try:
            fit(run, strategy, watch, devices=RANKS, quick=quick)
        except PlanError as error:
            said = str(error)
        plan, strategy = strategy.plan, None
        # the module of this run would be there beside that of the next one
        gc.collect()
        ends: list[Any] = [None] * RANKS
        dist.all_gather_object(ends, (watch.difference, watch.held))
        spec = next((rule.spec for rule in plan.rules if isinstance(rule.spec, PipelineStages)), None) if plan else None
        if dist.get_rank() == 0:
            steps = [b - a for a, b in zip(watch.ends, watch.ends[1:], strict=False)]
            found = {
                "refused": said,
                "ends": spec.ends if spec else "",
                "difference": max(difference for difference, _ in ends),
                "held": [held for _, held in ends],
                "seconds": run.accumulation * median(steps) if steps else None,
            }
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def settings(run: Run, plan: Plan | None) -> dict[str, Any]:
    """Of AMPStrategy; the plan is that of the run before."""
    if run.cut in ("even", "uneven"):
        assert plan is not None, "the first run of a schedule has made one"
        stages = 2 * RANKS if run.schedule == "interleaved" else RANKS
        return {"plan": recut(plan, ends_of(run.cut, {"vgg": 14, "gpt2": 12}[run.model], stages))}
    if run.schedule:
        return {"strategies": run.strategies, "schedule": run.schedule, "micro_batches": MICRO_BATCHES}
    return {"strategies": run.strategies, "model_parallel_size": RANKS}


def reference_file(folder: Path, run: Run) -> Path:
    """With the parameters of one process."""
    return folder / f"{run.model}_{run.accumulation}.pt"


def reference(run: Run, folder: Path, quick: bool) -> None:
    """One plain process; leaves its parameters in a file."""
    watch = Watch(None)
    module = fit(run, "auto", watch, devices=1, quick=quick)
    assert min(watch.norms) > CLIP[run.model], f"{run.model} is not clipped in every step: {watch.norms}"
    torch.save({name: p.detach() for name, p in module.named_parameters()}, reference_file(folder, run))


def measured(
    models: list[str], folder: Path, has: Collection[str] = (), *, quick: bool
) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Every run that a page has no row of, with what came of it, as it ends."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    for model in models:
        runs = runs_of(model, has, quick=quick)
        if not runs:
            continue
        for run in {run.accumulation: run for run in runs}.values():
            # a process of its own gives its memory back
            alone = multiprocessing.get_context("spawn").Process(target=reference, args=(run, folder, quick))
            alone.start()
            alone.join()
            if alone.exitcode:
                raise SystemExit(f"the plain process of {model} ended with {alone.exitcode}")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)),
            *("-m", "benchmarks.pipeline.training", "--rank-of", model, "--folder", str(folder)),
            *(["--quick"] if quick else []),
            *("--has", *has),
        ]
        with (
            (folder / "errors").open("w+") as errors,
            subprocess.Popen(
                command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True
            ) as ranks,
        ):
            assert ranks.stdout is not None
            lines = (line for line in ranks.stdout if line.startswith("{"))
            # the lines first, or a run would be taken and have no line
            yield from ((run, json.loads(line)) for line, run in zip(lines, runs, strict=False))
            if ranks.wait():
                errors.seek(0)
                raise SystemExit(f"ranks of {model} ended with {ranks.returncode}:\n{errors.read()}")


def row_of(run: Run, found: dict[str, Any]) -> list[str]:
    """Of the table."""
    if found["refused"]:
        return [*run.named, "refused, see below", "", ""]
    cut = f"{run.cut} {found['ends']}".strip()
    held = found["held"]
    name, how, _, accumulation = run.named
    return [
        *(name, how, cut, accumulation, f"{found['difference']:.1e}"),
        *(", ".join(map(format_bytes, held)), format_seconds(found["seconds"])),
    ]


def rows_in(page: list[str]) -> Iterator[list[str]]:
    """The cells of the rows of a table."""
    for line in page:
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if cells and cells[0] in NAMES.values():
            yield cells


def report(models: list[str], page: list[str], *, quick: bool, write: Callable[[list[str]], None]) -> None:
    """Run what is not in the lines of a page, and hand on these lines as they grow.

    Raises:
        SystemExit: A run is further away than `TOLERANCE`, or was lost.
    """
    command = f"python -m benchmarks.pipeline.training{' --quick' * quick} {'--add' if page else '--write'}"
    about = list(
        paragraph(f"""{origin(command)} {RANKS} gloo ranks of one thread on this machine, {STEPS} steps in
    float64 of {SAMPLES} samples in {MICRO_BATCHES} micro-batches, every one clipped. The difference is the largest of
    any parameter on any rank to that of one plain process. Ranks share the cores, so that seconds of a step (median,
    with all its accumulated batches) are no speed.""")
    )
    rows = {key_of(row): row for row in rows_in(page)}
    has, below, wrong = tuple(rows), list[str](), list[str]()
    if page:
        first, *_, last = (n for n, line in enumerate(page) if line.startswith("|"))
        added = list(paragraph(f"The rows of {', '.join(NAMES[m] for m in models)} that it had not: {origin(command)}"))
        about, below = [*page[:first], *added], page[last + 2 :]
    order = [run.key for model in NAMES for run in all_runs(model, quick=quick)]
    with tempfile.TemporaryDirectory() as folder:
        for run, found in measured(models, Path(folder), has, quick=quick):
            row = rows[run.key] = row_of(run, found)
            if found["refused"]:
                told = re.sub(r"\s+", " ", found["refused"])
                below += paragraph(f"`{run.strategies}` on the {NAMES[run.model]}: {told}")
            elif not found["difference"] <= TOLERANCE:
                wrong.append(" ".join(row))
            listed = [rows[key] for key in sorted(rows, key=order.index)]
            write([*about, *table(HEADER, listed), *below])
            print(" | ".join(row), flush=True)
    if wrong:
        raise SystemExit(f"further than {TOLERANCE} from one process: " + "; ".join(wrong))


def main() -> None:
    """Measure, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models, one schedule")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), help="these models")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reports/pipeline.md")
    parser.add_argument("--add", action="store_true", help="add to it the rows that are missing there")
    parser.add_argument("--rank-of", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--has", nargs="*", default=[], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_of:
        on_this_rank(asked.rank_of, asked.folder, asked.has, quick=asked.quick)
        return
    written = asked.write or asked.add
    # a page without markers is refused before anything is measured
    page = read_part(PAGE, PART) if written else []
    report(
        asked.only,
        page if asked.add else [],
        quick=asked.quick,
        write=(lambda lines: write_part(PAGE, PART, lines)) if written else lambda lines: None,
    )


if __name__ == "__main__":
    main()
