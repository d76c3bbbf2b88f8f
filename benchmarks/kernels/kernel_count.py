"""How many operators and kernels one more stratum costs, forward and backward, with the settings of an accelerator.

    python -m benchmarks.kernels.kernel_count [--format text|json] [--cells 8 256] [--device-type cuda] [--write]
    python -m benchmarks.kernels.kernel_count --lines S4,sdpa,sparse,stream [--cells 8]

A decoder with a few strata runs a step on the CPU, computing with the sizes at a time that the device type has; so does
one with more strata, and what comes once a step drops out of the difference. Steps are not the first: what is looked at
once, at installation or for the first batch, is not counted. Where `sparse` is in a plan the counts come by their
entries, as the data module hands them out. What the words mean: benchmarks/kernels/count_operators.py.
`--write` puts the counts into docs/reports/gpu.md. `--lines` lists the operators of one plan by
the line that asks for them.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.count_operators import OperatorCounter
from benchmarks.page import ROOT, write_part
from benchmarks.page import table as markdown
from benchmarks.side_by_side.cases import OURS, Case, Method, Size
from benchmarks.side_by_side.plans import plan_of
from benchmarks.side_by_side.training import Training
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.footprint.target_device import settings_of
from lightning_amp.text_table import table

ANCHORS, WINDOW, DIM = 5400, 640, 128
CELLS = (8, 256)
STRATA = (2, 4)
"""Of the two decoders; the first stratum has no key, and is in both."""
HEADER = ["plan", "cells", "kernels", "operators", "views", "host syncs", "kernels by module"]
CHOICES: tuple[tuple[str, ...], ...] = (
    (),
    ("S4",),
    ("fused",),
    ("sdpa",),
    ("sparse",),
    ("stream",),
    OURS,
    ("S4", "sdpa", "sparse", "stream"),
)
"""Strategies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """One more stratum of a decoder under a plan.

    Attributes:
        anchors: N.
        window: Anchors in a bucket of attention.
        cells: B.
        strategies: The plan's, beside S1.
        kernels_per_stratum: Operators that make or change a tensor.
        operators_per_stratum: All operators.
        views: Operators of a stratum that make and change nothing.
        host_syncs: Of a whole step: what the host waits for.
        parts: Kernels of a stratum by the module that asks for them.
        lines: Operators of a stratum: name, whether it is a kernel, the line that asks for it, and how many.
        waits: Where in the package the host waits, and for which operator.
    """

    anchors: int
    window: int
    cells: int
    strategies: tuple[str, ...]
    kernels_per_stratum: float
    operators_per_stratum: float
    views: float
    host_syncs: int
    parts: dict[str, float]
    lines: list[tuple[str, bool, str, float]]
    waits: list[str]


def count(strategies: tuple[str, ...], *, cells: int, anchors: int, window: int, dim: int, device_type: str) -> Count:
    """What one more stratum costs."""
    few, many = (
        _step(Size(anchors=anchors, strata=k, cells=cells, dim=dim, window=window), strategies, device_type)
        for k in STRATA
    )
    more = STRATA[1] - STRATA[0]
    kernels, operators = (many.kernels - few.kernels) / more, (many.operators - few.operators) / more
    parts = Counter(many.parts)
    parts.subtract(few.parts)
    lines = Counter(many.lines)
    lines.subtract(few.lines)
    return Count(
        anchors=anchors,
        window=window,
        cells=cells,
        strategies=strategies,
        kernels_per_stratum=kernels,
        operators_per_stratum=operators,
        views=operators - kernels,
        host_syncs=many.host_syncs.total(),
        parts={name: n / more for name, n in parts.most_common() if n},
        lines=[(*what, n / more) for what, n in sorted(lines.items(), key=_place) if n],
        waits=[f"{n} x {name} in {line}" for (name, line), n in many.host_syncs.most_common()],
    )


def _step(size: Size, strategies: tuple[str, ...], device_type: str) -> OperatorCounter:
    """The operators of a decoder's second step."""
    case = Case(size=size, method=Method(name="", strategies=strategies), threads=1)
    with settings_of(device_type):
        plan = plan_of(case, launched=device_type != "cpu")
        training = Training(case, plan, None)
        if "sparse" in strategies:
            training.batch["x"] = SparseCounts.from_dense(training.batch["x"])
        training.step()
        loss = training.module(**training.batch)
        loss.backward()
        training.batch["u"].grad = None
        training.module.zero_grad()
        with OperatorCounter() as counter:
            training.module(**training.batch).backward()
    return counter


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--cells", type=int, nargs="+", default=CELLS)
    parser.add_argument("--anchors", type=int, default=ANCHORS)
    parser.add_argument("--window", type=int, default=WINDOW)
    parser.add_argument("--dim", type=int, default=DIM)
    parser.add_argument("--device-type", default="cuda")
    parser.add_argument("--lines", metavar="STRATEGIES", help='list the operators of one plan; "" is the eager one')
    parser.add_argument("--write", action="store_true", help="put the counts into docs/reports/gpu.md")
    arguments = parser.parse_args()
    sizes = {name: getattr(arguments, name) for name in ("anchors", "window", "dim", "device_type")}
    if arguments.lines is not None:
        _print_lines(tuple(filter(None, arguments.lines.split(","))), arguments.cells, sizes)
        return
    counts = [count(chosen, cells=cells, **sizes) for cells in arguments.cells for chosen in CHOICES]
    if arguments.format == "json":
        print(json.dumps([asdict(one) for one in counts], indent=2))
        return
    rows = [_row(one) for one in counts]
    if arguments.write:
        write_part(
            ROOT / "docs" / "reports" / "gpu.md",
            "kernels.kernel_count",
            markdown(HEADER[:-1], [row[:-1] for row in rows]),
        )
        return
    print(table(HEADER, rows))
    for one in counts:
        for line in one.waits:
            print(f"{_name(one)}, {one.cells} cells: the host waits for {line}")


def _print_lines(strategies: tuple[str, ...], cells: Sequence[int], sizes: dict[str, Any]) -> None:
    for few in cells:
        found = count(strategies, cells=few, **sizes)
        print(
            f"{_name(found)}, {few} cells: {found.kernels_per_stratum:g} kernels and"
            f" {found.operators_per_stratum:g} operators a stratum"
        )
        rows = [[f"{n:g}", name, "" if kernel else "no", where] for name, kernel, where, n in found.lines]
        print(table(["times", "operator", "kernel", "line, or node of the backward pass"], rows))


def _place(line: tuple[tuple[str, bool, str], int]) -> tuple[str, str]:
    return line[0][2], line[0][0]


def _name(count: Count) -> str:
    return ",".join(count.strategies) or "eager"


def _row(one: Count) -> list[str]:
    return [
        _name(one),
        str(one.cells),
        f"{one.kernels_per_stratum:g}",
        f"{one.operators_per_stratum:g}",
        f"{one.views:g}",
        str(one.host_syncs),
        ", ".join(f"{name} {n:g}" for name, n in one.parts.items()),
    ]


if __name__ == "__main__":
    main()
