"""A rank's part of a sharded tensor, and where it lies in the whole one.

A part is what a checkpoint holds in place of a whole tensor while it is on its way to a directory of shards. It is no
tensor on purpose: a hook that would take it for the whole value fails instead of saving a piece.

    box    a block of adjacent entries: the offsets in the whole tensor, and a view of the part

Known limit: rows that do not follow each other make one box for every run of adjacent ones.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from lightning_amp.errors import DataError
from lightning_amp.techniques.contract.sharded_parameter import ShardedParameter


class Box(NamedTuple):
    """A block of adjacent entries of the whole tensor, which this rank has; its values are a view of the part."""

    offsets: tuple[int, ...]
    values: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Part:
    """A rank's part of a tensor: its own entries, the shape of the whole, and where they lie in it."""

    own: Tensor
    shape: torch.Size
    boxes: tuple[Box, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor."""
        return self.own.dtype

    def entries_at(self, offsets: tuple[int, ...]) -> Tensor:
        """The entries of the box at these offsets of the whole tensor."""
        (box,) = (box for box in self.boxes if box.offsets == offsets)
        return box.values

    def __reduce__(self) -> NoReturn:
        """Refuse to be written as if it were the whole."""
        raise DataError(
            f"a checkpoint was to be written with a part of a tensor of shape {tuple(self.shape)!r} outside of"
            " 'state_dict' and 'optimizer_states', where a hook has put it; a part is of use to no one: leave it out,"
            " or take save_distributed_checkpoint=False, with which hooks see whole tensors"
        )


def part_of(parameter: ShardedParameter, own: Tensor) -> Part:
    """What this rank has of a tensor with the shape of a sharded parameter: its values, or an optimiser's state."""
    shape, own_values = parameter.shape, own.detach()
    if parameter.in_place:
        parts: Any = parameter.parts
        return Part(own=own, shape=shape, boxes=tuple(Box(*box) for box in parts.boxes(own_values)))
    boxes = list[Box]()
    for block in product(*[_runs(_coordinates(parameter, dim)) for dim in range(len(shape))]):
        values = own_values
        for dim, (_, start, n) in enumerate(block):
            values = values.narrow(dim, start, n)
        boxes.append(Box(tuple(first for first, _, _ in block), values))
    return Part(own=own, shape=shape, boxes=tuple(boxes))


def _coordinates(parameter: ShardedParameter, dim: int) -> Tensor:
    """Which entries of a dimension this rank has; asked of the parameter, for only it knows how it is sharded."""
    shape = parameter.whole.shape
    line = torch.arange(shape[dim])
    own = parameter.own(line.view([-1 if d == dim else 1 for d in range(len(shape))]).expand(shape))
    if own.numel() == 0:
        return line[:0]
    return own[tuple(slice(None) if d == dim else 0 for d in range(len(shape)))]


def _runs(coordinates: Tensor) -> list[tuple[int, int, int]]:
    """(first in the whole, first in the part, length) of every run of adjacent coordinates."""
    if len(coordinates) == 0:
        return []
    gaps = ((coordinates.diff() != 1).nonzero().flatten() + 1).tolist()
    ends = [*gaps, len(coordinates)]
    return [(int(coordinates[i]), i, end - i) for i, end in zip([0, *gaps], ends, strict=True)]
