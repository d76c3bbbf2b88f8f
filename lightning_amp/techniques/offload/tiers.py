"""Choose for each stretch of a step whether it is kept, runs again, or leaves for the host.

Replay alone chooses stretches for a bound. With more room than the bound, it chooses fewer and other ones; each of
these is kept, runs again or leaves as takes the least time within the bound (choose_ways.py). What leaves in the end is
chosen, tensor by tensor, on a count of the step in which the chosen stretches run again.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from lightning_amp.costs.profiled_step import ProfiledStep
from lightning_amp.costs.rule import Rule, changes_of
from lightning_amp.techniques.host_memory.limit import room_of
from lightning_amp.techniques.offload.choose_ways import choose_ways
from lightning_amp.techniques.offload.timeline import AGAIN, KEEP, Link, SavedTensors
from lightning_amp.techniques.replay.choose_cuts import AT_ONCE, KEPT, Cuts, Part, Replays, Stretches, fastest
from lightning_amp.techniques.replay.row import ReplayOperators, spec_of

ROOMS = 0.0, 0.25, 0.5, 0.75
"""Room beyond the bound for which replay chooses stretches, as shares of what it would have to free. Without room,
replay keeps the bound by itself."""
SLOWER = "another share of the budget takes less time"
TRIES = 3
"""Most choices of replay by itself that are counted to find one that keeps the bound."""


def link_of(seen: ProfiledStep, window: float) -> Link:
    """Return the link of a step's device to its host."""
    rates = seen.rates
    if rates.launches:
        return Link(out=rates.host.out, back=rates.host.back, window=window)
    # the core that computes reads and writes both
    return Link(out=rates.memory_bytes / 2, back=rates.memory_bytes / 2, window=0)


class Tiers:
    """Choices of stretches that run again, beside others that leave.

    Args:
        replay: Rules -> the choices of replay alone.
        look: Counts of the step from which tensors leave.
        seen: The profiled step.
        rank: 0 if nothing runs again; else place of the choice among those of ROOMS by predicted time, from 1 on.
        rules: Rules of other techniques.
    """

    def __init__(
        self,
        replay: Callable[[tuple[Rule, ...]], Replays],
        look: Any,
        seen: ProfiledStep,
        rank: int,
        rules: tuple[Rule, ...],
    ) -> None:
        self._replays, self._look, self._seen, self._rank, self._rules = replay(rules), look, seen, rank, rules

    @property
    def stretches(self) -> Stretches | str:
        """Bytes and times of the step's segments, or the reason why they are unknown."""
        return self._replays.stretches

    def choose(self, bound: int | None) -> Cuts | str:
        """Return the stretches that run again, which may be none."""
        stretches, look = self.stretches, self._look
        if bound is None or isinstance(stretches, str):
            return self._replays.choose(bound)
        if not self._rank:
            return Cuts(parts=(), n_bytes=stretches.all_saved)
        if look.is_slow(self._seen.seconds, alone=False):
            # nothing but replay by itself can be as good as what fits already
            return self._by_replay(stretches, bound) if self._rank == 1 else SLOWER
        key = "ranked", changes_of(self._rules), bound
        _, seconds, room, cuts = look.once(key, lambda: self._ranked(stretches, bound))[self._rank - 1]
        if not room:
            return self._by_replay(stretches, bound)
        if isinstance(cuts, str):
            return cuts
        return SLOWER if cuts.parts and look.is_slow(seconds, alone=False) else cuts

    def _ranked(self, stretches: Stretches, bound: int) -> list[tuple[bool, float, float, Any]]:
        """Return for each of ROOMS whether its choice exceeds the bound, its seconds, the room and the choice, by
        prediction, in this order."""
        found = list[tuple[bool, float, float, Any]]()
        for room in ROOMS:
            more = int(bound + room * max(0, stretches.all_saved - bound))
            cuts = (fastest(stretches, more) if room else None) or self._replays.choose(more)
            if isinstance(cuts, str):
                found.append((True, np.inf, room, cuts))
            elif room:
                fits, seconds, chosen = self._beside(stretches, cuts, bound)
                found.append((not fits, self._seen.seconds + seconds, room, chosen))
            else:
                found.append((cuts.n_bytes > bound, self._seen.seconds + cuts.seconds, room, cuts))
        return sorted(found, key=lambda one: one[:3])

    def _beside(self, stretches: Stretches, cuts: Cuts, bound: int) -> tuple[bool, float, Cuts]:
        """Return whether these stretches keep a bound if some leave instead of running again, the seconds that this
        adds to the step, and the stretches that run again."""
        # as it is counted with both, so that places are those of the segments
        spec = ReplayOperators(ends="", views=stretches.views)
        rule = Rule(fqn="", spec=spec, strategy="replay", why="counted")
        saved: SavedTensors = self._look.saved((*self._rules, rule))
        parts = [*cuts.parts, Part(end=int(stretches.places[-1]), kind=KEPT)]
        # a tensor is saved by the operator before its place, or by the one after as its argument
        part_of = np.searchsorted([part.end for part in parts[:-1]], saved.place - 1, "right")
        groups = [np.nonzero(part_of == i)[0].tolist() for i in range(len(parts))]
        freed = [
            part.share * saved.away(group, back=saved.back[group].min() if part.kind == AT_ONCE and group else 2**62)
            for part, group in zip(parts, groups, strict=True)
        ]
        timeline = saved.timeline(
            groups, np.stack(freed), np.array([np.inf if part.kind == KEPT else part.seconds for part in parts])
        )
        # what is on its way needs room too
        at = int(saved.live.argmax())
        window = self._seen.rates.launches * 2 * saved.n_bytes[(saved.gone <= at) & (at < saved.back)].max(initial=0.0)
        link = link_of(self._seen, window)
        aim = timeline.peak([KEEP] * len(parts)) - (stretches.all_saved - bound) - window
        room = room_of(self._seen.requested["offload"], self._seen, self._rules)
        ways = choose_ways(timeline, aim, link, host=np.inf if room is None else room)
        runs = [way == AGAIN for way in ways]
        chosen = [
            part if again else replace(part, kind=KEPT, keeps=(), seconds=0.0, share=0.0)
            for part, again in zip(parts, runs, strict=True)
        ]
        while chosen and chosen[-1].kind == KEPT:
            chosen.pop()
        less = timeline.peak([KEEP] * len(parts)) - timeline.peak([AGAIN if again else KEEP for again in runs])
        again = Cuts(parts=tuple(chosen), n_bytes=int(stretches.all_saved - less), window=cuts.window)
        return timeline.peak(ways) <= aim, timeline.took(ways, link) - timeline.seconds, again

    def _by_replay(self, stretches: Stretches, bound: int) -> Cuts | str:
        """Return the choice of replay by itself that keeps a bound when it is counted, or the last that was tried."""
        plain = self._look.plain_bytes(self._rules) if self._rules else self._seen.peak_bytes(1)
        within, aim = plain - (stretches.all_saved - bound), bound
        for _ in range(TRIES):
            cuts = self._replays.choose(aim)
            if isinstance(cuts, str) or cuts.n_bytes > bound:
                break
            if cuts.parts and self._look.is_slow(self._seen.seconds + cuts.seconds, alone=True):
                return SLOWER
            rule = Rule(fqn="", spec=spec_of(cuts, stretches), strategy="replay", why="counted")
            over = self._look.plain_bytes((*self._rules, rule)) - within
            if over <= 0:
                break
            aim -= over
        return cuts
