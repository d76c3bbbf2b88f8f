"""One device against eight: the decoder side by side with what people use today, written to docs/reports/benchmarks.md.

    python -m benchmarks.side_by_side [--quick] [--out docs/reports]

Compared are the eager decoder, DDP, FSDP2, HiGLUE's own answers, the paper's S1 to S5 and ours: memory, time and bytes
communicated, how they grow with K, N, B and ranks, and whether goals are reached. Less than 25 minutes on two quiet
cores, with --quick less than 2. Linux only: memory is the kernel's high-water mark. On a machine that others use, set
OMP_WAIT_POLICY=passive, or threads that wait for each other take the time of those that work.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.decoders import flops
from benchmarks.page import read_part, write_part
from benchmarks.side_by_side.fresh_process import matmul_rate, measure_all
from benchmarks.side_by_side.goals import Goal, Results, goals
from benchmarks.side_by_side.pictures import draw_all
from benchmarks.side_by_side.report import document
from benchmarks.side_by_side.simulated import simulate_all
from benchmarks.side_by_side.suite import FULL, QUICK, Suite

DOCUMENT = "benchmarks.md"
PROCESSES = 2
"""For simulations, of which each is one thread."""


def results_of(suite: Suite) -> Results:
    """Measure, then simulate."""
    rates = {threads: matmul_rate(threads) for threads in (1, 2)}
    measured = measure_all(suite.measured())
    simulated = simulate_all(suite.simulations(), processes=PROCESSES)
    work = {size: flops(size) for size in dict.fromkeys(case.size for case in measured)}
    return Results(suite=suite, measured=measured, simulated=simulated, matmul_rate=rates, flops=work)


def show(goal: Goal) -> str:
    """A goal as text."""
    answer = goal.answer.strip("*")
    return f"{answer:>7}  {goal.what}: {goal.target}; found {goal.found or 'nothing'}"


def main() -> None:
    """Print the goals, write the document and its pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few and small sizes")
    parser.add_argument("--out", type=Path, default=Path("docs/reports"), help="folder to write to")
    arguments = parser.parse_args()
    results = results_of(QUICK if arguments.quick else FULL)
    print("\n".join(["", *map(show, goals(results))]))
    arguments.out.mkdir(parents=True, exist_ok=True)
    page = arguments.out / DOCUMENT
    whole_steps = read_part(page, "training.whole_step")
    page.write_text(document(results, quick=arguments.quick))
    write_part(page, "training.whole_step", whole_steps)
    draw_all(arguments.out, results)
    print(f"\nwrote {page} and its pictures")
    wrong = [case.method.name for case in results.wrong()]
    if wrong:
        sys.exit(f"these should be exact and are not: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
