"""Count the exact bytes of live tensors on any device, storage by storage.

A storage is new if an operator returned it and did not receive it. It counts until it is released, once for all its
views. Views, in-place operators and `out=` into an existing storage are free. Backward passes are counted too, also
those of `torch.autograd.grad` inside a forward pass and of recomputation. Only weak references are kept. Fake and meta
tensors count as if they were real. Some CPU kernels leave their result in more memory than it needs (RESIZED); fake
results of these operators get the same memory.

Known limits: overhead of the allocator is not counted, nor is scratch memory that a kernel allocates and frees, except
for the largest: CUDA's backward pass of a softmax.

`UntypedStorage.resize_` is not an operator, but torch's `fully_shard` allocates and frees gathered parameters with it.
It is patched while a mode is active, so that its calls are counted.
"""

import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from lightning_amp._torch import SOFTMAX_BACKWARD, FakeTensor, TorchDispatchMode, fake_like, parts_of, unseen
from lightning_amp.data.batch import dense_parts, tensors_in
from lightning_amp.footprint.target_device import launches_operators

RESIZED = ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
"""Losses whose CPU kernels return the sum or mean in a storage with the size of all losses."""
_RESIZED = {getattr(torch.ops.aten, name).default for name in RESIZED}
MADE_OUTSIDE = (torch.ops.aten.lift_fresh.default,)
"""Operators that return a storage which no operator made, as in `torch.tensor`."""
COLLECTIVES = ("c10d", "_c10d_functional")
"""Namespaces of operators that communicate."""
PLAIN = (Tensor, nn.Parameter, FakeTensor)
_PLAIN = frozenset(PLAIN)
Read = Sequence[tuple[Tensor, torch.UntypedStorage]]
# of a fake tensor, torch computes the layout in Python
_layout_of = cast(Any, Tensor.layout).__get__
_DEVICE_OF = torch.ops.prim.device.default
"""`tensor.device` of a fake tensor, which is dispatched although it computes nothing."""


class _Ref(weakref.ref[torch.UntypedStorage]):
    """Weak reference to a storage, with the key under which it is counted."""

    __slots__ = ("key",)
    key: int


class RepeatedResult(NamedTuple):
    """A storage that an operator makes which does not run: its first tensor, or that one's layout if none is needed.

    Attributes:
        slot: Its number among those that are made.
    """

    slot: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    n_bytes: int
    tensor: Tensor | None


class Repeated(NamedTuple):
    """An operator on fake tensors that does not run again, for it makes what it has made before.

    Attributes:
        given: Tensors that it reads and that no operator before it makes.
        makes: Storages that it makes.
        frees: Those without a tensor that are freed after it, by their numbers.
    """

    func: Any
    given: Sequence[Tensor] = ()
    makes: Sequence[RepeatedResult] = ()
    frees: Sequence[int] = ()


def named_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator's call by name, in the order of its schema; defaults for those left out."""
    schema = func._schema.arguments
    found = {one.name: one.default_value for one in schema}
    found.update((one.name, value) for one, value in zip(schema, args, strict=False))
    return found | dict(kwargs)


