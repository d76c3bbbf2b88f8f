"""Count steps from which tensors leave for the host, and when each of them could be away."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, TypeVar

import numpy as np
from lightning.pytorch import LightningModule

from lightning_amp._torch import unseen
from lightning_amp.costs.profiled_step import TIE
from lightning_amp.costs.rule import Rule, changes_of
from lightning_amp.footprint.live_bytes import Read, moved_bytes
from lightning_amp.footprint.module_profile import Life, alive_bytes, bytes_alive
from lightning_amp.footprint.operator_rates import OperatorRates
from lightning_amp.footprint.profile_module import counted_step
from lightning_amp.footprint.step_recorder import StepRecorder
from lightning_amp.techniques.contract.protocol import StepToPlan
from lightning_amp.techniques.host_memory.host_pool import Buffer, HostPool
from lightning_amp.techniques.offload.install import moves_of
from lightning_amp.techniques.offload.row import NAME, ON_CPU, UNPROVED, Offload
from lightning_amp.techniques.offload.timeline import OnHost, SavedTensors
from lightning_amp.techniques.replay.tape import Tape

T = TypeVar("T")
ALL = Offload(least_bytes=1)


class Look:
    """Counts of a step with other rules and a spec; raises an AmpError where it cannot be counted.

    Attributes:
        least: Seconds of the fastest of several drafts that keeps the budget, so far; by whether it has one technique
            alone.
    """

    def __init__(self, step: StepToPlan) -> None:
        self._step, self.least = step, {True: inf, False: inf}
        self._known: dict[Any, Any] = {}

    def for_drafts(self) -> "Look":
        """Return one for several drafts, with the same counts."""
        found = copy(self)
        found.least = {True: inf, False: inf}
        return found

    def is_slow(self, seconds: float, *, alone: bool) -> bool:
        """Whether a draft that takes so many seconds or more is not chosen, for another one keeps the budget.

        A draft with both techniques has to be faster than others by more than what counts as equally fast.
        """
        if alone:
            return seconds > TIE * min(self.least.values())
        return seconds >= self.least[False] or TIE * seconds >= self.least[True]

    def plain_bytes(self, rules: tuple[Rule, ...], within: float = inf) -> int:
        """Return the peak without the technique, which is counted unless the storages say that it is above a bound."""
        key = "plain", changes_of(rules)
        if key not in self._known and within < inf and (peak := self.saved(rules).peak([])) > within:
            return int(peak)
        return self.once(key, lambda: self._step.count(rules).larger_peak_bytes)

    def saved(self, rules: tuple[Rule, ...]) -> SavedTensors:
        """Return the storages that could leave."""
        count = partial(_saved, rates=self._step.operator_rates(), pinned=self._step.launches)
        return self.once(("saved", changes_of(rules)), lambda: self._step.run_with((*rules, _rule(ALL)), count))

    @staticmethod
    def on_host(saved: SavedTensors, which: Sequence[int]) -> OnHost:
        """Return what some of a step's storages take of the host: the pool gets and gives back as in the step."""
        numbers, pool, held = {*saved.number[which].tolist()}, HostPool(None), dict[int, Buffer]()
        left = list[int]()
        for number, is_taken, in_step in saved.buffers.tolist():
            if number not in numbers:
                continue
            if is_taken:
                held[number] = pool.take(int(saved.sizes[number]), real=False, pinned=saved.pinned)
                left += [int(saved.sizes[number])] * in_step
            elif number in held:
                # else it was taken in an earlier run of the step
                pool.give(held.pop(number))
        return OnHost(host_bytes=pool.n_bytes, left_bytes=sum(left), n_left=len(left))

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """Return what was made for a key before, or make it."""
        if key not in self._known:
            self._known[key] = make()
        found: T = self._known[key]
        return found


def look(step: StepToPlan) -> Look | str:
    """Return the counts of a step, made when a draft asks for them; or why only its name installs it."""
    if NAME in step.requested:
        return Look(step)
    return UNPROVED if step.launches else ON_CPU


