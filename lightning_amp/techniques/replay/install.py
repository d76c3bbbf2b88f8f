"""Install `replay`: record the operators of the training step, and replay segments of it in the backward pass.

To choose the segments, the step is first recorded as one segment. The tape shows when each storage is made, when it is
last read, and whether autograd saves it. From this follow the bytes and times of any segment of the step.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_amp._torch import AnyBatchNorm, autograd_node, tree_map
from lightning_amp.costs.rule import Rule, Spec
from lightning_amp.errors import AmpError
from lightning_amp.footprint.copies.noted_values import answers_now
from lightning_amp.footprint.inner_run import EnoughSeen
from lightning_amp.footprint.live_bytes import has_storage, storages_of, tensors_of
from lightning_amp.footprint.operator_rates import OperatorRates
from lightning_amp.footprint.profile_module import counted_step
from lightning_amp.footprint.step_recorder import StepRecorder
from lightning_amp.techniques.contract.change import Change
from lightning_amp.techniques.contract.protocol import StepToPlan
from lightning_amp.techniques.put_methods import method_of, put_methods, refuse_unseen
from lightning_amp.techniques.replay.choose_cuts import Array, Replays, Stretches
from lightning_amp.techniques.replay.row import ReplayOperators
from lightning_amp.techniques.replay.segment import Handle, Kept, how_of
from lightning_amp.techniques.replay.tape import Tape

PLACES = 120
"""Largest number of places at which a segment may end."""


class Look(Tape):  # type: ignore[no-untyped-call]
    """Record a step as one segment, with the time of its operators.

    Attributes:
        writes_to_views: Whether an operator writes to memory of which views were made. Autograd then makes the views
            again, on fake tensors by other operators than on real ones, so that views can have no places.

    Args:
        rates: Rates of the device.
        views: Whether an operator that only returns views has a place.
    """

    def __init__(self, rates: OperatorRates, *, views: bool = True) -> None:
        super().__init__([(2**62, True)], views=views)
        self.views, self.writes_to_views, self._viewed = views, False, set[int]()
        self.seconds: list[float] = []
        self.saved: dict[int, int] = {}
        self.backwards: set[int] = set()
        self.stay: dict[int, int] = {}
        self.wrappers: set[str] = set()
        self._rates, self._read = rates, list[tuple[weakref.ref[Kept], int]]()

    def _pack(self, x: Tensor) -> Kept:
        """Record that a tensor is saved, and when; the loss graph may be freed before the step ends."""
        ref = self._ref(x)
        if ref is not None:
            self.saved[ref.slot] = self.at
        elif not has_storage(x):
            self.wrappers.add(type(x).__name__)
        return Kept.of(x)

    def _unpack(self, kept: Handle | Kept) -> Tensor:
        """Record the tensors that a backward pass inside the step reads."""
        if isinstance(kept, Kept) and (ref := self._ref(kept.tensor)) is not None:
            self._read.append((weakref.ref(kept), ref.slot))
        return super()._unpack(kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and record an operator, with its predicted time."""
        before = self.at
        if autograd_node() is None:
            self._note_views(func, args, kwargs or {})
        found = super().__torch_dispatch__(func, types, args, kwargs)
        if autograd_node() is None:
            # a backward pass that keeps its graph, as for second derivatives, also keeps the replayed tensors
            self.stay |= {slot: before for kept, slot in self._read if kept() is not None}
            self._read.clear()
            # full storages are counted, which overestimates the time: a replay with little gain is not worth recording
            moved = sum(storage.nbytes() for _, storage in storages_of(tensors_of((args, kwargs, found))))
            self.seconds += [0.0] * (before + 1 - len(self.seconds))
            self.seconds[before] += self._rates.seconds(func, args, kwargs or {}, found, moved)
        elif not torch.is_grad_enabled():
            # with gradients enabled, the graph is kept for a second backward pass
            self.backwards.add(before)
        return found

    def _note_views(self, func: Any, args: Any, kwargs: Any) -> None:
        how = how_of(func)
        if how.is_view:
            self._viewed |= {id(storage) for _, storage in storages_of(tensors_of((args, kwargs)))}
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


def stretches_of(look: Look) -> Stretches:
    """Compute the bytes and times of all segments from the recorded step."""
    segment, n = look.segment, look.at + 1
    assert segment is not None, "the step is recorded as one segment"
    seconds = look.seconds + [0.0] * (n - len(look.seconds))
    made, last = np.zeros(len(segment.slots), int), np.zeros(len(segment.slots), int)
    n_bytes = np.array([slot.n_bytes for slot in segment.slots], float)
    saved = np.zeros(len(segment.slots), bool)
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
    for slot, place in look.stay.items():
        # kept until a later backward pass frees it
        last[slot] = max(last[slot], min((border for border in look.backwards if border > place), default=n) - 1)
    borders = sorted(place for place in look.backwards if 0 < place < n)
    places = np.union1d(_places(made, last, n_bytes, np.array(seconds), n), np.array(borders, int))
    birth, death = np.searchsorted(places, made, "right") - 1, np.searchsorted(places, last, "right") - 1
    k = len(places)
    # [b, l]: made in stretch b, last read in stretch l
    by_life, by_saved = np.zeros((k, k)), np.zeros((k, k))
    np.add.at(by_life, (birth, death), n_bytes)
    np.add.at(by_saved, (birth[saved], death[saved]), n_bytes[saved])
    # [b, q]: bytes made in stretch b and last read in stretch q or later; saved bytes last read before q
    later = np.cumsum(by_life[:, ::-1], 1)[:, ::-1]
    sooner = np.cumsum(by_saved, 1) - by_saved
    # bytes read in stretch q or later; with saved bytes that are not
    out = _between(later)
    kept = out + _between(sooner)
    # took[i] is the time of the operators before i; made + 1 includes the operator that makes a storage
    took = np.concatenate([[0], np.cumsum(seconds)])
    since = took[places]
    saved_bytes, n_saved = (
        _between(np.tile(np.bincount(birth[saved], weights, k)[:, None], k)) for weights in (n_bytes[saved], None)
    )
    # for every saved storage, the time of the operators from the beginning of its stretch up to it
    until = _between(np.tile(np.bincount(birth[saved], took[made[saved] + 1], k)[:, None], k))
    return Stretches(
        places=places,
        out=out,
        saved=kept,
        seconds=since[None, :] - since[:, None],
        at_work=_at_work(places, made, last, n_bytes),
        one_by_one_seconds=until - n_saved * since[:, None],
        saved_each=saved_bytes / np.maximum(n_saved, 1),
        borders=tuple(np.searchsorted(places, borders).tolist()),
        views=look.views,
        why_nothing=look.why_nothing,
    )


