"""Cases in fresh processes, one after the other in rounds, so that what disturbs the machine disturbs all alike."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.page import ROOT
from benchmarks.side_by_side.cases import Case
from benchmarks.side_by_side.plans import plan_of
from lightning_amp.quantities import format_bytes

POLL_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What was measured of a case.

    Attributes:
        seconds: Median over rounds of the slowest rank's time of a step.
        peak_bytes: Median over rounds of the highest rank's memory above its start.
        loss: Mean over ranks of the first step's loss, which is the loss of all cells.
        norm: Of the gradient of the anchors' latents in the first step.
        along: The same gradient along a random direction, so that its error shows as large as it is.
        sent_bytes: Most bytes that a rank hands to collectives in a step.
    """

    seconds: float
    peak_bytes: float
    loss: float
    norm: float
    along: float
    sent_bytes: int


class CaseFailed(Exception):
    """A process of a case ended with an error."""


def measure_all(work: Sequence[tuple[Case, int]]) -> dict[Case, Measured | str]:
    """Measure cases, each in its number of rounds; of one that fails, what it said.

    Args:
        work: Cases and rounds.
    """
    plans = {case: plan_of(case).to_json() for case, _ in work}
    found: dict[Case, list[list[dict[str, Any]]]] = {case: [] for case, _ in work}
    failed: dict[Case, Measured | str] = {}
    for n in range(max((rounds for _, rounds in work), default=0)):
        for case in (case for case, rounds in work if n < rounds and case not in failed):
            begin = time.perf_counter()
            try:
                found[case].append(run_ranks(case, plans[case]))
            except CaseFailed as error:
                failed[case] = str(error)
            print(_line(case, n, failed.get(case) or median_of(found[case]), begin), flush=True)
    return {case: median_of(rounds) for case, rounds in found.items() if case not in failed} | failed


def median_of(rounds: Sequence[Sequence[Mapping[str, Any]]]) -> Measured:
    """Several rounds of a case's ranks as one."""
    first = rounds[0]
    return Measured(
        seconds=median(max(steps) for ranks in rounds for steps in zip(*(r["seconds"] for r in ranks), strict=True)),
        peak_bytes=median(max(rank["peak_bytes"] for rank in ranks) for ranks in rounds),
        loss=sum(rank["loss"] for rank in first) / len(first),
        norm=first[0]["norm"],
        along=first[0]["along"],
        sent_bytes=max(rank["sent_bytes"] for rank in first),
    )


def matmul_rate(threads: int) -> float:
    """FLOP/s of products of matrices, in a process of its own."""
    with _started([json.dumps({"matmul": threads})], threads) as (process,):
        return float(json.loads(_ended([process])[0])["rate"])


def run_ranks(case: Case, plan: str) -> list[dict[str, Any]]:
    """Every rank's result, in the order of ranks.

    Args:
        case: The case.
        plan: Its plan as JSON.

    Raises:
        CaseFailed: With the last line that the first rank to fail has written.
    """
    with TemporaryDirectory() as folder:
        request = {"case": asdict(case), "plan": json.loads(plan), "store": str(Path(folder) / "store")}
        requests = [json.dumps(request | {"rank": rank}) for rank in range(case.ranks)]
        with _started(requests, case.threads) as processes:
            return [json.loads(text) for text in _ended(processes)]


@contextmanager
def _started(requests: Sequence[str], threads: int) -> Iterator[list[subprocess.Popen[str]]]:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "benchmarks.side_by_side.one_case"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, r], cwd=ROOT, env=environment, **pipes) for r in requests]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _ended(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """What the processes have written; the others may wait for ever for one that failed."""
    while any(process.poll() is None for process in processes):
        failed = [process for process in processes if process.poll()]
        if failed:
            break
        time.sleep(POLL_S)
    for process in processes:
        if process.poll():
            text = process.communicate()[1].strip().splitlines()
            killed = f"ended by signal {-process.returncode}, as for want of memory"
            raise CaseFailed(killed if process.returncode < 0 else (text or ["no word"])[-1])
    return [process.communicate()[0].splitlines()[-1] for process in processes]


def _line(case: Case, n: int, found: Measured | str, begin: float) -> str:
    what = f"round {n + 1}  {case.size}, {case.ranks} x {case.threads}  {case.method.name:<44}"
    took = f"({time.perf_counter() - begin:.0f} s)"
    if isinstance(found, str):
        return f"{what} failed: {found} {took}"
    return f"{what} {found.seconds:7.2f} s  {format_bytes(found.peak_bytes):>9} {took}"
