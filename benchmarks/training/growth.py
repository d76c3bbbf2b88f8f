"""How the time of a step and of an epoch grows with cells, bins, strata and ranks, written to docs/reports/growth.md.

    python -m benchmarks.training.growth [--quick] [--cores 2] [--rounds 3] [--seconds S]
    python -m benchmarks.training.growth --redraw

The reference model under the Trainer on synthetic cells: plain Lightning, ddp, the plan of the paper's policy, and
auto. One size grows at a time. Every method has the same cores: as threads of one process, or as ranks of one thread
each. A run is one new process, as in whole_step.py; those of a size take turns, and all sizes are measured in a
round before the next round begins. An epoch is `EPOCH_CELLS` cells, its time what the measured steps took in all.

Numbers are kept in docs/reports/growth.json after every run. A command that was stopped (or has used up `--seconds`)
continues there; one of another version of the sources, or with other arguments, is refused until the file is removed.
`--redraw` only writes picture and page again. About 75 minutes on two quiet cores; with --quick, which has few and
small sizes and one round, 8.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.page import ROOT, machine, origin, paragraph, read_part, table, version, write_part
from benchmarks.training.growth_picture import Panel, draw
from benchmarks.training.whole_step import STEPS, measure
from lightning_amp.progress import track
from lightning_amp.quantities import format_seconds

PART, PICTURE, NUMBERS = "training.growth", "growth.png", "growth.json"
EPOCH_CELLS = 384
"""So many that the measured steps are whole epochs for every number of cells below."""
GENES = 300
METHODS: dict[str, dict[str, Any] | str] = {
    "plain": "auto",
    "ddp": "ddp_find_unused_parameters_true",
    "paper": {"policy": "paper"},
    "auto": {},
}
WORDS = {
    "plain": "plain Lightning",
    "auto, one process": "amp, auto",
    "ddp": "ddp",
    "paper": "amp, the paper's plan",
    "auto": "amp, auto",
}
"""Of the curves, which are the methods, and auto once more: with all cores as threads of one process."""
ALONE = ("plain", "auto, one process")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process, or one for each rank.

    Attributes:
        method: one of `METHODS`
        cells: of a step, over all ranks
        threads: of a rank
    """

    method: str
    bins: int
    strata: int
    cells: int
    ranks: int
    threads: int


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The sizes: each axis grows while the others stay at `base`."""

    base: dict[str, int]
    cells: tuple[int, ...]
    bins: tuple[int, ...]
    strata: tuple[int, ...]

    def sizes(self, axis: str) -> list[dict[str, int]]:
        """Bins, strata and cells along one of these."""
        return [{**self.base, axis: value} for value in getattr(self, axis)]


AXES = ("cells", "bins", "strata")
LABELS = {"cells": "cells of a step", "bins": "bins", "strata": "strata", "ranks": "ranks of one thread each"}
FULL = Suite(
    base={"bins": 240, "strata": 16, "cells": 64},
    cells=(32, 64, 128, 384),
    bins=(60, 120, 240, 480, 960),
    strata=(4, 8, 16, 32),
)
QUICK = Suite(base={"bins": 120, "strata": 8, "cells": 64}, cells=(32, 64, 128), bins=(60, 120, 240), strata=(4, 8, 16))


def in_places(size: dict[str, int], cores: int) -> list[Run]:
    """The runs of a size that share its cores, as threads of one process or as ranks."""
    alone = [Run(method=name, ranks=1, threads=cores, **size) for name in ("plain", "auto")]
    ranks = [Run(method=name, ranks=cores, threads=1, **size) for name in ("ddp", "paper", "auto")]
    return alone + ranks if cores > 1 else alone


def on_ranks(suite: Suite, cores: int) -> list[Run]:
    """The runs of more and more ranks, of one thread each."""
    counts = [1 << i for i in range(cores.bit_length()) if 1 << i <= cores]
    return [
        Run(method=name, ranks=count, threads=1, **suite.base)
        for count in counts
        for name in METHODS
        if count == 1 or name != "plain"
    ]


def all_runs(suite: Suite, cores: int) -> list[Run]:
    """Every run once; those that compare with each other follow each other."""
    runs = [run for axis in AXES for size in suite.sizes(axis) for run in in_places(size, cores)]
    return list(dict.fromkeys(runs + on_ranks(suite, cores)))


def measure_all(file: Path, head: dict[str, Any], suite: Suite, *, seconds: float) -> bool:
    """Measure what the file lacks, and say whether nothing is missing now.

    Args:
        file: JSON of a head and runs, written after every run
        head: what must be the same in a file that is continued
        suite: what to measure
        seconds: after which no run begins
    """
    found = read(file) if file.exists() else {"head": head, "runs": []}
    if found["head"] != head:
        raise SystemExit(
            f"{file}: has numbers of {found['head']!r}, asked for are {head!r}, which do not go together; remove the"
            " file to measure anew, or draw what it has with --redraw"
        )
    there = [(row["run"], row["round"]) for row in found["runs"]]
    turns = [(run, number) for number in range(head["rounds"]) for run in all_runs(suite, head["cores"])]
    todo = [(run, number) for run, number in turns if (asdict(run), number) not in there]
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        for run, number in track(todo, description="training", total=len(todo)):
            if time.monotonic() > end:
                return False
            data = _cells(Path(folder), run)
            request = {"data": str(data), "cells": run.cells // run.ranks, "ranks": run.ranks, "threads": run.threads}
            got = measure(METHODS[run.method], request)
            found["runs"].append({"run": asdict(run), "round": number, **got})
            file.write_text(json.dumps(found, indent=0) + "\n")
    return True


def _cells(folder: Path, run: Run) -> Path:
    from lightning_amp.data.prepare.synthetic import synthesize

    data = folder / f"{run.bins}-{run.strata}"
    if not data.exists():
        synthesize(data, cells=EPOCH_CELLS, bins=run.bins, strata=run.strata, genes=GENES)
    return data


def read(file: Path) -> dict[str, Any]:
    """What was measured so far."""
    found: dict[str, Any] = json.loads(file.read_text())
    return found


class Results:
    """What was found, by run."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.head = found["head"]
        self.cores = self.head["cores"]
        self.suite = QUICK if self.head["quick"] else FULL
        self._of: dict[Run, list[dict[str, Any]]] = {}
        for row in found["runs"]:
            self._of.setdefault(Run(**row["run"]), []).append(row)

    def step(self, run: Run) -> float | None:
        """Median seconds of a step."""
        runs = self._of.get(run)
        return median(step for row in runs for step in row["steps"]) if runs else None

    def epoch(self, run: Run) -> float | None:
        """Seconds of an epoch, the median of rounds."""
        runs = self._of.get(run)
        return median(mean(row["steps"]) for row in runs) * EPOCH_CELLS / run.cells if runs else None

    def plan(self, run: Run) -> str:
        """Techniques of the last run."""
        return str(self._of[run][-1]["plan"]) if run in self._of else ""

    def curves(self, axis: str) -> dict[str, list[Run]]:
        """The runs along an axis, by the name of their curve."""
        if axis == "ranks":
            curves: dict[str, list[Run]] = {}
            for run in on_ranks(self.suite, self.cores):
                curves.setdefault(run.method, []).append(run)
            return curves
        sizes = self.suite.sizes(axis)
        columns = zip(*(in_places(size, self.cores) for size in sizes), strict=True)
        return {name_of(runs[0]): list(runs) for runs in columns}

    def panel(self, axis: str, *, epoch: bool = False) -> Panel:
        """Seconds against an axis."""
        seconds = self.epoch if epoch else self.step
        found = {name: {getattr(run, axis): seconds(run) for run in runs} for name, runs in self.curves(axis).items()}
        curves = {
            name: {x: y for x, y in points.items() if y is not None}  # what a stopped command has not reached
            for name, points in found.items()
        }
        what = f"an epoch of {EPOCH_CELLS} cells" if epoch else "a step"
        title = self.rest(axis)
        if axis != "cells":
            title += f", {EPOCH_CELLS // self.suite.base['cells']} steps an epoch"
        return Panel(label=LABELS[axis], what=what, title=title, curves=curves, whole=axis == "ranks")

    def rest(self, axis: str) -> str:
        """What stays the same along an axis."""
        words = {"bins": "bins", "strata": "strata", "cells": "cells a step"}
        return ", ".join(f"{n} {words[name]}" for name, n in self.suite.base.items() if name != axis)


