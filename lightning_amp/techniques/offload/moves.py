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
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_amp._torch import FakeTensor, shares_version, unseen, version_of, whole_of
from lightning_amp.errors import ModelError
from lightning_amp.footprint.confirm_count import Shape
from lightning_amp.footprint.live_bytes import has_storage, is_plain, storages_of, tensor_on
from lightning_amp.techniques.host_memory.host_pool import HostPool
from lightning_amp.techniques.offload.copies import Copies
from lightning_amp.techniques.offload.entries import Handle, Kept, Left, Numbered, Watcher, geometry_of

CHANGED = (
    "offload: a tensor was changed in place after the forward pass had saved it for the backward pass, which would fail"
    " without offload too; make the change out of place, as by x = x + 1"
)


DAMAGED = (
    "offload: a tensor came back from the host with other values than it had left with; leave offload out, and report"
    " this error"
)


class Moves:
    """The storages of a module's training steps that are on the host.

    Attributes:
        pool: Host memory.
        candidates: Bytes of the storages of the last step that may leave, by their numbers.
        sizes: Bytes of the storages that left in it, in this order.
        shapes: Shapes of its arguments.
        came_bytes: Bytes that came back since it began.
        gone: Storages of which no saved tensor exists.
        watcher: What is told of the storages in a count.

    Args:
        least_bytes: Smaller storages stay.
        leaves: Numbers of the storages of a step that leave; None for all.
        window: W, bytes.
        limit: Most bytes of host memory; None for no limit.
    """

    def __init__(self, *, least_bytes: int, leaves: Collection[int] | None, window: int, limit: int | None) -> None:
        self.pool = HostPool(limit)
        self.candidates, self.sizes = list[int](), list[int]()
        self.came_bytes, self.shapes = 0, list[Shape]()
        self.gone = deque[Left]()
        self.watcher: Watcher | None = None
        self._least, self._leaves, self._window = least_bytes, leaves, window
        self._copies = Copies()
        self._stays = dict[int, weakref.ref[Any]]()
        self._on_fakes = False
        self._known: dict[int, Numbered] = {}
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
        held = [*held]
        self._on_fakes = any(isinstance(tensor, FakeTensor) for tensor in held)
        self.hold(held)
        self._known, self._step, self.candidates, self.sizes, self.came_bytes = {}, [], [], [], 0
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._stays, self._known = {}, {}

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Let the storages of some tensors stay in this step."""
        self._stays.update((id(storage), weakref.ref(storage)) for _, storage in storages_of(tensors))

    def left_of(self, x: Tensor) -> Left | None:
        """Return the entry of a tensor's storage if it was copied in this step."""
        known = self._known.get(id(x.untyped_storage())) if has_storage(x) else None
        return None if known is None else known.left

    def differs(self, left: Left) -> bool:
        """Whether a storage on the device has other values than its copy, where tensors of it were saved."""
        storage, memory = left.on_device(), left.buffer.memory
        if storage is None or memory is None or not left.alive:
            return False
        with unseen(), torch.no_grad():
            self._copies.finish(left.device)
            copy = memory.untyped_storage()
            pairs = [
                (tensor_on(storage, *part, left.device), tensor_on(copy, *part, memory.device)) for part in left.parts
            ]
            # bit by bit: NaN is equal to itself
            return not all(torch.equal(_bits(here), _bits(there.to(left.device))) for here, there in pairs)

    def _pack(self, x: Tensor) -> Handle | Kept:
        self._settle()
        with torch.no_grad():
            left = self._sent(x)
            return Kept(x) if left is None else Handle(left, x)

    def _sent(self, x: Tensor) -> Left | None:
        """Return the entry of a tensor's storage, which is copied unless it was before; None if the tensor stays."""
        # in a run with values, a fake tensor is a placeholder of a pipeline, which has nothing to copy
        if not _may_leave(x) or (isinstance(x, FakeTensor) and not self._on_fakes):
            return None
        storage = x.untyped_storage()
        key, n_bytes = id(storage), storage.nbytes()
        stays = self._stays.get(key)
        if n_bytes < self._least or not n_bytes or (stays is not None and stays() is storage):
            return None
        known = self._known.get(key)
        if known is not None and known.here() is storage and not shares_version(known.watched.counter, x):
            # parts of a storage with counters of their own, as of `unsafe_chunk`: the other part was copied before
            # this one was written
            return None
        if known is None or known.here() is not storage or known.watched.changed:
            known = self._number(x, key)
        if known.left is not None and known.left.alive and not known.left.ended:
            return known.left
        return self._send(known, x) if self._leaves is None or known.number in self._leaves else None

    def _number(self, x: Tensor, key: int) -> Numbered:
        """Give a storage a number."""
        storage, known = x.untyped_storage(), self._known

        def forget(_: object) -> None:
            known.pop(key, None)

        # the key may be another storage's when this one is freed
        known[key] = found = Numbered(len(self.candidates), x, weakref.ref(storage, forget))
        self.candidates.append(storage.nbytes())
        if self.watcher is not None:
            self.watcher.saves(found.number, storage)
        return found

    def _send(self, known: Numbered, x: Tensor) -> Left:
        """Start the copy of a storage to the host."""
        storage, real = x.untyped_storage(), not isinstance(x, FakeTensor)
        buffer = self.pool.take(storage.nbytes(), real=real, pinned=x.device.type == "cuda")
        known.left = left = Left(self, self._step, known, x, buffer)
        self._step.append(weakref.ref(left))
        self.sizes.append(left.n_bytes)
        if self.watcher is not None:
            self.watcher.leaves(known.number)
        done = self._copies.out(x, buffer) if real else None
        if real and self._compares and x.is_contiguous():
            # not of the whole storage, of which other parts may be written while it is copied
            left.digest = x.dtype, geometry_of(x), self._copies.digest(x)
        self._queue[left] = storage, done
        self._queued += left.n_bytes
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
        if self.watcher is not None:
            self.watcher.comes(left.number, storage)
        return storage

    def _look_ahead(self, left: Left) -> None:
        """Start the copies of storages that left before this one, up to W bytes."""
        for place in range(left.place - 1, -1, -1):
            other = left.step[place]()
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
            if self.watcher is not None:
                self.watcher.stays_no_more(left.number)


def _bits(x: Tensor) -> Tensor:
    """Return the bytes of a tensor's elements."""
    return x.contiguous().flatten().view(torch.uint8)


def _may_leave(x: Tensor) -> bool:
    """Whether a tensor is described by its storage, dtype, size, stride and offset, and is no parameter."""
    # parameters that `fully_shard` gathers are made anew in every step
    of_parameter = isinstance(whole_of(x), torch.nn.Parameter)
    return is_plain(x) and not x.is_meta and not of_parameter and not x.is_inference()
