"""Whole training steps of the reference model under the Trainer: plain Lightning, ddp, and plans of `strategy="amp"`.

    python -m benchmarks.training.whole_step [--quick] [--data DIR] [--ranks 1] [--threads 1]
    python -m benchmarks.training.whole_step --write [--quick] [--data DIR]

A run is one process per method and round, rounds interleaved; a step is the time from the end of one batch to the end
of the next, loading included, after `WARM_UP` batches. Printed are medians over all rounds, and their ratio to that of
the first method. The last column is what comes before: from the call of `fit` to the end of its first batch, in which
processes are started, the plan is made and installed, and a kernel runs for the first time; it is a median too. Without
`--data` the cells are synthetic. `--write` measures one rank with one and two threads and two ranks of one thread, on
synthetic cells and on those of `--data`, and puts the tables into docs/reports/benchmarks.md; about 25 minutes for each
kind of cells on two quiet cores, with --quick 3.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.page import ROOT, origin, paragraph, read_part, write_part
from benchmarks.page import table as markdown
from lightning_amp.progress import track
from lightning_amp.quantities import format_seconds
from lightning_amp.text_table import table

WARM_UP, STEPS, ROUNDS = 4, 12, 3
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
PAGE = ROOT / "docs" / "reports" / "benchmarks.md"
PLACES = ((1, 1), (1, 2), (2, 1))
"""Ranks and threads of each, of the tables that are written."""
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


def prepared(
    data: str | Path, *, cells: int, threads: int, strategy: Any, callback: Any, ranks: int = 1, **options: Any
) -> Callable[[], None]:
    """The call of `fit` of the reference model, by a Trainer that writes nothing and goes on until it is stopped.

    Args:
        data: a data directory
        cells: of a step on each rank
        threads: of each rank
        strategy, callback: of the Trainer
        options: of the data module
    """
    import torch
    from lightning.pytorch import Trainer, seed_everything

    import lightning_amp

    torch.set_num_threads(threads)
    seed_everything(0, verbose=False)
    module = lightning_amp.GLUE(lr=0.01, hidden_depth=1, lam_graph=0.02, window=25)
    loader = lightning_amp.SingleCellDataModule(data, batch_size=cells, **options)
    trainer = Trainer(**QUIET, strategy=strategy, devices=ranks, accelerator="cpu", max_epochs=-1, callbacks=[callback])
    return partial(trainer.fit, module, datamodule=loader)


def fit(method: dict[str, Any] | str, *, data: str, cells: int, ranks: int, threads: int, out: str) -> None:
    """Train in this process and write the seconds of every step."""
    from lightning.pytorch import Callback, LightningModule, Trainer

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
    how = {"cells": cells, "threads": threads, "ranks": ranks, "val_fraction": 0.0}
    run = prepared(data, strategy=strategy, callback=Clock(), **how)
    begin = time.perf_counter()
    run()


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


def take_turns(
    methods: dict[str, dict[str, Any] | str], request: dict[str, Any], *, rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """The runs of every method, one of each in every round."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in methods}
    turns = [name for _ in range(rounds) for name in methods]
    for name in track(turns, description="training", total=len(turns)):
        found[name].append(measure(methods[name], request))
    return found


def rows_of(found: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """A row of the table of `HEADER` for every method."""
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


def compare(data: str, *, cells: int, ranks: int, threads: int, quick: bool) -> list[list[str]]:
    """Rows of all methods that are for so many ranks, measured by turns."""
    methods = ONE if ranks == 1 else TWO
    chosen = {name: methods[name] for name in methods if not quick or name in QUICK}
    request = {"data": data, "cells": cells // ranks, "ranks": ranks, "threads": threads}
    return rows_of(take_turns(chosen, request, rounds=1 if quick else ROUNDS))


def write(page: Path, data: dict[str, str], *, cells: int, quick: bool) -> None:
    """Measure all tables, and put them into the page; what is finished is written at once.

    Args:
        page: has the markers of `page.write_part`
        data: heading -> data directory
        cells: of a step, over all ranks
        quick: few methods, one round
    """
    lines = [*paragraph(f"{origin('python -m benchmarks.training.whole_step --write' + ' --quick' * quick)} {ABOUT}")]
    for heading, directory in data.items():
        for ranks, threads in PLACES:
            count = "one process" if ranks == 1 else f"{ranks} ranks"
            lines += [f"{heading}, {cells} cells a step, {count}, {threads} thread{'s' * (threads > 1)} each:", ""]
            rows = compare(directory, cells=cells, ranks=ranks, threads=threads, quick=quick)
            lines += markdown(HEADER, rows)
            write_part(page, "training.whole_step", lines)


def main() -> None:
    """Measure all methods by turns, and print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few methods, one round")
    parser.add_argument("--data", help="a data directory; synthetic cells without")
    parser.add_argument("--name", default="real cells", help="how --write calls the cells of --data")
    parser.add_argument("--cells", type=int, default=64, help="of a step, over all ranks")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="put all tables into docs/reports/benchmarks.md")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        fit(**json.loads(arguments.one))
        return
    if arguments.write:
        read_part(PAGE, "training.whole_step")  # a page without markers is refused before anything is measured
    with tempfile.TemporaryDirectory() as folder:
        data = {} if arguments.data is None else {arguments.name: arguments.data}
        if arguments.write or not data:
            from lightning_amp.data.prepare.synthetic import synthesize

            synthesize(folder, cells=256, bins=250, strata=32, genes=300)
            data = {SYNTHETIC: folder, **data}
        if arguments.write:
            write(PAGE, data, cells=arguments.cells, quick=arguments.quick)
            return
        rows = compare(
            next(iter(data.values())),
            cells=arguments.cells,
            ranks=arguments.ranks,
            threads=arguments.threads,
            quick=arguments.quick,
        )
    print(table(HEADER, rows))


if __name__ == "__main__":
    main()
