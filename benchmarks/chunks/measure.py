"""Bytes, operators, floating point operations and seconds of a pass, forward alone or with its backward."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_amp._torch import tree_leaves
from lightning_amp.footprint.live_bytes import LiveBytes

ROUNDS = 5
Pass = Callable[[], Any]


class Counter(LiveBytes):
    """The meter, and how many operators run."""

    n_operators = 0

    def dispatched(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        self.n_operators += 1
        return super().dispatched(func, types, args, kwargs)


def forward(module: nn.Module, args: tuple[Any, ...]) -> Pass:
    """Inference."""

    def run() -> Any:
        with torch.no_grad():
            return module(*args)

    return run


def both_passes(module: nn.Module, args: tuple[Any, ...]) -> Pass:
    """Forward and backward pass of a loss."""

    def run() -> None:
        module.zero_grad()
        module(*args).backward()

    return run


def count(run: Pass) -> tuple[int, int, int]:
    """Most bytes beyond what was there, operators and FLOP."""
    with FlopCounterMode(display=False) as flops, Counter() as meter:
        run()
    return meter.peak, meter.n_operators, int(flops.get_total_flops())


def counted(run: Pass) -> tuple[int, int]:
    """Most bytes beyond what was there, and operators; hooks of the counter of FLOP would make it another call."""
    with Counter() as meter:
        run()
    return meter.peak, meter.n_operators


def memory_profile() -> torch.profiler.profile:
    """A profiler that sees what torch's allocator gives out and takes back."""
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)


def most_allocated(found: torch.profiler.profile) -> int:
    """Most bytes beyond what was there when a profile of memory began."""
    assert found.profiler is not None
    assert found.profiler.kineto_results is not None
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    now, most = 0, 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def seconds(runs: Sequence[Pass]) -> list[float]:
    """Median time of each relative to the first, in rounds that run all of them, and the first one's seconds."""
    times: list[list[float]] = []
    for _ in range(ROUNDS + 1):
        times.append([_timed(run) for run in runs])
    # the first round warms up
    shares = [median(row[k] / row[0] for row in times[1:]) for k in range(1, len(runs))]
    return [median(row[0] for row in times[1:]), *shares]


def _timed(run: Pass) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def largest_difference(right: Any, found: Any) -> float:
    """Between results in any nesting, relative to the largest value."""
    pairs = zip(tree_leaves(right), tree_leaves(found), strict=True)
    both = [(a.double(), b.double()) for a, b in pairs if isinstance(a, Tensor) and a.is_floating_point()]
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)) for a, b in both)
