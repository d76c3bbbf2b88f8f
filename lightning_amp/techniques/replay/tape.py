"""Record the operators of a training step in segments, and replay a segment when the backward pass needs its tensors.

A dispatch mode sees the operators below autograd and autocast. In a segment that is replayed autograd keeps a handle
in place of every tensor that the segment has made, and the tape keeps the operators, with

    tensors of the segment     by the number of their storage, with shape, strides and offset
    all other tensors          as they are: what earlier segments made, parameters, the batch

When the first handle is asked for, the operators that lead to tensors with handles run again. Nothing is known of
modules, so a step may compute in any way: by functions, by layers of a list, by branches. Where a segment ends changes
what is held, and no result.

Exactness rests on these rules:

    random numbers              the generator's state is kept with every operator that draws, and put back
    writes inside a segment     are replayed in their order; the backward pass finds the last values, or fails, as it
                                does without the tape: autograd's version counters are compared
    writes to other tensors     are not replayed: what tapes hold of the old values is copied before the write
    collectives, operators of   run once; what they return counts as made outside of the segment
    higher order, subclasses
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_amp._torch import (
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    autograd_node,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from lightning_amp.dist._torch import (
    AUTOGRAD_AND_AUTOCAST,
    excluded_keys,
    force_dispatch_keys,
    included_keys,
)
from lightning_amp.errors import ModelError

PLAIN = (Tensor, nn.Parameter, FakeTensor)
COLLECTIVES = ("c10d", "_c10d_functional")
UNDECLARED = ("running_mean", "running_var")
"""Arguments that batch norms write to, which their schemas do not say."""
CHANGED = (
    "a tensor was changed in place after the forward pass had saved it for the backward pass: without replay the step"
    " would fail, or train on the new values; make the change out of place, as by x = x + 1"
)
Geometry = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]
"""Type, shape, strides and offset of a tensor in its storage."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of the segment: the number of its storage, and how it lies in it."""

    slot: int
    geometry: Geometry


@dataclass(eq=False, slots=True, weakref_slot=True)
class Outside:
    """A tensor that the segment reads and has not made; `copied` after a write to it, when it has the old values."""

    tensor: Tensor
    copied: bool = False


@dataclass(eq=False, slots=True)
class Operator:
    """One operator of a tape.

    Attributes:
        at: Its place among all operators of the step.
        leaves, spec: Its arguments, flat; tensors are of type Ref or Outside.
        draws: Generators that it draws from, with their states.
        results: The storage of each result that the segment has made, None for others.
        reads, writes, makes: Numbers of storages.
    """

    func: Any
    at: int
    leaves: list[Any]
    spec: Any
    draws: list[tuple[torch.Generator, Tensor]]
    results: list[int | None]
    reads: frozenset[int]
    writes: frozenset[int]
    makes: frozenset[int]


@dataclass(eq=False, slots=True)
class Slot:
    """A storage that a segment has made.

    Attributes:
        storage: The storage, as long as it is alive.
        n_bytes: Its size.
        written: Whether an operator after the one that made it has written to it.
        version: The largest of autograd's version counters that a write has left.
        dtypes: Types of the tensors that operators of the tape return of it.
    """

    storage: "weakref.ref[torch.UntypedStorage]"
    n_bytes: int
    written: bool = False
    version: int = 0
    dtypes: set[torch.dtype] = field(default_factory=set)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Handle:
    """What autograd keeps in place of a tensor.

    Attributes:
        after: Operators of the tape when it was saved.
        version: Of the tensor, by autograd's counter.
        value: The tensor, once its segment was replayed or a later one has written to its storage.
    """

    segment: "Segment"
    ref: Ref
    after: int
    version: int
    value: Tensor | None = None


@dataclass(eq=False, slots=True)
class Kept:
    """What autograd keeps in place of any other tensor."""

    tensor: Tensor
    version: int