def name_of(run: Run) -> str:
    """The curve to which a run belongs."""
    return f"{run.method}, one process" if run.method == "auto" and run.ranks == 1 else run.method


def legend(cores: int) -> dict[str, str]:
    """What the curves are, in words."""
    process, ranks = f"one process of {cores} threads", f"{cores} ranks"
    return {
        name: f"{text}, {process if name in ALONE else ranks}" if cores > 1 else text for name, text in WORDS.items()
    }


def page(results: Results) -> Iterator[str]:
    """The part of the page that is written, as Markdown."""
    head = results.head
    yield from paragraph(
        f"""{head["origin"]} {head["rounds"]} round{"s" * (head["rounds"] > 1)}, every run a new process; the step is
        the median of {STEPS} steps of each round after warming up, loading included. Synthetic cells,
        {EPOCH_CELLS} an epoch, with {GENES} genes. {"**The small sizes of --quick.**" if head["quick"] else ""}"""
    )
    yield f"![Time of a step against cells, bins, strata and ranks.]({PICTURE})"
    yield ""
    for axis in (*AXES, "ranks"):
        yield from _axis(results, axis)


def _axis(results: Results, axis: str) -> Iterator[str]:
    curves, words = results.curves(axis), WORDS if axis == "ranks" else legend(results.cores)
    places = list(dict.fromkeys(getattr(run, axis) for runs in curves.values() for run in runs))
    yield f"## {LABELS[axis].capitalize()}"
    yield ""
    yield f"{results.rest(axis).capitalize()}; time of a step, and of an epoch:"
    yield ""
    rows = []
    for place in places:
        runs = [next((r for r in own if getattr(r, axis) == place), None) for own in curves.values()]
        rows.append([f"{place:,}", *(_both(results, run) for run in runs), _plan(results, runs)])
    yield from table([LABELS[axis], *(words[name] for name in curves), "auto's plan"], rows)
    yield from paragraph(" ".join(_pays(results, axis, words)))


