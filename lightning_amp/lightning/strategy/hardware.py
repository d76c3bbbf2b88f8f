"""Describe where a run takes place: the memory and speed of a rank's device."""

import os
import time
from collections.abc import Callable
from statistics import median

import psutil
import torch
import torch.distributed as dist

from lightning_amp._torch import ALLOCATOR_VARIABLES, set_allocator

TENSORS_SHARE = 0.97
"""Of what CUDA's allocator can have, what tensors can have: on an H100 steps of 95 % ran, and of 99 % did not."""


def device_budget(device: torch.device, *, node_ranks: int) -> int:
    """Bytes that one rank may use; on CPU the ranks of a node share its memory."""
    if device.type == "cuda":
        # without the context and what other processes have: half a gigabyte and more, which no tensor can have
        library = take_workspaces(device)
        found = int(torch.cuda.mem_get_info(device)[0]) + int(torch.cuda.memory_reserved(device))
        return int(TENSORS_SHARE * (found - library))
    return int(psutil.virtual_memory().total) // max(1, node_ranks)


def take_workspaces(device: torch.device) -> int:
    """Bytes that cuBLAS takes from torch's allocator at the first product of each thread, forward and backward."""
    before = int(torch.cuda.memory_allocated(device))
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(8, 8, device=device, requires_grad=True)
        (x @ x).sum().backward()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    del x
    return int(torch.cuda.memory_allocated(device)) - before


def let_segments_grow(device: torch.device) -> None:
    """Let CUDA's allocator grow the segments that it has, unless the environment configures it.

    Segments of one size each are kept for tensors of that size: under recomputation 12.3 GiB were taken where 7.5 were
    used at once (docs/reports/gpu.md), and a step that fits by its tensors ran out of memory.
    """
    if device.type == "cuda" and not any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
        set_allocator("expandable_segments:True")


SPEED_S, WINDOWS, SPEED_SIZE = 1.0, 4, 384
"""Seconds of a window, how many of them, and rows of a matrix."""


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
