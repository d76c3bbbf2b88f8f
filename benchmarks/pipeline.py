"""Cutting layers into stages: the figures of Zhou et al. 2025 (CSIMD) redone, written to the end of a document.

    python -m benchmarks.pipeline [--quick] [--only quality] [--out docs/pipeline.md]

Quality beside a dynamic program and IMD (their Figures 6 and 7), time beside both (8 and 9), and how often cross-search
stops short of the best pair. About 5 minutes on one quiet core, most of it IMD with eta 1000; no GPU.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import mean, median

import numpy as np

from benchmarks.page import paragraph, table
from benchmarks.partition.dynamic_program import least_sum, one_pass, tables
from benchmarks.partition.imd import imd
from benchmarks.partition.instances import Instance, draw
from lightning_amp.planning.pipeline.micro_batches import (
    Devices,
    LayerTimes,
    cross_search,
    gpipe_seconds,
    search_all,
)
from lightning_amp.progress import track

ETAS = (10, 100, 1000)
STAGES = (4, 5)
PASS_LAYERS = 2000
"""Layers up to which one pass of the dynamic program is timed."""
COUNTS = tuple(range(1, 65))


def ratios(layers: int, stages: int, instances: int, sending: float) -> dict[str, list[float]]:
    """What each method reaches, divided by the oracle's optimum."""
    found: dict[str, list[float]] = {"exact": [], **{f"IMD {eta}": [] for eta in ETAS}}
    for seed in range(instances):
        instance = draw(layers, seed, sending=sending)
        least = least_sum(instance, stages)
        runs = instance.runs(stages)
        found["exact"].append(instance.cut(stages).total / least)
        for eta in ETAS:
            found[f"IMD {eta}"].append(imd(runs, eta) / least)
    return found


def quality(layers: list[int], instances: int, *, dominated: bool) -> Iterator[str]:
    """Figures 6 and 7 as a table: over all K, the worst ratio and how often the optimum is reached."""
    rows = []
    for stages in STAGES:
        by_layers = [
            # one sending takes as long as a stage computes, on average
            ratios(k, stages, instances, k / stages if dominated else 1.0)
            for k in track(layers, description=f"quality, {stages} stages", total=len(layers))
        ]
        for method in by_layers[0]:
            every = [ratio for found in by_layers for ratio in found[method]]
            share = [mean(ratio == 1 for ratio in found[method]) for found in by_layers]
            rows.append(
                [
                    *(str(stages), method, f"{mean(every):.4f}", f"{max(every):.4f}"),
                    *(f"{mean(share):.3f}", f"{min(share):.2f}"),
                ]
            )
    header = ["stages", "method", "mean ratio", "largest ratio", "optimum reached", "at the worst K"]
    yield from table(header, rows)


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def timed(layers: int, stages: int, repeats: int) -> list[str]:
    """A row: the exact cut (median and longest of some instances), IMD, and one pass of the dynamic program."""
    instances = [draw(layers, seed) for seed in range(repeats)]
    exact = [seconds(partial(instance.as_floats().cut, stages)) for instance in instances]
    runs = instances[0].runs(stages)
    others = [f"{seconds(partial(imd, runs, eta)):.3g}" for eta in ETAS]
    one = "" if layers > PASS_LAYERS else f"{seconds(partial(first_pass, instances[0], stages)):.3g}"
    return [f"{layers:,}", f"{stages:,}", f"{median(exact):.3g}", f"{max(exact):.3g}", *others, one]


def first_pass(instance: Instance, stages: int) -> float:
    """One of the passes that the dynamic program would need."""
    return one_pass(tables(instance)[0], stages)


def nonlinear(seed: int, layers: int) -> LayerTimes:
    """Layers that shrink with the micro-batch only in part: some time is fixed, the rest falls as p to some power."""
    rng = np.random.default_rng((1, seed))
    p = np.array(COUNTS)[:, None]
    four = [
        rng.uniform(50, 100, layers) / p ** rng.uniform(0.5, 1, layers) + rng.uniform(0, 5, layers)
        for _ in range(4)
    ]
    return LayerTimes(
        counts=COUNTS, forward=four[0], backward=four[1], send_forward=four[2], send_backward=four[3]
    )