def _both(results: Results, run: Run | None) -> str:
    step, epoch = (None, None) if run is None else (results.step(run), results.epoch(run))
    return "" if step is None or epoch is None else f"{format_seconds(step)}, {format_seconds(epoch)}"


def _plan(results: Results, runs: list[Run | None]) -> str:
    plans = [results.plan(run) for run in runs if run is not None and run.method == "auto"]
    return "; ".join(plan for plan in dict.fromkeys(plans) if plan)


def _pays(results: Results, axis: str, words: dict[str, str]) -> Iterator[str]:
    """Where each method begins to be faster than plain Lightning, in words."""
    panel = results.panel(axis)
    for name, points in panel.curves.items():
        plain = panel.plain(points)
        if name == "plain" or not plain:
            continue
        begins, first = panel.begins(name), min(plain)
        if begins:
            places = " and ".join(f"{x:,.0f}" for x, _ in begins)
            yield f"*{words[name]}* begins to pay at about {places} {LABELS[axis].split()[0]}."
        elif points[first] < plain[first]:
            yield f"*{words[name]}* is faster than plain Lightning from the smallest size on."
        else:
            yield f"*{words[name]}* is not faster than plain Lightning at these sizes."


def write(folder: Path, found: dict[str, Any]) -> None:
    """Draw the picture, and write the part of the page."""
    results = Results(found)
    panels = [results.panel("cells"), results.panel("cells", epoch=True)]
    panels += [results.panel(axis) for axis in ("bins", "strata", "ranks")]
    draw(folder / PICTURE, panels, legend(results.cores))
    write_part(folder / "growth.md", PART, page(results))
    print(f"wrote {folder / 'growth.md'} and {PICTURE}")


def main() -> None:
    """Measure what is missing, then write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few and small sizes, one round")
    parser.add_argument("--cores", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--rounds", type=int, help="3, or 1 with --quick")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no run begins")
    parser.add_argument("--redraw", action="store_true", help="write picture and page of what was measured")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "reports", help="folder of page, picture and numbers"
    )
    arguments = parser.parse_args()
    file = arguments.out / NUMBERS
    read_part(arguments.out / "growth.md", PART)  # a page without markers is refused before anything is measured
    if not arguments.redraw:
        command = "python -m benchmarks.training.growth" + " --quick" * arguments.quick
        known = read(file)["head"]["origin"] if file.exists() else origin(command)
        head = {
            "origin": known,
            "version": version().removesuffix("-dirty"),
            "machine": machine(),
            "quick": arguments.quick,
            "cores": arguments.cores,
            "rounds": arguments.rounds or (1 if arguments.quick else 3),
        }
        suite = QUICK if arguments.quick else FULL
        if not measure_all(file, head, suite, seconds=arguments.seconds):
            print("not all is measured yet; the same command continues")
    write(arguments.out, read(file))


if __name__ == "__main__":
    main()
