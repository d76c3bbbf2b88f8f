"""Define what a segment of a training step records of its operators, and of the tensors that they read and make."""

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_amp._torch import version_of

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
    """A tensor that the segment reads and did not make; `copied` if it is a copy made before a write."""

    tensor: Tensor
    copied: bool = False
    source: "weakref.ref[Tensor] | None" = None
    """The tensor that was read, whose version shows later writes; `tensor` is detached and has a separate version."""
    version: int = 0

    @property
    def was_changed(self) -> bool:
        """Whether it was written to after it was read, by what no tape has seen."""
        read = None if self.copied or self.source is None else self.source()
        return read is not None and version_of(read) != self.version


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
