"""Record the operators of a training step in segments, and replay a segment when the backward pass needs its tensors.

A dispatch mode records the operators below autograd and autocast. In a replayed segment, autograd saves a handle in
place of every tensor that the segment has made. The tape keeps the operators, with

    tensors of the segment     as index of their storage, with shape, strides and offset
    all other tensors          directly: tensors of earlier segments, parameters, the batch

When the backward pass requests the first handle, the operators that lead to tensors with handles run again. Segments of
kind ONE_BY_ONE run only those that lead to each handle, which holds less memory and takes longer. Recording is
independent of modules, so a step may contain any code: functions, layers of a list, branches. The place where a segment
ends changes the memory, and not the results.

Exactness depends on these rules:

    random numbers              the generator's state is stored with every operator that draws, and restored
    writes inside a segment     are replayed in order; the backward pass gets the final values, or fails as it would
                                without the tape: autograd's version counters are compared
    writes to other tensors     are not replayed: old values that tapes hold are copied before the write
    collectives, higher-order   run once; their results count as made outside of the segment
    operators, subclasses
"""

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_amp._torch import TorchDispatchMode, autograd_node, top_saving_hooks, version_of
from lightning_amp.errors import ModelError
from lightning_amp.footprint.live_bytes import has_storage, is_plain, tensors_of
from lightning_amp.footprint.run_again.recompute_state import digests
from lightning_amp.own_operators import are_own_operators
from lightning_amp.sharding._torch import AUTOGRAD_AND_AUTOCAST, excluded_keys, force_dispatch_keys, included_keys
from lightning_amp.techniques.replay.choose_cuts import KEPT, ONE_BY_ONE
from lightning_amp.techniques.replay.on_fakes import made_by
from lightning_amp.techniques.replay.one_hot import around_one_hot
from lightning_amp.techniques.replay.recorded import Operator, Outside, Slot, StorageRef, geometry_of
from lightning_amp.techniques.replay.segment import CHANGED, Handle, Kept, Segment, copied, draws_of, how_of, mapped

