"""Cut layers where links between neighbouring stages differ: the exact least time of a step, by best-first search.

    minimise   sum over stages (forward + backward) + sum over cuts of both sendings + (p - 1) (rho_1 + rho_2)     Eq. 8

With one link a stage that takes more layers is never worse (costs/ordered_runs.py). Here it can be: the next stage may
have to end at an earlier place, where less is sent. So a partial cut, stages up to n over layers up to e, goes on in
every way. The next one is always that of the least bound, and the first that has all layers is an optimum. The bound
counts, for what is left, the least sum, the least maximum forward and backward, and that of both together, each as if
it were alone. Of partial cuts at the same (n, e), one that is no better than another in f, b and sum is dropped.

Every stage has a layer: an idle device would join two links. Times are whole numbers, so no rounding decides.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf
from operator import add

from lightning_amp.costs.ordered_runs import Device

Way = tuple[Sequence[int], Sequence[Sequence[int]]]
"""Costs before every layer and of all, [K + 1]; and times of sending over the cut before each layer, [N, K + 1]: row n
is of the link that follows stage n, and 0 at either end.
"""


def least_step(forward: Way, backward: Way, devices: Sequence[Device], more: int) -> tuple[list[int], int, int] | None:
    """Ends of the stages of the fastest step, with rho_2 and rho_1; None where no cut keeps to the caps.

    Args:
        forward, backward: Of every layer and link.
        devices: N.
        more: p - 1.
    """
    (there, on), (back, returned) = forward, backward
    both: Way = (list(map(add, there, back)), [list(map(add, *sent)) for sent in zip(on, returned, strict=True)])
    least_f, least_b, least_both = (_least(way, devices, max) for way in (forward, backward, both))
    least_sum = _least(both, devices, lambda *times: sum(times))
    stages, last = len(devices), len(there) - 1
    seen = defaultdict[tuple[int, int], list[tuple[int, int, int]]](list)
    # by the bound, of equal ones the longest partial cut first
    heap: list[tuple[int, int, tuple[int, ...], int, int, int]] = [(0, 0, (), 0, 0, 0)]
    while heap:
        _, _, ends, f, b, spent = heappop(heap)
        n, start = len(ends), ends[-1] if ends else 0
        if n == stages:
            return list(ends), f, b
        others = seen[n, start]
        if any(x <= f and y <= b and z <= spent for x, y, z in others):
            continue
        others.append((f, b, spent))
        device = devices[n]
        for end in range(start + 1, last + 1):
            if not device.holds(start, end):
                break
            if least_sum[n + 1][end] == inf:
                continue
            takes_f = (there[end] - there[start]) * device.pace
            takes_b = (back[end] - back[start]) * device.pace
            # no less than what is left takes, which makes more of the partial cuts comparable
            new_f = max(f, takes_f, on[n][end], least_f[n + 1][end])
            new_b = max(b, takes_b, returned[n][end], least_b[n + 1][end])
            total = spent + takes_f + takes_b + both[1][n][end]
            bound = total + least_sum[n + 1][end] + more * max(new_f + new_b, least_both[n + 1][end])
            heappush(heap, (bound, -n - 1, (*ends, end), new_f, new_b, total))
    return None


def _least(way: Way, devices: Sequence[Device], join: Callable[[int, int, int], int]) -> list[list[int]]:
    """The least of what the times of stages from n on with layers from e on join to, [N + 1, K + 1]; inf: no cut."""
    before, sends = way
    last = len(before) - 1
    nothing: list[int] = [inf] * (last + 1)  # type: ignore[list-item]
    table = [[*nothing[:-1], 0]]
    for device, sent in zip(reversed(devices), reversed(sends), strict=True):
        rest, own = table[-1], nothing.copy()
        for start in range(last):
            for end in range(start + 1, last + 1):
                time = (before[end] - before[start]) * device.pace
                if time >= own[start] or not device.holds(start, end):
                    break
                if rest[end] != inf:
                    own[start] = min(own[start], join(time, sent[end], rest[end]))
        table.append(own)
    return table[::-1]
