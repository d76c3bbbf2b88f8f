"""Choose the number of micro-batches together with the cut of layers (Zhou et al. 2025, ODPA and CSIMD).

    T(cut, p) = sum over layers of (forward + backward) + sum over cuts of both sendings
                + (p - 1) (rho_1 + rho_2)                                                                 Eq. 8

All times are those of one of p micro-batches, and they are not proportional to its size: each layer has its own for
every p. `gpipe_seconds` takes all p at once (their Algorithm 4); `cross_search` chooses cut and p in turn until
neither improves (Algorithm 1), `search_all` cuts for every p that may be best. Either takes the cut of least
rho_1 + rho_2 for a p, as the paper does: what is sent once per cut is in T but not in what is minimised, and for p = 1
it is all that matters. Where links differ, the cut is that of least T.

Legend: K layers, P numbers of micro-batches, N stages.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from lightning_amp.errors import PlanError
from lightning_amp.techniques.pipeline.schedule.cut import cut_pipeline
from lightning_amp.techniques.pipeline.schedule.numbers import Numbers, check_count, numbers_of, speeds_of

Table = Float[np.ndarray, "P K"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerTimes:
    """Times of every layer for one micro-batch, a row for each number of micro-batches.

    Attributes:
        counts: The numbers of micro-batches p, rising.
        forward: Of the forward pass.
        backward: Of the backward pass.
        send_forward: Of sending what the layer returns on; where links differ, by every stage, [P, N, K].
        send_backward: Of sending the gradient that the layer returns back; likewise.
        after: What a step takes besides, once for all micro-batches, [P]; none: no time.
    """

    counts: tuple[int, ...]
    forward: Table
    backward: Table
    send_forward: Float[np.ndarray, "P *N K"]
    send_backward: Float[np.ndarray, "P *N K"]
    after: Float[np.ndarray, " P"] | None = None

    def __post_init__(self) -> None:
        """Refuse what does not fit together.

        Raises:
            PlanError: Counts that do not rise from 1 on, tables of another shape, or a number out of range.
        """
        for count in self.counts:
            check_count("counts", count)
        if list(self.counts) != sorted(set(self.counts)):
            raise PlanError(
                f"counts={self.counts!r} is not supported; allowed are rising numbers of micro-batches: sort them"
            )
        shape = self.forward.shape
        for name in ("forward", "backward", "send_forward", "send_backward"):
            table = getattr(self, name)
            found = table.shape[:1] + table.shape[2:] if "send" in name and table.ndim == 3 else table.shape
            if found != shape or len(shape) != 2 or shape[0] != len(self.counts):
                raise PlanError(
                    f"{name} got a table of {table.shape!r}; allowed is {(len(self.counts), *shape[1:])!r},"
                    " a row for every number of micro-batches and a column for every layer: correct it"
                )
            numbers_of(name, table.ravel())


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionChoice:
    """What was chosen.

    Attributes:
        ends: One past the last layer of every stage.
        micro_batches: p.
        seconds: T of a step, in the unit of the times.
        cuts: How many times layers were cut to find it.
    """

    ends: tuple[int, ...]
    micro_batches: int
    seconds: float
    cuts: int


def gpipe_seconds(times: LayerTimes, ends: Sequence[int], *, speeds: Numbers | None = None) -> NDArray[np.float64]:
    """Time of a step for every number of micro-batches, with the layers cut as they are (Eq. 8).

    Args:
        times: Of the layers.
        ends: One past the last layer of every stage, as `cut_pipeline` returns them.
        speeds: Of every stage's device; none: all 1.

    Raises:
        PlanError: Fewer speeds than stages, or a number out of range.
    """
    starts = np.array((0, *ends[:-1]))
    used = np.flatnonzero(starts < np.array(ends))
    speed = np.array(speeds_of(speeds, len(ends)))
    cuts = starts[used][1:]
    forward = np.add.reduceat(times.forward, starts[used], axis=1) / speed[used]
    backward = np.add.reduceat(times.backward, starts[used], axis=1) / speed[used]
    on, back = (
        table[:, layers] if table.ndim == 2 else table[:, stages, layers]
        for table, stages, layers in ((times.send_forward, used[:-1], cuts - 1), (times.send_backward, used[1:], cuts))
    )
    slowest = np.maximum(forward.max(1), on.max(1, initial=0)) + np.maximum(backward.max(1), back.max(1, initial=0))
    once = sum(part.sum(1) for part in (forward, backward, on, back))
    seconds: NDArray[np.float64] = once + (np.array(times.counts) - 1) * slowest
    return seconds if times.after is None else seconds + times.after


@dataclass(frozen=True, kw_only=True, slots=True)
class Devices:
    """What layers are cut for; arguments as those of `cut_pipeline`."""

    n_stages: int
    speeds: Numbers | None = None
    layer_bytes: Numbers | Iterable[Numbers] | None = None
    stage_bytes: Numbers | float | None = None


def cross_search(times: LayerTimes, devices: Devices, *, first: int | None = None) -> PartitionChoice:
    """Cut for a number of micro-batches, choose the best number for the cut, and so on until neither improves.

    It can stop short of what `search_all` finds, for it looks along one of the two at a time.

    Args:
        times: Of the layers.
        devices: What they are cut for.
        first: The number of micro-batches to begin with; none: the least.

    Raises:
        PlanError: As `cut_pipeline`, or no such number of micro-batches to begin with.
    """
    if first is not None and first not in times.counts:
        raise PlanError(f"first={first!r} is not supported; allowed are {times.counts!r}: choose one of them")
    best = _cut(times, devices, 0 if first is None else times.counts.index(first))
    cuts = 1
    while True:
        seconds = gpipe_seconds(times, best.ends, speeds=devices.speeds)
        row = int(seconds.argmin())
        if seconds[row] >= best.seconds:
            return replace(best, cuts=cuts)
        best = replace(best, micro_batches=times.counts[row], seconds=float(seconds[row]))
        other = _cut(times, devices, row)
        cuts += 1
        if other.seconds >= best.seconds:
            return replace(best, cuts=cuts)
        best = other


def search_all(times: LayerTimes, devices: Devices) -> PartitionChoice:
    """Cut for every number of micro-batches that may be best, and choose the best of these cuts and any number.

    A number whose least possible time is no less than one that was found is not cut for. Ties go to the fewest
    micro-batches.

    Raises:
        PlanError: As `cut_pipeline`.
    """
    least = _least_seconds(times, devices)
    best: PartitionChoice | None = None
    cuts = 0
    # exact cuts take most of the time, so the most promising number comes first
    for row in np.argsort(least, kind="stable"):
        if best is not None and least[row] > best.seconds:
            break
        ends, cuts = _cut(times, devices, int(row)).ends, cuts + 1
        seconds = gpipe_seconds(times, ends, speeds=devices.speeds)
        found = int(seconds.argmin())
        one = PartitionChoice(ends=ends, micro_batches=times.counts[found], seconds=float(seconds[found]), cuts=cuts)
        if best is None or (one.seconds, one.micro_batches) < (best.seconds, best.micro_batches):
            best = one
    assert best is not None, "there is a number of micro-batches"
    return replace(best, cuts=cuts)


def fastest_of(times: LayerTimes, devices: Devices, others: Sequence[int]) -> dict[int, float]:
    """Seconds of the best number of micro-batches, then of some others, each cut for itself."""
    best = search_all(times, devices)
    seconds = {count: _cut(times, devices, times.counts.index(count)).seconds for count in others}
    return {best.micro_batches: best.seconds} | seconds


def _least_seconds(times: LayerTimes, devices: Devices) -> NDArray[np.float64]:
    """Less than any cut can take: all devices as busy as the slowest, nothing sent, [P]."""
    speeds = np.array(speeds_of(devices.speeds, devices.n_stages))
    busy: Any = 0.0
    for table in (times.forward, times.backward):
        busy += np.maximum(table.sum(1) / speeds.sum(), table.max(1) / speeds.max())
    once = (times.forward.sum(1) + times.backward.sum(1)) / speeds.max()
    least: NDArray[np.float64] = once + (np.array(times.counts) - 1) * busy
    # sums of floats in another order may differ in the last digits
    return (least if times.after is None else least + times.after) * (1 - 1e-9)


def _cut(times: LayerTimes, devices: Devices, row: int) -> PartitionChoice:
    cut = cut_pipeline(
        times.forward[row],
        times.backward[row],
        devices.n_stages,
        send_forward=times.send_forward[row],
        send_backward=times.send_backward[row],
        layer_bytes=devices.layer_bytes,
        stage_bytes=devices.stage_bytes,
        speeds=devices.speeds,
        micro_batches=times.counts[row],
    )
    seconds = gpipe_seconds(times, cut.ends, speeds=devices.speeds)[row]
    return PartitionChoice(ends=cut.ends, micro_batches=times.counts[row], seconds=float(seconds), cuts=1)
