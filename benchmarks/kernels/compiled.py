"""What torch.compile makes of a decoder's strata on this machine: seconds of a step, and of the first one.

    python -m benchmarks.kernels.compiled [--rounds 15] [--write]

The decoder with and without `compile`, in turns in one process, one thread: medians of steps, and of their ratios, in
seconds of the processor, which others on the machine do not change much. The compiler starts with empty caches for
every plan, and the first step has its work in it, that of the C++ compiler too.
`--write` puts the table into docs/reports/gpu.md.
"""

import argparse
import os
import time
from statistics import median

import torch
from torch._inductor import config
from torch._inductor.utils import fresh_cache

from benchmarks.page import ROOT, origin, paragraph, table, write_part
from benchmarks.side_by_side.cases import Case, Method, Size
from benchmarks.side_by_side.plans import plan_of
from benchmarks.side_by_side.training import Training

SIZE = Size(anchors=600, strata=8, cells=32, dim=64, window=160)
CHOICES = (("S4",), ("S4", "fused"), ("S4", "sdpa", "sparse"), ("S4", "fused", "sparse", "stream"))
HEADER = ["plan", "ms a step", "ms compiled", "times as long", "first step, s"]


def measure(strategies: tuple[str, ...], rounds: int) -> list[str]:
    """A row of the table."""
    both = []
    for chosen in (strategies, (*strategies, "compile")):
        case = Case(size=SIZE, method=Method(name="", strategies=chosen), threads=1)
        both.append(Training(case, plan_of(case), None))
    torch.compiler.reset()
    # compiled in this process, whose time and that of its children is counted
    with fresh_cache(), config.patch(compile_threads=1):
        begin = sum(os.times()[:4])
        losses = [training.step()[1] for training in reversed(both)]
        first = sum(os.times()[:4]) - begin
        assert abs(losses[0] - losses[1]) <= 1e-5 * abs(losses[1]), losses
        seconds = [[_seconds(training) for training in both] for _ in range(rounds + 2)][2:]
    as_it_is, compiled = (1e3 * median(times) for times in zip(*seconds, strict=True))
    ratio = median(after / before for before, after in seconds)
    return [",".join(strategies), f"{as_it_is:.1f}", f"{compiled:.1f}", f"{ratio:.2f}", f"{first:.0f}"]


def _seconds(training: Training) -> float:
    begin = time.process_time()
    training.step()
    return time.process_time() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="put the table into docs/reports/gpu.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(chosen, arguments.rounds) for chosen in CHOICES]
    found = [
        *paragraph(origin("python -m benchmarks.kernels.compiled --write")),
        *paragraph(
            f"The decoder alone, N {SIZE.anchors}, K {SIZE.strata}, w {SIZE.window}, B {SIZE.cells}, D {SIZE.dim}, one"
            f" thread, medians of {arguments.rounds} rounds in turns, in time of the processor:"
        ),
        *table(HEADER, rows),
    ]
    if arguments.write:
        write_part(ROOT / "docs" / "reports" / "gpu.md", "kernels.compiled", found)
        return
    print("\n".join(found))


if __name__ == "__main__":
    main()
