"""Partition ordered layers or strata into contiguous runs over ordered devices.

    time of a run forward      forward costs of its layers, summed, times the device's time for a unit of cost
    a cut is legal             where what is sent over it takes no longer than the bound, there and back
    a bound (f, b) is met      where every device's runs forward take f at most, and backward b at most

The test of a bound is greedy: each device in turn takes all that it can, up to the last legal cut. How far a device
reaches never decreases with where it begins, so no other way reaches further. A device that can take no layer is left
idle. One test takes O(N log K) steps for K layers and N devices.

Exact: costs are whole numbers, into which `whole` turns floats without rounding, and a search asks only for bounds
that some run really reaches (in the manner of Nicol, 1994): from a bound that is not met it goes on at the least one
at which any device could go further, and from one that is met to what its runs take. So it ends at an optimum.

Partition ordered strata into contiguous runs, one per rank, so that the slowest rank is as fast as possible.

    minimise   max over r of   sum of c_k over the run of r, and of p_k before it, divided by the speed of r

This is the segmentation problem that Zhou et al. 2025 (CSIMD) reduce network division to. What differs:
- They minimise rho_1 + rho_2 (Eq. 9): the slowest forward and the slowest backward stage of a pipeline, in which
  devices wait for each other after either (`schedule/cut.py`). Strata do not wait for each other, so a stratum has one
  cost, forward and backward together; for that case they name the one-dimensional problem and its bisection.
- They bisect to a tolerance (Algorithm 2). Here the result is an optimum.
- A fixed cost of their runs is the time to send the last layer's output on; strata send nothing on, so there is none.
  What a run costs on top is its way there: in a chained decoder a rank passes all strata before its own.

Legend: c_k cost of stratum k, p_k of passing it.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import lcm


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What takes one run.

    Attributes:
        pace: Time that it needs for a unit of cost, a whole number above 0.
        bytes_before: Bytes before every layer and after the last one, K + 1 whole numbers; none: no cap.
        cap: Bytes that its run may have.
    """

    pace: int = 1
    bytes_before: Sequence[int] = ()
    cap: int = 0

    def holds(self, start: int, end: int) -> bool:
        """Whether the run of these layers keeps to the cap."""
        before = self.bytes_before
        return not before or before[end] - before[start] <= self.cap


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderedRuns:
    """K layers on N devices; all numbers are whole, and lists have K + 1: one for every place where a cut can be.

    Attributes:
        forward: Forward costs before every layer, and of all.
        backward: Backward costs, likewise.
        send_forward: Time of what is sent over the cut before every layer; 0 at either end, where nothing is.
        send_backward: Time of the gradients that are sent back over the cut, likewise.
        forward_ends: Forward costs of a run from the first layer to every place, where they are more than its layers',
            and never fall; none: `forward`. Of `turned` ones there are none.
    """

    forward: Sequence[int]
    backward: Sequence[int]
    send_forward: Sequence[int]
    send_backward: Sequence[int]
    devices: Sequence[Device]
    forward_ends: Sequence[int] = ()

    @property
    def layers(self) -> int:
        """K."""
        return len(self.forward) - 1

    @property
    def ends_forward(self) -> Sequence[int]:
        """Forward costs of a run from the first layer to every place."""
        return self.forward_ends or self.forward

    @property
    def no_bound(self) -> int:
        """A bound that no run exceeds, forward or backward."""
        slowest = max(device.pace for device in self.devices)
        costs = max(self.ends_forward[-1], self.backward[-1]) * slowest
        return max(costs, *self.send_forward, *self.send_backward)

    def fill(self, f: int, b: int) -> list[int]:
        """The end of every device's run when each takes all it can; up to the one that takes the last layer.

        The bound is met where the last end is K. A device that is left idle ends where the one before it does.
        """
        ends, start, layers, forward_ends = [], 0, self.layers, self.ends_forward
        for device in self.devices:
            end = bisect_right(forward_ends, self.forward[start] + f // device.pace, start) - 1
            end = max(end, start)
            end = bisect_right(self.backward, self.backward[start] + b // device.pace, start, end + 1) - 1
            if device.bytes_before:
                most = device.bytes_before[start] + device.cap
                end = bisect_right(device.bytes_before, most, start, end + 1) - 1
            # Bounds of computing hold for any earlier end too, and those of sending need not: they do not grow with the
            # run.
            while end > start and (self.send_forward[end] > f or self.send_backward[end] > b):
                end -= 1
            ends.append(end)
            if end == layers:
                break
            start = end
        return ends

    def times(self, ends: Sequence[int]) -> tuple[int, int]:
        """The slowest run or sending forward, and backward: the least bound that these runs meet."""
        f = b = start = 0
        forward_ends = self.ends_forward
        # Of an idle device `forward_ends` could be more than `forward` at the same place, which no run takes.
        for device, end in zip(self.devices, ends, strict=False):
            if end > start:
                f = max(f, (forward_ends[end] - self.forward[start]) * device.pace, self.send_forward[end])
            b = max(b, (self.backward[end] - self.backward[start]) * device.pace, self.send_backward[end])
            start = end
        return f, b

    def next_forward(self, ends: Sequence[int], b: int) -> int | None:
        """The least bound forward at which any device could go further than these ends, while backward stays at b.

        Below it, and with any lower bound backward, every device ends where it did or before. None: there is none.
        """
        least: int | None = None
        start, forward_ends = 0, self.ends_forward
        for device, end in zip(self.devices, ends, strict=True):
            at = end + 1
            while (
                at <= self.layers
                and (self.backward[at] - self.backward[start]) * device.pace <= b
                and device.holds(start, at)
            ):
                time = (forward_ends[at] - self.forward[start]) * device.pace
                # runs only grow from here on, so nothing further away can be met earlier
                if least is not None and time >= least:
                    break
                # An end whose gradients take too long to send is skipped, and not the last one: a later cut may carry
                # less.
                if self.send_backward[at] <= b:
                    found = max(time, self.send_forward[at])
                    least = found if least is None else min(least, found)
                at += 1
            start = end
        return least

    def least_forward(self, b: int) -> list[int] | None:
        """Ends of runs whose slowest is as fast forward as it can be while backward takes b at most; None: no runs."""
        best = self.fill(self.no_bound, b)
        if best[-1] < self.layers:
            return None
        low, high = 0, self.times(best)[0]
        while low < high:
            # a tried bound lies below the least that is known to be met, and not below the least that may be
            middle = (low + high) // 2
            ends = self.fill(middle, b)
            if ends[-1] == self.layers:
                best, high = ends, self.times(ends)[0]
            else:
                further = self.next_forward(ends, b)
                assert further is not None, "a higher bound is met, so some device goes further"
                low = further
        return best

    def turned(self) -> "OrderedRuns":
        """The same with forward and backward exchanged."""
        return OrderedRuns(
            forward=self.backward,
            backward=self.forward,
            send_forward=self.send_backward,
            send_backward=self.send_forward,
            devices=self.devices,
        )


def whole(numbers: Sequence[float]) -> tuple[list[int], int]:
    """The numbers times their least common denominator, and that: nothing is rounded."""
    exact = [n.as_integer_ratio() for n in numbers]
    scale = lcm(*(denominator for _, denominator in exact))
    return [numerator * (scale // denominator) for numerator, denominator in exact], scale


def paces(speeds: Sequence[float]) -> tuple[list[int], int]:
    """Times that devices of these speeds need for a unit of cost, in whole numbers, and the unit of time as 1 / it."""
    exact, scale = whole(speeds)
    common = lcm(*exact)
    return [scale * (common // speed) for speed in exact], common


@lru_cache(maxsize=256)
def deal(
    costs: tuple[float, ...], ranks: int, speeds: tuple[float, ...] = (), passing: tuple[float, ...] = ()
) -> tuple[int, ...]:
    """One past the last stratum of every rank, each of which has one at least; of optimal ways the earliest ends.

    Plans that differ elsewhere ask for the same, so the answers are remembered.

    Args:
        costs: c_k of every stratum, finite and 0 or more, in any unit.
        ranks: No more than there are strata.
        speeds: What every rank does in a unit of time, above 0; none: they are equal. A rank so slow that an optimum
            would leave it without a stratum has one all the same, and may be the slowest then.
        passing: p_k of every stratum, no more than its c_k; none: nothing.
    """
    strata = len(costs)
    assert ranks <= strata, "the caller has refused more ranks than strata"
    nothing = [0] * (strata + 1)
    # in one unit
    listed, _ = whole((*costs, *(passing or (0.0,) * strata)))
    assert all(p <= c for c, p in zip(listed, listed[strata:], strict=False)), "to pass a stratum is a part of it"
    before = list(accumulate(listed[strata:], initial=0))
    from_last = list(accumulate(listed[:strata][::-1], initial=0))
    # filling ranks from the last stratum on makes every end as early as it can be
    mirrored = OrderedRuns(
        forward=from_last,
        # a run that ends at a place here begins there
        forward_ends=[own + more for own, more in zip(from_last, before[::-1], strict=True)],
        backward=nothing,
        send_forward=nothing,
        send_backward=nothing,
        devices=[Device(pace=pace) for pace in paces(speeds[::-1] or (1,) * ranks)[0]],
    )
    filled = mirrored.least_forward(0)
    assert filled is not None, "without a cap there is always a way"
    ends = [strata - end for end in reversed((0, *filled, *[strata] * (ranks - len(filled))))][1:]
    # a rank left without a stratum gets one from its neighbours, whose time shrinks; among equals a single stratum
    # never takes longer than the slowest run, so this is optimal too
    apart = list(accumulate(ends, lambda before, end: max(before + 1, end), initial=0))[1:]
    return tuple(min(end, strata - (ranks - 1 - r)) for r, end in enumerate(apart))


def speeds_of_model(speeds: tuple[float, ...], model: int) -> tuple[float, ...]:
    """Of the ranks of the model axis, from those of all ranks: the slowest of every place, for groups wait for it."""
    return tuple(min(speeds[m::model]) for m in range(model)) if speeds else ()
