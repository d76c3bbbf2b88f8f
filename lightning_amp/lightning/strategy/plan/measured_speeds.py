"""Measure how fast every rank computes while all of them run, for `AMPStrategy(device_speeds="measure")`."""

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

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
