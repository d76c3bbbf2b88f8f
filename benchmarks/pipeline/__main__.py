"""Cutting layers into stages beside others' ways (Figures 6 to 9 of Zhou et al. 2025, CSIMD), and what a cut is worth.

    python -m benchmarks.pipeline [--quick] [--only seven ...] [--write]

    quality     the exact cut and IMD beside the optimum of a dynamic program
    times       their seconds
    searches    the paper's cross-search, and even cuts, beside the best pair of a cut and a number of micro-batches
    speedups    the same from layers that are measured one by one on this machine
    seven       a GPT of 7 billion parameters over 8 devices: data parallel, sharded, pipelines; predicted

`--write` puts the tables into docs/reports/pipeline.md. About 10 minutes on one quiet core, most of it IMD with eta
1000; no GPU. With --quick half a minute.
"""

import argparse
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from statistics import mean, median
from typing import Any

import numpy as np
import torch

from benchmarks.page import ROOT, origin, paragraph, show_parts, table
from benchmarks.pipeline.baselines import seconds
from benchmarks.pipeline.dynamic_program import least_sum, one_pass, tables
from benchmarks.pipeline.imd import imd
from benchmarks.pipeline.instances import draw
from benchmarks.pipeline.models import GPT, VGG, measured
from benchmarks.pipeline.networks import cross_search
from lightning_amp.costs.device_rates import rates_for
from lightning_amp.footprint.run.run_settings import RunSettings
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.planning.modules.candidates import draft
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.pipeline.schedule.micro_batches import LayerTimes, gpipe_seconds, search_all
from lightning_amp.techniques.pipeline.schedule.schedules import SCHEDULES
from lightning_amp.techniques.pipeline.stages import staged
from lightning_amp.techniques.stage_search import StageOptions

PAGE = ROOT / "docs" / "reports" / "pipeline.md"
ETAS, STAGES, COUNTS = (10, 100, 1000), (4, 5), tuple(range(1, 65))
PASS_LAYERS = 2000
"""Layers up to which one pass of the dynamic program is timed."""
DEVICES, TEXTS, REPEATS = 8, 32, 3


def quality(*, quick: bool) -> Iterator[str]:
    """How near every method comes to the optimum."""
    layers, instances = ([5, 20, 50], 5) if quick else ([*range(5, 101, 5)], 100)
    yield from paragraph(
        f"""Layers with random times, as in Zhou et al. 2025 (CSIMD), Section V-A: computing and sending, forward and
        backward, each from U[50, 100]. A ratio is rho_1 + rho_2 of a method by that of the optimum, which a dynamic
        program finds by itself. K from {layers[0]} to {layers[-1]} in {len(layers)} steps, {instances} instances of
        each K. The paper's own IMD has a largest ratio of 1.1, 1.01 and 1.001 with eta 10, 100 and 1000, and reaches
        the optimum in more than 45, 70 and 95 % at the worst K (their Figures 6 and 7)."""
    )
    yield from ratios(layers, instances, dominated=False)
    few = layers if quick else [5, *range(20, 101, 20)]
    yield from paragraph(
        f"""Where communication dominates: what is sent takes K / N times as long, about as long as a stage computes.
        K from {few[0]} to {few[-1]} in {len(few)} steps."""
    )
    yield from ratios(few, instances, dominated=True)


def ratios(layers: list[int], instances: int, *, dominated: bool) -> Iterator[str]:
    """Over all K, the worst ratio and how often the optimum is reached."""
    rows = []
    for stages in STAGES:
        found: dict[str, list[list[float]]] = {"exact": [], **{f"IMD {eta}": [] for eta in ETAS}}
        for k in layers:
            for one in found.values():
                one.append([])
            for seed in range(instances):
                instance = draw(k, seed, sending=k / stages if dominated else 1.0)
                least, runs = least_sum(instance, stages), instance.runs(stages)
                found["exact"][-1].append(instance.cut(stages).total / least)
                for eta in ETAS:
                    found[f"IMD {eta}"][-1].append(imd(runs, eta) / least)
        for method, by_layers in found.items():
            every = [ratio for some in by_layers for ratio in some]
            share = [mean(ratio == 1 for ratio in some) for some in by_layers]
            rows.append(
                [str(stages), method, f"{mean(every):.4f}", f"{max(every):.4f}", f"{mean(share):.3f}",
                 f"{min(share):.2f}"]
            )  # fmt: skip
    header = ["stages", "method", "mean ratio", "largest ratio", "optimum reached", "at the worst K"]
    yield from table(header, rows)


