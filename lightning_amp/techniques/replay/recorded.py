"""Define what a segment of a training step records of its operators, and of the tensors that they read and make."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_amp._torch import counter_of, version_of
from lightning_amp.footprint.live_bytes import tensor_on

Geometry = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]
"""Dtype, shape, strides and offset of a tensor in its storage."""


def geometry_of(x: Tensor) -> Geometry:
    """Return the geometry of a tensor."""
    return x.dtype, tuple(x.shape), x.stride(), int(x.storage_offset())


class Made(NamedTuple):
    """A result on fake tensors; `known` says whether its values are (known_values.py)."""

    geometry: Geometry
    device: torch.device
    known: bool


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A tensor made in the segment: the index of its storage, and its geometry."""

    slot: int
    geometry: Geometry


@dataclass(eq=False, slots=True, weakref_slot=True)
class Outside:
    """A tensor that the segment reads and did not make.

    Attributes:
        tensor: It, detached, with the counter of writes of what was read; without memory while it is `away`.
        version: The counter when it was read.
        copied: Whether it is a copy made before a write.
        away: Gets it from where the hooks around the step have put it; None while it is here.
        geometry, storage: Of a tensor that is away.
    """

    tensor: Tensor
    version: int = 0
    copied: bool = False
    away: Callable[[], Tensor] | None = None
    geometry: Geometry | None = None
    storage: "weakref.ref[torch.UntypedStorage] | None" = None

    @property
    def was_changed(self) -> bool:
        """Whether it was written to after it was read, by what no tape has seen."""
        return not self.copied and version_of(self.tensor) != self.version

    def leave(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        """Give the tensor to hooks on saved tensors."""
        self.geometry, self.storage = geometry_of(self.tensor), weakref.ref(self.tensor.untyped_storage())
        self.away, self.tensor = partial(unpack, pack(self.tensor)), counter_of(self.tensor)

    def come_back(self) -> None:
        """Get the tensor from the hooks."""
        if self.away is not None:
            self.tensor, self.away = self.away(), None
            self.version = version_of(self.tensor)

    def on(self, storage: torch.UntypedStorage) -> Tensor | None:
        """Return the tensor, by its storage; None if it is away and has another one."""
        if self.away is None:
            return self.tensor
        assert self.geometry is not None, "what is away has a geometry"
        assert self.storage is not None, "what is away had a storage"
        dtype, shape, strides, offset = self.geometry
        here = self.storage() is storage
        return tensor_on(storage, dtype, (offset, shape, strides), self.tensor.device) if here else None


@dataclass(eq=False, slots=True)
class Operator:
    """One recorded operator.

    Attributes:
        at: Place among all operators of the step.
        args, kwargs: Arguments, with a StorageRef or an Outside in place of every tensor.
        grad: Whether gradients were enabled; kernels of recurrent layers return other results then.
        draws: Generators that it draws from, or notes on fake tensors (noted_values.py), with their states.
        results: Index of the storage of each result made in the segment; None for others.
        reads, writes, makes: Indices of storages.
        given: The StorageRefs and Outsides in its arguments, in order.
        made: On fake tensors, what each result is, by which a replay makes it without running the operator; else None.
    """

    func: Any
    at: int
    args: Any
    kwargs: Any
    grad: bool
    draws: list[tuple[Any, Any]]
    results: list[int | None]
    reads: frozenset[int]
    writes: frozenset[int]
    makes: frozenset[int]
    given: list[StorageRef | Outside]
    made: "list[Made] | None"


@dataclass(eq=False, slots=True)
class Slot:
    """A storage made in a segment.

    Attributes:
        storage: The storage, while it is alive.
        n_bytes: Its size.
        small: Whether another result of its operator is much larger, as for the statistics of a norm.
        written: Whether a later operator has written to it.
        version: Largest autograd version after a write.
        dtypes: Dtypes of the tensors that recorded operators return in it.
    """

    storage: "weakref.ref[torch.UntypedStorage]"
    n_bytes: int
    small: bool = False
    written: bool = False
    version: int = 0
    dtypes: set[torch.dtype] = field(default_factory=set)
