"""Record a training step as one segment, and compute the bytes and times of any segment of it.

The tape shows when each storage is made, when it is last read, and whether autograd saves it.
"""

import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_amp._torch import autograd_node
from lightning_amp.footprint.confirm_count import Shape
from lightning_amp.footprint.copies.noted_values import answers_now
from lightning_amp.footprint.live_bytes import has_storage, storages_of, tensors_of
from lightning_amp.footprint.module_profile import bytes_alive
from lightning_amp.footprint.operator_rates import OperatorRates
from lightning_amp.techniques.checks.planned_order import as_text
from lightning_amp.techniques.replay.choose_cuts import Array, Level, Stretches
from lightning_amp.techniques.replay.recorded import Operator
from lightning_amp.techniques.replay.segment import Handle, Kept, how_of
from lightning_amp.techniques.replay.tape import Tape

PLACES = 120
"""Largest number of places at which a segment may end."""
SHARES = 0.3, 0.6, 0.9
"""Shares of the time of all replayed operators that the operators whose results levels keep take."""


class Look(Tape):  # type: ignore[no-untyped-call]
    """Record a step as one segment, with the time of its operators.

    Attributes:
        seconds: Time of each recorded operator.
        saved, first_saved: Storages that autograd saves -> the place where it does so last, and first.
        read_last: Bytes of trained parameters that the step reads, and the place where it does so last, by storage.
        writes_to_views: Whether an operator writes to memory of which views were made. Autograd then makes the views
            again, on fake tensors by other operators than on real ones, so that views can have no places.

    Args:
        rates: Rates of the device.
        trained: Parameters that get gradients.
        views: Whether an operator that only returns views has a place.
    """

    def __init__(self, rates: OperatorRates, trained: Iterable[Tensor] = (), *, views: bool = True) -> None:
        super().__init__([(2**62, True)], views=views)
        self.views, self.writes_to_views = views, False
        # an id may be that of a later storage
        self._viewed = weakref.WeakValueDictionary[int, Any]()
        self.seconds: list[float] = []
        self.read_last: dict[int, tuple[int, int]] = {}
        self._trained = {id(storage) for _, storage in storages_of(trained)}
        self.first_saved: dict[int, int] = {}
        self.saved: dict[int, int] = {}
        self.backwards: set[int] = set()
        self.stay: dict[int, int] = {}
        self.wrappers: set[str] = set()
        self._rates, self._read = rates, list[tuple[weakref.ref[Kept], int]]()

    def _pack(self, x: Tensor) -> Any:
        """Record that a tensor is saved, and when; the loss graph may be freed before the step ends."""
        ref = self._ref(x)
        if ref is not None:
            self.saved[ref.slot] = self.at
            self.first_saved.setdefault(ref.slot, self.at)
        elif not has_storage(x):
            self.wrappers.add(type(x).__name__)
        return self._kept(x)

    def _unpack(self, kept: Handle | Kept) -> Tensor:
        """Record the tensors that a backward pass inside the step reads."""
        if isinstance(kept, Kept) and (ref := self._ref(kept.tensor)) is not None:
            self._read.append((weakref.ref(kept), ref.slot))
        return super()._unpack(kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and record an operator, with its predicted time."""
        before = self.at
        if self._packing:
            return func(*args, **(kwargs or {}))
        if autograd_node() is None:
            self._note_views(func, args, kwargs or {})
        found = super().__torch_dispatch__(func, types, args, kwargs)
        if autograd_node() is None:
            # a backward pass that keeps its graph, as for second derivatives, also keeps the replayed tensors
            self.stay |= {slot: before for kept, slot in self._read if kept() is not None}
            self._read.clear()
            # full storages are counted, which overestimates the time: a replay with little gain is not worth recording
            storages = [storage for _, storage in storages_of(tensors_of((args, kwargs, found)))]
            moved = sum(storage.nbytes() for storage in storages)
            # an operator without gradients, as of the batch's masks, leads to none
            if torch.is_grad_enabled():
                read = (storage for storage in storages if id(storage) in self._trained)
                self.read_last |= {id(storage): (storage.nbytes(), before) for storage in read}
            if self.segment is not None and len(self.segment.operators) > len(self.seconds):
                self.seconds.append(self._rates.seconds(func, args, kwargs or {}, found, moved))
        elif not torch.is_grad_enabled():
            # with gradients enabled, the graph is kept for a second backward pass
            self.backwards.add(before)
        return found

    def _end(self) -> None:
        """Forget nothing."""

    def _note_views(self, func: Any, args: Any, kwargs: Any) -> None:
        how = how_of(func)
        if how.is_view:
            self._viewed.update({id(storage): storage for _, storage in storages_of(tensors_of((args, kwargs)))})
        elif torch.is_grad_enabled() and how.writes != ():
            written = storages_of(how.written(args, kwargs))
            self.writes_to_views |= any(id(storage) in self._viewed for _, storage in written)

    @property
    def why_nothing(self) -> str:
        """Why a replay of this step may have nothing to free."""
        if self.stay:
            return (
                "a gradient that the step takes with create_graph=True or retain_graph=True keeps the tensors that a"
                " replay would make, until the backward pass of the loss; take a smaller batch"
            )
        if self.wrappers:
            return (
                f"autograd keeps tensors of {', '.join(map(repr, sorted(self.wrappers)))}, which is no dense tensor of"
                " torch, and whose operators are not replayed; pad its rows to one length"
            )
        return Stretches.why_nothing


@dataclass(frozen=True, eq=False, kw_only=True)
class Storages:
    """Storages that the step makes, and the places among operators.

    Attributes:
        n_bytes, made, last: Of each storage: its size, the place that makes it, the place that reads it last.
        saved, first_saved: Whether autograd saves it, and the place of the first operator that does; `never` for none.
        small: Whether it is always kept.
        places: Places at which segments may end.
        never: A place after the end.
    """

    n_bytes: Array
    made: Array
    last: Array
    saved: Array
    first_saved: Array
    small: Array
    places: Array
    never: int

    def stretch(self, at: Any) -> Array:
        """Return the index of the stretch between two places in which an operator is."""
        found: Array = np.minimum(np.searchsorted(self.places, at, "right"), len(self.places)) - 1
        return found

    def between(self, first: Any, last: Any, amount: Any) -> Array:
        """Sum [p, q] the amounts that begin in the segment and end before q."""
        found = np.zeros((len(self.places), len(self.places)))
        np.add.at(found, (self.stretch(first), self.stretch(last)), amount)
        return _between(np.cumsum(found, 1) - found)


def stretches_of(look: Look, shapes: Iterable[Shape] = (), *, gradient_bytes: int = 0) -> Stretches:
    """Compute the bytes and times of all segments from the recorded step of a batch of some shapes.

    `gradient_bytes`: bytes of gradients at its peak.
    """
    segment, n = look.segment, look.at + 1
    assert segment is not None, "the step is recorded as one segment"
    made, last = np.zeros(len(segment.slots), int), np.zeros(len(segment.slots), int)
    n_bytes = np.array([slot.n_bytes for slot in segment.slots], float)
    saved, first_saved = np.zeros(len(segment.slots), bool), np.full(len(segment.slots), n)
    for operator in reversed(segment.operators):
        # in reverse, so that the first operator that makes a storage counts; results that are also read are views
        made[list(operator.makes - operator.reads)] = operator.at
    for operator in segment.operators:
        both = list(operator.reads | operator.makes | operator.writes)
        last[both] = np.maximum(last[both], operator.at)
    for slot, place in look.saved.items():
        saved[slot] = True
        # place - 1: tensors are saved by the operator before, or by the one after as its argument
        last[slot] = max(last[slot], place - 1)
        first_saved[slot] = look.first_saved[slot] - 1
    for slot, place in look.stay.items():
        # kept until a later backward pass frees it
        last[slot] = max(last[slot], min((border for border in look.backwards if border > place), default=n) - 1)
    borders = sorted(place for place in look.backwards if 0 < place < n)
    seconds = np.bincount([one.at for one in segment.operators], look.seconds, n)
    places = np.union1d(_places(made, last, n_bytes, seconds, n), np.array(borders, int))
    storages = Storages(
        n_bytes=n_bytes,
        made=made,
        last=last,
        saved=saved,
        first_saved=first_saved,
        small=np.array([slot.small for slot in segment.slots], bool),
        places=places,
        never=n,
    )
    crossed = np.searchsorted(places, borders)
    # operators of optimizers, and tensors that a backward pass leaves to others
    barred = [one.at for one in segment.operators if borders and one.at >= borders[0] and not one.grad]
    barred += made[list(look.stay)].tolist()
    k = len(places)
    # [b, l]: bytes made in stretch b and last read in stretch l
    by_life = np.zeros((k, k))
    np.add.at(by_life, (storages.stretch(made), storages.stretch(last)), n_bytes)
    # read in stretch q or later
    out = _between(np.cumsum(by_life[:, ::-1], 1)[:, ::-1])
    births = storages.stretch(made[saved])
    saved_bytes, n_saved = (
        _between(np.tile(np.bincount(births, weights, k)[:, None], k)) for weights in (n_bytes[saved], None)
    )
    all_saved = out + storages.between(made[saved], last[saved], n_bytes[saved])
    gradients = np.zeros(k)
    for size, at in look.read_last.values() if not borders else ():
        gradients[places <= at] += size
    return Stretches(
        places=places,
        out=out,
        saved=all_saved,
        saved_each=saved_bytes / np.maximum(n_saved, 1),
        levels=tuple(_level(look, storages, keeps) for keeps in _dear(look, storages)),
        borders=tuple(crossed.tolist()),
        barred=tuple(np.union1d(crossed, storages.stretch(np.array(barred, int))).tolist()),
        views=look.views,
        # with notes of values other operators run than with values, and a plan says that it was counted by notes
        operators="" if answers_now() is not None else as_text(shapes, look.ran),
        why_nothing=look.why_nothing,
        # the plain step takes no more there than at its peak
        gradients=np.minimum(gradients - gradient_bytes, all_saved[0, -1] - all_saved[0]).clip(0),
    )


def _needed(operators: list[Operator], storages: Storages, keeps: Collection[int]) -> tuple[Array, Array]:
    """Return from which place on each operator runs again, and each storage is needed for that or for a saved tensor.

    An operator runs again in segments that end after the first place at which a tensor is saved that it leads to.
    """
    runs, needed = np.full(len(operators), storages.never), storages.first_saved.copy()
    for i, operator in reversed(list(enumerate(operators))):
        if operator.at not in keeps:
            runs[i] = min((needed[slot] for slot in operator.makes | operator.writes), default=storages.never)
            for slot in operator.reads:
                needed[slot] = min(needed[slot], runs[i])
    return runs, needed


def _dear(look: Look, storages: Storages) -> list[frozenset[int]]:
    """Return for each level the places of operators that take the most seconds for each byte of their results."""
    assert look.segment is not None, "the step is recorded as one segment"
    operators = look.segment.operators
    runs, _ = _needed(operators, storages, ())
    at, written, times = [one.at for one in operators], set[int](), np.where(runs < storages.never, look.seconds, 0)
    for operator in operators:
        # a write copies what was read before it
        written |= operator.writes
    alone = np.bincount(at, minlength=1) == 1
    n_bytes = {
        i: sum(storages.n_bytes[list(one.makes)])
        for i, one in enumerate(operators)
        if times[i] and one.grad and alone[one.at] and not one.makes & (one.reads | written)
    }
    order = sorted((i for i, size in n_bytes.items() if size), key=lambda i: -times[i] / n_bytes[i])
    share = np.cumsum(times[order]) / max(times.sum(), 1e-30)
    # with the same places as others, a level is left out
    ends = sorted({0, *(int(np.searchsorted(share, one)) for one in SHARES)})
    return [frozenset(at[i] for i in order[:end]) for end in ends]


def _level(look: Look, storages: Storages, keeps: frozenset[int]) -> Level:
    assert look.segment is not None, "the step is recorded as one segment"
    operators, places, k = look.segment.operators, storages.places, len(storages.places)
    runs, needed = _needed(operators, storages, keeps)
    kept = np.zeros(len(storages.n_bytes), bool)
    for operator in operators:
        kept[list(operator.makes) if operator.at in keeps else []] = True
    until = np.maximum(needed, storages.last)
    held, unsaved = (
        storages.between(storages.made[which], until[which], storages.n_bytes[which])
        for which in (kept, kept & ~storages.saved)
    )
    at = np.array([one.at for one in operators], int)
    seconds = storages.between(at, runs, look.seconds)
    # [b, p]: for the saved storages made in stretch b, the time of the operators from place p on that lead to each
    each, leads = np.zeros((k, k)), dict[int, int]()
    again = storages.saved & ~kept & ~storages.small
    stretch = storages.stretch(at)
    for i, operator in enumerate(operators):
        if operator.at in keeps:
            continue
        # a set of operators is an integer, with a bit for each of them
        found = 1 << i
        for slot in operator.reads | operator.writes:
            found |= leads.get(slot, 0)
        leads |= dict.fromkeys(operator.makes | operator.writes, found)
    n_words = len(operators) // 8 + 1
    for slot, found in leads.items():
        if again[slot]:
            bits = np.unpackbits(np.frombuffer(found.to_bytes(n_words, "little"), np.uint8), bitorder="little")
            (ran,) = np.nonzero(bits)
            times = np.bincount(stretch[ran], np.array(look.seconds)[ran], k)
            each[storages.stretch(storages.made[slot])] += np.cumsum(times[::-1])[::-1]
    one_by_one = np.concatenate([np.zeros((1, k)), np.cumsum(each, 0)])
    q = np.arange(k)
    return Level(
        keeps=np.array(sorted(keeps), int),
        held=held,
        unsaved=unsaved,
        seconds=seconds,
        # [p, q]: of the stretches from p to q, the time from p on
        one_by_one_seconds=one_by_one[q][:, q].T - one_by_one[q, q][:, None],
        at_work=_at_work(places, storages.made, storages.last, np.where(kept, 0, storages.n_bytes))
        + _between(np.tile(np.bincount(storages.stretch(storages.made[kept]), storages.n_bytes[kept], k)[:, None], k)),
    )


def _at_work(places: Array, made: Array, last: Array, n_bytes: Array) -> Array:
    """Return [p, q]: peak bytes of storages made in the stretch [p, q) while it runs forward."""
    k, n = len(places), int(places[-1])
    found = np.zeros((k, k))
    for p in range(k - 1):
        inside = made >= places[p]
        # bytes made and not read for the last time, up to each operator, and their maximum so far
        highest = np.maximum.accumulate(bytes_alive(made[inside], last[inside], n_bytes[inside], n)[places[p] :])
        found[p, p + 1 :] = highest[places[p + 1 :] - places[p] - 1]
    return found


def _between(by_place: Array) -> Array:
    """Sum [b, q] over the stretches b of [p, q), for every [p, q]."""
    sums = np.concatenate([np.zeros((1, by_place.shape[1])), np.cumsum(by_place, 0)])
    q = np.arange(by_place.shape[1])
    found: Array = sums[q, q][None, :] - sums[:-1]
    return found


def _places(made: Array, last: Array, n_bytes: Array, seconds: Array, n: int) -> Array:
    """Return the places with the fewest live bytes, one in each stretch of equal shares of bytes and time."""
    # made before a place and read at it or later
    across = bytes_alive(made + 1, last, n_bytes, n + 1)
    share = np.bincount(made, n_bytes, n)[:n]
    share = share / max(share.sum(), 1) + seconds[:n] / max(seconds.sum(), 1e-30)
    window = np.minimum((np.cumsum(share) / share.sum() * PLACES).astype(int), PLACES - 1)
    found = {0, n}
    for one in np.unique(window):
        inside = np.nonzero(window == one)[0]
        found.add(int(inside[np.argmin(across[inside])]))
    return np.array(sorted(found))
