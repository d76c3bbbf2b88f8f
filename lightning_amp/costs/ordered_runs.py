"""Partition ordered layers or strata into contiguous runs over ordered devices.

    time of a run forward      sum of its layers' forward costs, times the device's time per unit of cost
    a cut is legal             if sending over it takes no longer than the bound, forward and backward
    a bound (f, b) is met      if every device's run takes at most f forward, and at most b backward

The test of a bound is greedy: each device in turn takes as many layers as it can, up to the last legal cut. A device
that starts later never stops earlier, so no other assignment gets further. A device that can take no layer is idle. One
test takes O(N log K) steps for K layers and N devices.

The result is exact: `whole` converts costs to integers without rounding, and a search tries only bounds that some run
attains (as in Nicol, 1994). After a bound that is not met, it continues at the least bound at which a device could take
more; after one that is met, at the time of its runs. So it terminates at an optimum.

For strata, runs are chosen so that the slowest rank is as fast as possible:

    minimise   max over r of   sum of c_k over the run of r, and of p_k before it, divided by the speed of r

This is the segmentation problem to which Zhou et al. 2025 (CSIMD) reduce network division, with these differences:
- They minimise rho_1 + rho_2 (Eq. 9): the slowest forward and the slowest backward stage of a pipeline, whose devices
  wait for each other after both (`schedule/cut.py`). Strata do not wait for each other, so a stratum has one cost,
  forward and backward together; for that case they name the one-dimensional problem and its bisection.
- They bisect to a tolerance (Algorithm 2). Here the result is an optimum.
- Their fixed cost of a run is the time to send the last layer's output. Strata send nothing; their additional cost is
  to reach the run: in a chained decoder a rank passes over all previous strata.

Legend: c_k cost of stratum k, p_k cost of passing over it.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import inf, lcm
from typing import Any

from lightning_amp.errors import PlanError


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A device, which takes one run.

    Attributes:
        pace: Time per unit of cost, a whole number above 0.
        bytes_before: Bytes before every layer and after the last one, K + 1 whole numbers; empty: no cap.
        cap: Most bytes of its run.
    """

    pace: int = 1
    bytes_before: Sequence[int] = ()
    cap: int = 0

    def holds(self, start: int, end: int) -> bool:
        """Whether the run of layers [start, end) is within the cap."""
        before = self.bytes_before
        return not before or before[end] - before[start] <= self.cap


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderedRuns:
    """K layers on N devices; all numbers are whole, and lists have K + 1 entries, one per possible cut.

    Attributes:
        forward: Forward costs before every layer, and of all layers.
        backward: Backward costs, likewise.
        send_forward: Time to send activations over the cut before every layer; 0 at both ends.
        send_backward: Time to send gradients back over the cut, likewise.
        forward_ends: Forward costs of a run from the first layer to every cut, if more than its layers' costs, not
            decreasing; empty: `forward`. Dropped by `turned`.
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
        """Forward costs of a run from the first layer to every cut."""
        return self.forward_ends or self.forward

    @property
    def no_bound(self) -> int:
        """Return a bound that no run exceeds, forward or backward."""
        slowest = max(device.pace for device in self.devices)
        costs = max(self.ends_forward[-1], self.backward[-1]) * slowest
        return max(costs, *self.send_forward, *self.send_backward)

    def fill(self, f: int, b: int) -> list[int]:
        """Return the end of every device's run if each takes as much as it can, up to the device with the last layer.

        The bound is met if the last end is K. The end of an idle device is that of the previous device.
        """
        ends, start, layers, forward_ends = [], 0, self.layers, self.ends_forward
        for device in self.devices:
            end = bisect_right(forward_ends, self.forward[start] + f // device.pace, start) - 1
            end = max(end, start)
            end = bisect_right(self.backward, self.backward[start] + b // device.pace, start, end + 1) - 1
            if device.bytes_before:
                most = device.bytes_before[start] + device.cap
                end = bisect_right(device.bytes_before, most, start, end + 1) - 1
            # Compute bounds also hold for any earlier end. Send bounds need not: send times do not grow with the run.
            while end > start and (self.send_forward[end] > f or self.send_backward[end] > b):
                end -= 1
            ends.append(end)
            if end == layers:
                break
            start = end
        return ends

    def times(self, ends: Sequence[int]) -> tuple[int, int]:
        """Return the slowest run or send forward, and backward: the least bound that these runs meet."""
        f = b = start = 0
        forward_ends = self.ends_forward
        # An idle device takes no run, so its `forward_ends`, which may exceed `forward` at the same cut, is not
        # counted.
        for device, end in zip(self.devices, ends, strict=False):
            if end > start:
                f = max(f, (forward_ends[end] - self.forward[start]) * device.pace, self.send_forward[end])
            b = max(b, (self.backward[end] - self.backward[start]) * device.pace, self.send_backward[end])
            start = end
        return f, b

    def next_forward(self, ends: Sequence[int], b: int) -> int | None:
        """Return the least forward bound at which a device could get further than these ends, with backward bound b.

        Below it, and for any lower backward bound, no device gets further. None if there is no such bound.
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
                # the run only gets longer, so no later cut can have a smaller bound
                if least is not None and time >= least:
                    break
                # A cut with gradients that take too long to send is skipped, but the search continues: a later cut may
                # send less.
                if self.send_backward[at] <= b:
                    found = max(time, self.send_forward[at])
                    least = found if least is None else min(least, found)
                at += 1
            start = end
        return least

    def least_forward(self, b: int) -> list[int] | None:
        """Return ends of runs that minimise the slowest forward run, with backward bound b; None if there are none."""
        best = self.fill(self.no_bound, b)
        if best[-1] < self.layers:
            return None
        low, high = 0, self.times(best)[0]
        while low < high:
            # the middle is below the least bound known to be met, and at least the least bound that may be met
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
        """Return the same problem with forward and backward exchanged."""
        return OrderedRuns(
            forward=self.backward,
            backward=self.forward,
            send_forward=self.send_backward,
            send_backward=self.send_forward,
            devices=self.devices,
        )