@cache
def places_written(func: Any) -> list[tuple[int, str]]:
    """Return the arguments that an operator writes to. Schemas of batch norm do not declare the running statistics."""
    return [
        (i, argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if argument.name in ("running_mean", "running_var")
        or (argument.alias_info is not None and argument.alias_info.is_write)
    ]


def tensors_written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that a call of an operator writes to."""
    values = (args[i] if i < len(args) else kwargs.get(name) for i, name in places_written(func))
    return tensors_of([*values])


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts the bytes of every storage created while it is active and still alive.

    Earlier storages are not counted unless they are passed to `watch`. A counted storage is subtracted when it is
    released, also while the mode is not active. Operators in other threads are counted only where torch propagates
    modes to them, as its autograd engine does.

    Args:
        device_type: Count only memory of this type of device, such as "cuda"; None counts all.
    """

    counts_repeated = True
    """Whether it counts operators that do not run (`repeated`)."""

    def __init__(self, *, device_type: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        # A storage can be released during any statement, so its bytes are queued to be subtracted.
        self._freed: deque[int] = deque()
        self._current = 0
        self._peak = 0
        self._finds_shapes = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise torch calls the mode through Dynamo, which takes longer than most operators here."""
        return False

    @property
    def current(self) -> int:
        """Bytes alive now."""
        while self._freed:
            self._current -= self._freed.popleft()
        return self._current

    @property
    def peak(self) -> int:
        """Most bytes alive at once since the start or the last `reset_peak`."""
        return self._peak

    def __enter__(self) -> Self:
        """Start counting."""
        _ACTIVE.append(self)
        # set on this class, because `resize_` is inherited from a base class that cannot be changed
        torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign, assignment]
        return cast(Self, super().__enter__())  # type: ignore[no-untyped-call]

    def __exit__(self, *args: Any) -> None:
        """Stop counting."""
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        _ACTIVE.remove(self)
        if not _ACTIVE:
            del torch.UntypedStorage.resize_

    def reset_peak(self) -> None:
        """Reset the peak to the bytes alive now."""
        self._peak = self.current

    def watch(self, values: Any) -> None:
        """Count existing tensors from now on; `values` is any nesting of the containers of a batch."""
        self._count(tensors_in(values))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF:
            # a shortcut, because autograd reads a fake tensor's device more often than it computes
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        return self.dispatched(func, types, args, kwargs or {})

    def dispatched(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, and count its results."""
        if not _PLAIN.issuperset(types) and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # A wrapper such as DTensor owns no storage. It dispatches operators on its shards, which are counted.
            parts = (tensor for tensor, _ in storages_of(tensors_of((args, kwargs))))
            finds_shapes = not any(isinstance(part, FakeTensor) for part in parts)
            for mode in _ACTIVE:
                # torch calls only the innermost mode for a wrapper
                mode._finds_shapes = finds_shapes
            return NotImplemented
        read = list(storages_of(tensors_of((*args, *kwargs.values()) if kwargs else args)))
        self.begins(func, args, read)
        result = func(*args, **kwargs)
        if func in _RESIZED and isinstance(result, FakeTensor) and result.device.type == "cpu":
            # the CPU kernel leaves the sum in the memory of all losses
            n_losses = torch.broadcast_shapes(*(tensor.shape for tensor in tensors_of(args))).numel()  # type: ignore[no-untyped-call]
            storage, n_bytes = result.untyped_storage(), n_losses * result.element_size()
            if storage.nbytes() < n_bytes:
                super(torch.UntypedStorage, storage).resize_(n_bytes)
        if self._finds_shapes:
            given = (tensor for tensor, _ in read)
            self._finds_shapes = any(isinstance(t, FakeTensor) for t in (*given, *tensors_of(result)))
        if not self._finds_shapes:
            # otherwise DTensor runs the operator on fake tensors to compute the global shape, which takes no memory
            self.made(func, result, () if func in MADE_OUTSIDE else {id(storage) for _, storage in read})
        self.ends(func, args, kwargs, read, result)
        return result

    def repeated(self, steps: Iterable[Repeated]) -> None:
        """Count operators as if they ran."""
        n_bytes = dict[int, int]()
        for step in steps:
            self.begins(step.func, (), ())
            for one in step.makes:
                if one.tensor is not None:
                    self._count([one.tensor])
                    continue
                n_bytes[one.slot] = one.n_bytes
                self._current += one.n_bytes
                self._appears(one)
            self._peak = max(self._peak, self.current)
            for slot in step.frees:
                self._current -= n_bytes[slot]
                self._passes(slot)

    def made(self, func: Any, result: Any, given: Collection[int] = ()) -> None:
        """Count an operator's results; `given` has the ids of the storages that it received."""
        self._count(tensors_of(result), given)
        if func in SOFTMAX_BACKWARD and launches_operators(result):
            # CUDA's kernel first multiplies gradient and result (torch's SoftMax.cu, `softmax_backward_cuda_out`). This
            # temporary is released at once, so that it counts only while the operator runs.
            self._count([torch.empty_like(result)])

    def begins(self, func: Any, args: Any, read: Read) -> None:
        """Hook before an operator runs; `read` has its tensors and their storages."""

    def ends(self, func: Any, args: Any, kwargs: Any, read: Read, result: Any) -> None:
        """Hook after an operator has run and its results are counted."""

    def resized(self, storage: torch.UntypedStorage, *, was_empty: bool) -> None:
        """Update the size of a resized storage; one from before the mode counts from now on if it was empty."""
        key = id(storage)
        if key not in self._alive:
            if not was_empty:
                return
            self._alive[key] = (self._refer(storage, key), 0)
            self._born(key, 0, None)
        self._change(key, storage.nbytes())
        self._peak = max(self._peak, self.current)

    def _change(self, key: int, n_bytes: int) -> None:
        ref, before = self._alive[key]
        self._alive[key] = (ref, n_bytes)
        self._current -= before
        self._resized(key, n_bytes)
        self._current += n_bytes

    def _count(self, tensors: Iterable[Tensor], given: Collection[int] = ()) -> None:
        for tensor, storage in storages_of(tensors):
            if self._device_type not in (None, tensor.device.type):
                continue
            key, n_bytes = id(storage), storage.nbytes()
            if key in self._alive:
                # the operator has resized the storage, as operators do with `out=` arguments
                if n_bytes != self._alive[key][1]:
                    self._change(key, n_bytes)
            elif key not in given:
                self._take(key, storage, tensor)
        self._peak = max(self._peak, self.current)

    def alive(self) -> list[tuple[int, torch.UntypedStorage]]:
        """Return the storages that are alive now, with their keys."""
        found = ((key, ref()) for key, (ref, _) in list(self._alive.items()))
        return [(key, storage) for key, storage in found if storage is not None]

    def _take(self, key: int, storage: torch.UntypedStorage, tensor: Tensor | None = None) -> None:
        """Count a storage from now on."""
        n_bytes = storage.nbytes()
        self._alive[key] = (self._refer(storage, key), n_bytes)
        self._born(key, n_bytes, tensor)
        self._current += n_bytes

    def _refer(self, storage: torch.UntypedStorage, key: int) -> _Ref:
        # a storage keeps one Python object while it lives: its id is a unique key, and the object dies with the memory
        ref = _Ref(storage, self._forget)
        ref.key = key
        return ref

    def _forget(self, ref: Any) -> None:
        # this runs before the address is reused, so that a later storage cannot have the same key
        self._freed.append(self._alive.pop(ref.key)[1])
        self._died(ref.key)

    def _born(self, key: int, n_bytes: int, tensor: Tensor | None) -> None:
        """Hook: a storage counts from now on; `tensor` is its first tensor, None if there is none."""

    def _appears(self, result: RepeatedResult) -> None:
        """Hook: a storage of an operator that does not run counts from now on."""

    def _passes(self, slot: int) -> None:
        """Hook: such a storage is freed."""

    def _resized(self, key: int, n_bytes: int) -> None:
        """Hook: a counted storage has another size; its bytes are excluded from `current` during this call."""

    def _died(self, key: int) -> None:
        """Hook: a storage was released; this may run during any statement."""


_ACTIVE: list[LiveBytes] = []
_NO_TENSORS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout))


