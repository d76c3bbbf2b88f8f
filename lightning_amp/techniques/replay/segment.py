"""Define a segment of a recorded training step, and replay its operators to recompute the tensors that they make.

An operator can run again if it is known which arguments it writes to and which generators it draws from (`how_of`).
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from lightning_amp._torch import OpOverload
from lightning_amp.errors import ModelError
from lightning_amp.footprint.copies.noted_values import answers_now, decided_by_values
from lightning_amp.footprint.live_bytes import COLLECTIVES, is_plain, places_written, tensors_of
from lightning_amp.footprint.run_again.recompute_state import digests, same_digests
from lightning_amp.sharding._torch import AUTOGRAD_AND_AUTOCAST, excluded_keys, force_dispatch_keys, included_keys
from lightning_amp.techniques.replay.choose_cuts import AT_ONCE, ONE_BY_ONE
from lightning_amp.techniques.replay.on_fakes import replayed_on_fakes
from lightning_amp.techniques.replay.recorded import Operator, Outside, Slot, StorageRef

RETYPED = {
    torch.ops.aten.view.dtype,
    *(getattr(torch.ops.aten, name).default for name in ("view_as_real", "view_as_complex", "_conj", "_neg_view")),
}
"""Views that geometry does not describe."""


@dataclass(frozen=True, slots=True)
class How:
    """Properties of an operator that its replay depends on.

    Attributes:
        replayable: Whether it may run a second time.
        is_view: Whether it only returns other geometries of its argument.
        draws: Whether it draws random numbers.
        in_place: Whether it only returns arguments that it has written to.
        writes: Positions and names of arguments that it writes to; None for all of its tensors.
    """

    replayable: bool
    is_view: bool
    draws: bool
    in_place: bool
    writes: tuple[tuple[int, str], ...] | None

    def written(self, args: Any, kwargs: Any) -> list[Tensor]:
        """Return the tensors that it writes to."""
        if self.writes is None:
            return tensors_of((args, kwargs))
        return tensors_of([args[i] if i < len(args) else kwargs.get(name) for i, name in self.writes])


@cache
def how_of(func: Any) -> How:
    """Return the properties of an operator; cached."""
    if not isinstance(func, OpOverload):
        return How(replayable=False, is_view=False, draws=False, in_place=False, writes=())
    collective = func.namespace in COLLECTIVES
    return How(
        replayable=not collective,
        is_view=bool(func._schema.returns)
        and all(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        and func not in RETYPED,
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        in_place=all(r.alias_info is not None and r.alias_info.is_write for r in func._schema.returns)
        and func._schema.is_mutable,
        # schemas of collectives do not declare what they write to
        writes=None if collective else tuple(places_written(func)),
    )


def copied(x: Tensor) -> Tensor:
    """Return a copy with the same strides."""
    copy = x.clone()
    if copy.stride() == x.stride():
        return copy
    # `clone` keeps the strides of dense tensors only: a tensor with gaps or overlaps becomes a view of a copy of its
    # storage
    n = x.untyped_storage().nbytes() // x.element_size()
    return x.as_strided((n,), (1,), 0).clone().as_strided(x.shape, x.stride(), x.storage_offset())


def draws_of(func: Any, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    """Return the generators that an operator may draw from, or the notes that decide its shape, with their states."""
    if not how_of(func).draws:
        answers = answers_now()
        noted = answers is not None and decided_by_values(func, args)
        return [(answers, answers.get_state())] if answers is not None and noted else []
    if (given := kwargs.get("generator")) is not None:
        return [(given, given.get_state())]
    found = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # the operator may make its tensor on another device than its arguments
        found += torch.cuda.default_generators
    return [(generator, generator.get_state()) for generator in found]


CHANGED = (
    "a tensor was changed in place after the forward pass had saved it for the backward pass: without replay the step"
    " would fail, or train on the new values; make the change out of place, as by x = x + 1"
)
UNSEEN = (
    "replay cannot run this step: an operator gave other values the second time, so something that torch does not see"
    " writes to its tensors, such as a kernel of Triton or NumPy. Make it an operator (torch.library.custom_op), or"
    " leave replay out"
)
ALLOCATIONS = {
    getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
}
"""Operators whose results are uninitialized."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Handle:
    """Object that autograd saves in place of a tensor.

    Attributes:
        version: Autograd version of the tensor.
        digest: Digest of its values, if the replay is compared.
        value: The tensor; set by a replay of its segment, or before an unrecorded write to its storage.
    """

    segment: "Segment"
    ref: StorageRef
    version: int
    digest: list[tuple[str, float, float]] | None = None
    value: Tensor | None = None


