"""Whole training steps of the reference model under the Trainer: plain Lightning, ddp, and plans of `strategy="amp"`.

    python -m benchmarks.training.whole_step [--quick] [--data DIR] [--write]

A run is one process per method and round, rounds interleaved; a step is the time from the end of one batch to the end
of the next, loading included, after `WARM_UP` batches. Printed are medians over all rounds, and their ratio to that of
the first method. The last column is what comes before: from the call of `fit` to the end of its first batch, in which
processes are started, the plan is made and installed, and a kernel runs for the first time; it is a median too.
Tables are of one rank with one and two threads and of two ranks of one thread, on synthetic cells and on those of
`--data`; `--write` puts them into docs/reports/benchmarks.md. About 25 minutes for each kind of cells on two quiet
cores, with --quick 3.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.page import ROOT, origin, paragraph, read_part, table, write_part
from lightning_amp.progress import track
from lightning_amp.quantities import format_seconds

WARM_UP, STEPS, ROUNDS = 4, 12, 3
CELLS = 64
"""Of a step, over all ranks."""
ONE: dict[str, dict[str, Any] | str] = {
    "plain Lightning": "auto",
    "amp, S1": {"strategies": "S1"},
    "amp, sparse": {"strategies": "S1,sparse"},
    "amp, S4 sparse": {"strategies": "S1,S4,sparse"},
    "amp, S4 sparse stream": {"strategies": "S1,S4,sparse,stream"},
    "amp, S4 fused sparse stream": {"strategies": "S1,S4,fused,sparse,stream"},
    "amp, fused sparse": {"strategies": "S1,fused,sparse"},
    "amp, fused": {"strategies": "S1,fused"},
    "amp, S3 S4": {"strategies": "S1,S3,S4"},
    "amp, auto": {},
}
TWO: dict[str, dict[str, Any] | str] = {
    "ddp": "ddp_find_unused_parameters_true",
    "amp, S1": {"strategies": "S1"},
    "amp, S1, own batch statistics": {"strategies": "S1", "share_batch_statistics": False},
    "amp, auto": {},
}
QUICK = ("plain Lightning", "ddp", "amp, S1", "amp, auto")
HEADER = ["method", "step", "ratio", "plan", "fit to first batch"]
PAGE, PART = ROOT / "docs" / "reports" / "benchmarks.md", "whole_step"
PLACES = ((1, 1), (1, 2), (2, 1))
"""Ranks and threads of each."""
SYNTHETIC = "Synthetic cells (250 bins, 32 strata, 300 genes)"
QUIET = {
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
}
"""Settings of a Trainer that only trains."""
ABOUT = f"""Whole training steps of the reference model under the Trainer, loading included: the median of {STEPS} steps
of each round, its ratio to that of the first row, and the time from the call of `fit` to the end of its first batch.
Methods of a table take turns, each in new processes. All rows train to the same numbers, save that ranks with their own
batch statistics (ddp, and where it is said) are another model."""


def fit(method: dict[str, Any] | str, *, data: str, cells: int, ranks: int, threads: int, out: str) -> None:
    """Train in this process and write the seconds of every step."""
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

    import lightning_amp

    class Clock(Callback):
        """Notes when batches end."""

        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            self.ends.append(time.perf_counter())
            if len(self.ends) > WARM_UP + STEPS:
                trainer.should_stop = True

        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if trainer.is_global_zero:
                plan = getattr(trainer.strategy, "plan", None)
                steps = [end - begin for begin, end in zip(self.ends, self.ends[1:], strict=False)]
                strategies = "" if plan is None else ",".join(plan.strategies)
                found = {"steps": steps[-STEPS:], "plan": strategies, "first": self.ends[0] - begin}
                Path(out).write_text(json.dumps(found))

    strategy = method if isinstance(method, str) else lightning_amp.AMPStrategy(**method)
    torch.set_num_threads(threads)
    seed_everything(0, verbose=False)
    module = lightning_amp.GLUE(lr=0.01, hidden_depth=1, lam_graph=0.02, window=25)
    loader = lightning_amp.SingleCellDataModule(data, batch_size=cells, val_fraction=0.0)
    trainer = Trainer(**QUIET, strategy=strategy, devices=ranks, accelerator="cpu", max_epochs=-1, callbacks=[Clock()])
    begin = time.perf_counter()
    trainer.fit(module, datamodule=loader)


def measure(method: dict[str, Any] | str, request: dict[str, Any]) -> dict[str, Any]:
    """Steps of one process."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        words = json.dumps({**request, "method": method, "out": file.name})
        environment = {**os.environ, "OMP_NUM_THREADS": str(request["threads"])}
        command = [sys.executable, "-m", "benchmarks.training.whole_step", "--one", words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{method!r} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(Path(file.name).read_text())
        return found


def compare(data: str, *, ranks: int, threads: int, quick: bool) -> list[list[str]]:
    """Rows of all methods that are for so many ranks; in every round each runs once."""
    methods = {name: how for name, how in (ONE if ranks == 1 else TWO).items() if not quick or name in QUICK}
    request = {"data": data, "cells": CELLS // ranks, "ranks": ranks, "threads": threads}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in methods}
    turns = [name for _ in range(1 if quick else ROUNDS) for name in methods]
    for name in track(turns, description="training", total=len(turns)):
        found[name].append(measure(methods[name], request))
    medians = {name: median(step for run in runs for step in run["steps"]) for name, runs in found.items()}
    first = next(iter(medians.values()))
    return [
        [
            name,
            format_seconds(seconds),
            f"{seconds / first:.2f}",
            found[name][-1]["plan"],
            format_seconds(median(run["first"] for run in found[name])),
        ]
        for name, seconds in medians.items()
    ]


def grown(data: Mapping[str, str], *, quick: bool) -> Iterator[list[str]]:
    """The part of the page, again with every table; `data` has data directories by their headings."""
    command = f"python -m benchmarks.training.whole_step --write{' --quick' * quick}"
    lines = list(paragraph(f"{origin(command)} {ABOUT}"))
    for (heading, directory), (ranks, threads) in product(data.items(), PLACES):
        count = "one process" if ranks == 1 else f"{ranks} ranks"
        many = "s" * (threads > 1)
        lines += [f"{heading}, {CELLS} cells a step, {count}, {threads} thread{many} each:", ""]
        lines += table(HEADER, compare(directory, ranks=ranks, threads=threads, quick=quick))
        yield lines


def main() -> None:
    """Measure all methods by turns, and print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few methods, one round")
    parser.add_argument("--data", help="a data directory, with the synthetic cells")
    parser.add_argument("--name", default="real cells", help="how the tables call the cells of --data")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/reports/benchmarks.md")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        fit(**json.loads(asked.one))
        return
    if asked.write:
        read_part(PAGE, PART)  # a page without markers is refused before anything is measured
    from lightning_amp.data.prepare.synthetic import synthesize

    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        synthesize(folder, cells=256, bins=250, strata=32, genes=300)
        real = {} if asked.data is None else {asked.name: asked.data}
        for lines in grown({SYNTHETIC: folder, **real}, quick=asked.quick):
            if asked.write:
                write_part(PAGE, PART, lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
