"""Describe how a tensor is sharded over the axes of a mesh: at most one dim per axis, and one axis per dim."""

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self
from weakref import WeakValueDictionary

from lightning_amp.errors import ShardError
from lightning_amp.sharding._torch import in_backward
from lightning_amp.sharding.owners import Owners


@dataclass(eq=False, slots=True)
class MeshAxis:
    """One axis of a device mesh, over whose ranks tensors are sharded.

    Attributes:
        name: Name in messages and plans.
        size, rank: Number of ranks of the axis, and this process's rank among them.
        group: Process group; None in a dry run, in which nothing is sent.
        unknown: Action for an operator that cannot be computed on shards: raise an error, or gather its tensors.
        sent: Collectives that this rank has issued over the axis; None for those of `SENT`.
    """

    name: str
    size: int
    rank: int
    group: Any = None
    unknown: Literal["error", "gather"] = "error"
    sent: "list[Sent] | None" = field(default=None, repr=False)


class DryAxis:
    """One axis of a mesh as one rank sees it in a dry run, for code that takes a DeviceMesh; copies share it.

    Args:
        size, rank, name: As in MeshAxis.
    """

    def __init__(self, size: int, rank: int, name: str = "model") -> None:
        self.axis = MeshAxis(name, size, rank)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __getitem__(self, name: str) -> "DryAxis":
        """Return the axis, the only one of its mesh."""
        assert name == self.axis.name, "it is asked for as a mesh of one axis"
        return self

    def size(self) -> int:
        """Return the number of ranks."""
        return self.axis.size

    def get_local_rank(self) -> int:
        """Return the rank."""
        return self.axis.rank

    def get_group(self) -> None:
        """Return None: there are no other ranks."""


class DryMesh:
    """The mesh of a run as one rank sees it in a dry run; copies share it.

    Args:
        data, model: Ranks of each axis.
        rank: The rank, row-major in (data, model).
    """

    def __init__(self, data: int, model: int, rank: int) -> None:
        at_data, at_model = divmod(rank, model)
        self._axes = {"data": DryAxis(data, at_data, "data"), "model": DryAxis(model, at_model)}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __getitem__(self, name: str) -> DryAxis:
        """Return an axis."""
        return self._axes[name]


AXES_OF_STEP: list[MeshAxis] = []
"""All axes over which tensors of the current or last step may be sharded."""
_AXES: dict[Any, MeshAxis] = {}


def axis_of(mesh: Any) -> MeshAxis:
    """Return the axis of a one-dimensional mesh, else raise a ShardError; one object per process group."""
    if isinstance(mesh, MeshAxis):
        return mesh
    if isinstance(mesh, DryAxis):
        return mesh.axis
    if mesh.ndim != 1:
        raise ShardError(
            f"a mesh with the axes {mesh.mesh_dim_names!r} was given; give one of them, such as mesh['model']"
        )
    group = mesh.get_group()
    if group not in _AXES:
        name = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "ranks"
        _AXES[group] = MeshAxis(name, mesh.size(), mesh.get_local_rank(), group)
    return _AXES[group]


class Sent(NamedTuple):
    """One collective of a rank.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "ring".
        n_bytes: Bytes that the rank passes in; for an all-to-all and a ring, only those for other ranks.
        backward: Whether it belongs to the backward pass.
        why: The operator that needs it; "" in the backward pass.
        ranks: Number of ranks of the axis.
        axis: Name of the axis.
        moves: Whether it redistributes a tensor because the operator requires other splits.
    """

    kind: str
    n_bytes: int
    backward: bool
    why: str
    ranks: int
    axis: str = ""
    moves: bool = False


class Split(NamedTuple):
    """A dim that is sharded over an axis."""

    axis: MeshAxis
    dim: int
    owners: Owners


class Splits:
    """The splits of a tensor, sorted by axis name; equal splits are one object.

    A replicated tensor has empty splits.
    """

    __slots__ = ("__weakref__", "_splits")

    def __init__(self, splits: tuple[Split, ...]) -> None:
        self._splits = splits

    def __iter__(self) -> Iterator[Split]:
        return iter(self._splits)

    def __len__(self) -> int:
        return len(self._splits)

    @staticmethod
    def of(splits: Sequence[Split]) -> "Splits":
        """Return interned splits; at most one per axis and one per dim."""
        found = tuple(sorted(splits, key=lambda split: split.axis.name))
        assert len({id(split.axis) for split in found}) == len(found), "an axis splits one dim of a tensor"
        assert len({split.dim for split in found}) == len(found), "a dim is split over one axis"
        return _INTERNED.setdefault(found, Splits(found))

    def on(self, axis: MeshAxis) -> Split | None:
        """Return the split over an axis."""
        return next((split for split in self if split.axis is axis), None)

    def at(self, dim: int) -> Split | None:
        """Return the split of a dim."""
        return next((split for split in self if split.dim == dim), None)

    @property
    def dims(self) -> tuple[int, ...]:
        """Sharded dims."""
        return tuple(split.dim for split in self)

    def mapped(self, place: "Callable[[int], int | None]") -> "Splits":
        """Return splits with every dim d replaced by `place(d)`; splits whose dim becomes None are dropped."""
        moved = [(split, place(split.dim)) for split in self]
        return Splits.of([Split(s.axis, dim, s.owners) for s, dim in moved if dim is not None])

    def replaced(self, axis: MeshAxis, split: Split | None) -> "Splits":
        """Return splits with another split over an axis, or none."""
        rest = [other for other in self if other.axis is not axis]
        return Splits.of([*rest, split] if split is not None else rest)

    def without(self, *dims: int) -> "Splits":
        """Return splits without those of some dims."""
        return Splits.of([split for split in self if split.dim not in dims])

    def local_shape(self, shape: Sequence[int]) -> list[int]:
        """Return the shape of the local shard of a tensor with a global shape."""
        found = list(shape)
        for axis, dim, owners in self:
            found[dim] = owners.counts[axis.rank]
        return found

    def global_shape(self, local: Sequence[int]) -> list[int]:
        """Return the global shape of a tensor from the shape of the local shard."""
        found = list(local)
        for _, dim, owners in self._splits:
            found[dim] = owners.n
        return found

    def __str__(self) -> str:
        parts = [f"dim {s.dim} in {s.owners.sizes or s.owners.counts} over {s.axis.name!r}" for s in self]
        return "; ".join(parts) or "whole on every rank"


# weak references: shapes that vary from step to step would fill it without limit
_INTERNED = WeakValueDictionary[tuple[Split, ...], Splits]()
WHOLE = Splits.of(())

REASON: ContextVar[str] = ContextVar("REASON", default="")
"""Operator for which collectives are issued."""
MOVING: ContextVar[bool] = ContextVar("MOVING", default=False)
"""Whether these collectives redistribute a tensor to other splits."""


# no part of an axis: a block that runs a second time must not have changed what it holds
SENT: ContextVar[list[Sent] | None] = ContextVar("SENT", default=None)
"""Collectives over axes that do not count their own; None if they are not counted."""


def record(axis: MeshAxis, kind: str, n_bytes: int) -> None:
    """Record a collective, if they are counted."""
    sent = SENT.get() if axis.sent is None else axis.sent
    if sent is not None:
        sent.append(Sent(kind, n_bytes, in_backward(), REASON.get(), axis.size, axis.name, MOVING.get()))


def record_dry(mesh: Any, kind: str, n_bytes: int) -> None:
    """Record a collective over an axis of a dry run."""
    if isinstance(mesh, DryAxis):
        record(mesh.axis, kind, n_bytes)
