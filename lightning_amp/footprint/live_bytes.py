"""Count the exact bytes of live tensors on any device, storage by storage.

A storage that an operator returned and did not receive is new and counts until it dies, however many tensors view it.
Views, in-place operators and `out=` into an existing storage are free. Backward passes are seen too,
`torch.autograd.grad` inside another forward and recomputation included. Only weak references are kept. Fake and meta
tensors count as if they were real: what a kernel of a CPU leaves in larger memory than its result needs (RESIZED) is
given to those without values too.

Known limits: what an allocator adds, and scratch memory that a kernel takes and returns inside one operator, but for
the largest: CUDA's backward pass of a softmax.

`UntypedStorage.resize_` is no operator, and torch's `fully_shard` frees and makes gathered parameters by it; while a
mode is active it tells of every call.
"""

import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from lightning_amp._torch import SOFTMAX_BACKWARD, FakeTensor, TorchDispatchMode, parts_of
from lightning_amp.data.batch import dense_parts, tensors_in
from lightning_amp.footprint.target_device import launches_operators

RESIZED = ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
"""Losses whose sum or mean is, on a CPU, a number in the memory of all losses."""
_RESIZED = {getattr(torch.ops.aten, name).default for name in RESIZED}
MADE_OUTSIDE = (torch.ops.aten.lift_fresh.default,)
"""Operators that hand in a storage which was made without an operator, as `torch.tensor` does."""
COLLECTIVES = ("c10d", "_c10d_functional")
"""Namespaces of operators that communicate."""
PLAIN = (Tensor, nn.Parameter, FakeTensor)
Read = Sequence[tuple[Tensor, torch.UntypedStorage]]
_DEVICE_OF = torch.ops.prim.device.default
"""`tensor.device` of a fake tensor: a question, and no operator."""