def _at_work(places: Array, made: Array, last: Array, n_bytes: Array) -> Array:
    """Return [p, q]: peak bytes of storages made in the stretch [p, q) while it runs forward."""
    k, n = len(places), int(places[-1])
    found = np.zeros((k, k))
    for p in range(k - 1):
        inside = made >= places[p]
        changes = np.zeros(n + 2)
        np.add.at(changes, made[inside], n_bytes[inside])
        np.add.at(changes, np.minimum(last[inside], n) + 1, -n_bytes[inside])
        # bytes made and not read for the last time, up to each operator, and their maximum so far
        highest = np.maximum.accumulate(changes.cumsum()[places[p] : n])
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
    # bytes made before a place and read at it or later
    across = np.zeros(n + 2)
    np.add.at(across, made + 1, n_bytes)
    np.add.at(across, last + 1, -n_bytes)
    across = np.cumsum(across)[: n + 1]
    share = np.bincount(made, n_bytes, n)[:n]
    share = share / max(share.sum(), 1) + seconds[:n] / max(seconds.sum(), 1e-30)
    window = np.minimum((np.cumsum(share) / share.sum() * PLACES).astype(int), PLACES - 1)
    found = {0, n}
    for one in np.unique(window):
        inside = np.nonzero(window == one)[0]
        found.add(int(inside[np.argmin(across[inside])]))
    return np.array(sorted(found))


def install(module: nn.Module, spec: ReplayOperators, mesh: object) -> Change:
    """Replace the training step of a LightningModule by one whose segments are replayed."""
    refuse_unseen("replay", module)
    # the replays of the first call are compared with the saved values
    step, first = method_of(module, "training_step"), iter((True,))

    @wraps(step)
    def run(module: LightningModule, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return step(module, *args, **kwargs)
        tape = Tape(spec.segments, views=spec.views, window=spec.window, compares=next(first, False))
        with recorded(tape, module):
            return step(module, *args, **kwargs)

    return Change({}, methods={"training_step": run})


@contextmanager
def recorded(tape: Tape, module: nn.Module) -> Iterator[None]:
    """Record the operators of a module's step on a tape."""
    # on several ranks they share batch statistics, and run other operators than in the plan
    norms = [child for child in module.modules() if isinstance(child, AnyBatchNorm)]
    with tape.as_one(norms), tape, tape.hooks():
        yield


def look(step: StepToPlan) -> Callable[[tuple[Rule, ...]], Replays]:
    """Return a function from rules to the choices of the step with these rules, recorded on first use."""
    known: dict[tuple[tuple[str, Spec], ...], Replays] = {}

    def replays(rules: tuple[Rule, ...]) -> Replays:
        key = tuple((rule.fqn, rule.spec) for rule in rules)
        return known.setdefault(key, Replays(partial(_stretches, step, rules)))

    return replays


def _stretches(step: StepToPlan, rules: tuple[Rule, ...]) -> Stretches | str:
    """Return bytes and times of the step's segments, or the reason why they are unknown."""
    found = list[Stretches]()

    def count(module: LightningModule, batch: Any, **options: Any) -> None:
        refuse_unseen("replay", module)
        plain, views = method_of(module, "training_step"), True

        @wraps(plain)
        def training_step(module: LightningModule, *args: Any, **kwargs: Any) -> Any:
            nonlocal views
            automatic = module.automatic_optimization
            # twice: objects that a module makes only once, such as position tables, are not part of later steps
            for _ in range(1 + automatic):
                if (answers := answers_now()) is not None:
                    answers.restart(in_step=True)
                look = Look(step.operator_rates(), views=views)
                # a step may take its labels out of its batch
                own_args, own_kwargs = tree_map(lambda one: one, (args, kwargs))
                with recorded(look, module):
                    loss = plain(module, *own_args, **own_kwargs)
                views = views and not look.writes_to_views
            found.append(stretches_of(look))
            # with manual optimization, optimizer state exists from the second step on
            if automatic or len(found) == 2:
                raise EnoughSeen
            return loss

        undo = put_methods(module, {"training_step": MethodType(training_step, module)})
        try:
            counted_step(module, batch, make=StepRecorder, **options)
        finally:
            undo()

    try:
        step.run_with(rules, count)
    except AmpError as error:
        return str(error)
    return found[-1]
