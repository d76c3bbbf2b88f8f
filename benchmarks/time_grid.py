"""Decoder steps of many sizes under every plan of one device, measured once: what the time model is judged by.

    python -m benchmarks.time_grid measure [--threads 1] [--out benchmarks/time_grid.jsonl] [--seconds 900]
    python -m benchmarks.time_grid judge

`measure` writes one line of JSON per size: the least seconds of every plan, rounds interleaved. A plan that took more
than `APART` times the fastest in its first round is not timed again. `judge` says how often the plan that `auto` would
choose is within 5 and 15 % of the fastest one that was measured.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import torch

from benchmarks.side_by_side.cases import Case, Method, Size
from benchmarks.side_by_side.plans import plan_of
from benchmarks.side_by_side.training import Training
from lightning_amp.planning.plan.axes import Axes, MeshShape
from lightning_amp.planning.plan.strategies import conflicts, in_order
from lightning_amp.planning.time.device_rates import CPU_CORE, Rates
from lightning_amp.planning.time.step_seconds import step_seconds
from lightning_amp.progress import track

TABLE = Path(__file__).with_name("time_grid.jsonl")
APART = 1.6
ROUNDS = 3
MOST_SECONDS = 1.5
"""Predicted time of the slowest plan up to which a size is measured."""

ANCHORS = (100, 250, 600, 1200, 2700, 5400, 11000, 27000)
STRATA = (4, 12, 32, 64)
CELLS = (1, 8, 32, 64, 256)
DIMS = (64, 128)


def sizes() -> Iterator[Size]:
    """Sizes of the grid that a step of every plan can be measured of; windows as users choose them."""
    for anchors, strata, cells, dim in product(ANCHORS, STRATA, CELLS, DIMS):
        if strata * 4 > anchors or (dim == 128) != (anchors >= 1200):
            continue
        yield Size(
            anchors=anchors, strata=strata, cells=cells, dim=dim, window=min(20 * strata, anchors // 4)
        )


def plans() -> list[tuple[str, ...]]:
    """Every legal choice on one device; S3 is what `fused` does better."""
    choices = product(((), ("fused",)), ((), ("S4",)), ((), ("sparse",)), ((), ("recompute",), ("stream",)))
    found = [in_order(frozenset().union(*parts)) for parts in choices]
    return [chosen for chosen in found if not any(conflicts(chosen))]


def predicted(size: Size, chosen: tuple[str, ...], *, threads: int, rates: Rates) -> float:
    """Seconds of a step by the model."""
    decoder = replace(size.decoder(), threads=threads)
    return step_seconds(decoder, Axes.of(chosen), MeshShape(data=1, model=1), cells=size.cells, rates=rates)


def measure_size(size: Size, *, threads: int) -> dict[str, float]:
    """Least seconds of every plan, by its strategies."""
    steps = {}
    for chosen in plans():
        case = Case(size=size, method=Method(name="", strategies=chosen), threads=threads)
        steps[",".join(chosen)] = Training(case, plan_of(case), None)
    least: dict[str, float] = {}
    for training in steps.values():
        training.step()
    for turn in range(ROUNDS):
        for name, training in steps.items():
            best = min(least.values(), default=0.0)
            if turn and least[name] > APART * best:
                continue
            seconds, _ = training.step()
            least[name] = min(seconds, least.get(name, seconds))
    return least


def measure(out: Path, *, threads: int, seconds: float) -> None:
    """Measure sizes, spread over the grid, until the time is used up; sizes that are in the file are left out."""
    torch.set_num_threads(threads)
    lines = out.read_text().splitlines() if out.exists() else []
    there = {(tuple(json.loads(line)["size"].values()), json.loads(line)["threads"]) for line in lines}
    todo = [
        size
        for size in sizes()
        if max(predicted(size, chosen, threads=threads, rates=CPU_CORE) for chosen in plans()) < MOST_SECONDS
        and (tuple(asdict(size).values()), threads) not in there
    ]
    # a stride without a common factor visits all, and neighbours late
    order = [todo[i * 37 % len(todo)] for i in range(len(todo))] if len(todo) % 37 else todo
    end = time.monotonic() + seconds
    with out.open("a") as file:
        for size in track(order, description="sizes", total=len(order)):
            if time.monotonic() > end:
                break
            found = measure_size(size, threads=threads)
            rounded = {name: float(f"{value:.4g}") for name, value in found.items()}
            file.write(json.dumps({"size": asdict(size), "threads": threads, "seconds": rounded}) + "\n")
            file.flush()


def judge(table: Path, rates: Rates) -> list[tuple[float, Size, int, str, str]]:
    """For every size how much slower than the fastest measured plan the predicted one is, worst first."""
    found = []
    for line in table.read_text().splitlines():
        row = json.loads(line)
        size, threads, seconds = Size(**row["size"]), row["threads"], row["seconds"]
        guess = {
            name: predicted(size, tuple(filter(None, name.split(","))), threads=threads, rates=rates)
            for name in seconds
        }
        chosen, best = min(guess, key=guess.__getitem__), min(seconds, key=seconds.__getitem__)
        found.append((seconds[chosen] / seconds[best], size, threads, chosen or "none", best or "none"))
    return sorted(found, reverse=True, key=lambda row: row[0])


def main() -> None:
    """Measure or judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("measure", "judge"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=TABLE)
    parser.add_argument("--seconds", type=float, default=900)
    arguments = parser.parse_args()
    if arguments.what == "measure":
        measure(arguments.out, threads=arguments.threads, seconds=arguments.seconds)
        return
    rows = judge(arguments.out, CPU_CORE)
    for ratio, size, threads, chosen, best in rows[:25]:
        print(f"{ratio:5.2f}  {size}, D {size.dim}, w {size.window}, {threads} thr: {chosen} for {best}")
    shares = [sum(ratio <= limit for ratio, *_ in rows) / len(rows) for limit in (1.05, 1.15)]
    print(f"{len(rows)} sizes: within 5 % {shares[0]:.0%}, within 15 % {shares[1]:.0%}")


if __name__ == "__main__":
    main()