def _resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    """Replace `UntypedStorage.resize_`, and report the call to the active modes."""
    was_empty = storage.nbytes() == 0
    super(torch.UntypedStorage, storage).resize_(size)
    for mode in _ACTIVE:
        mode.resized(storage, was_empty=was_empty)
    return storage


def tensors_of(values: Any, found: list[Tensor] | None = None) -> list[Tensor]:
    """Return the tensors in an operator's arguments, in nested lists, tuples and dicts; append them to `found`."""
    found = [] if found is None else found
    if isinstance(values, Tensor):
        found.append(values)
    elif isinstance(values, dict):
        for value in values.values():
            tensors_of(value, found)
    elif isinstance(values, (list, tuple)):
        for value in values:
            # tensors, numbers and None are most of the arguments, and need no call
            kind = type(value)
            if kind in PLAIN:
                found.append(value)
            elif kind not in _NO_TENSORS:
                tensors_of(value, found)
    return found


def moved_bytes(read: Read, result: Any) -> int:
    """Return the bytes of the dense tensors that an operator reads and makes."""
    tensors = (*(tensor for tensor, _ in read), *tensors_of(result))
    return sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided)


def has_storage(tensor: Tensor) -> bool:
    """Whether a tensor has its own storage: it is neither a wrapper subclass nor sparse."""
    return type(tensor) in PLAIN and _layout_of(tensor) is torch.strided


def storages_of(tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, torch.UntypedStorage]]:
    """Yield every storage with one of its tensors."""
    for tensor in tensors:
        if has_storage(tensor):
            yield tensor, tensor.untyped_storage()
        elif hasattr(tensor, "__tensor_flatten__"):
            # a wrapper's storage has a size but no memory
            yield from storages_of(parts_of(tensor))
        else:
            yield from ((part, part.untyped_storage()) for part in dense_parts(tensor))


def is_plain(x: Tensor) -> bool:
    """Return whether a tensor is fully described by storage, dtype, shape, strides and offset."""
    # forward-mode AD makes zeros without memory, whose operators see them as other tensors
    return has_storage(x) and not x.is_conj() and not x.is_neg() and not x._is_zerotensor()


def tensor_on(storage: torch.UntypedStorage, dtype: torch.dtype, geometry: Any, device: torch.device) -> Tensor:
    """Return a tensor on a storage; `geometry` has its offset, size and strides, as `set_` takes them."""
    empty = torch.empty(0, dtype=dtype, device=device)
    if not isinstance(empty, FakeTensor):
        return empty.set_(storage, *geometry)
    # fake tensors keep arguments of operators in a cache, which would hold the storage
    with unseen():
        on_meta = torch.empty(0, dtype=dtype, device="meta").set_(storage, *geometry)
        return fake_like(vars(empty), on_meta, device)
