"""Move tensors that autograd saves in a training step to host memory, and back when the backward pass asks for them.

A storage leaves when autograd saves a tensor of it for the first time, once for all of its views; these come back by
dtype, size, stride and offset. Its memory on the device is free when nothing else refers to it: a tensor that a later
operator of the forward pass reads stays until then. Whatever is still on the device when the backward pass asks is used
from there.

    leaving     a storage waits in a queue until its copy has ended; with more than W bytes in the queue, the device
                waits for the oldest copies and lets go of their storages
    returning   the backward pass waits for the storage that it asks for; those saved before it start on their way, up
                to W bytes that nothing has asked for yet

So the bytes on the device follow from the order of operators alone; a slow link costs time. On a CPU copies are made
at once. Exactness depends on these rules:

    writes in place     a tensor keeps the version counter of what left, without its memory: the backward pass fails
                        where autograd would, if the tensor was changed after it was saved
    unseen writes       writes that no counter shows, as to `x.data`, are looked for in the first step, and refused
    other tensors       parameters, buffers, arguments of the step, small, sparse or subclassed tensors stay
    second backward     the copy on the host stays until autograd lets go of the last tensor of the storage
"""

import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_amp._torch import FakeTensor, counter_of, shares_version, tensor_on, unseen, version_of, whole_of
from lightning_amp.errors import ModelError
from lightning_amp.footprint.live_bytes import has_storage, storages_of
from lightning_amp.techniques.offload.copies import Copies
from lightning_amp.techniques.offload.host_pool import Buffer, HostPool

CHANGED = (
    "offload: a tensor was changed in place after the forward pass had saved it for the backward pass, which would fail"
    " without offload too; make the change out of place, as by x = x + 1"
)


DAMAGED = (
    "offload: a tensor came back from the host with other values than it had left with; leave offload out, and report"
    " this error"
)


class Kept:
    """A saved tensor that stays."""

    __slots__ = ("tensor", "version")

    def __init__(self, x: Tensor) -> None:
        # without its node, to which the node's saved tensor would refer
        self.tensor, self.version = x.detach(), version_of(x)


class Left:
    """A storage that was copied to the host.

    Attributes:
        number: Its place in the order of leaving.
        here: Weak reference to the storage on the device, the first or the last that came back.
        back: The storage that came back, while saved tensors of it have not been asked for.
        arrival: Event after its copy to the device; None if there is nothing to wait for.
        ahead: Whether it is on its way back and nothing has asked for it.
        alive, unread: Saved tensors that exist; those of them that were not asked for on this trip.
        trip: How often it came back.
        parts: Types and geometries of its saved tensors.
        ended: Whether its buffer was given back.
        digest: Type, geometry and digest of its first saved tensor, in the first step.
    """

    def __init__(self, moves: "Moves", step: list["weakref.ref[Left]"], x: Tensor, buffer: Buffer) -> None:
        storage = x.untyped_storage()
        self.moves, self.step, self.number = moves, step, len(step)
        self.n_bytes, self.device, self.buffer = storage.nbytes(), x.device, buffer
        self.here: weakref.ref[Any] = weakref.ref(storage)
        self.watched = Version(x)
        self.parts = set[tuple[torch.dtype, Any]]()
        self.back: Any = None
        self.arrival: Any = None
        self.digest: tuple[torch.dtype, Any, Tensor] | None = None
        self.ahead = self.ended = False
        self.alive = self.unread = self.trip = 0

    def on_device(self) -> Any:
        """Return the storage if it is on the device."""
        storage = self.here()
        # `fully_shard` empties storages that others refer to
        return storage if storage is not None and storage.nbytes() == self.n_bytes else None


class Version:
    """Version counter of a tensor, without its memory."""

    __slots__ = ("counter", "saved")

    def __init__(self, x: Tensor) -> None:
        self.counter, self.saved = counter_of(x), version_of(x)

    @property
    def changed(self) -> bool:
        """Whether the tensor was written to since."""
        return version_of(self.counter) != self.saved