@dataclass(eq=False, slots=True, weakref_slot=True)
class Kept:
    """Object that autograd saves in place of a tensor that is not replayed."""

    tensor: Tensor
    version: int


class Segment:
    """Recorded operators of a stretch of the step.

    Args:
        alive: Tensors that segments read and did not make, by their storage.
        kind: AT_ONCE or ONE_BY_ONE.
        window: Bytes of tensors saved before it that a replay for one tensor also makes.
        compares: Whether handles have digests, with which the replay is compared.
    """

    def __init__(
        self,
        alive: "dict[int, list[weakref.ref[Outside]]]",
        *,
        kind: int = AT_ONCE,
        window: int = 0,
        compares: bool = False,
    ) -> None:
        self.operators: list[Operator] = []
        self.slots: list[Slot] = []
        self.handles: list[weakref.ref[Handle]] = []
        self.outside: dict[Any, Outside] = {}
        self.replayed = False
        self.kind, self.window, self.compares = kind, window, compares
        self._alive = alive

    def value(self, handle: Handle) -> Tensor:
        """Return the tensor of a handle; replay the segment if it has none."""
        if self.slots[handle.ref.slot].version > handle.version:
            raise ModelError(CHANGED)
        if handle.value is None:
            self._replay(handle.ref.slot)
        assert handle.value is not None, "a replay gives a value to every handle"
        return handle.value

    def end(self) -> None:
        """Forget the operators, and the tensors, that no replay needs."""
        wanted, needed = {handle.ref.slot for ref in self.handles if (handle := ref()) is not None}, list[Operator]()
        for operator in reversed(self.operators):
            if wanted & (operator.makes | operator.writes):
                wanted |= operator.reads
                needed.append(operator)
        # the operators hold the outside tensors that they read
        self.operators, self.outside = needed[::-1], {}

    def read(self) -> list[Outside]:
        """Return the dense tensors of others that replays read."""
        found = (one for operator in self.operators for one in operator.given if type(one) is Outside)
        return [one for one in dict.fromkeys(found) if one.away is None and is_plain(one.tensor)]

    def keep(self, number: int, alias: Tensor) -> None:
        """Set the values of handles of a storage before an unrecorded write to it."""
        self.slots[number].written = True
        for ref in self.handles:
            handle = ref()
            if handle is not None and handle.ref.slot == number and handle.value is None:
                dtype, shape, strides, offset = handle.ref.geometry
                if dtype != alias.dtype:
                    raise ModelError(CHANGED)
                # not copied: after the write, `value` raises because of the version, as autograd does without replay
                handle.value = alias.as_strided(shape, strides, offset)

    def _replay(self, slot: int) -> None:
        """Set the values of all handles, or of those of one storage and of storages made before it."""
        left = [handle for ref in self.handles if (handle := ref()) is not None and handle.value is None]
        made = {slot, *self._before(slot, {handle.ref.slot for handle in left})}
        handles = left if self.kind == AT_ONCE else [handle for handle in left if handle.ref.slot in made]
        values: dict[tuple[int, torch.dtype], Tensor] = {}
        keep = {handle.ref.slot for handle in handles}
        needed = self._needed(keep, values)
        # before any operator runs, so that a count has the same bytes; what left last comes first
        read = (one for operator in reversed(needed) for one in reversed(operator.given) if type(one) is Outside)
        for outside in dict.fromkeys(read):
            outside.come_back()
        # a replay holds no more than the forward pass: storages are freed after the last operator that reads them
        last = {slot: i for i, operator in enumerate(needed) for slot in operator.reads | operator.makes}
        ends: dict[int, list[int]] = {}
        for slot, i in last.items():
            if slot not in keep:
                ends.setdefault(i, []).append(slot)
        # recorded below autograd and autocast, and replayed there: autocast would cast arguments a second time
        with torch.no_grad(), force_dispatch_keys(included_keys(), excluded_keys() | AUTOGRAD_AND_AUTOCAST):
            known = replayed_on_fakes(self.slots, needed, ends, keep, values, copies=self.kind == ONE_BY_ONE)
            for i, operator in enumerate(() if known else needed):
                # below autograd, so that no graph is made
                torch.set_grad_enabled(operator.grad)
                self._run(operator, values)
                for slot in ends.get(i, ()):
                    for dtype in self.slots[slot].dtypes:
                        values.pop((slot, dtype), None)
            torch.set_grad_enabled(False)
            for handle in handles:
                handle.value = _tensor(handle.ref, values)
                if handle.digest is not None and not same_digests(handle.digest, digests(handle.value)):
                    raise ModelError(UNSEEN)
        self.replayed = True
        self.handles = [ref for ref in self.handles if (one := ref()) is not None and one.value is None]
        if not self.handles:
            # only the values of handles are still needed
            self.operators, self.outside = [], {}

    def _before(self, slot: int, slots: set[int]) -> Iterator[int]:
        """Yield the last storages made before one, up to the bytes of the window: the backward pass reads them next."""
        left = self.window
        for one in sorted((one for one in slots if one < slot), reverse=True):
            left -= self.slots[one].n_bytes
            if left < 0:
                return
            yield one

    def _needed(self, slots: set[int], values: dict[tuple[int, torch.dtype], Tensor]) -> list[Operator]:
        """Return the operators that make storages; tensors of storages that still exist unchanged go to `values`."""
        needed, wanted = list[Operator](), set[int]()

        def want(slot: int) -> None:
            if slot not in wanted:
                wanted.add(slot)
                for tensor in self._still_there(self.slots[slot]):
                    values[slot, tensor.dtype] = tensor

        for slot in slots:
            want(slot)
        # in reverse: an operator is needed if a later needed operator reads its result
        for operator in reversed(self.operators):
            made = {slot for slot in operator.makes | operator.writes if slot in wanted}
            # not needed if `values` has the tensors, because the storage still exists (`_still_there`)
            if any((slot, dtype) not in values for slot in made for dtype in self.slots[slot].dtypes):
                needed.append(operator)
                for slot in operator.reads:
                    want(slot)
        return needed[::-1]

    def _still_there(self, slot: Slot) -> Iterator[Tensor]:
        """Yield existing tensors in a storage, unless it was written to."""
        storage = slot.storage()
        if storage is not None and not slot.written:
            # a later segment may hold a tensor of this one as an outside tensor
            for ref in self._alive.get(id(storage), ()):
                one = ref()
                tensor = None if one is None or one.copied else one.on(storage)
                if tensor is not None and is_plain(tensor):
                    yield tensor

    def _run(self, operator: Operator, values: dict[tuple[int, torch.dtype], Tensor]) -> None:
        def tensor(one: StorageRef | Outside) -> Tensor:
            if type(one) is Outside:
                if one.was_changed:
                    # after the step, such as by a hook before the backward pass
                    raise ModelError(CHANGED)
                # copied, because the operator may write to it, and the next replay needs the old value
                return copied(one.tensor) if one.copied and self.kind == ONE_BY_ONE else one.tensor
            return _tensor(cast(StorageRef, one), values)

        args, kwargs = mapped(operator.args, tensor), mapped(operator.kwargs, tensor)
        # generators are set to the recorded state for the operator, and restored afterwards
        now = [generator.get_state() for generator, _ in operator.draws]
        for generator, state in operator.draws:
            generator.set_state(state)
        try:
            found = operator.func(*args, **kwargs)
        finally:
            for (generator, _), state in zip(operator.draws, now, strict=True):
                generator.set_state(state)
        if self.compares and operator.func.overloadpacket in ALLOCATIONS:
            # uninitialized memory may still contain the result of an undetected write, which would hide it
            for made in tensors_of(found):
                made.fill_(torch.nan if made.is_floating_point() or made.is_complex() else 1)
        for result, slot in zip(tensors_of(found), operator.results, strict=True):
            if slot is not None:
                # in-place results are present already, under the same key
                values.setdefault((slot, result.dtype), result)


def _tensor(ref: StorageRef, values: dict[tuple[int, torch.dtype], Tensor]) -> Tensor:
    dtype, shape, strides, offset = ref.geometry
    base = values[ref.slot, dtype]
    if tuple(base.shape) == shape and base.stride() == strides and base.storage_offset() == offset:
        return base
    return base.as_strided(shape, strides, offset)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to the tensors, and their placeholders, in an operator's arguments."""
    kind = type(value)
    if kind is StorageRef or kind is Outside or isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return [mapped(item, change) for item in value]
    if kind is dict:
        return {key: mapped(item, change) for key, item in value.items()}
    return value
