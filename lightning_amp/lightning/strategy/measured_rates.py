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

import torch
import torch.distributed as dist

from lightning_amp.planning.time.device_rates import CPU_CORE, Rates

ROUNDS = 15
CHAIN = 100
PRODUCTS, MEMORY, OVERHEAD = 140e9, 28e9, 3.1e-6
"""What the probes found on the core that CPU_CORE was fitted on: operations and bytes per second, seconds."""
SPEED_S, SPEED_SIZE = 1.0, 384
"""Seconds of work, and rows of a matrix, for the speed of a rank among the others."""
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
    """Products of matrices that every rank computes in `SPEED_S`, by those of the fastest; a collective.

    All ranks work at once, as in a step: what one takes from another counts. A quota that the system gives out in
    periods of a tenth of a second is met several times.
    """
    if n_ranks == 1:
        return (1.0,)
    matrix = torch.ones(SPEED_SIZE, SPEED_SIZE, device=device)
    matrix @ matrix
    everyones: list[float] = [0.0] * n_ranks
    dist.barrier()
    begin, done = time.perf_counter(), 0
    while time.perf_counter() - begin < SPEED_S:
        matrix @ matrix
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        done += 1
    own = done / (time.perf_counter() - begin)
    dist.all_gather_object(everyones, own)
    return tuple(speed / max(everyones) for speed in everyones)


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
