"""Cut ordered layers into the stages of a pipeline over ordered, possibly unequal devices (Zhou et al. 2025).

    minimise   rho_1 + rho_2                                                                            Eq. 9
    rho_1 = max over stages of max( sum of backward over the stage / speed, sending the gradient back )     Eq. 8
    rho_2 = max over stages of max( sum of forward over the stage / speed, sending the output on )

With p micro-batches a step takes one pass of all stages and (p - 1) (rho_1 + rho_2) more (Eq. 6). Of the pass a cut can
change only what is sent; where links are equal, that is left out of the choice (docs/paper/csimd.md has how much). What
is sent is counted into the maximum and not added to the stage, because a device sends while it computes the next
micro-batch. A cut before layer e (Eq. 7, where F_i^M = H^M of the stage's last layer and B_i^M = J^M of the next
stage's first) is crossed by

    forward    what layer e - 1 returns, sent to layer e           send_forward[e - 1]
    backward   the gradient that layer e returns, sent to e - 1    send_backward[e]

and nothing is sent by the last layer forward or by the first one backward (F_N^M = B_N^M = 0). The paper's Algorithm 3
reads J^M at the stage's own last layer instead; Eq. 7 and 8 are what is minimised here.

What belongs to the first and the last layer (embedding; head and loss) is part of their costs and bytes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any, SupportsFloat, TypeAlias

import numpy as np

from lightning_amp.costs.ordered_runs import Device, OrderedRuns, paces, whole
from lightning_amp.errors import PlanError
from lightning_amp.quantities import is_number
from lightning_amp.techniques.pipeline.schedule.least_sum import least_step, least_sum
from lightning_amp.techniques.pipeline.schedule.schedules import check_count

Numbers: TypeAlias = Iterable[SupportsFloat]
LARGEST = 1e100
"""More than any time or number of bytes; sums of such numbers do not overflow."""


def numbers_of(name: str, given: Any, length: int | None = None, *, above_zero: bool = False) -> list[float]:
    """Convert a list or array to a list of Python numbers, without rounding, and check it.

    Args:
        name: Name of the argument, for messages.
        given: A list, a tuple, an array.
        length: Required length; None for one or more.
        above_zero: Whether 0 is not allowed.

    Raises:
        PlanError: The argument is not a list, has another length, or has a number out of range.
    """
    found = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(found, str | bytes) or not isinstance(found, Iterable):
        raise PlanError(f"{name}={given!r} is not supported; allowed is a list of numbers: pass one")
    listed = [n.item() if hasattr(n, "item") else n for n in found]
    if not listed or length not in (None, len(listed)):
        raise PlanError(
            f"{name} got {len(listed)!r} numbers; allowed are"
            f" {'one or more' if length is None else repr(length)}: pass one for each"
        )
    for place, n in enumerate(listed):
        if not (is_number(n) and 0 <= n <= LARGEST and (n > 0 or not above_zero)):
            raise PlanError(
                f"{name}[{place}]={n!r} is not supported; allowed are numbers"
                f" {'above 0' if above_zero else 'from 0'} to {LARGEST:g}: correct it"
            )
    return listed


def rows_of(name: str, given: Any, stages: int, length: int) -> list[list[float]]:
    """Convert an argument to one row of numbers for all stages, or to a row for each stage.

    Args:
        name, given, length: As in `numbers_of`; `given` may be a list of rows.
        stages: Required number of rows, if there are several.

    Raises:
        PlanError: As in `numbers_of`, or the number of rows differs.
    """
    rows = given.tolist() if hasattr(given, "tolist") else given
    rows = list(rows) if isinstance(rows, Iterable) else rows
    if not isinstance(rows, list) or not any(isinstance(row, Iterable) for row in rows):
        return [numbers_of(name, rows, length)]
    if len(rows) != stages:
        raise PlanError(
            f"{name} got {len(rows)!r} rows; allowed are a number for each layer, or a row for each of"
            f" {stages!r} stages: pass one of these"
        )
    return [numbers_of(f"{name}[{i}]", row, length) for i, row in enumerate(rows)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineCut:
    """Assignment of layers to pipeline stages.

    Attributes:
        ends: One past the last layer of every stage, in the order of the devices, the last one K. Where devices
            differ, one that is best left idle ends where the one before it does; idle ones at the end are left out.
        rho_forward: Forward time of one micro-batch in the slowest stage or transfer (the paper's rho_2).
        rho_backward: Likewise backward (rho_1).
    """

    ends: tuple[int, ...]
    rho_forward: float
    rho_backward: float

    @property
    def total(self) -> float:
        """rho_1 + rho_2."""
        return self.rho_forward + self.rho_backward


def cut_pipeline(
    forward: Numbers,
    backward: Numbers,
    n_stages: int,
    *,
    send_forward: Numbers | Iterable[Numbers] | None = None,
    send_backward: Numbers | Iterable[Numbers] | None = None,
    layer_bytes: Numbers | Iterable[Numbers] | None = None,
    stage_bytes: Numbers | float | None = None,
    speeds: Numbers | None = None,
    micro_batches: int | None = None,
) -> PipelineCut:
    """Split layers into pipeline stages; minimize the sum of the slowest forward and slowest backward time.

    If links differ, the time of a whole step (Eq. 8) is minimized instead, and every stage has a layer.

    The result is an optimum of this, exactly: floats count as the rational numbers that they are, and only the times
    that some stages really take are compared, so neither rounding nor a tolerance decides.

    Args:
        forward: Time of every layer's forward pass of one micro-batch on a device of speed 1, in any unit; K of them.
        backward: Time of every layer's backward pass, in the same unit.
        n_stages: The most stages; fewer are used where that is better and links do not differ.
        send_forward: Time of sending what a layer returns to the next one; none: no time. Where links differ, a row of
            K for every stage that sends it.
        send_backward: Time of sending the gradient that a layer returns to the one before it; likewise.
        layer_bytes: Bytes of every layer; or, where they depend on the stage, as the micro-batches in flight do, a row
            of K for every stage.
        stage_bytes: Bytes that a stage may have: a number, or one for every stage; none: no cap.
        speeds: Speed of every stage's device; a layer's time is divided by it. None means 1.
        micro_batches: Number of micro-batches (the paper's p); required if links differ.

    Raises:
        PlanError: No cut fits `stage_bytes`, lists differ in length, or a number is out of range.
    """
    check_count("n_stages", n_stages)
    costs = [numbers_of("forward", forward)]
    layers = len(costs[0])
    costs.append(numbers_of("backward", backward, layers))
    sends = [
        [[0.0] * layers] if given is None else rows_of(name, given, n_stages, layers)
        for name, given in (("send_forward", send_forward), ("send_backward", send_backward))
    ]
    # A layer takes its cost over the speed. Multiplied by `unit` that is a whole number, cost times pace, and times of
    # sending, which no speed divides, are multiplied by it too.
    pace, unit = paces([1] * n_stages if speeds is None else numbers_of("speeds", speeds, n_stages, above_zero=True))
    flat, scale = whole([number for column in (*costs, *sends[0], *sends[1]) for number in column])
    columns = [flat[i : i + layers] for i in range(0, len(flat), layers)]
    there, back = (list(accumulate(column, initial=0)) for column in columns[:2])
    # over the cut before every layer
    on = [[0, *(unit * time for time in row[:-1]), 0] for row in columns[2 : 2 + len(sends[0])]]
    returned = [[0, *(unit * time for time in row[1:]), 0] for row in columns[2 + len(sends[0]) :]]
    devices = _devices(pace, layer_bytes, stage_bytes, layers)
    if all(row == rows[0] for rows in (on, returned) for row in rows):
        runs = OrderedRuns(forward=there, backward=back, send_forward=on[0], send_backward=returned[0], devices=devices)
        ends = least_sum(runs)
        if ends is None:
            # how far stages reach when each takes all it can
            first = runs.fill(runs.no_bound, runs.no_bound)[-1]
            raise PlanError(
                f"{layers!r} layers on {n_stages!r} stages with stage_bytes={stage_bytes!r} are not possible; stages"
                f" that take all they can hold the first {first!r} layers and no more: allow more bytes or more stages,"
                " or make layers smaller (recompute, chunk)"
            )
        f, b = runs.times(ends)
    else:
        more = check_count("micro_batches", micro_batches) - 1
        links = on * (n_stages // len(on))
        # the link after a stage carries the gradients of the next one
        links_back = [*(returned * (n_stages // len(returned)))[1:], [0] * (layers + 1)]
        found = least_step((there, links), (back, links_back), devices, more)
        if found is None:
            raise PlanError(
                f"{layers!r} layers on {n_stages!r} stages with stage_bytes={stage_bytes!r} are not possible where each"
                " stage has a layer, as unlike links require: allow more bytes or other stages, or make layers smaller"
                " (recompute, chunk)"
            )
        ends, f, b = found
    return PipelineCut(
        ends=tuple(ends), rho_forward=float(Fraction(f, scale * unit)), rho_backward=float(Fraction(b, scale * unit))
    )


def _devices(pace: list[int], layer_bytes: Any, stage_bytes: Any, layers: int) -> list[Device]:
    if stage_bytes is None:
        if layer_bytes is not None:
            rows_of("layer_bytes", layer_bytes, len(pace), layers)
        return [Device(pace=p) for p in pace]
    if layer_bytes is None:
        raise PlanError(
            f"stage_bytes={stage_bytes!r} requires layer_bytes; a cap needs the bytes of every layer: pass"
            " them too, or leave stage_bytes out"
        )
    rows = rows_of("layer_bytes", layer_bytes, len(pace), layers)
    listed = isinstance(stage_bytes, Iterable)
    caps = numbers_of("stage_bytes", stage_bytes if listed else [stage_bytes], len(pace) if listed else 1)
    flat, _ = whole([number for row in (*rows, caps) for number in row])
    before = [list(accumulate(flat[i : i + layers], initial=0)) for i in range(0, layers * len(rows), layers)]
    room = flat[layers * len(rows) :]
    # one row, or one cap, stands for all stages
    return [Device(pace=p, bytes_before=before[i % len(before)], cap=room[i % len(room)]) for i, p in enumerate(pace)]


def filled(ends: tuple[int, ...], stages: int, seconds: Any, speeds: tuple[float, ...]) -> tuple[int, ...]:
    """Extend a cut to the required number of stages, each with a block.

    Without speeds, the longest stages are split. With speeds, a rank without blocks gets one of its neighbour.

    Args:
        ends: One past the last block of every stage.
        stages: Required number.
        seconds: Seconds of every block, [K].
        speeds: Speeds of the ranks; empty if they are equal.
    """
    if speeds:
        blocks = len(seconds)
        whole = [*ends, *[blocks] * (stages - len(ends))]
        strict = list(accumulate(whole, lambda before, end: max(before + 1, end), initial=0))[1:]
        return tuple(min(end, blocks - (stages - 1 - s)) for s, end in enumerate(strict))
    # caps may leave the first rank without a block
    ends = tuple(sorted({*ends} - {0}))
    work = np.concatenate([[0.0], np.cumsum(seconds)])
    while len(ends) < stages:
        runs = [run for run in pairwise((0, *ends)) if run[1] - run[0] > 1]
        start, end = max(runs, key=lambda run: float(work[run[1]] - work[run[0]]))
        middle = min(range(start + 1, end), key=lambda i: abs(float(2 * work[i] - work[start] - work[end])))
        ends = tuple(sorted({*ends, middle}))
    return ends