def times(*, quick: bool) -> Iterator[str]:
    """The exact cut (median and longest of some instances), IMD, and one pass of the dynamic program."""
    sizes = [(1000, 50), (2000, 50), (5000, 50), (10_000, 50), (2000, 1000), (10_000, 1000), (50_000, 1000)]
    repeats, rows = 1 if quick else 5, list[list[str]]()
    yield from paragraph(
        f"""Seconds of the processor, pure Python for the exact cut and for IMD, numpy for the dynamic program, all in
        one run: of the exact cut the median and the longest of {repeats} instances, of the others one. The exact cut
        has floats of 53 bits, whose sums exceed a machine's word, the others multiples of 2^-20. The dynamic program
        needs a pass for every time forward that is tried as a bound, and a pass is timed up to K = {PASS_LAYERS:,}; its
        steps grow with N K^2."""
    )
    for layers, stages in sizes[: 1 if quick else None]:
        instances = [draw(layers, seed) for seed in range(repeats)]
        exact = [seconds(partial(instance.as_floats().cut, stages)) for instance in instances]
        others = [f"{seconds(partial(imd, instances[0].runs(stages), eta)):.3g}" for eta in ETAS]
        forward = tables(instances[0])[0] if layers <= PASS_LAYERS else None
        one = "" if forward is None else f"{seconds(partial(one_pass, forward, stages)):.3g}"
        rows.append([f"{layers:,}", f"{stages:,}", f"{median(exact):.3g}", f"{max(exact):.3g}", *others, one])
    header = ["K", "N", "exact (s)", "longest", *(f"IMD {eta} (s)" for eta in ETAS), "one pass of DP (s)"]
    yield from table(header, rows)


def nonlinear(seed: int, layers: int) -> LayerTimes:
    """Layers that shrink with the micro-batch only in part: some time is fixed, the rest falls as p to some power."""
    rng, p = np.random.default_rng((1, seed)), np.array(COUNTS)[:, None]
    four = [
        rng.uniform(50, 100, layers) / p ** rng.uniform(0.5, 1, layers) + rng.uniform(0, 5, layers) for _ in range(4)
    ]
    return LayerTimes(counts=COUNTS, forward=four[0], backward=four[1], send_forward=four[2], send_backward=four[3])


