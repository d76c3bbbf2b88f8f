"""Compute bytes and blocks of every stage, which a cut of a pipeline needs besides its seconds."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from lightning_amp.footprint.chain.passes import Passes
from lightning_amp.techniques.pipeline.schedule.schedules import Order, most_in_flight
from lightning_amp.techniques.pipeline.schedule.stage_bytes import stage_bytes


def layer_bytes(part: Passes, orders: Sequence[Order], stages: int, *, at_once: bool) -> Iterator[list[float]]:
    """For every stage, what each block of a micro-batch would hold there.

    Args:
        part: Passes of the micro-batch.
        orders: Of all ranks; stage s is on rank s mod the ranks.
        at_once: As of `Pipeline`.
    """
    blocks = len(part.names)
    alone = [stage_bytes(part, i, i + 1, to_the_end=not at_once) for i in range(blocks)]
    # what passes between blocks is kept once per stage
    kept = [own.kept - own.received - own.result for own in alone]
    held = [0.0] * blocks
    for p in part.parameters:
        places = {min(i, blocks - 1) for i in p.segments} if p.block is None else {p.block}
        for i in places:
            # those of the last step are there too
            held[i] += p.n_bytes + p.state_bytes + 2 * p.gradient_bytes
    flights = [most_in_flight(order) for order in orders]
    for stage in range(stages):
        flying = flights[stage % len(orders)][stage]
        yield [own + flying * saved for own, saved in zip(held, kept, strict=True)]


def filled(ends: tuple[int, ...], stages: int, seconds: Any, speeds: tuple[float, ...]) -> tuple[int, ...]:
    """As many stages as there are: where fewer would be better, the longest one of several blocks is cut in two; of
    ranks that are not equal one that would be best left idle gets a block of its neighbour's.

    Args:
        ends: One past the last block of every stage.
        stages: How many there are.
        seconds: Of every block, [K].
        speeds: Of the ranks; none: they are equal.
    """
    if speeds:
        blocks = len(seconds)
        whole = [*ends, *[blocks] * (stages - len(ends))]
        apart = list(accumulate(whole, lambda before, end: max(before + 1, end), initial=0))[1:]
        return tuple(min(end, blocks - (stages - 1 - s)) for s, end in enumerate(apart))
    # caps of ranks may leave the first one without a block
    ends = tuple(sorted({*ends} - {0}))
    work = np.concatenate([[0.0], np.cumsum(seconds)])
    while len(ends) < stages:
        runs = [run for run in pairwise((0, *ends)) if run[1] - run[0] > 1]
        start, end = max(runs, key=lambda run: float(work[run[1]] - work[run[0]]))
        middle = min(range(start + 1, end), key=lambda i: abs(float(2 * work[i] - work[start] - work[end])))
        ends = tuple(sorted({*ends, middle}))
    return ends
