"""Define what autograd keeps in place of the tensors that it saves, and what is known of their storages."""

import weakref
from collections import deque
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_amp._torch import counter_of, version_of
from lightning_amp.sharding.sharded_tensor import ShardedTensor
from lightning_amp.techniques.host_memory.host_pool import Buffer


class Kept:
    """A saved tensor that stays."""

    __slots__ = ("tensor", "version")

    def __init__(self, x: Tensor) -> None:
        # without its node, to which the node's saved tensor would refer. A sharded tensor has the node in its part: a
        # checkpoint that saves it computes its block again from there
        self.tensor, self.version = x if isinstance(x, ShardedTensor) else x.detach(), version_of(x)


class Version:
    """Version counter of a tensor, without its memory."""

    __slots__ = ("counter", "saved")

    def __init__(self, x: Tensor) -> None:
        self.counter, self.saved = counter_of(x), version_of(x)

    @property
    def changed(self) -> bool:
        """Whether the tensor was written to since."""
        return version_of(self.counter) != self.saved


class Numbered:
    """A storage that may leave.

    Attributes:
        number: Its place in the order in which autograd saves storages that may leave.
        here: Weak reference to it.
        watched: Its counter of writes.
        left: What has left of it, if it leaves.
    """

    __slots__ = ("here", "left", "number", "watched")

    def __init__(self, number: int, x: Tensor, here: "weakref.ref[Any]") -> None:
        self.number, self.here, self.watched = number, here, Version(x)
        self.left: Left | None = None


class Watcher(Protocol):
    """What is told of storages that may leave, in a count."""

    def saves(self, number: int, storage: Any) -> None:
        """Note that autograd saves a storage for the first time."""

    def leaves(self, number: int) -> None:
        """Note that a storage gets host memory."""

    def stays_no_more(self, number: int) -> None:
        """Note that its host memory is free."""

    def comes(self, number: int, storage: Any) -> None:
        """Note that a storage has come back, as this one."""


class Owner(Protocol):
    """What moves storages.

    Attributes:
        gone: Storages of which no saved tensor exists.
    """

    gone: "deque[Left]"

    def drop(self, left: "Left") -> None:
        """Drop a storage that came back, which nothing will ask for."""


class Left:
    """A storage that was copied to the host.

    Attributes:
        number: Its number among the storages that may leave.
        place: Its place in the order of leaving.
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

    def __init__(
        self, moves: Owner, step: list["weakref.ref[Left]"], numbered: Numbered, x: Tensor, buffer: Buffer
    ) -> None:
        self.moves, self.step, self.place, self.number = moves, step, len(step), numbered.number
        self.n_bytes, self.device, self.buffer = x.untyped_storage().nbytes(), x.device, buffer
        self.here, self.watched = numbered.here, numbered.watched
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


class Handle:
    """What autograd keeps in place of a tensor that left."""

    __slots__ = ("dtype", "geometry", "left", "read", "version")

    def __init__(self, left: Left, x: Tensor) -> None:
        self.left, self.read = left, -1
        left.alive += 1
        left.unread += 1
        self.dtype, self.version = x.dtype, Version(x)
        self.geometry = geometry_of(x)
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


def geometry_of(x: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return the offset, size and strides of a tensor on its storage, as `set_` takes them."""
    return int(x.storage_offset()), tuple(x.shape), tuple(x.stride())