class Segment:
    """The operators of a stretch of the step."""

    def __init__(self, alive: "dict[int, list[weakref.ref[Outside]]]") -> None:
        self.operators: list[Operator] = []
        self.slots: list[Slot] = []
        self.handles: list[weakref.ref[Handle]] = []
        self.outside: dict[Any, Outside] = {}
        self.replayed = False
        self._alive = alive

    def value(self, handle: Handle) -> Tensor:
        """The tensor of a handle; the first call replays the segment."""
        if self.slots[handle.ref.slot].version > handle.version:
            raise ModelError(CHANGED)
        if handle.value is None:
            self._replay()
        assert handle.value is not None, "a replay gives a value to every handle"
        return handle.value

    def keep(self, number: int, alias: Tensor) -> None:
        """Give handles of a storage their values, before something that is not in the tape writes to it."""
        self.slots[number].written = True
        for ref in self.handles:
            handle = ref()
            if handle is not None and handle.ref.slot == number and handle.value is None:
                dtype, shape, strides, offset = handle.ref.geometry
                if dtype != alias.dtype:
                    raise ModelError(CHANGED)
                handle.value = alias.as_strided(shape, strides, offset)

    def _replay(self) -> None:
        handles = [handle for ref in self.handles if (handle := ref()) is not None and handle.value is None]
        values: dict[tuple[int, torch.dtype], Tensor] = {}
        needed = self._needed({handle.ref.slot for handle in handles}, values)
        keep = {handle.ref.slot for handle in handles}
        last = {slot: i for i, operator in enumerate(needed) for slot in operator.reads | operator.makes}
        ends: dict[int, list[int]] = {}
        for slot, i in last.items():
            if slot not in keep:
                ends.setdefault(i, []).append(slot)
        with torch.no_grad(), force_dispatch_keys(included_keys(), excluded_keys() | AUTOGRAD_AND_AUTOCAST):
            for i, operator in enumerate(needed):
                self._run(operator, values)
                for slot in ends.get(i, ()):
                    for dtype in self.slots[slot].dtypes:
                        values.pop((slot, dtype), None)
            for handle in handles:
                handle.value = _tensor(handle.ref, values)
        # what is left of it are the values of handles
        self.operators, self.outside, self.handles, self.replayed = [], {}, [], True

    def _needed(self, slots: set[int], values: dict[tuple[int, torch.dtype], Tensor]) -> list[Operator]:
        """The operators that lead to storages; of those that are alive as they were, `values` gets the tensors."""
        needed, wanted = list[Operator](), set[int]()

        def want(slot: int) -> None:
            if slot not in wanted:
                wanted.add(slot)
                for tensor in self._still_there(self.slots[slot]):
                    values[slot, tensor.dtype] = tensor

        for slot in slots:
            want(slot)
        for operator in reversed(self.operators):
            made = {slot for slot in operator.makes | operator.writes if slot in wanted}
            if any((slot, dtype) not in values for slot in made for dtype in self.slots[slot].dtypes):
                needed.append(operator)
                for slot in operator.reads:
                    want(slot)
        return needed[::-1]

    def _still_there(self, slot: Slot) -> Iterator[Tensor]:
        """Tensors in a storage that others keep, if nobody has written to it."""
        storage = slot.storage()
        if storage is not None and not slot.written:
            for ref in self._alive.get(id(storage), ()):
                one = ref()
                if one is not None and not one.copied and _is_plain(one.tensor):
                    yield one.tensor

    def _run(self, operator: Operator, values: dict[tuple[int, torch.dtype], Tensor]) -> None:
        leaves = [
            _tensor(leaf, values) if type(leaf) is Ref else leaf.tensor if type(leaf) is Outside else leaf
            for leaf in operator.leaves
        ]
        args, kwargs = tree_unflatten(leaves, operator.spec)
        with _drawing(operator.draws):
            found = operator.func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        for tensor, slot in zip(results, operator.results, strict=True):
            if slot is not None:
                values.setdefault((slot, tensor.dtype), tensor)


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records a training step in segments; `hooks` are what autograd saves its tensors by.

    Args:
        ends: Places among the operators of the step at which segments end, and whether the segment is replayed; what
            comes after the last of them is kept.
    """

    supports_higher_order_operators = True

    def __init__(self, ends: Sequence[tuple[int, bool]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ends = list(ends)
        self.at = 0
        self._known: dict[int, tuple[Segment, int]] = {}
        self._alive: dict[int, list[weakref.ref[Outside]]] = {}
        self._just_written: list[tuple[Slot, Tensor]] = []
        self.segment: Segment | None = None
        self._begin()

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """What the forward pass has to run in, with the mode itself."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _begin(self) -> None:
        again = bool(self._ends) and self._ends[0][1]
        self.segment = Segment(self._alive) if again else None

    def _pack(self, x: Tensor) -> Any:
        self._note_versions()
        segment = self.segment
        ref = None if segment is None or segment.replayed else self._ref(x)
        if segment is None or ref is None:
            return Kept(x, _version(x))
        handle = Handle(segment, ref, len(segment.operators), _version(x))
        segment.handles.append(weakref.ref(handle))
        return handle

    def _note_versions(self) -> None:
        """Read the counters of what the last operator has written, which autograd counts up when it has returned."""
        for slot, tensor in self._just_written:
            slot.version = max(slot.version, _version(tensor))
        self._just_written.clear()

    def _ref(self, x: Tensor) -> Ref | None:
        """A tensor of this segment, None of any other."""
        if not _is_plain(x):
            return None
        found = self._known.get(id(x.untyped_storage()))
        if found is None or found[0] is not self.segment or x.dtype not in found[0].slots[found[1]].dtypes:
            return None
        return Ref(found[1], (x.dtype, tuple(x.shape), x.stride(), int(x.storage_offset())))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator of the forward pass, and record it."""
        kwargs = kwargs or {}
        if autograd_node() is not None or func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        self._note_versions()
        while self._ends and self.at >= self._ends[0][0]:
            self._ends.pop(0)
            self._begin()
        if self.segment is not None and self.segment.replayed:
            # a backward pass inside of the step
            self.segment = Segment(self._alive)
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        written = _written(func, args, kwargs, tensors)
        whole = (
            isinstance(func, OpOverload)
            and func.namespace not in COLLECTIVES
            and all(type(t) in PLAIN and t.layout is torch.strided for t in tensors)
        )
        given = {id(t.untyped_storage()) for t in tensors if type(t) in PLAIN and t.layout is torch.strided}
        segment = self.segment
        if segment is not None and not whole and any(self._ref(t) is not None for t in written):
            # what it writes is kept from here on
            segment = self.segment = Segment(self._alive)
        refs = (
            []
            if segment is None
            else [self._leaf(segment, leaf, written) for leaf in leaves]
            if whole
            else []
        )
        own = {leaf.slot for leaf in refs if type(leaf) is Ref}
        self._before_write(t for t in written if whole is False or segment is None or self._ref(t) is None)
        draws = _draws(func, kwargs, tensors) if segment is not None and whole else []
        found = func(*args, **kwargs)
        self.at += 1
        if segment is not None and whole:
            results = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
            self._record(segment, func, refs, spec, draws, results, given, own, written)
        return found

    def _leaf(self, segment: Segment, leaf: Any, written: Sequence[Tensor]) -> Any:
        """What a tape keeps of an argument."""
        if not isinstance(leaf, Tensor):
            return leaf
        ref = self._ref(leaf)
        if ref is not None:
            return ref
        if any(leaf is t for t in written):
            # the replay must not write to it
            return Outside(_copied(leaf.detach()), copied=True)
        key = (
            id(leaf.untyped_storage()),
            _version(leaf),
            leaf.dtype,
            leaf.shape,
            leaf.stride(),
            leaf.storage_offset(),
            leaf.is_conj(),
            leaf.is_neg(),
        )
        if key not in segment.outside:
            one = segment.outside[key] = Outside(leaf.detach())
            self._alive.setdefault(key[0], []).append(weakref.ref(one))
        return segment.outside[key]

    def _before_write(self, tensors: Iterable[Tensor]) -> None:
        """Copy what tapes hold of tensors that are about to be written."""
        for tensor in tensors:
            if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
                continue
            key = id(tensor.untyped_storage())
            for ref in self._alive.pop(key, ()):
                one = ref()
                if one is not None:
                    one.tensor, one.copied = _copied(one.tensor), True
            if key in self._known:
                segment, number = self._known[key]
                segment.keep(number, tensor.detach())
                self._just_written.append((segment.slots[number], tensor))

    def _record(
        self,
        segment: Segment,
        func: Any,
        refs: list[Any],
        spec: Any,
        draws: list[tuple[torch.Generator, Tensor]],
        results: Sequence[Tensor],
        given: set[int],
        own: set[int],
        written: Sequence[Tensor],
    ) -> None:
        numbers, new = list[int | None](), False
        for tensor in results:
            numbers.append(None)
            if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            key = id(storage)
            if key not in given:
                slot = self._new_slot(segment, storage)
            elif (there := self._known.get(key)) is not None and there[0] is segment:
                slot = there[1]
            else:
                continue
            numbers[-1] = slot
            if tensor.is_conj() or tensor.is_neg():
                numbers[-1] = None
                continue
            new |= tensor.dtype not in segment.slots[slot].dtypes
            segment.slots[slot].dtypes.add(tensor.dtype)
        own_writes = [(ref.slot, t) for t in written if (ref := self._ref(t)) is not None]
        writes = frozenset(slot for slot, _ in own_writes)
        for slot in writes:
            segment.slots[slot].written = True
        self._just_written += [(segment.slots[slot], t) for slot, t in own_writes]
        if new or writes:
            made = frozenset(slot for slot in numbers if slot is not None)
            segment.operators.append(
                Operator(func, self.at - 1, refs, spec, draws, numbers, frozenset(own), writes, made)
            )

    def _new_slot(self, segment: Segment, storage: torch.UntypedStorage) -> int:
        key, known, alive = id(storage), self._known, self._alive

        def forget(_: object) -> None:
            known.pop(key, None)
            alive.pop(key, None)

        segment.slots.append(Slot(weakref.ref(storage, forget), storage.nbytes()))
        known[key] = segment, len(segment.slots) - 1
        return len(segment.slots) - 1


def _unpack(kept: Handle | Kept) -> Tensor:
    if isinstance(kept, Handle):
        return kept.segment.value(kept)
    if _version(kept.tensor) != kept.version:
        raise ModelError(CHANGED)
    return kept.tensor


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor is given by its place in a storage."""
    return type(x) in PLAIN and x.layout is torch.strided and not x.is_conj() and not x.is_neg()


