"""Time and peak of the three heavy decoders: techniques and precisions, against the rate of products of a device.

A step is forward and backward pass and the optimiser's update, with counts by their entries, as the data module gives
them at these sizes. Useful operations are those of the plain decoder: what a technique computes twice counts once.

The order is that of what tells most: our plan in float32 at all sizes, then in the other precisions, the plain decoder,
what policy "auto" takes, and every other choice for attention and activations.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from benchmarks.decoders import Size, flops
from benchmarks.gpu.device import BF16, FLOAT32, TF32, Allocated, Precision, free_bytes, matmul_rate, median_seconds
from benchmarks.gpu.runner import Work
from benchmarks.gpu.subject import EAGER, OURS, Subject, plan_of
from lightning_amp.errors import AmpError
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.table import conflicts

SPARE = 0.9
"""Of the free memory, what a step that is tried may be predicted to need."""
WITHIN_S, STEPS = 2.0, 5
"""Seconds and steps that a case is timed for."""
RATE_GOAL = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Heavy:
    """A heavy decoder.

    Attributes:
        goal_seconds: Of our plan in float32 on an H200; None without one.
        goal_bytes: Of its peak.
        paper: What the paper says of it.
    """

    size: Size
    goal_seconds: float | None = None
    goal_bytes: int | None = None
    paper: str = ""


HEAVY = (
    Heavy(size=Size(anchors=5400, strata=32, cells=256), goal_seconds=0.1, paper="27.5 s on four RTX 3090"),
    Heavy(size=Size(anchors=27_000, strata=32, cells=128), goal_seconds=0.3, paper="1000 s on four RTX 3090"),
    Heavy(size=Size(anchors=113_505, strata=32, cells=1), goal_bytes=2**30),
)
TINY = (Heavy(size=Size(anchors=90, strata=3, cells=8, dim=8, window=16)),)

Case = tuple[Heavy, tuple[str, ...] | None, Precision]


def cases(heavy: Sequence[Heavy]) -> Iterator[Case]:
    """Everything that is timed, each once, the most telling first; no strategies mean policy "auto"."""
    firsts: list[tuple[tuple[str, ...] | None, Precision]] = [
        (OURS, FLOAT32),
        (OURS, TF32),
        (OURS, BF16),
        (EAGER, FLOAT32),
        (None, FLOAT32),
        (EAGER, BF16),
    ]
    yield from ((one, *first) for first in firsts for one in heavy)
    rest = product((FLOAT32, BF16), choices(), heavy)
    yield from ((one, chosen, precision) for precision, chosen, one in rest if (chosen, precision) not in firsts)


def choices() -> list[tuple[str, ...]]:
    """Every choice for attention and activations, with and without S4 and the sparse likelihood."""
    found = []
    for scores, attention, activations in product(
        (("S4", "sparse"), ()), ((), ("fused",), ("sdpa",), ("S3",)), (("stream",), ("recompute",), ())
    ):
        chosen = {*scores, *attention, *activations}
        if not any(conflicts(chosen)):
            order = ("S1", "S3", "S4", "fused", "sdpa", "sparse", "recompute", "stream")
            found.append(tuple(name for name in order if name in chosen | {"S1"}))
    return found


def run(work: Work) -> None:
    """The rates of products, a row for each case that fits and that there is time for, and the goals."""
    heavy = TINY if work.tiny else HEAVY
    n = 256 if work.tiny else 8192 if work.device.type == "cuda" else 2048
    rates = {p.name: matmul_rate(p, work.device, n=n) for p in (FLOAT32, TF32, BF16)}
    work.record.fact(matmul_flops=rates)
    useful = {one.size: flops(one.size) for one in heavy}
    left = 0
    for one, strategies, precision in cases(heavy):
        what = f"{one.size}, {_named(strategies)}, {precision.name}"
        if work.clock.left < 1:
            left += 1
            continue
        try:
            _measure(work, (one, strategies, precision), useful[one.size], rates[precision.name], what)
        except (torch.OutOfMemoryError, AmpError) as error:
            work.record.note(f"{what}: {str(error).splitlines()[0]}")
    if left:
        work.record.note(f"{left} cases, the last ones of the list, were not reached: the time was over.")
    _tell_goals(work, heavy)


def _named(strategies: tuple[str, ...] | None) -> str:
    return "policy auto" if strategies is None else ",".join(strategies)


def _measure(work: Work, case: Case, useful: int, rate: float, what: str) -> None:
    (one, strategies, precision), device = case, work.device
    free = free_bytes(device)
    budget = None if free is None else int(SPARE * free)
    made = plan_of(one.size.decoder(), strategies, cells=one.size.cells, device=device, budget=budget)
    if not work.has_room(what, made.predicted_peak_bytes, budget):
        return
    predicted_seconds = made.predicted_step_seconds or 0.0
    if (STEPS // 2) * predicted_seconds > work.clock.left:
        work.record.note(f"{what}: not run, a step of {format_seconds(predicted_seconds)} was predicted.")
        return
    allocated = Allocated(device)
    subject = Subject(one.size, made, device=device, precision=precision, sparse=True)
    subject.step()
    within = max(0.1, min(WITHIN_S, work.clock.left / 4))
    seconds = median_seconds(subject.step, device, most=1 if work.tiny else STEPS, within=within)
    peak = allocated.peak_of(subject.step, subject.held)
    work.record.row(
        size=str(one.size),
        precision=precision.name,
        strategies=_named(strategies) if strategies else f"auto: {','.join(made.strategies) or 'none'}",
        step_seconds=seconds,
        predicted_seconds=predicted_seconds,
        peak_bytes=peak,
        predicted_bytes=made.predicted_peak_bytes,
        rate_flops=useful / seconds,
        share_of_products=useful / seconds / rate,
    )


def _tell_goals(work: Work, heavy: Sequence[Heavy]) -> None:
    """Of the fastest plan in float32, and of the one that needs least memory."""
    goals: list[str] = []
    for one in heavy:
        rows = [r for r in work.record.entry["rows"] if r["size"] == str(one.size) and r["precision"] == "float32"]
        if not rows:
            continue
        fast, small = (min(rows, key=lambda row: row[key]) for key in ("step_seconds", "peak_bytes"))
        if one.goal_seconds is not None:
            seconds, share = fast["step_seconds"], fast["share_of_products"]
            target = f"<= {one.goal_seconds} s a step on an H200 (the paper: {one.paper})"
            goals.append(_goal(one, target, seconds <= one.goal_seconds, format_seconds(seconds), fast))
            target = f">= {RATE_GOAL:.0%} of the rate of products"
            goals.append(_goal(one, target, share >= RATE_GOAL, f"{share:.0%}", fast))
        if one.goal_bytes is not None:
            n, target = small["peak_bytes"], f"peak <= {format_bytes(one.goal_bytes)}"
            goals.append(_goal(one, target, n <= one.goal_bytes, format_bytes(n), small))
    work.record.fact(goals=goals)


def _goal(one: Heavy, target: str, reached: bool, found: str, row: dict[str, Any]) -> str:
    return f"{one.size}: {target}: {'yes' if reached else '**no**'}, {found} with {row['strategies']}"