def whole(numbers: Sequence[float]) -> tuple[list[int], int]:
    """Return the numbers times their least common denominator, and the denominator; nothing is rounded."""
    exact = [n.as_integer_ratio() for n in numbers]
    scale = lcm(*(denominator for _, denominator in exact))
    return [numerator * (scale // denominator) for numerator, denominator in exact], scale


def paces(speeds: Sequence[float]) -> tuple[list[int], int]:
    """Return whole-number times per unit of cost for devices of these speeds, in units of 1 / (the second result)."""
    exact, scale = whole(speeds)
    common = lcm(*exact)
    return [scale * (common // speed) for speed in exact], common


@lru_cache(maxsize=256)
def deal(
    costs: tuple[float, ...], ranks: int, speeds: tuple[float, ...] = (), passing: tuple[float, ...] = ()
) -> tuple[int, ...]:
    """Return the end of each rank's run of strata, at least one stratum per rank; ties go to the earliest ends.

    Results are cached, because many plans have the same costs.

    Args:
        costs: c_k of every stratum, finite and 0 or more, in any unit.
        ranks: Number of ranks, at most the number of strata.
        speeds: Relative speed of every rank, above 0; empty: equal. A rank so slow that an optimum would leave it
            without a stratum still has one, and may then be the slowest.
        passing: p_k of every stratum, at most its c_k; empty: 0.
    """
    strata = len(costs)
    assert ranks <= strata, "the caller has refused more ranks than strata"
    nothing = [0] * (strata + 1)
    # convert both lists to the same unit
    listed, _ = whole((*costs, *(passing or (0.0,) * strata)))
    assert all(p <= c for c, p in zip(listed, listed[strata:], strict=False)), "to pass a stratum is a part of it"
    before = list(accumulate(listed[strata:], initial=0))
    from_last = list(accumulate(listed[:strata][::-1], initial=0))
    # filling ranks from the last stratum backwards makes every end as early as possible
    mirrored = OrderedRuns(
        forward=from_last,
        # in the reversed problem, a run that ends at a cut starts there
        forward_ends=[own + more for own, more in zip(from_last, before[::-1], strict=True)],
        backward=nothing,
        send_forward=nothing,
        send_backward=nothing,
        devices=[Device(pace=pace) for pace in paces(speeds[::-1] or (1,) * ranks)[0]],
    )
    filled = mirrored.least_forward(0)
    assert filled is not None, "without a cap there is always a way"
    ends = [strata - end for end in reversed((0, *filled, *[strata] * (ranks - len(filled))))][1:]
    # a rank without a stratum gets one from a neighbour, whose time decreases; with equal speeds one stratum never
    # takes longer than the slowest run, so this is still an optimum
    strict = list(accumulate(ends, lambda before, end: max(before + 1, end), initial=0))[1:]
    return tuple(min(end, strata - (ranks - 1 - r)) for r, end in enumerate(strict))


def speeds_of_ranks(device_speeds: Any, ranks: int | None = None) -> tuple[float, ...]:
    """Return the speed of every rank relative to the fastest; empty if all are equal, as for None.

    Args:
        device_speeds: Numbers above 0, one per rank, in any unit, as a list or as "1,1,0.5".
        ranks: Number of ranks; None skips the check of the list's length.

    Raises:
        PlanError: Not such numbers, or of another number of ranks.
    """
    if device_speeds is None:
        return ()
    listed = device_speeds.split(",") if isinstance(device_speeds, str) else device_speeds
    try:
        found = [float(speed) for speed in listed]
    except (TypeError, ValueError):
        found = []
    if not found or not all(0 < speed < inf for speed in found):
        raise PlanError(
            f"device_speeds={device_speeds!r} is not supported; allowed are numbers above 0, one per rank, such as"
            " [1, 1, 0.5]"
        )
    if ranks is not None and len(found) != ranks:
        raise PlanError(
            f"device_speeds={device_speeds!r} has {len(found)} speeds, and there are {ranks} devices; give one for each"
        )
    return tuple(speed / max(found) for speed in found) if len({*found}) > 1 else ()


def speeds_of_model(speeds: tuple[float, ...], model: int) -> tuple[float, ...]:
    """Return the speeds of the model-axis ranks: the slowest at each position, because its group waits for it."""
    return tuple(min(speeds[m::model]) for m in range(model)) if speeds else ()
