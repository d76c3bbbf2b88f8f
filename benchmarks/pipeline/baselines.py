"""Time IMD layer by layer, dynamic programming and recursion: Figures 8 and 9 and Table II of Zhou et al. 2025 (CSIMD).

    python -m benchmarks.pipeline.baselines [--quick] [--write]

All times are seconds of the processor, so that other work on the machine counts little. Dynamic programming and
recursion solve one direction under one bound, as in the paper; the least sum needs a pass for every bound. `--write`
puts the tables into docs/paper/csimd.md. About five minutes.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import cache, partial

import numpy as np

from benchmarks.page import ROOT, origin, paragraph, table, write_part
from benchmarks.pipeline.dynamic_program import one_pass, tables
from benchmarks.pipeline.imd import imd, layer_by_layer
from benchmarks.pipeline.instances import Instance, draw

PAGE, PART = ROOT / "docs" / "paper" / "csimd.md", "pipeline.baselines"
FITTED = {
    (50, 10): ((1000, 2000, 5000, 10_000), 0.00015, 0.9977),
    (50, 100): ((1000, 2000, 5000, 10_000), 0.00112, 0.9857),
    (50, 1000): ((1000, 2000, 5000, 10_000), 0.01116, 0.9887),
    (1000, 10): ((2000, 10_000, 20_000, 50_000), 0.00009, 0.9459),
    (1000, 100): ((2000, 10_000, 20_000, 50_000), 0.00112, 0.9951),
    (1000, 1000): ((2000, 10_000, 20_000, 50_000), 0.01285, 0.9938),
}
"""Stages and eta: numbers of layers, and slope and R^2 of the paper's Table II."""
STAGES, ETA = 50, 1000
RECURSIVE, LARGEST = 1000, 10_000
"""Layers up to which recursion and dynamic programming are timed."""


def recursive(instance: Instance, stages: int) -> float:
    """The least maximum over at most so many stages, from the last one on."""
    found = tables(instance)[0].tolist()

    @cache
    def least(n: int, end: int) -> float:
        if n == 1:
            return float(found[0][end])
        fewer = least(n - 1, end)
        return min((max(least(n - 1, a), found[a][end]) for a in range(1, end)), default=fewer)

    return min(least(n, len(instance.forward)) for n in range(1, stages + 1))


def programmed(instance: Instance, stages: int) -> float:
    """The same by dynamic programming."""
    return one_pass(tables(instance)[0], stages)


def seconds(work: Callable[[], object]) -> float:
    """Of the processor, for one call."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def fits(*, quick: bool) -> Iterator[str]:
    """Table II: the time of IMD, by the number of layers."""
    rows = []
    for (stages, eta), (sizes, slope, share) in FITTED.items():
        layers = sizes[:2] if quick else sizes
        taken = [seconds(partial(imd, draw(k, 0).runs(stages), eta, layer_by_layer)) for k in layers]
        ours = np.polyfit(layers, taken, 1)
        rest = np.array(taken) - np.polyval(ours, layers)
        shown = ", ".join(f"{k:,}: {t:.2f}" for k, t in zip(layers, taken, strict=True))
        r2 = 1 - (rest**2).sum() / ((np.array(taken) - np.mean(taken)) ** 2).sum()
        rows.append([str(stages), str(eta), shown, f"{ours[0]:.5f}", f"{r2:.4f}", f"{slope:.5f}", f"{share:.4f}"])
    header = ["N", "eta", "K: seconds", "slope", "R^2", "the paper's slope", "the paper's R^2"]
    yield from table(header, rows)


def baselines(*, quick: bool) -> Iterator[str]:
    """Figure 9."""
    rows = []
    for layers in (100, 200) if quick else (200, 500, 1000, 2000, 5000, 10_000):
        instance = draw(layers, 0)
        ways = {
            "recursive": partial(recursive, instance, STAGES) if layers <= RECURSIVE else None,
            "programmed": partial(programmed, instance, STAGES) if layers <= LARGEST else None,
            "imd": partial(imd, instance.runs(STAGES), ETA),
            "exact": partial(instance.as_floats().cut, STAGES),
        }
        rows.append([f"{layers:,}", *("" if way is None else f"{seconds(way):.3g}" for way in ways.values())])
    header = ["K", "recursion, one pass", "dynamic program, one pass", f"IMD {ETA}, by bisection", "exact cut"]
    yield from table(header, rows)


def main() -> None:
    """Print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few and small instances")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.relative_to(ROOT)}")
    asked = parser.parse_args()
    lines = [
        *paragraph(
            f"""{origin("python -m benchmarks.pipeline.baselines --write")} Seconds of the processor, of one instance
            each; layers as in the paper's Section V-A."""
        ),
        *("### Table II, IMD layer by layer", "", *fits(quick=asked.quick)),
        *(f"### Figure 9, {STAGES} stages", "", *baselines(quick=asked.quick)),
    ]
    if asked.write:
        write_part(PAGE, PART, lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