def _rule(spec: Offload) -> Rule:
    return Rule(fqn="", spec=spec, strategy=NAME, why="counted")


@dataclass(eq=False, slots=True)
class _Trip:
    """A storage that leaves: its bytes on the device before, the place and moment of its saving, and of its coming."""

    life: Life
    place: int
    saved: int
    back: int | None = None


class _Timed(StepRecorder):  # type: ignore[no-untyped-call]
    """Record the seconds of a step's operators, and when storages leave and come back.

    Attributes:
        seconds: Of each operator, like `work`.
        trips: Storages by their numbers.
        sizes: Bytes of the storages that may leave, by number.
        buffers: When host memory is taken for a storage (1) and given back (0): its number, which, and whether an
            operator of the recorded step has run.
    """

    counts_repeated = False

    def __init__(self, module: LightningModule, *, rates: OperatorRates) -> None:
        super().__init__(module)
        self.seconds, self.trips = list[float](), dict[int, _Trip]()
        self.sizes, self.buffers = list[int](), list[tuple[int, int, bool]]()
        self._rates = rates

    def ends(self, func: Any, args: Any, kwargs: Any, read: Read, result: Any) -> None:
        """Note the seconds of an operator."""
        super().ends(func, args, kwargs, read, result)
        self.seconds += [0.0] * (len(self.work) - 1 - len(self.seconds))
        self.seconds.append(self._rates.seconds(func, args, kwargs, result, moved_bytes(read, result)))

    def saves(self, number: int, storage: Any) -> None:
        """Note that autograd saves a storage for the first time."""
        # of the last step alone: each has numbers from 0 on
        del self.sizes[number:]
        self.sizes.append(storage.nbytes())
        life = self._of_key.get(id(storage))
        if life is not None:
            with unseen() as modes:
                place = next((mode.at for mode in modes if isinstance(mode, Tape)), 0)
            self.trips[number] = _Trip(life, place, len(self.work) - 1)

    def leaves(self, number: int) -> None:
        """Note that a storage gets host memory."""
        self.buffers.append((number, 1, len(self.work) > 1))

    def stays_no_more(self, number: int) -> None:
        """Note that its host memory is free."""
        self.buffers.append((number, 0, len(self.work) > 1))

    def comes(self, number: int, storage: Any) -> None:
        """Note that a storage has come back."""
        life, trip = self._of_key.get(id(storage)), self.trips.get(number)
        if life is not None and trip is not None and trip.back is None:
            trip.back = life.birth


def _saved(module: LightningModule, batch: Any, *, rates: OperatorRates, pinned: bool, **options: Any) -> SavedTensors:
    moves = moves_of(module)
    assert moves is not None, "the rule is installed"

    def make(module: LightningModule) -> _Timed:
        moves.watcher = made = _Timed(module, rates=rates)
        return made

    try:
        found, _ = counted_step(module, batch, make=make, **options)
    finally:
        moves.watcher = None
    n = len(found.work)
    live = alive_bytes(found.lives, n).astype(float)
    clock = np.concatenate([[0], np.cumsum(found.seconds), np.full(n - len(found.seconds), sum(found.seconds))])
    # a storage that is used from the device, or is freed only then, frees nothing by leaving
    rows = [
        (number, one.life.n_bytes, one.place, one.saved, one.life.death + 1, one.back)
        for number, one in sorted(found.trips.items())
        if one.back is not None and one.life.death is not None and one.life.death + 1 < one.back
    ]
    number, n_bytes, place, saved_at, gone, back = np.array(rows, int).reshape(-1, 6).T
    # the step before may have saved more
    buffers = [one for one in found.buffers if one[0] < len(found.sizes)]
    return SavedTensors(
        live=live + bytes_alive(gone, back - 1, n_bytes, n),
        sizes=np.array(found.sizes),
        buffers=np.array(buffers, int).reshape(-1, 3),
        clock=clock,
        shapes=tuple(moves.shapes),
        number=number,
        n_bytes=n_bytes.astype(float),
        place=place,
        saved_at=saved_at,
        gone=gone,
        back=back,
        pinned=pinned,
    )