def searches(*, quick: bool) -> Iterator[str]:
    """How cross-search does beside the search of all pairs."""
    yield from paragraph(
        """Micro-batches: layers whose time shrinks only in part with the micro-batch, and up to 64 of these.
        Cross-search stopped short of the best pair of a cut and a number of micro-batches in so many instances, and was
        at most so much slower; the last two columns are the times of even cuts with p = 1 and p = 4 by that of the best
        pair (Eq. 8, mean)."""
    )
    rows, instances = list[list[str]](), 5 if quick else 100
    for layers, stages in ((24, 4), (48, 8)):
        even, found = tuple(layers * (r + 1) // stages for r in range(stages)), list[tuple[float, float, float]]()
        for seed in range(instances):
            layer_times = nonlinear(seed, layers)
            best = search_all(layer_times, stages).seconds
            fixed = gpipe_seconds(layer_times, even) / best
            found.append((cross_search(layer_times, stages) / best, fixed[COUNTS.index(1)], fixed[COUNTS.index(4)]))
        crossed, one, four = zip(*found, strict=True)
        short = f"{sum(ratio > 1 for ratio in crossed)} of {instances}"
        rows.append([str(layers), str(stages), short, f"{max(crossed):.4f}", f"{mean(one):.2f}", f"{mean(four):.2f}"])
    yield from table(["K", "N", "cross-search short", "at most", "even, p = 1", "even, p = 4"], rows)


@cache
def layer_times_of(name: str, module: Any, batch: Any) -> LayerTimes:
    """Of measured blocks, for all numbers of micro-batches; times between measured lengths are interpolated."""
    sizes = [2**i for i in range(len(batch).bit_length())]
    found = [measured(module, batch[:size], REPEATS) for size in sizes]
    rows = [-(-len(batch) // count) for count in range(1, len(batch) + 1)]

    def of(key: str) -> Any:
        columns = np.stack([one[key] for one in found]).T
        return np.stack([np.interp(rows, sizes, column) for column in columns], axis=1)

    sends = of("sent") / 1e9
    back = np.roll(sends, 1, axis=1)
    counts = tuple(range(1, len(batch) + 1))
    return LayerTimes(
        counts=counts, forward=of("forward"), backward=of("backward"), send_forward=sends, send_backward=back
    )


def speedups(*, quick: bool) -> Iterator[str]:
    """The best pair of a cut and a number of micro-batches beside others, by simulated time from measured layers."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = {"dim": 128, "heads": 4, "layers": 4} if quick else {"dim": 768, "heads": 12, "layers": 12}
    gpt = GPT(words=1_000 if quick else 50_257, length=64, **size), torch.randint(1_000, (16, 64))
    models: dict[str, tuple[Any, Any]] = {f"GPT of {size['layers']} blocks, {size['dim']} wide": gpt}
    if not quick:
        models = {"VGG-like CNN": (VGG(), torch.randn(32, 3, 64, 64)), **models}
    yield from paragraph(
        f"""Simulated time of a step (Eq. 8) from layers that were measured one by one on this machine: one thread, the
        least of {REPEATS} repeats, for micro-batches of 1, 2, 4, ... samples, times between these interpolated; what is
        sent takes as long as its bytes by 1 GB/s. How many times as long as the best pair of a cut and a number of
        micro-batches p. No pipeline was run for this table."""
    )
    header = ["model", "stages", "best p", "cut", "even cut", "exact cut, p = 1", "p = 4", "random cuts"]
    yield from table(header, (simulated(name, *model, stages) for name, model in models.items() for stages in (2, 4)))


def simulated(name: str, module: Any, batch: Any, stages: int) -> list[str]:
    """A row."""
    layer_times = layer_times_of(name, module, batch)
    layers, best = layer_times.forward.shape[1], search_all(layer_times, stages)

    def ratio(ends: tuple[int, ...], count: int | None = None) -> str:
        found = gpipe_seconds(layer_times, ends)
        return f"{(found.min() if count is None else found[count - 1]) / best.seconds:.2f}"

    drawn = [sorted(np.random.default_rng(s).choice(layers - 1, stages - 1, replace=False) + 1) for s in range(3)]
    even = tuple(layers * (s + 1) // stages for s in range(stages))
    cells = [name, str(stages), str(best.micro_batches), ",".join(map(str, best.ends)), ratio(even)]
    return [*cells, ratio(best.ends, 1), ratio(best.ends, 4), ", ".join(ratio((*ends, layers)) for ends in drawn)]


def seven(*, quick: bool) -> Iterator[str]:
    """A GPT of 7 billion parameters over 8 devices, as `simulate` predicts it."""
    sizes = {"words": 32_000, "dim": 4096, "heads": 32, "layers": 16 if quick else 32, "length": 2048}
    with torch.device("meta"):
        model = GPT(**sizes)
    yield from paragraph(
        f"""A GPT of {sum(p.numel() for p in model.parameters()) / 1e9:.1f} billion parameters ({sizes["layers"]} blocks
        of dimension {sizes["dim"]:,}, texts of {sizes["length"]:,} words, float32, AdamW) over {DEVICES} devices with
        the rates of an H100's data sheet, {TEXTS} texts in a step: {TEXTS // DEVICES} on each rank of a data axis, or
        all of them through one pipeline. Simulated, not run: bytes are counted on fake tensors and seconds predicted,
        for operators one after the other; a pipeline keeps the gradients of the step before, and all that it has sent,
        until a step ends. Of the ranks of a pipeline the first and the last are shown beside the fullest."""
    )
    header = ["by", "micro-batches", "fullest rank", "first and last rank", "parameters and state", "step", "idle"]
    yield from table(header, seven_rows(model, sizes["length"]))


def seven_rows(model: Any, length: int) -> Iterator[list[str]]:
    """Data parallel, sharded, and pipelines."""

    def seen(texts: int) -> Any:
        batch = torch.zeros(texts, length, dtype=torch.int64)
        return StepOfModule(model, lambda: batch, run_settings=RunSettings()).profiled(rates_for("H100"))

    each, whole = seen(TEXTS // DEVICES), seen(TEXTS)
    for names in ((), ("fsdp",), ("fsdp", "recompute")):
        made: Any = draft(each, names, ranks=DEVICES, budget=None)
        held, peak = each.held_bytes // (DEVICES if names else 1), format_bytes(made.peak_bytes)
        yield [" and ".join(names) or "ddp (S1)", "", peak, "all alike", format_bytes(held),
               format_seconds(made.seconds), ""]  # fmt: skip
    for name in SCHEDULES:
        asked = StageOptions(schedule=name, micro_batches=TEXTS)
        made = staged(whole, DEVICES, data=1, budget=None, asked=asked)
        ends = f"{format_bytes(made.stages[0].peak_bytes)}, {format_bytes(made.stages[-1].peak_bytes)}"
        idle = mean(stage.idle for stage in made.stages)
        yield [f"pipeline, {name}", str(TEXTS), format_bytes(made.peak_bytes), ends, format_bytes(made.held_bytes),
               format_seconds(made.seconds), f"{100 * idle:.0f} %"]  # fmt: skip


SECTIONS: dict[str, Callable[..., Iterator[str]]] = {
    "quality": quality,
    "times": times,
    "searches": searches,
    "speedups": speedups,
    "seven": seven,
}


def main() -> None:
    """Print or write the tables that are asked for, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few and small instances")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="these tables")
    parser.add_argument("--write", action="store_true", help="put them into docs/reports/pipeline.md")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")

    def lines_of(name: str) -> list[str]:
        command = f"python -m benchmarks.pipeline{' --quick' * asked.quick} --only {name} --write"
        return [*paragraph(origin(command)), *SECTIONS[name](quick=asked.quick)]

    parts = ((f"## {name}\n", f"pipeline.{name}", partial(lines_of, name)) for name in asked.only)
    show_parts(PAGE, parts, write=asked.write)


if __name__ == "__main__":
    main()