class _Ref(weakref.ref[torch.UntypedStorage]):
    """A reference to a storage, with the key that it counts by."""

    __slots__ = ("key",)
    key: int


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, while active, the bytes of every storage created and still alive.

    Storages that were there before are free unless they are given to `watch`. A storage counted once is
    counted down when it dies, also while the mode is not active. Other threads than the one that entered the
    mode are seen only where torch carries modes over to them, as its autograd engine does.

    Args:
        device_type: Of the memory whose bytes count, as "cuda"; None counts all.
    """

    def __init__(self, *, device_type: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        # A storage can die in the middle of any statement here, so its bytes wait in line to be subtracted.
        self._freed: deque[int] = deque()
        self._current = 0
        self._peak = 0
        self._finds_shapes = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch calls it by way of its compiler, which takes longer than most operators do here."""
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
        """Begin to count."""
        _ACTIVE.append(self)
        # the class has it from a base that cannot be changed
        torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign, assignment]
        return cast(Self, super().__enter__())  # type: ignore[no-untyped-call]

    def __exit__(self, *args: Any) -> None:
        """End it."""
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        _ACTIVE.remove(self)
        if not _ACTIVE:
            del torch.UntypedStorage.resize_

    def reset_peak(self) -> None:
        """Let the peak start again from the bytes alive now."""
        self._peak = self.current

    def watch(self, values: Any) -> None:
        """Count tensors that already exist, in any nesting of the containers of a batch, from now on."""
        self._count(tensors_in(values))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF:
            # autograd asks a fake tensor for its device more often than it computes
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        return self.dispatched(func, types, args, kwargs or {})

    def dispatched(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, and count what it has made."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # A wrapper such as DTensor owns no storage: let it split up, and see the operators on its parts.
            parts = (tensor for tensor, _ in storages_of(tensors_of((args, kwargs))))
            finds_shapes = not any(isinstance(part, FakeTensor) for part in parts)
            for mode in _ACTIVE:
                # torch asks the innermost mode alone about a wrapper
                mode._finds_shapes = finds_shapes
            return NotImplemented
        read = list(storages_of(tensors_of((args, kwargs))))
        self.begins(func, args, read)
        result = func(*args, **kwargs)
        if func in _RESIZED and isinstance(result, FakeTensor) and result.device.type == "cpu":
            # a sum of losses gets the memory of all of them
            n_losses = torch.broadcast_shapes(*(tensor.shape for tensor in tensors_of(args))).numel()  # type: ignore[no-untyped-call]
            storage, n_bytes = result.untyped_storage(), n_losses * result.element_size()
            if storage.nbytes() < n_bytes:
                super(torch.UntypedStorage, storage).resize_(n_bytes)
        if self._finds_shapes:
            given = (tensor for tensor, _ in read)
            self._finds_shapes = any(isinstance(t, FakeTensor) for t in (*given, *tensors_of(result)))
        if not self._finds_shapes:
            # else DTensor runs an operator on fake tensors first, to know the shape of the whole: no memory
            self.made(func, result, () if func in MADE_OUTSIDE else {id(storage) for _, storage in read})
        self.ends(func, args, kwargs, read, result)
        return result

    def made(self, func: Any, result: Any, given: Collection[int] = ()) -> None:
        """Count what an operator has made; `given` are ids of the storages that it has got."""
        self._count(tensors_of(result), given)
        if func in SOFTMAX_BACKWARD and launches_operators(result):
            # CUDA's kernel first multiplies gradient and result (torch's SoftMax.cu, `softmax_backward_cuda_out`): one
            # more tensor, dropped at once, so that it counts for the moment of the operator
            self._count([torch.empty_like(result)])

    def begins(self, func: Any, args: Any, read: Read) -> None:
        """An operator is about to run; `read` are its tensors and their storages."""

    def ends(self, func: Any, args: Any, kwargs: Any, read: Read, result: Any) -> None:
        """It has run, and its results are counted."""

    def resized(self, storage: torch.UntypedStorage, *, was_empty: bool) -> None:
        """A storage has another size now; one that was there before and was empty counts from now on."""
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
                # the operator has resized it, as it may an `out=` argument
                if n_bytes != self._alive[key][1]:
                    self._change(key, n_bytes)
            elif key not in given:
                self._alive[key] = (self._refer(storage, key), n_bytes)
                self._born(key, n_bytes, tensor)
                self._current += n_bytes
        self._peak = max(self._peak, self.current)

    def _refer(self, storage: torch.UntypedStorage, key: int) -> _Ref:
        # torch gives a storage one Python object for as long as it lives, so that its id is a key and its end is the
        # memory's
        ref = _Ref(storage, self._forget)
        ref.key = key
        return ref

    def _forget(self, ref: Any) -> None:
        # this runs before the address can be used again, so no later storage is taken for this one
        self._freed.append(self._alive.pop(ref.key)[1])
        self._died(ref.key)

    def _born(self, key: int, n_bytes: int, tensor: Tensor | None) -> None:
        """A storage counts from now on; `tensor` is the first that was seen of it, None where none was."""

    def _resized(self, key: int, n_bytes: int) -> None:
        """A storage that counts has another size now; its bytes are not among those alive while this is told."""

    def _died(self, key: int) -> None:
        """A storage counts no longer; called in the middle of any statement."""


_ACTIVE: list[LiveBytes] = []


def _resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    """`UntypedStorage.resize_`, reported to the active modes."""
    was_empty = storage.nbytes() == 0
    super(torch.UntypedStorage, storage).resize_(size)
    for mode in _ACTIVE:
        mode.resized(storage, was_empty=was_empty)
    return storage


def tensors_of(values: Any, found: list[Tensor] | None = None) -> list[Tensor]:
    """The tensors among the arguments of an operator, in any nesting of lists, tuples and dicts; added to `found`."""
    found = [] if found is None else found
    if isinstance(values, Tensor):
        found.append(values)
    elif isinstance(values, list | tuple | dict):
        for value in values.values() if isinstance(values, dict) else values:
            tensors_of(value, found)
    return found


def has_storage(tensor: Tensor) -> bool:
    """Whether a tensor lies in a storage that is its own: it is no wrapper, and not sparse."""
    return type(tensor) in PLAIN and tensor.layout is torch.strided


def storages_of(tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, torch.UntypedStorage]]:
    """Every storage, with a tensor that lies in it."""
    for tensor in tensors:
        if has_storage(tensor):
            yield tensor, tensor.untyped_storage()
        elif hasattr(tensor, "__tensor_flatten__"):
            # a wrapper: its storage has a size and no memory
            yield from storages_of(parts_of(tensor))
        else:
            yield from ((part, part.untyped_storage()) for part in dense_parts(tensor))
