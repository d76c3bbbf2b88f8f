"""Break every technique on purpose, and see that its tests notice: several mutants for each of them.

    python -m tests.mutants [--only S5]

Each mutant is one edit of one line in a copy of the repository; the tests named beside it must fail there. An edit
that no longer applies, and a mutant that survives, end the run with status 1. Takes some minutes on 2 cores.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.mutant_table import MUTANTS, Mutant
from tests.paths import ROOT

COPIED = ("lightning_amp", "tests", "benchmarks", "examples", "configs", "pyproject.toml")
LIMIT_S = 240
CHOSEN = ("-m", "not exhaustive and not slow")
"""Those of `make test`, and of `make full` what is no matrix; a mutant whose tests are one names its mark."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant: killed or not, and the last line of the tests."""

    mutant: Mutant
    killed: bool
    line: str


def copy_repository(to: Path) -> None:
    """What the tests need of the repository."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, to / name)


def run_tests(folder: Path, tests: str) -> tuple[bool, str]:
    """Whether the tests pass in a copy, and their last line."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *CHOSEN, *tests.split()]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return False, f"no end within {LIMIT_S} s"
    # 1: tests failed. Anything else but 0 (no tests found, a broken import) would be no verdict
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout[-2000:]}")
    return done.returncode == 0, done.stdout.strip().splitlines()[-1]


def judge(mutant: Mutant, folder: Path) -> Verdict:
    """Apply one edit, run its tests, take the edit back."""
    file = folder / mutant.file
    text = file.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(
            f"{mutant.technique} ({mutant.kind}): {mutant.old!r} is found {text.count(mutant.old)} times in"
            f" {mutant.file}; it must be there once: bring tests/mutant_table/ up to date"
        )
    file.write_text(text.replace(mutant.old, mutant.new))
    try:
        passed, line = run_tests(folder, mutant.tests)
    finally:
        file.write_text(text)
    return Verdict(mutant, killed=not passed, line=line)


def main() -> None:
    """Judge all mutants and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="one technique, such as S5")
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if arguments.only in (None, m.technique)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_repository(folder)
        for tests in sorted({mutant.tests for mutant in chosen}):
            passed, line = run_tests(folder, tests)
            if not passed:
                raise SystemExit(f"{tests} fails without any mutant: {line}")
        verdicts = []
        for mutant in chosen:
            verdicts.append(judge(mutant, folder))
            word = "killed  " if verdicts[-1].killed else "SURVIVED"
            print(f"{mutant.technique}  {word}  {mutant.kind:30s}  {verdicts[-1].line}", flush=True)
    survivors = [verdict for verdict in verdicts if not verdict.killed]
    print(f"{len(verdicts) - len(survivors)} of {len(verdicts)} killed")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
