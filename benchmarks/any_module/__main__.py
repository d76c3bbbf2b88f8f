"""Modules that nobody wrote for lightning_amp, trained by `strategy="amp"` under a budget, beside what else one can do.

    python -m benchmarks.any_module [--quick] [--rounds N] [--only NAME ...] [--tables peers budgets] [--write]

`budgets`: every module of examples/any_module, unedited, with 75, 50 and 30 % of the bytes that a plain step takes, on
1, 2 and 4 ranks: the largest part, the plan, its predicted peak beside the meter's in the second step of a real run,
and how far losses, the last gradients and the parameters are from one plain process after 3 steps in float64; or what
the refusal says (budgets.py). `peers`: peak and time of the same modules, with more rows, on 2 ranks, for ddp, torch's
`activation_memory_budget`, FSDP2 and recomputed blocks written by hand, and for amp (peers.py).

A run is a new process for each rank, a fork of one that has imported torch, of one thread. Bytes are exact; times are
medians of steps, in rounds that take turns. `--write` puts the tables into docs/reports/any_module.md as they grow.
Modules whose packages are not there are left out, and named. About two hours on two quiet cores, with --quick
10 minutes.
"""

import argparse
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from benchmarks.any_module import budgets, peers
from benchmarks.page import ROOT, origin, paragraph, read_part, write_part
from benchmarks.page import table as markdown
from tests.any_module import NAMES

PAGE = ROOT / "docs" / "reports" / "any_module.md"
TABLES = {
    # times first, for what is exact may be counted while the machine does something else
    "peers": (peers.HEADER, peers.peer_rows),
    "budgets": (budgets.HEADER, budgets.budget_rows),
}
"""Parts of the page, with what makes them."""
QUICK = ("gene_transformer", "evoformer", "wide_mlp")


def available(names: list[str]) -> tuple[list[str], list[str]]:
    """Names whose packages are there, and the others."""
    files = {name: (ROOT / "examples" / "any_module" / f"{name}.py").read_text() for name in names}
    absent = [name for name in names if "transformers" in files[name] and find_spec("transformers") is None]
    return [name for name in names if name not in absent], absent


def grown(name: str, names: list[str], *, quick: bool, rounds: int) -> Iterator[list[str]]:
    """A table's part of the page, again with every row."""
    header, rows = TABLES[name]
    options = f"{' --quick' * quick}{f' --rounds {rounds}' * (name == 'peers')}"
    command = f"python -m benchmarks.any_module --tables {name}{options} --write"
    text = [*paragraph(f"{origin(command)} Bytes of the second step; the most of any rank.")]
    done: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        times = {"rounds": rounds} if name == "peers" else {}
        for row in rows(names, Path(folder), quick=quick, **times):
            done.append(row)
            yield [*text, *markdown(header, done)]


def main() -> None:
    """Measure, and print or write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three modules, two ranks at most, one round")
    parser.add_argument(
        "--rounds", type=int, default=2, help="of timed runs by turns, after the first of each"
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, help="these modules")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--write", action="store_true", help="put the tables into docs/reports/any_module.md")
    arguments = parser.parse_args()
    names, absent = available(arguments.only or list(QUICK if arguments.quick else NAMES))
    if absent:
        print(f"left out, for they need the package transformers: {', '.join(absent)}")
    for name in arguments.tables:
        part = f"any_module.{name}"
        if arguments.write:
            read_part(PAGE, part)  # a page without markers is refused before anything is measured
        lines: list[str] = []
        for lines in grown(
            name, names, quick=arguments.quick, rounds=0 if arguments.quick else arguments.rounds
        ):
            if arguments.write:
                write_part(PAGE, part, lines)
        print("\n".join(lines))


if __name__ == "__main__":
    main()
