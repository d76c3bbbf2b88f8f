"""Define the entry of offload in the table of techniques: its spec, its options, and the predicted peak and time.

Storages leave that are away where the peak is, as many as the budget requires; those whose copies the computation hides
first. Beside `replay`, stretches of the step are kept, run again or leave, whichever takes less time (tiers.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf
from typing import Any

import numpy as np

from lightning_amp.costs.profiled_step import LEAST_SECONDS, Draft, ProfiledStep
from lightning_amp.costs.rule import Rule, changes_of, runs_again, splits_parameters
from lightning_amp.errors import AmpError, PlanError
from lightning_amp.footprint.module_profile import ACTIVATIONS
from lightning_amp.on_demand import first_of
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.checks.planned_order import as_text
from lightning_amp.techniques.host_memory.limit import room_of, with_requested
from lightning_amp.techniques.offload.choose_ways import choose_ways
from lightning_amp.techniques.offload.tiers import ROOMS, SLOWER, Tiers, link_of
from lightning_amp.techniques.offload.timeline import HOST, OnHost, SavedTensors
from lightning_amp.techniques.technique import Installer, Prediction, Technique

NAME = "offload"
LEAST_BYTES = 2**20
"""Smaller tensors stay: they are many, and hold little."""
SMALLEST_SHARE = 2**-10
"""In a small step, tensors below this share of what leaves stay instead."""
AHEADS = 2, 4, 1, 0
"""Storages as large as the largest one that may be on their way at once, on a device whose copies run beside it;
those that take the fewest seconds within the budget are chosen."""
TRIES = 5
"""Most choices that are made to find one that keeps a bound with what is on its way."""
GROUPS = 32
"""Most groups of storages, saved one after the other, that are chosen from; single ones are left out afterwards."""
ROUNDS = 5
"""Most choices with what is on its way that are made to find which tensors leave."""
ON_CPU = "a CPU's memory is the host's, so that nothing would be free; strategies='offload' copies there nevertheless"
UNPROVED = "its copies have not run on a GPU yet, so that it is used by name only; name it in strategies"


@dataclass(frozen=True, kw_only=True, slots=True)
class Offload:
    """Tensors that autograd saves in the training step wait in host memory for the backward pass.

    Attributes:
        leaves: Storages of a step that leave, as numbers in the order in which autograd saves those that may:
            "0-11,14"; None for all.
        least_bytes: Smaller storages stay, and have no number.
        window: W, the most bytes that are on their way in a direction; 0 copies at once.
        host_memory: Most bytes of host memory that a rank takes; None for 80 % of what is free, shared by the ranks of
            a node.
        host_bytes: Predicted bytes of host memory.
        moved_bytes: Predicted bytes that leave in a step, and come back.
        saves: Bytes of the storages with numbers, in their order, and the batch's shapes, compressed
            (planned_order.py), with which a step is compared; "" where values decide them, and in older plans.
    """

    leaves: str | None = None
    least_bytes: int = LEAST_BYTES
    window: int = 0
    host_memory: int | None = None
    host_bytes: int = 0
    moved_bytes: int = 0
    saves: str = ""

    @property
    def numbers(self) -> frozenset[int] | None:
        """The numbers of `leaves`."""
        if self.leaves is None:
            return None
        ends = [part.split("-") for part in self.leaves.split(",") if part]
        return frozenset(n for part in ends for n in range(int(part[0]), int(part[-1]) + 1))


def written(numbers: list[int]) -> str:
    """Return sorted numbers in the text form of a plan."""
    parts = list[list[int]]()
    for n in numbers:
        if parts and n == parts[-1][-1] + 1:
            parts[-1][1:] = [n]
        else:
            parts.append([n])
    return ",".join("-".join(map(str, part)) for part in parts)


def least_of(saved_bytes: float) -> int:
    """Return the bytes below which a storage stays, in a step whose storages have so many together."""
    return min(LEAST_BYTES, max(1, int(SMALLEST_SHARE * saved_bytes)))


def add(seen: ProfiledStep, draft: Draft, budget: int | None) -> Draft | str:
    """Let tensors that autograd saves leave for host memory, as many as the budget requires."""
    # blocks and operators that run again, and split parameters, save tensors as before
    rules = tuple(rule for rule in draft.targets if not splits_parameters(rule))
    others = dict.fromkeys(rule.strategy for rule in rules if not runs_again(rule))
    if others:
        return f"it is not supported together with {' and '.join(others)}"
    look, spec = seen.facts.get(NAME), seen.requested.get(NAME)
    if look is None:
        return "the step was not counted with it"
    assert isinstance(spec, Offload), "the step is counted with it by name only"
    replays = any(rule.strategy == "replay" for rule in rules)
    room = room_of(spec, seen, draft.targets)
    if budget is not None and draft.peak_bytes <= budget and not replays:
        # a budget that others keep already: by name as few leave as help
        budget = draft.peak_bytes - 1
    try:
        # what other ranks hold is not in the count; of replays the draft has none
        beyond = seen.peak_bytes(draft.ranks) - seen.peak_bytes(1)
        bound = budget - beyond if budget is not None and replays else -1
        plain = look.plain_bytes(rules, bound) if rules else seen.peak_bytes(1)
        beyond = beyond if replays else draft.peak_bytes - plain
        within = None if budget is None else budget - beyond
        fits = replays and within is not None and plain <= within
        key = "leaves", changes_of(rules), within, room
        made = (
            None
            if fits
            else look.once(key, lambda: _Leaving(look, rules, spec, seen, draft, plain, room).least(within))
        )
    except AmpError as error:
        return str(error)
    if made is None or plain <= made.peak_bytes:
        if replays:
            # which is the fastest by itself
            return _noted(look, replace(draft, peak_bytes=plain + beyond), budget, alone=True)
        if made and not made.on_host.n_left:
            return f"the host has room for {format_bytes(room or 0)}, less than the first tensor takes"
        return "the peak is elsewhere" if made else "autograd saves nothing but parameters, the batch and small tensors"
    found, saved, n = made.on_host, plain - made.peak_bytes, made.on_host.n_left
    seconds = max(LEAST_SECONDS, made.seconds)
    spec = replace(
        made.spec,
        host_memory=None if spec.host_memory is None else room,
        host_bytes=found.host_bytes,
        moved_bytes=found.left_bytes,
    )
    why = (
        f"predicted: {n} tensor{'s' * (n > 1)} wait{'s' * (n == 1)} on the host, which takes"
        f" {format_bytes(found.host_bytes)} there and keeps {format_bytes(saved)} less on the device;"
        f" {format_bytes(found.left_bytes)} leave in a step, which takes {format_seconds(seconds)} more"
    )
    held = seen.held_bytes if draft.held_bytes is None else draft.held_bytes
    leaving = replace(
        draft,
        peak_bytes=max(made.peak_bytes + beyond, held),
        seconds=draft.seconds + seconds,
        targets=(*draft.targets, Rule(strategy=NAME, fqn="", spec=spec, why=why, saves_bytes=saved)),
    )
    return _noted(look, leaving, budget, alone=not replays)


def _noted(look: Any, draft: Draft, budget: int | None, *, alone: bool) -> Draft:
    """Let slower drafts be left out from now on if this one keeps the budget."""
    if budget is not None and draft.peak_bytes <= budget:
        look.least[alone] = min(look.least[alone], draft.seconds)
    return draft


@dataclass(frozen=True, kw_only=True, slots=True)
class _Made:
    """Which storages leave, the predicted peak, what they take of the host, and the seconds that they add to a step."""

    spec: Offload
    peak_bytes: int
    on_host: OnHost
    seconds: float


class _Leaving:
    """Storages of a step that may leave.

    Args:
        look: Counts of the step.
        rules: Rules of other techniques.
        spec: The requested spec.
        seen: The profiled step.
        draft: The step with the other techniques.
        plain: Its peak.
        room: Bytes of host memory that may be taken; None for any.
    """

    def __init__(
        self,
        look: Any,
        rules: tuple[Rule, ...],
        spec: Offload,
        seen: ProfiledStep,
        draft: Draft,
        plain: int,
        room: int | None,
    ) -> None:
        self._look, self._rules, self._seen, self._before = look, rules, seen, draft.seconds
        every: SavedTensors = look.saved(rules)
        least = least_of(every.sizes.sum())
        self._saved = every.at_least(least)
        # of other sizes in each batch if values decide shapes, which a note of the plan says
        saves = "" if seen.profile.noted else as_text(every.shapes, self._saved.sizes.tolist())
        self._spec = replace(spec, least_bytes=least, saves=saves)
        # the count has what is foreseen, too
        self._more = max(0.0, plain - self._saved.peak([]))
        self._room = inf if room is None else room

    def least(self, within: int | None) -> _Made | None:
        """Return the fewest seconds of leaving that keep the peak within a bound, else the least peak.

        None for the bound lets all leave.
        """
        if not len(self._saved.number):
            return None
        if within is None:
            return self._predicted(self._all(), self._aheads[0])
        tried, aim = dict[Any, _Made](), within - self._more
        for _ in range(ROUNDS):
            which, ahead = self._fitting(aim)
            if (tuple(which), ahead) in tried or not which:
                break
            if self._rules and self._look.is_slow(self._before + self._seconds(which, ahead), alone=False):
                # it is raised, so that it is not kept for other drafts
                raise PlanError(SLOWER)
            made = tried[tuple(which), ahead] = self._predicted(which, ahead)
            if (over := made.peak_bytes - within) <= 0:
                return made
            aim -= over
        some = [*tried.values(), self._predicted(self._all(), AHEADS[-1])]
        fitting = [one for one in some if one.peak_bytes <= within]
        if fitting:
            return min(fitting, key=lambda one: one.seconds)
        return min(some, key=lambda one: (one.peak_bytes, one.on_host.left_bytes))

    def _fitting(self, bound: float) -> tuple[list[int], int]:
        """Return storages whose leaving is predicted to keep a bound, and how many may be on their way at once."""
        fitting, tried = list[tuple[float, list[int], int]](), list[tuple[float, list[int], int]]()
        for ahead in self._aheads:
            aim = bound
            for _ in range(TRIES):
                which = self._chosen(aim, ahead)
                window = self._window(which, ahead)
                over = self._saved.peak(which, window) - bound
                tried.append((over, which, ahead))
                if over <= 0:
                    fitting.append((self._saved.took({*which}, link_of(self._seen, window)), which, ahead))
                    break
                aim -= over
            if fitting and fitting[-1][0] <= self._saved.seconds:
                break
        return min(fitting or tried)[1:]

    @property
    def _aheads(self) -> tuple[int, ...]:
        return AHEADS if self._seen.rates.launches else AHEADS[-1:]

    def _window(self, which: list[int], ahead: int) -> int:
        return ahead * int(max(self._saved.n_bytes[which], default=0))

    def _all(self) -> list[int]:
        """Return all storages, or the first for which the host has room."""
        return np.nonzero(np.cumsum(self._saved.taken) <= self._room)[0].tolist()

    @cached_property
    def _leanest(self) -> tuple[float, list[int]]:
        """The least peak that leaving can reach, and what leaves for it; -inf if the host has no room for all."""
        which = self._all()
        if len(which) < len(self._saved.number):
            return -inf, which
        return self._saved.peak(which), self._without_needless(which, -inf)

    def _without_needless(self, which: list[int], aim: float) -> list[int]:
        """Leave out storages, the last first, which come back first, that are not needed for a peak or its least."""
        most = max(aim, self._saved.peak(which))
        for i in reversed(which):
            fewer = [other for other in which if other != i]
            if self._saved.peak(fewer) <= most:
                which = fewer
        return which

    def _chosen(self, aim: float, ahead: int) -> list[int]:
        saved = self._saved
        if aim < self._leanest[0]:
            return self._leanest[1]
        share = np.cumsum(saved.n_bytes) / saved.n_bytes.sum()
        group = np.minimum((share * GROUPS).astype(int), GROUPS - 1)
        groups = [np.nonzero(group == one)[0].tolist() for one in np.unique(group)]
        link = link_of(self._seen, ahead * saved.n_bytes.max())
        ways = choose_ways(saved.timeline(groups), aim, link, host=self._room)
        which = [i for some, way in zip(groups, ways, strict=True) if way == HOST for i in some]
        return self._without_needless(which, aim)

    def _predicted(self, which: list[int], ahead: int) -> _Made:
        window = self._window(which, ahead)
        return _Made(
            spec=replace(self._spec, leaves=written(self._saved.number[which].tolist()), window=window),
            peak_bytes=int(self._saved.peak(which, window) + self._more),
            on_host=self._look.on_host(self._saved, which),
            seconds=self._seconds(which, ahead),
        )

    def _seconds(self, which: list[int], ahead: int) -> float:
        """Return the seconds that leaving adds to the step."""
        return self._saved.took({*which}, link_of(self._seen, self._window(which, ahead))) - self._saved.seconds


def variants(seen: ProfiledStep, ranks: int) -> Iterator[ProfiledStep]:
    """Yield the step with each way to share the budget with replay, if both are requested."""
    look, replay = seen.facts.get(NAME), seen.facts.get("replay")
    if NAME not in seen.requested or look is None:
        yield seen
        return
    # a copy for the drafts that are compared with each other, of one budget
    look = look.for_drafts()
    if replay is None:
        yield replace(seen, facts=first_of({NAME: look}, seen.facts))
        return
    for rank in range(len(ROOMS) + 1):
        both = {NAME: look, "replay": partial(Tiers, replay, look, seen, rank)}
        yield replace(seen, facts=first_of(both, seen.facts))


ROW = Technique(
    title="activations on the host",
    shrinks="what autograd keeps between the passes, which waits in host memory",
    between_batches=True,
    works_in_any_steps=True,
    specs=(Offload,),
    installers={Offload: Installer("lightning_amp.techniques.offload.install:install")},
    conflicts={
        "stream": "stream runs the backward pass of a stratum before its forward pass has ended, so nothing waits"
    },
    look="lightning_amp.techniques.offload.look:look",
    option_names=("host_memory",),
    options=with_requested,
    remark=lambda spec, launches: "" if launches else f"offload: {ON_CPU}",
    prediction=Prediction(
        add=add,
        kinds=(ACTIVATIONS,),
        limit="tensors that other code holds, or that an operator makes for itself, do not leave",
        order=5,
        slow=True,
        variants=variants,
    ),
)
