"""Let code that asks whether a tensor is fake run as in training, by the values of the first batch.

Libraries leave out a branch on values if they get fake tensors: transformers then makes a mask, which a batch without
padding does not need. While a step is counted, `isinstance(x, FakeTensor)` is False outside of torch for a tensor whose
values can be computed, also from the batch. Other code does not get values of the batch: a step that branches on them
is counted by notes of its forward pass (noted_values.py).

`BatchReads` has what was read of the batch: another batch of which other values are read may take other bytes.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_amp._torch import FakeTensor, unseen
from lightning_amp.footprint.copies.known_values import Recipe, leaves_of, memory_of, number_of, recipe_of


class BatchReads:
    """The numbers that a counted step has read from its batch."""

    def __init__(self) -> None:
        self._reads: list[Recipe] = []
        self._leaves: dict[int, Recipe] = {}

    @property
    def names(self) -> list[str]:
        """Names of the tensors that were read, in the batch."""
        return sorted({leaf.of_batch for leaf in self._leaves.values()})

    def note(self, read: Recipe) -> None:
        """Keep what a step reads, if it depends on the batch."""
        found = {id(leaf): leaf for leaf in leaves_of(read) if leaf.of_batch}
        if found:
            self._reads.append(read)
            self._leaves.update(found)

    def of(self, batch: Mapping[str, Tensor]) -> tuple[Any, ...]:
        """Return what the step reads from another batch, whose tensors are given by name."""
        for leaf in self._leaves.values():
            leaf.given = batch.get(leaf.of_batch)
        try:
            # constants that the count has kept are no tensors of the step, and meters do not count them
            with unseen():
                return tuple(map(number_of, self._reads))
        except (RuntimeError, IndexError) as error:
            # its sizes do not fit the operators of the first batch
            return (str(error),)
        finally:
            for leaf in self._leaves.values():
                leaf.given = None


def read_by_torch() -> bool:
    """Whether torch itself asks `isinstance`; to be called in `__instancecheck__`."""
    name: str = sys._getframe(2).f_globals.get("__name__", "")
    return name.partition(".")[0] == "torch"


class _Asked(type(FakeTensor)):  # type: ignore[misc]
    def __instancecheck__(cls, value: Any) -> bool:
        if not isinstance(value, FakeTensor):
            return False
        return read_by_torch() or not _may_be_read(value)


class AskedFakeTensor(FakeTensor, metaclass=_Asked):
    """Stands for torch's FakeTensor while a step is counted."""


def _may_be_read(tensor: FakeTensor) -> bool:
    """Whether the values of a fake tensor can be computed; code may then read them, also those of the batch."""
    recipe = recipe_of(tensor)
    if recipe is None:
        return False
    closed = [leaf for leaf in leaves_of(recipe) if leaf.closed]
    for leaf in closed:
        leaf.closed = False
    with unseen(), torch.no_grad():
        known = memory_of(recipe, {}) is not None
    for leaf in closed:
        leaf.closed = not known
    return known
