"""Train more than 200 models of public libraries under budgets, against a plain step and checkpointing by hand.

    python -m benchmarks.zoo [--only PATTERN ...] [--again] [--optimizers] [--ranks] [--quick] [--limit S] [--write]

Every model has random weights and a small configuration; nothing is downloaded. It trains five steps in float64 with
SGD: plain, with each layer checkpointed by hand or by the library's own switch, under 75, 50 and 35 % of the bytes of
the plain step, with the fewest bytes, and under 100 %. `--optimizers` trains some of them in float32 with each of four
optimizers; `--ranks` on two ranks with each technique, against one process.

What is found is appended to docs/reports/zoo.jsonl as it comes. A run leaves out what is there, unless `--again` is
given; `--only` takes names or patterns such as 'timm*'. `--write` makes the tables of docs/reports/zoo.md of the file
after the run, `--tables` without one. Each model has a process of its own, and `--limit` seconds of the processor, so
that other work on the machine ends none; one that waits ends after WAITS times as long. Needs the extra
`zoo`; a model whose package is not there is named. The status is 1 if a fit is wrong, over its budget or crashed. About
two hours on a quiet core, with --quick three minutes.
"""

import argparse
import importlib
import json
import multiprocessing
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import packages_distributions
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import torch

from benchmarks.page import ROOT, version
from benchmarks.zoo import one_run, ranks, table
from benchmarks.zoo.cases import CASES, PREDICTED, QUICK
from benchmarks.zoo.subject import OPTIMIZERS
from lightning_amp.progress import track
from tests.ranks import PRELOADED

FILE, PAGE = ROOT / "docs" / "reports" / "zoo.jsonl", ROOT / "docs" / "reports" / "zoo.md"
LIMIT = 120
WAITS = 30
"""Seconds that may pass for each second of the limit."""
RANKS = "ranks"
PASSES = (("plain", "by hand", "50%"), ("75%", "35%", "least"))
FORKS = multiprocessing.get_context("fork")
Records = Callable[[], Iterator[one_run.Record]]


def in_a_child(records: Records, limit: int) -> Iterator[one_run.Record]:
    """Yield what a fork yields; after `limit` seconds of the processor it is ended, and a last record says so."""
    ours, theirs = FORKS.Pipe(duplex=False)
    child = FORKS.Process(target=_send, args=(records, theirs, limit), daemon=False)
    child.start()
    theirs.close()
    deadline = time.monotonic() + WAITS * limit
    try:
        while ours.poll(max(0.0, deadline - time.monotonic())):
            record = ours.recv()
            if record is None:
                return
            yield record
        yield {"kind": table.END, "ended": f"not finished in {WAITS * limit} s"}
    except EOFError:
        child.join()
        late = f"not finished in {limit} s of the processor"
        other = f"the process ended with status {child.exitcode}"
        yield {"kind": table.END, "ended": late if child.exitcode == -signal.SIGXCPU else other}
    finally:
        child.kill()
        child.join()


def _send(records: Records, connection: Any, limit: int) -> None:
    """Run in the fork; an error is a record."""
    # ends it by SIGXCPU; ranks that it starts have as many seconds, each
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    one_run.be_quiet()
    try:
        for record in records():
            connection.send(record)
    except BaseException as error:
        connection.send({"kind": table.END, "ended": one_run.said(error)})
    connection.send(None)


def jobs(asked: argparse.Namespace, names: list[str]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """A model, a run and kinds of fits; the first pass over all models has the most telling ones."""
    if asked.ranks:
        yield from ((name, RANKS, ranks.KINDS) for name in names)
    elif asked.optimizers:
        of = [name for name in names if name in PREDICTED]
        yield from ((name, f"{optimizer}, float32", ("100%", "50%")) for name in of for optimizer in OPTIMIZERS)
    else:
        yield from ((name, table.MAIN, kinds) for kinds in PASSES[: 1 if asked.quick else None] for name in names)


def records_of(name: str, run: str, kinds: tuple[str, ...]) -> Records:
    """What is run in the child."""
    if run == RANKS:
        return partial(ranks.runs_of, CASES[name], kinds)
    optimizer, _, dtype = run.partition(", ")
    return partial(one_run.fits_of, CASES[name], optimizer, getattr(torch, dtype), kinds)


def run(asked: argparse.Namespace, names: list[str], file: Path) -> int:
    """Append the records of every kind of fit that is not in the file yet; returns how many have failed."""
    failed = 0
    for late in PRELOADED:
        importlib.import_module(late)
    there = {} if asked.again else table.latest(table.read(file))
    about = {"version": version(), "date": date.today().isoformat(), "torch": torch.__version__}
    # scvi-tools is imported as scvi
    distributions = packages_distributions()
    wanted = list(jobs(asked, names))
    for name, run, kinds in track(wanted, description="zoo", total=len(wanted)):
        done = there.get((name, run), {})
        package, left = CASES[name].package, tuple(kind for kind in kinds if kind not in done)
        if table.END in done or not left:
            continue
        try:
            # in this process, so that every model of a library finds it imported
            importlib.import_module(package)
        except ImportError as error:
            print(f"{name}: left out, for {package} is not there: {error}")
            continue
        runs = dict(done)
        for record in in_a_child(records_of(name, run, left), asked.limit):
            about["library"] = version_of(distributions[package][0])
            record = {"model": name, "run": run} | record | about
            with file.open("a") as lines:
                lines.write(json.dumps(record) + "\n")
            runs[record["kind"]] = record
            says = table.verdict(record, runs)
            failed += says in table.FAILED or record["kind"] == table.END
            print(f"{name}, {run}, {record['kind']}: {says}")
            if record["kind"] == table.END:
                # later passes leave it out
                there.setdefault((name, run), {})[table.END] = record
    return failed


def main() -> None:
    """Run, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="models whose name fits, such as 'timm*'")
    parser.add_argument("--again", action="store_true", help="also models whose results are in the file")
    parser.add_argument("--optimizers", action="store_true", help="in float32, with four optimizers")
    parser.add_argument("--ranks", action="store_true", help="on two ranks")
    parser.add_argument(
        "--quick", action="store_true", help="one model of each library, at 50 %% of its bytes; the file stays as it is"
    )
    parser.add_argument("--limit", type=int, default=LIMIT, help="processor seconds of a model, %(default)s by default")
    parser.add_argument("--file", type=Path, default=FILE, help="JSON lines that results are appended to")
    parser.add_argument("--tables", action="store_true", help="write the page, and run nothing")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    patterns = asked.only or ["*"]
    names = [name for name in CASES if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not names:
        parser.error(f"--only {' '.join(patterns)}: no model's name fits; names are as {next(iter(CASES))!r}")
    if asked.quick:
        names, asked.file, asked.again = list(QUICK), Path("/dev/null"), True
    failed = 0 if asked.tables else run(asked, names, asked.file)
    if asked.write or asked.tables:
        table.write(asked.file, PAGE, list(CASES))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