def _version(x: Tensor) -> int:
    """Autograd's count of writes to a tensor; inference tensors have none."""
    return 0 if x.is_inference() else x._version


def _tensor(ref: Ref, values: dict[tuple[int, torch.dtype], Tensor]) -> Tensor:
    dtype, shape, strides, offset = ref.geometry
    base = values[ref.slot, dtype]
    if tuple(base.shape) == shape and base.stride() == strides and base.storage_offset() == offset:
        return base
    return base.as_strided(shape, strides, offset)


def _written(func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> list[Tensor]:
    """The tensors that an operator writes to."""
    if not isinstance(func, OpOverload):
        return []
    if func.namespace in COLLECTIVES:
        # their schemas do not say
        return tensors
    found = list[Tensor]()
    for i, argument in enumerate(func._schema.arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or argument.name in UNDECLARED:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


def _copied(x: Tensor) -> Tensor:
    """A copy that lies in memory as the tensor does."""
    copy = x.clone()
    if copy.stride() == x.stride():
        return copy
    n = x.untyped_storage().nbytes() // x.element_size()
    return x.as_strided((n,), (1,), 0).clone().as_strided(x.shape, x.stride(), x.storage_offset())


def _draws(func: Any, kwargs: Any, tensors: Sequence[Tensor]) -> list[tuple[torch.Generator, Tensor]]:
    """The generators that an operator may draw from, with their states."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return []
    if (given := kwargs.get("generator")) is not None:
        return [(given, given.get_state())]
    found = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # the operator may make its tensor on a device that no argument is on
        found += torch.cuda.default_generators
    return [(generator, generator.get_state()) for generator in found]


@contextmanager
def _drawing(draws: Sequence[tuple[torch.Generator, Tensor]]) -> Iterator[None]:
    """Let generators draw what they drew, and go on as if they had not."""
    now = [generator.get_state() for generator, _ in draws]
    for generator, state in draws:
        generator.set_state(state)
    try:
        yield
    finally:
        for (generator, _), state in zip(draws, now, strict=True):
            generator.set_state(state)
