"""The faults that test_faults.py injects, and the table of docs/reference/reliability.md.

    python -m tests.lightning.faults.fault_table --write

Seconds are measured, from the fault until the last process has ended; everything else in the table is checked.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lightning.faults.fault_cases import Case, Outcome, run_group, run_scripts
from tests.paths import ROOT

PAGE = ROOT / "docs" / "reference" / "reliability.md"
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
AT_ONCE = 2
STUCK = {"stuck_after": 3.0}
STEP = "training_step"
SAVED = "step=4.ckpt"
START = "on_train_batch_start"
HEAD = ("fault", "what every rank that is left says", "seconds", "last checkpoint")


@dataclass(frozen=True)
class Row:
    """One fault of the table.

    `says` is what the ranks that are left say, without machine, process and line numbers; `saved` the last complete
    checkpoint, if one was due; `launched` whether the Trainer starts the other rank; `signum` is sent to it.
    """

    what: str
    case: Case
    says: str
    saved: str = SAVED
    launched: bool = False
    signum: int = 0


def in_step(hook: str = STEP) -> str:
    return f"in {hook} (epoch 0, batch 5)"


ROWS = (
    Row("rank 1 is killed in a step", Case(1, STEP, "kill"), "rank 1 ended without a word"),
    Row("rank 0 is killed in a step", Case(0, STEP, "kill"), "rank 0 ended without a word"),
    Row(
        "rank 1, started by the Trainer, is killed", Case(1, STEP, "kill"), "rank 1 was ended by SIGKILL", launched=True
    ),
    *(
        Row(
            f"rank 1 raises in `{hook}`",
            Case(1, hook, "raise"),
            f"rank 1 failed in {hook} ({where}), at fault_cases.py in boom: ValueError: boom",
            saved,
        )
        for hook, where, saved in (
            (STEP, "epoch 0, batch 5", SAVED),
            ("validation_step", "validate", SAVED),
            ("on_train_start", "epoch 0, batch 0", ""),
            ("setup", "epoch 0, batch 0", ""),
        )
    ),
    Row(
        "a loader worker of rank 1 raises",
        Case(1, "worker", "raise", workers=1),
        "rank 1 failed in the data loader (epoch 0, batch 0): ValueError: Caught ValueError in DataLoader worker",
        saved="",
    ),
    Row(
        "rank 1 is stuck (`stuck_after=3`)",
        Case(1, START, "stick", STUCK),
        f"rank 1 has made no progress for N s {in_step(START)}",
    ),
    Row(
        "ranks wait for each other in different collectives (`stuck_after=3`)",
        Case(1, START, "another collective", STUCK),
        "rank 0 has made no progress for N s in backward (epoch 0, batch 5), waiting for other ranks in all_reduce;"
        f" elsewhere: rank 1 {in_step(START)}, waiting for other ranks in barrier",
    ),
    Row(
        "rank 1's machine stands still (`lost_after=8`)",
        Case(1, START, "stop", {"lost_after": 8.0}),
        "rank 1 has not been heard of for",
    ),
    Row(
        "rank 1 runs out of memory",
        Case(1, STEP, "memory"),
        f"rank 1 failed {in_step()}, at fault_cases.py in <lambda>: RuntimeError: [enforce fail at alloc_cpu.cpp:127]",
    ),
    Row(
        "the disk is full while rank 0 writes a checkpoint",
        Case(0, "save_checkpoint", "full disk"),
        "rank 0 failed in save_checkpoint (epoch 0, batch 5): DataError: checkpoint",
    ),
    Row(
        "rank 0 is killed while it writes a checkpoint",
        Case(0, "save_checkpoint", "killed while saving"),
        "rank 0 ended without a word",
    ),
    Row("SIGTERM to rank 1", Case(1, STEP, "term"), f"rank 1 received SIGTERM {in_step()}"),
    Row(
        "SIGTERM to the process that has started the others",
        Case(0, START, "stick"),
        f"rank 0 received SIGTERM {in_step(START)}",
        launched=True,
        signum=signal.SIGTERM,
    ),
    Row(
        "Ctrl+C, to the process that has started the others",
        Case(0, START, "stick"),
        f"rank 0 was interrupted {in_step(START)}",
        launched=True,
        signum=signal.SIGINT,
    ),
    Row(
        "a loss is NaN on rank 1 (`check_finite=True`)",
        Case(1, STEP, "nan", {"check_finite": True}),
        f"rank 1 failed {in_step()}: ModelError: check_finite=True requires finite numbers; rank 1 found a"
        " loss of nan; the first output that is not finite, of finite inputs, is that of module 'last'",
    ),
)


def run(row: Row, folder: Path) -> Outcome:
    if not row.launched:
        return run_group(row.case, folder)

    def signal_it(started: list["subprocess.Popen[str]"]) -> None:
        if row.signum:
            os.kill(started[0].pid, row.signum)

    return run_scripts(row.case, folder, [[sys.executable]], devices=2, after_fault=signal_it)


def run_all(folder: Path) -> dict[str, tuple[Outcome, Path]]:
    """Inject every fault, some at once: what came of it, and the folder of its checkpoints."""
    folders = [folder / str(i) for i in range(len(ROWS))]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = list(pool.map(run, ROWS, folders))
    return {row.what: found for row, found in zip(ROWS, zip(outcomes, folders, strict=True), strict=True)}


def said(text: str) -> list[str]:
    """What ranks have said, one entry a message, without what differs from run to run."""
    start = "lightning_amp: "
    lines = [line.removeprefix(start) for line in text.splitlines() if line.startswith(start)]
    for what, instead in (
        (r"(\.py):\d+ in", r"\1 in"),
        (r" \([^()]*, process \d+\)", ""),
        # before its first word
        (r" \(rank 0's machine\)", ""),
        (r"for \d+ s\b", "for N s"),
    ):
        lines = [re.sub(what, instead, line) for line in lines]
    return lines


def cells(row: Row, seconds: str) -> list[str]:
    return [row.what, f"{row.says} ...", seconds, row.saved.removesuffix(".ckpt") or "none was due"]


def table(seconds: Callable[[Row], str]) -> str:
    rows: list[Any] = [HEAD, ["---"] * len(HEAD), *(cells(row, seconds(row)) for row in ROWS)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def committed() -> list[list[str]]:
    """The rows of the page, without the head."""
    inside = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in inside[2:]]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = run_all(Path(folder))
    text = PAGE.read_text()
    made = table(lambda row: f"{found[row.what][0].seconds:.1f}")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit("use: python -m tests.lightning.faults.fault_table --write")
    main()
