"""Cutting layers into stages: the figures of Zhou et al. 2025 (CSIMD) redone, and what a plan makes of real models.

    python -m benchmarks.pipeline [--quick] [--only seven] [--print] [--out docs/reports/pipeline.md]

Quality beside a dynamic program and IMD (their Figures 6 and 7), time beside both (8 and 9), how often cross-search
stops short of the best pair; what a cut is worth by simulated time from measured layers (`speedups`), and a GPT of 7
billion parameters over 8 devices (`seven`). Rows are written as they come. About 8 minutes on one quiet core, most of
it IMD with eta 1000; no GPU.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.page import paragraph, table, write_part
from benchmarks.pipeline.dynamic_program import least_sum, one_pass, tables
from benchmarks.pipeline.imd import imd
from benchmarks.pipeline.instances import Instance, draw
from lightning_amp.progress import track
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.pipeline.schedule.micro_batches import (
    Devices,
    LayerTimes,
    cross_search,
    gpipe_seconds,
    search_all,
    times_at,
)
from lightning_amp.techniques.pipeline.schedule.schedules import SCHEDULES

ETAS = (10, 100, 1000)
STAGES = (4, 5)
PASS_LAYERS = 2000
"""Layers up to which one pass of the dynamic program is timed."""
COUNTS = tuple(range(1, 65))
DEVICES, TEXTS, REPEATS = 8, 32, 3


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


def sevens(*, quick: bool) -> Iterator[str]:
    """A GPT of 7 billion parameters over 8 devices, as `simulate` predicts it."""
    import torch

    from benchmarks.pipeline.models import GPT

    sizes = {"words": 32_000, "dim": 4096, "heads": 32, "layers": 4 if quick else 32, "length": 2048}
    with torch.device("meta"):
        model = GPT(**sizes)
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    yield from paragraph(
        f"""A GPT of {billions:.1f} billion parameters ({sizes["layers"]} blocks of dimension {sizes["dim"]:,}, texts of
        {sizes["length"]:,} words, float32, AdamW) over {DEVICES} devices with the rates of an H100's data sheet,
        {TEXTS} texts in a step: {TEXTS // DEVICES} on each rank of a data axis, or all of them through one pipeline.
        Simulated, not run: bytes are counted on fake tensors and seconds predicted, for operators one after the other;
        a pipeline keeps the gradients of the step before, and all that it has sent, until a step ends. Of the ranks
        of a pipeline the first and the last are shown beside the fullest."""
    )
    header = [
        "by",
        "micro-batches",
        "fullest rank",
        "first and last rank",
        "parameters and state",
        "step",
        "idle",
    ]
    yield from table(header, list(seven_rows(model, sizes)))


def seven_rows(model: Any, sizes: dict[str, int]) -> Iterator[list[str]]:
    """Data parallel, sharded, and pipelines."""
    import torch

    from lightning_amp.costs.device_rates import rates_for
    from lightning_amp.footprint.inner_run import Around
    from lightning_amp.lightning.profiling.step_of_module import StepOfModule
    from lightning_amp.planning.modules.candidates import draft
    from lightning_amp.techniques.pipeline.options import PipelineOptions
    from lightning_amp.techniques.pipeline.stages import staged

    def seen(texts: int) -> Any:
        batch = torch.zeros(texts, sizes["length"], dtype=torch.int64)
        return StepOfModule(model, lambda: batch, around=Around()).profiled(rates_for("H100"))

    each = seen(TEXTS // DEVICES)
    for names in ((), ("fsdp",), ("fsdp", "recompute")):
        made = draft(each, names, ranks=DEVICES, budget=None)
        held = each.held_bytes // (DEVICES if names else 1)
        peak = format_bytes(made.peak_bytes)
        step = format_seconds(made.seconds)
        yield [" and ".join(names) or "ddp (S1)", "", peak, "all alike", format_bytes(held), step, ""]
    whole = seen(TEXTS)
    for name in SCHEDULES:
        asked = PipelineOptions(schedule=name, micro_batches=TEXTS)
        made = staged(whole, DEVICES, data=1, budget=None, asked=asked)
        ends = f"{format_bytes(made.stages[0].peak_bytes)}, {format_bytes(made.stages[-1].peak_bytes)}"
        idle = mean(stage.idle for stage in made.stages)
        yield [
            *(f"pipeline, {name}", str(TEXTS), format_bytes(made.peak_bytes), ends),
            *(format_bytes(made.held_bytes), format_seconds(made.seconds), f"{100 * idle:.0f} %"),
        ]


def speedups(*, quick: bool) -> Iterator[str]:
    """The best pair of a cut and a number of micro-batches beside others, by simulated time from measured layers."""
    import torch

    from benchmarks.pipeline.models import GPT, VGG

    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = {"dim": 256, "layers": 4} if quick else {"dim": 768, "layers": 12}
    gpt = GPT(words=50_257, heads=12 if not quick else 4, length=64, **size)
    models = {
        "VGG-like CNN": (VGG(), torch.randn(32, 3, 64, 64)),
        f"GPT of {size['layers']} blocks, {size['dim']} wide": (gpt, torch.randint(50_257, (16, 64))),
    }
    yield from paragraph(
        f"""Simulated time of a step (Eq. 8) from layers that were measured one by one on this machine: one thread, the
        least of {REPEATS} repeats, for micro-batches of 1, 2, 4, ... samples, times between these interpolated; what is
        sent takes as long as its bytes by 1 GB/s. How many times as long as the best pair of a cut and a number of
        micro-batches p. No pipeline was run for this table."""
    )
    header = ["model", "stages", "best p", "cut", "even cut", "exact cut, p = 1", "p = 4", "random cuts"]
    rows = (simulated(name, *model, stages) for name, model in models.items() for stages in (2, 4))
    yield from table(header, rows)


@cache
def measured_times(name: str, module: Any, batch: Any) -> LayerTimes:
    """Of the blocks for all numbers of micro-batches."""
    from benchmarks.pipeline.models import measured

    sizes = [2**i for i in range(len(batch).bit_length())]
    found = [measured(module, batch[:size], REPEATS) for size in sizes]
    tables = {key: np.stack([row[key] for row in found]) for key in ("forward", "backward")}
    sends = np.stack([row["sent"] for row in found]) / 1e9
    tables |= {"send_forward": sends, "send_backward": np.roll(sends, 1, axis=1)}
    return times_at(len(batch), range(1, len(batch) + 1), sizes, tables)


def simulated(name: str, module: Any, batch: Any, stages: int) -> list[str]:
    """A row."""
    layer_times = measured_times(name, module, batch)
    layers = layer_times.forward.shape[1]
    best = search_all(layer_times, Devices(n_stages=stages))

    def ratio(ends: tuple[int, ...], count: int | None = None) -> float:
        found = gpipe_seconds(layer_times, ends)
        return float((found.min() if count is None else found[count - 1]) / best.seconds)

    even = tuple(layers * (s + 1) // stages for s in range(stages))
    drawn = [
        (*sorted(np.random.default_rng(seed).choice(layers - 1, stages - 1, replace=False) + 1), layers)
        for seed in range(3)
    ]
    return [
        *(name, str(stages), str(best.micro_batches), ",".join(map(str, best.ends)), f"{ratio(even):.2f}"),
        *(f"{ratio(best.ends, 1):.2f}", f"{ratio(best.ends, 4):.2f}"),
        ", ".join(f"{ratio(ends):.2f}" for ends in drawn),
    ]


SECTIONS = {
    "quality": quality_section,
    "times": times_section,
    "searches": searches_section,
    "speedups": speedups,
    "seven": sevens,
}


def main() -> None:
    """Write the parts of the document, or one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few and small instances")
    parser.add_argument("--only", choices=list(SECTIONS), help="this part and no other")
    parser.add_argument("--print", action="store_true", help="write nothing")
    parser.add_argument(
        "--out", type=Path, default=Path("docs/reports/pipeline.md"), help="document to write"
    )
    asked = parser.parse_args()
    for name in [asked.only] if asked.only else list(SECTIONS):
        lines = list[str]()
        for line in SECTIONS[name](quick=asked.quick):
            lines.append(line)
            print(line, flush=True)
            if not asked.print:
                write_part(asked.out, f"pipeline.{name}", lines)


if __name__ == "__main__":
    main()