class Handle:
    """What autograd keeps in place of a tensor that left."""

    __slots__ = ("dtype", "geometry", "left", "read", "version")

    def __init__(self, left: Left, x: Tensor) -> None:
        self.left, self.read = left, -1
        left.alive += 1
        left.unread += 1
        self.dtype, self.version = x.dtype, Version(x)
        self.geometry = _geometry(x)
        left.parts.add((self.dtype, self.geometry))

    def is_read(self) -> None:
        """Note that the tensor was asked for; the last one of its storage ends the storage's stay."""
        left = self.left
        left.unread -= self.read != left.trip
        self.read = left.trip
        if not left.unread:
            left.moves.drop(left)

    def __del__(self) -> None:
        # during any statement, so that the pool takes the buffer later
        left = self.left
        left.alive -= 1
        self.is_read()
        if not left.alive:
            left.moves.gone.append(left)


class Moves:
    """The storages of a module's training steps that are on the host.

    Attributes:
        pool: Host memory.
        sizes: Bytes of the storages that left in the last step, in this order.
        came_bytes: Bytes that came back since it began.
        gone: Storages of which no saved tensor exists.

    Args:
        least_bytes: Smaller storages stay.
        most: Number of storages of a step that leave, the first that are saved; None for all.
        window: W, bytes.
        limit: Most bytes of host memory; None for no limit.
    """

    def __init__(self, *, least_bytes: int, most: int | None, window: int, limit: int | None) -> None:
        self.pool = HostPool(limit)
        self.sizes = list[int]()
        self.came_bytes = 0
        self.gone = deque[Left]()
        self._least, self._most, self._window = least_bytes, most, window
        self._copies = Copies()
        self._stays: set[int] = set()
        self._known: dict[int, Left] = {}
        self._step = list[weakref.ref[Left]]()
        # storages whose copy may not have ended, oldest first
        self._queue: OrderedDict[Left, Any] = OrderedDict()
        self._queued = self._ahead = 0
        # in the first step what comes back is compared with what has left, when the second step begins
        self._compares = True
        self._digests = list[tuple[Tensor, Tensor]]()

    @contextmanager
    def step(self, held: Iterable[Tensor]) -> Iterator[None]:
        """Context manager for a training step; storages of the tensors `held` stay."""
        self._settle()
        for left in [*self._queue]:
            self._let_go(left)
        digests, self._digests = self._digests, []
        if digests:
            self._compares = False
            if not self._copies.same(digests):
                raise ModelError(DAMAGED)
        self._stays = {id(storage) for _, storage in storages_of(held)}
        self._known, self._step, self.sizes, self.came_bytes = {}, [], [], 0
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._stays, self._known = set(), {}

    def left_of(self, x: Tensor) -> Left | None:
        """Return the entry of a tensor's storage if it was copied in this step."""
        return self._known.get(id(x.untyped_storage())) if has_storage(x) else None

    def differs(self, left: Left) -> bool:
        """Whether a storage on the device has other values than its copy, where tensors of it were saved."""
        storage, memory = left.on_device(), left.buffer.memory
        if storage is None or memory is None or not left.alive:
            return False
        with unseen(), torch.no_grad():
            self._copies.finish(left.device)
            copy = memory.untyped_storage()
            pairs = [(tensor_on(storage, *part, left.device), tensor_on(copy, *part, memory.device)) for part in left.parts]
            # bit by bit: NaN is equal to itself
            return not all(torch.equal(_bits(here), _bits(there.to(left.device))) for here, there in pairs)

    def _pack(self, x: Tensor) -> Handle | Kept:
        self._settle()
        with torch.no_grad():
            left = self._sent(x)
            return Kept(x) if left is None else Handle(left, x)

    def _sent(self, x: Tensor) -> Left | None:
        """Return the entry of a tensor's storage, which is copied unless it was before; None if the tensor stays."""
        if not _may_leave(x):
            return None
        storage = x.untyped_storage()
        key, n_bytes = id(storage), storage.nbytes()
        if n_bytes < self._least or not n_bytes or key in self._stays:
            return None
        left = self._known.get(key)
        if left is not None and left.alive and not left.ended and left.here() is storage:
            if not shares_version(left.watched.counter, x):
                # parts of a storage with counters of their own, as of `unsafe_chunk`: the other part was copied
                # before this one was written
                return None
            if not left.watched.changed:
                return left
        if self._most is not None and len(self._step) >= self._most:
            return None
        real = not isinstance(x, FakeTensor)
        buffer = self.pool.take(n_bytes, real=real, pinned=x.device.type == "cuda")
        left = Left(self, self._step, x, buffer)
        self._step.append(weakref.ref(left))
        self.sizes.append(n_bytes)
        done = self._copies.out(x, buffer) if real else None
        if real and self._compares and x.is_contiguous():
            # not of the whole storage, of which other parts may be written while it is copied
            left.digest = x.dtype, _geometry(x), self._copies.digest(x)
        known = self._known

        def forget(_: object) -> None:
            known.pop(key, None)

        # the key may be another storage's when this one is freed
        left.here, known[key] = weakref.ref(storage, forget), left
        self._queue[left] = storage, done
        self._queued += n_bytes
        while self._queued > self._window:
            self._let_go(next(iter(self._queue)))
        return left

    def _let_go(self, left: Left) -> None:
        """Let the device wait for the copy of a storage to the host, and drop the storage."""
        _, done = self._queue[left]
        if done is not None:
            self._copies.wait(done, left.device)
        del self._queue[left]
        self._queued -= left.n_bytes

    def _unpack(self, kept: Handle | Kept) -> Tensor:
        if isinstance(kept, Kept):
            if version_of(kept.tensor) != kept.version:
                raise ModelError(CHANGED)
            return kept.tensor
        if kept.version.changed:
            raise ModelError(CHANGED)
        self._settle()
        left = kept.left
        with torch.no_grad():
            storage = left.on_device()
            if storage is None:
                storage = self._bring(left)
            self._arrive(left)
            found = tensor_on(storage, kept.dtype, kept.geometry, left.device)
            # a storage that has not left may have been written since
            if left.trip and left.digest is not None and left.digest[:2] == (kept.dtype, kept.geometry):
                self._digests.append((left.digest[2], self._copies.digest(found)))
                left.digest = None
            kept.is_read()
            if not left.unread and left in self._queue:
                self._let_go(left)
            self._look_ahead(left)
        return found

    def drop(self, left: Left) -> None:
        """Drop a storage that came back; nothing will ask for it, or those who asked have it."""
        self._arrive(left)
        left.back = None

    def _arrive(self, left: Left) -> None:
        """Let the device wait for the copy of a storage that is on its way back."""
        if left.ahead:
            left.ahead = False
            self._ahead -= left.n_bytes
        if left.arrival is not None:
            self._copies.wait(left.arrival, left.device)
            left.arrival = None

    def _bring(self, left: Left) -> Any:
        """Start the copy of a storage to the device, and return it."""
        whole = torch.empty(left.n_bytes, dtype=torch.uint8, device=left.device)
        if left.buffer.memory is not None:
            left.arrival = self._copies.back(left.buffer, whole)
        storage = whole.untyped_storage()
        left.here, left.back = weakref.ref(storage), storage
        left.trip += 1
        left.unread = left.alive
        self.came_bytes += left.n_bytes
        return storage

    def _look_ahead(self, left: Left) -> None:
        """Start the copies of storages that left before this one, up to W bytes."""
        for number in range(left.number - 1, -1, -1):
            other = left.step[number]()
            if other is None or not other.alive or other.on_device() is not None:
                continue
            if self._ahead + other.n_bytes > self._window:
                return
            other.ahead = True
            self._ahead += other.n_bytes
            self._bring(other)

    def _settle(self) -> None:
        """Give the buffers of storages back of which no saved tensor exists."""
        while self.gone:
            left = self.gone.popleft()
            # another tensor of it may have been saved since
            if left.alive or left.ended:
                continue
            left.ended = True
            if left in self._queue:
                self._let_go(left)
            self.pool.give(left.buffer)


def _geometry(x: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return the offset, size and strides of a tensor on its storage, as `set_` takes them."""
    return int(x.storage_offset()), tuple(x.shape), tuple(x.stride())


def _bits(x: Tensor) -> Tensor:
    """Return the bytes of a tensor's elements."""
    return x.contiguous().flatten().view(torch.uint8)


def _may_leave(x: Tensor) -> bool:
    """Whether a tensor is described by its storage, dtype, size, stride and offset, and is no parameter."""
    plain = has_storage(x) and not x.is_conj() and not x.is_neg() and not x._is_zerotensor()
    # parameters that `fully_shard` gathers are made anew in every step
    return plain and not isinstance(whole_of(x), torch.nn.Parameter) and not x.is_inference()