SMALL = 64
"""A result is small if its operator's largest result is at least this many times larger."""
AS_ONE = "a norm of batches or one_hot"
"""Stands for the operators of a call that are counted as one."""


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records a training step in segments; the step must also run in its `hooks`.

    Args:
        ends: Places among the operators of the step at which segments end, and the kinds of the segments; the rest of
            the step is kept.
        views: Whether an operator that only returns views has a place.
        window: Bytes of tensors saved before it that a replay for one tensor also makes.
        keeps: Places of operators that do not run again; their results count as made outside of the segment.
        compares: Whether replays must equal the saved values; this detects writes that torch does not record, such as
            by a Triton kernel.

    Attributes:
        at: The current place.
        ran: The operators at the places before it.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        ends: Sequence[tuple[int, int]],
        *,
        views: bool = True,
        window: int = 0,
        keeps: Collection[int] = (),
        compares: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ends, self._views, self._window, self._compares = list(ends), views, window, compares
        self._keeps = keeps
        # hooks on saved tensors around the step, as of a technique that moves them: they get what the tape keeps
        self._around: tuple[Any, Any] | None = None
        self._just_saved: list[tuple[Handle, Tensor]] = []
        self.at, self.ran = 0, list[Any]()
        self._inside, self._packing = 0, False
        self._known: dict[int, tuple[Segment, int]] = {}
        self._alive: dict[int, list[weakref.ref[Outside]]] = {}
        self._just_written: list[tuple[Slot, Tensor]] = []
        self.segment: Segment | None = None
        self._begin()

    @contextmanager
    def as_one(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Count all operators of a call of one of these modules, or of `one_hot`, as one: a count may have others."""

        def begins(*_: Any) -> None:
            self._inside += 1

        def ends(*_: Any) -> None:
            self._inside -= 1
            if not self._inside:
                self._advance(AS_ONE)

        # calls may be nested: `_inside` is their depth, and the outermost call is one place
        hooks = [module.register_forward_pre_hook(begins) for module in modules]
        hooks += [module.register_forward_hook(ends, always_call=True) for module in modules]
        try:
            with around_one_hot(begins, ends):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the saved-tensor hooks in which the forward pass must run, in addition to this mode."""
        self._around = top_saving_hooks(False)
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _begin(self) -> None:
        kind = self._ends[0][1] if self._ends else KEPT
        again, settings = kind != KEPT, {"window": self._window, "compares": self._compares}
        self.segment = Segment(self._alive, kind=kind, **settings) if again else None  # type: ignore[arg-type]

    def _end(self) -> None:
        """Forget what no replay of the segment needs, and give the hooks around the step what it reads."""
        if self.segment is None:
            return
        self.segment.end()
        if self._around is not None:
            with self._by_itself():
                for one in self.segment.read():
                    one.leave(*self._around)

    @contextmanager
    def _by_itself(self) -> Iterator[None]:
        """Context manager for operators of the tape, which are not of the step.

        Autograd runs them also while an operator of the step runs, so that views share counters of writes.
        """
        self._packing, before = True, self._packing
        try:
            with force_dispatch_keys(included_keys(), excluded_keys() - AUTOGRAD_AND_AUTOCAST), torch.no_grad():
                yield
        finally:
            self._packing = before

    def _pack(self, x: Tensor) -> Any:
        self._note_versions()
        segment = self.segment
        # a replayed segment may have freed its operators, so later tensors of it are kept
        ref = None if segment is None or segment.replayed else self._ref(x)
        # recomputing the statistics of a norm would require the complete norm
        small = segment is not None and ref is not None and segment.slots[ref.slot].small
        if segment is None or ref is None or (small and segment.kind == ONE_BY_ONE):
            return self._kept(x)
        handle = Handle(segment, ref, version_of(x))
        segment.handles.append(weakref.ref(handle))
        if self._compares:
            self._just_saved.append((handle, x))
        return handle

    def _kept(self, x: Tensor) -> Any:
        """Keep a tensor without its node: if that saves its own result, neither would ever be freed without a backward
        pass through it."""
        with self._by_itself():
            if self._around is not None:
                return self._around[0](x)
            return Kept(x if x.grad_fn is None else x.detach(), version_of(x))

    def _unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Handle):
            return kept.segment.value(kept)
        if self._around is not None:
            back: Tensor = self._around[1](kept)
            return back
        tensor: Tensor = kept.tensor
        if version_of(tensor) != kept.version:
            raise ModelError(CHANGED)
        return tensor

    def _digest_saved(self) -> None:
        """Compute digests of saved tensors, after the next operator, which may be the one that makes them."""
        for handle, tensor in self._just_saved:
            handle.digest = digests(tensor.detach())
        self._just_saved.clear()

    def __exit__(self, *args: Any) -> None:
        """End the step."""
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        self._note_versions()
        self._digest_saved()
        self._end()
        # storages that outlive the step, such as an optimizer's state, would keep their segments
        self._known.clear()

    def _note_versions(self) -> None:
        """Read the versions of tensors that the last operator wrote; autograd increments them after it has returned."""
        for slot, tensor in self._just_written:
            slot.version = max(slot.version, version_of(tensor))
        self._just_written.clear()

    def _ref(self, x: Tensor) -> StorageRef | None:
        """Return the reference to a tensor of this segment; None for other tensors."""
        if not is_plain(x):
            return None
        found = self._known.get(id(x.untyped_storage()))
        if found is None or found[0] is not self.segment or x.dtype not in found[0].slots[found[1]].dtypes:
            return None
        return StorageRef(found[1], geometry_of(x))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator of the forward pass, and record it."""
        kwargs = kwargs or {}
        # `_kept` detaches tensors, and ranks weight a loss and average gradients, which are no operators of the step
        own = self._packing or are_own_operators()
        if own or autograd_node() is not None or func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        self._note_versions()
        how = how_of(func)
        if how.is_view and not self._views:
            return func(*args, **kwargs)
        while self._ends and self.at >= self._ends[0][0]:
            self._ends.pop(0)
            self._end()
            self._begin()
        if self.segment is not None and self.segment.replayed:
            # after a backward pass inside the step
            self._begin()
        if how.is_view:
            # described by its geometry, so it need not be replayed
            found = func(*args, **kwargs)
            self._next(func)
            return found
        written = how.written(args, kwargs)
        segment = self.segment
        tensors = () if segment is None else tensors_of((args, kwargs))
        kept = self.at in self._keeps and torch.is_grad_enabled() and not self._inside
        whole = how.replayable and not kept and all(map(has_storage, tensors))
        for t in written:
            if self._is_own(t) and not (whole and self._ref(t)):
                # this write cannot be replayed: from here on, the storage counts as made outside
                made, number = self._known.pop(id(t.untyped_storage()))
                made.keep(number, t.detach())
                self._just_written.append((made.slots[number], t))
        # writes to outside tensors are not repeated
        needless = how.in_place and not any(self._is_own(t) for t in written)
        if segment is None or not whole or needless:
            self._before_write(written)
            found = func(*args, **kwargs)
            self._next(func)
            return found
        # a result in one of these storages is a view or was written in place
        given, read = {id(t.untyped_storage()) for t in tensors}, list[StorageRef | Outside]()

        def recorded(x: Tensor) -> StorageRef | Outside:
            read.append(self._ref(x) or self._outside(segment, x, written))
            return read[-1]

        # before `_before_write`, which copies the tensors recorded here if the operator writes to their storage
        own_args, own_kwargs = mapped(args, recorded), mapped(kwargs, recorded)
        self._before_write(written)
        draws = draws_of(func, args, kwargs)
        found = func(*args, **kwargs)
        returned = tensors_of(found)
        results, new = self._results(segment, returned, given)
        own_writes = [(ref.slot, t) for t in written if (ref := self._ref(t)) is not None]
        for slot, tensor in own_writes:
            segment.slots[slot].written = True
            self._just_written.append((segment.slots[slot], tensor))
        if new or own_writes:
            segment.operators.append(
                Operator(
                    func=func,
                    at=self.at,
                    args=own_args,
                    kwargs=own_kwargs,
                    grad=torch.is_grad_enabled(),
                    draws=draws,
                    results=results,
                    reads=frozenset(one.slot for one in read if type(one) is StorageRef),
                    writes=frozenset(slot for slot, _ in own_writes),
                    makes=frozenset(slot for slot in results if slot is not None),
                    given=read,
                    made=made_by(func, returned, results),
                )
            )
        self._next(func)
        return found

    def _next(self, func: Any) -> None:
        """Advance to the next place; operators in no_grad, as of optimisers, have none: steps may differ in them."""
        self._digest_saved()
        if torch.is_grad_enabled() and not self._inside:
            self._advance(func)

    def _advance(self, func: Any) -> None:
        self.at += 1
        self.ran.append(func)

    def _is_own(self, x: Tensor) -> bool:
        """Return whether this segment has made the tensor's storage."""
        if not has_storage(x):
            return False
        found = self._known.get(id(x.untyped_storage()))
        return found is not None and found[0] is self.segment

    def _outside(self, segment: Segment, leaf: Tensor, written: Sequence[Tensor]) -> Outside:
        """Return the entry of an argument that the segment has not made."""
        if any(leaf is t for t in written):
            # copied, because the replay must not write to the original
            return Outside(copied(leaf.detach()), copied=True)
        key = (
            id(leaf.untyped_storage()),
            version_of(leaf),
            leaf.dtype,
            leaf.shape,
            leaf.stride(),
            leaf.storage_offset(),
            leaf.is_conj(),
            leaf.is_neg(),
        )
        one = segment.outside.get(key)
        # an entry that was copied has old values, even if the version is unchanged: not every write increments it
        if one is None or one.copied:
            with self._by_itself():
                one = segment.outside[key] = Outside(leaf.detach(), version_of(leaf))
            self._alive.setdefault(key[0], []).append(weakref.ref(one))
        return one

    def _before_write(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors that tapes hold in storages that are about to be written to."""
        for tensor in tensors:
            if not has_storage(tensor):
                continue
            key = id(tensor.untyped_storage())
            # each entry of this storage, in any tape, is copied once, before the first write
            for ref in self._alive.pop(key, ()):
                one = ref()
                there = None if one is None else one.on(tensor.untyped_storage())
                if one is not None and there is not None:
                    one.tensor, one.copied, one.away = copied(there), True, None
            if key in self._known and self._known[key][0] is not self.segment:
                segment, number = self._known[key]
                segment.keep(number, tensor.detach())
                self._just_written.append((segment.slots[number], tensor))

    def _results(self, segment: Segment, results: Sequence[Tensor], given: set[int]) -> tuple[list[int | None], bool]:
        """Return the slots of results, and whether one is new, or has a new dtype in its slot."""
        numbers, new = list[int | None](), False
        for tensor in results:
            number = None
            if has_storage(tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in given:
                    number = self._new_slot(segment, storage)
                elif (there := self._known.get(id(storage))) is not None and there[0] is segment:
                    number = there[1]
            # a lazy conjugate is not described by its geometry
            if number is not None and not is_plain(tensor):
                number = None
            # a replay finds values by storage and dtype, so a view with another dtype needs its operator
            if number is not None and tensor.dtype not in segment.slots[number].dtypes:
                segment.slots[number].dtypes.add(tensor.dtype)
                new = True
            numbers.append(number)
        largest = max((segment.slots[n].n_bytes for n in numbers if n is not None), default=0)
        for n in numbers:
            if n is not None and segment.slots[n].n_bytes * SMALL <= largest:
                segment.slots[n].small = True
        return numbers, new

    def _new_slot(self, segment: Segment, storage: torch.UntypedStorage) -> int:
        # the address may be reused when the storage is freed, so its entries are removed then
        key, known, alive = id(storage), self._known, self._alive

        def forget(_: object) -> None:
            known.pop(key, None)
            alive.pop(key, None)

        segment.slots.append(Slot(weakref.ref(storage, forget), storage.nbytes()))
        known[key] = segment, len(segment.slots) - 1
        return len(segment.slots) - 1
