"""What this CPU reaches right now, measured in a fifth of a second before a plan is made.

Three short probes, the best of several rounds each, for other work on the machine only slows one down:

    products     a batch of matrices of the sizes that attention has
    memory       the sum of two tensors, read and written
    overhead     a chain of operators on a few numbers, forward and backward

A probe reaches what an operator can; a training step has views, allocations and Python between operators, and tensors
in and out of caches. The known rates were fitted to whole steps, so that they are scaled: by what a probe finds now, to
what the same probe found on the core where they were fitted.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from statistics import median

import torch
import torch.distributed as dist

from lightning_amp.planning.time.device_rates import CPU_CORE, Rates

ROUNDS = 15
CHAIN = 100
PRODUCTS, MEMORY, OVERHEAD = 140e9, 28e9, 3.1e-6
"""What the probes found on the core that CPU_CORE was fitted on: operations and bytes per second, seconds."""
SPEED_S, WINDOWS, SPEED_SIZE = 1.0, 4, 384
"""Seconds of a window, how many of them, and rows of a matrix, for the speed of a rank among the others."""
MOST_APART = 8.0
"""Scaled further than this no rate is: a probe that was disturbed may not make a plan."""


@cache
def measured_rates(threads: int) -> Rates:
    """CPU_CORE, scaled to what this process reaches with so many threads; measured once."""
    words = f"this CPU with {threads} {'thread' if threads == 1 else 'threads'}, measured"
    return replace(
        CPU_CORE,
        matmul_flops=CPU_CORE.matmul_flops * _scale(_products() / PRODUCTS),
        memory_bytes=CPU_CORE.memory_bytes * _scale(_memory() / MEMORY),
        overhead_seconds=CPU_CORE.overhead_seconds * _scale(_overhead() / OVERHEAD),
        device=words,
    )


def measured_speeds(device: torch.device, n_ranks: int) -> tuple[float, ...]:
    """Products of matrices that every rank computes in a second, by those of the fastest; a collective.

    All ranks work at once, as in a step: what one takes from another counts. Of several windows the median counts,
    each by what all ranks have done in it.
    """
    if n_ranks == 1:
        return (1.0,)
    matrix = torch.ones(SPEED_SIZE, SPEED_SIZE, device=device)
    matrix @ matrix

    def product() -> None:
        matrix @ matrix
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    everyones: list[list[int]] = [[]] * n_ranks
    dist.barrier()
    dist.all_gather_object(everyones, done_in_windows(product, SPEED_S, WINDOWS))
    by_window = [[done / max(window) for done in window] for window in zip(*everyones, strict=True)]
    speeds = [median(ratios) for ratios in zip(*by_window, strict=True)]
    return tuple(speed / max(speeds) for speed in speeds)


def done_in_windows(
    work: Callable[[], object], seconds: float, windows: int, clock: Callable[[], float] = time.perf_counter
) -> list[int]:
    """How often some work is done in each of some windows of so many seconds, at least 1; the first does not count.

    A processor's quota is given out in periods, mostly of a tenth of a second. Windows lie edge to edge and are whole
    numbers of these, so that each has as much quota wherever in a period it begins; the first one has more, of before.
    """
    done, begin = [0] * windows, clock()
    while (window := int((clock() - begin) / seconds)) < windows:
        done[window] += 1
        work()
    return [max(1, count) for count in done[1:]]


def _scale(ratio: float) -> float:
    return min(MOST_APART, max(1 / MOST_APART, ratio))


def _best(run: Callable[[], object]) -> float:
    """Least seconds of a few rounds, after one that does not count."""
    run()
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def _products() -> float:
    batch, rows, dim, keys = 8, 256, 128, 256
    a, b = torch.ones(batch, rows, dim, device="cpu"), torch.ones(batch, dim, keys, device="cpu")
    return 2 * batch * rows * dim * keys / _best(lambda: torch.bmm(a, b))


def _memory() -> float:
    a, b = (torch.ones(2**20, device="cpu") for _ in range(2))
    return 3 * a.nbytes / _best(lambda: a + b)


def _overhead() -> float:
    first = torch.ones(64, device="cpu")

    def chain() -> None:
        with torch.enable_grad():
            last = first.clone().requires_grad_()
            for _ in range(CHAIN):
                last = last * 1.01
            torch.autograd.backward(last.sum())

    return _best(chain) / (2 * CHAIN)