def searches(layers: int, stages: int, instances: int) -> list[str]:
    """A row: cross-search and even cuts against the best pair of cut and micro-batches."""
    crossed, even_one, even_four = [], [], []
    even = tuple(layers * (r + 1) // stages for r in range(stages))
    for seed in range(instances):
        layer_times = nonlinear(seed, layers)
        best = search_all(layer_times, Devices(n_stages=stages)).seconds
        crossed.append(cross_search(layer_times, Devices(n_stages=stages)).seconds / best)
        fixed = gpipe_seconds(layer_times, even) / best
        even_one.append(fixed[COUNTS.index(1)])
        even_four.append(fixed[COUNTS.index(4)])
    short = [ratio for ratio in crossed if ratio > 1]
    return [
        *(str(layers), str(stages), f"{len(short)} of {instances}", f"{max(crossed):.4f}"),
        *(f"{mean(even_one):.2f}", f"{mean(even_four):.2f}"),
    ]


def quality_section(*, quick: bool) -> Iterator[str]:
    """How near every method comes to the optimum."""
    layers, instances = ([5, 20, 50], 5) if quick else (list(range(5, 101, 5)), 100)
    few = layers if quick else [5, *range(20, 101, 20)]
    yield from paragraph(
        f"""Layers with random times, as in Zhou et al. 2025 (CSIMD), Section V-A: computing and sending, forward and
        backward, each from U[50, 100]. A ratio is rho_1 + rho_2 of a method by that of the optimum, which a dynamic
        program finds by itself. K from {layers[0]} to {layers[-1]} in {len(layers)} steps, {instances} instances of
        each K. The paper's own IMD has a largest ratio of 1.1, 1.01 and 1.001 with eta 10, 100 and 1000, and reaches
        the optimum in more than 45, 70 and 95 % at the worst K (their Figures 6 and 7)."""
    )
    yield from quality(layers, instances, dominated=False)
    yield from paragraph(
        f"""Where communication dominates: what is sent takes K / N times as long, about as long as a stage computes.
        K from {few[0]} to {few[-1]} in {len(few)} steps."""
    )
    yield from quality(few, instances, dominated=True)


def times_section(*, quick: bool) -> Iterator[str]:
    """What the table of times shows, and the table: Figures 8 and 9."""
    sizes = [(1000, 50), (2000, 50), (5000, 50), (10_000, 50), (2000, 1000), (10_000, 1000), (50_000, 1000)]
    repeats = 1 if quick else 5
    yield from paragraph(
        f"""Seconds on one core, pure Python for the exact cut and for IMD, numpy for the dynamic program, all in one
        run: of the exact cut the median and the longest of {repeats} instances, of the others one. The exact cut has
        floats of 53 bits, whose sums exceed a machine's word, the others multiples of 2^-20. The dynamic program needs
        a pass for every time forward that is tried as a bound, and a pass is timed up to K = {PASS_LAYERS:,}; its steps
        grow with N K^2."""
    )
    header = ["K", "N", "exact (s)", "longest", *(f"IMD {eta} (s)" for eta in ETAS), "one pass of DP (s)"]
    asked = sizes[:2] if quick else sizes
    rows = [timed(*size, repeats) for size in track(asked, description="times", total=len(asked))]
    yield from table(header, rows)


def searches_section(*, quick: bool) -> Iterator[str]:
    """How cross-search does beside the search of all pairs."""
    yield from paragraph(
        """Micro-batches: layers whose time shrinks only in part with the micro-batch, and up to 64 of these.
        Cross-search stopped short of the best pair of a cut and a number of micro-batches in so many instances, and was
        at most so much slower; the last two columns are the times of even cuts with p = 1 and p = 4 by that of the best
        pair (Eq. 8, mean)."""
    )
    header = ["K", "N", "cross-search short", "at most", "even, p = 1", "even, p = 4"]
    pairs = [(24, 4), (48, 8)]
    rows = [
        searches(*pair, 5 if quick else 100)
        for pair in track(pairs, description="searches", total=len(pairs))
    ]
    yield from table(header, rows)


HEADING = "## Cutting layers into stages"
SECTIONS = {"quality": quality_section, "times": times_section, "searches": searches_section}


def main() -> None:
    """Write the document, or print a part of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few and small instances")
    parser.add_argument("--only", choices=list(SECTIONS), help="print this part, write nothing")
    parser.add_argument("--out", type=Path, default=Path("docs/pipeline.md"), help="document to write")
    asked = parser.parse_args()
    if asked.only:
        print("\n".join(SECTIONS[asked.only](quick=asked.quick)))
        return
    # what stands before is written by hand
    before = asked.out.read_text().partition(HEADING)[0].rstrip() if asked.out.exists() else ""
    text = [before, "", HEADING, "", "Written by `python -m benchmarks.pipeline`.", ""]
    for section in SECTIONS.values():
        text += section(quick=asked.quick)
    asked.out.write_text("\n".join(text).strip() + "\n")
    print(f"wrote {asked.out}")


if __name__ == "__main__":
    main()
