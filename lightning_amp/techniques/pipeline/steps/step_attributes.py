"""Restore module attributes after each micro-batch, and copy the step's attribute changes to all ranks.

A training step may count its calls, append outputs to a list, or store state for the next step. A run of one
micro-batch or of one stage must not change such attributes. One rank runs the whole step once; its changes are applied
on the other ranks.

Known limits: changes of global variables and closures are not detected.
"""

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_amp.errors import ModelError
from lightning_amp.footprint.copies.restore_state import refill
from lightning_amp.footprint.run_again.recompute_state import DEPTH, OF_EVERY_MODULE, PLAIN, mark_of
from lightning_amp.techniques.put_methods import STEPS

NOT_THE_USER_S = OF_EVERY_MODULE | frozenset(vars(LightningModule())) | {"log", "all_gather", *STEPS}
CONTAINERS = (list, dict, set, deque)


@dataclass(frozen=True)
class AttributeChange:
    """Change of one attribute.

    Attributes:
        module, name: Names of the module and of the attribute.
        is_buffer: Whether the attribute is a buffer.
        value: The new value; for a list that has grown, the appended items.
        how: "set", "grown" or "gone".
    """

    module: str
    name: str
    is_buffer: bool
    value: Any = None
    how: str = "set"

    @property
    def full_name(self) -> str:
        """Qualified name of the attribute, for messages."""
        return f"{self.module}.{self.name}" if self.module else self.name


class Attributes:
    """Snapshot of the attributes of some modules.

    Args:
        modules: Modules by name.
        modes: Modules whose `training` flag is stored.
    """

    def __init__(self, modules: Mapping[str, nn.Module], modes: Mapping[str, nn.Module]) -> None:
        self._modes = [(name, part, part.training) for name, part in modes.items()]
        self._tables = [
            (name, is_buffer, table, dict(_of_user(table)))
            for name, part in modules.items()
            for is_buffer, table in ((False, vars(part)), (True, part._buffers))
        ]
        changing = (value for value in self._values() if not isinstance(value, PLAIN))
        # modules are compared by identity: their attributes are in `_tables`
        self._known: dict[int, Any] = {id(part): part for part in modes.values()}
        # a mark detects in-place changes of an object
        self._marks = {id(value): self._mark(value) for value in changing}
        self._contents: dict[int, tuple[Any, Any]] = {}
        for value in self._values():
            self._keep(value)

    def put_back(self) -> None:
        """Restore all attributes.

        Raises:
            ModelError: A tensor or an object of another kind than lists, dictionaries and sets was changed in place.
        """
        for *_, table, values in self._tables:
            for key in [key for key, _ in _of_user(table) if key not in values]:
                del table[key]
            table.update(values)
        for _, part, training in self._modes:
            part.training = training
        # containers are refilled in place: a hook or another module may hold the same list
        for container, content in self._contents.values():
            refill(container, content)
        for name, is_buffer, _, values in self._tables:
            for key, value in values.items():
                # a buffer that was changed in place is refused on all ranks at once (pipelined_steps.py)
                if not is_buffer and self._is_changed(value):
                    raise ModelError(
                        f"pipeline: every micro-batch changes the contents of"
                        f" {AttributeChange(name, key, is_buffer).full_name!r}, which cannot be undone: keep numbers,"
                        " tensors, lists and dictionaries, change it in on_train_batch_end, or leave 'pipeline' out"
                    )

    def changes(self) -> list[AttributeChange]:
        """Return the changes since the snapshot."""
        found = [
            AttributeChange(name, "training", False, part.training)
            for name, part, training in self._modes
            if part.training != training
        ]
        for name, is_buffer, table, before in self._tables:
            for key, value in dict(_of_user(table)).items():
                if key not in before or value is not before[key]:
                    same = key in before and isinstance(value, PLAIN) and type(value) is type(before[key])
                    if not (same and value == before[key]):
                        found.append(AttributeChange(name, key, is_buffer, value))
                elif self._is_changed(value):
                    found.append(self._changed(AttributeChange(name, key, is_buffer, value)))
            found += [AttributeChange(name, key, is_buffer, how="gone") for key in before if key not in table]
        return found

    def _is_changed(self, value: Any) -> bool:
        return not isinstance(value, PLAIN) and self._mark(value) != self._marks[id(value)]

    def _mark(self, value: Any) -> Any:
        return mark_of(value, dict(self._known), DEPTH)

    def _changed(self, change: AttributeChange) -> AttributeChange:
        """For a list that has grown, keep only the appended items; the other ranks have the rest."""
        value = change.value
        if type(value) is list:
            before = self._contents[id(value)][1]
            if len(value) > len(before) and all(a is b for a, b in zip(before, value, strict=False)):
                return AttributeChange(change.module, change.name, change.is_buffer, value[len(before) :], "grown")
        return change

    def _values(self) -> Iterator[Any]:
        return (value for *_, values in self._tables for value in values.values())

    def _keep(self, value: Any) -> None:
        if isinstance(value, CONTAINERS) and id(value) not in self._contents:
            self._contents[id(value)] = value, copy.copy(value)
        if isinstance(value, (*CONTAINERS, tuple)):
            for part in value.values() if isinstance(value, dict) else value:
                self._keep(part)


def apply(changes: Iterable[AttributeChange], modules: Mapping[str, nn.Module]) -> None:
    """Apply the changes of another rank to the modules of this rank."""
    for change in changes:
        part = modules[change.module]
        table = part._buffers if change.is_buffer else vars(part)
        value, here = change.value, table.get(change.name)
        if change.how == "gone":
            table.pop(change.name, None)
        elif change.how == "grown":
            here.extend(value)  # type: ignore[union-attr]
        elif isinstance(here, CONTAINERS) and type(here) is type(value):
            # another object may hold the same list
            refill(here, value)
        else:
            table[change.name] = value


def _of_user(table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the user's attributes, without those of every module and without children."""
    for key, value in table.items():
        if key not in NOT_THE_USER_S and not key.startswith("__") and not isinstance(value, nn.Module):
            yield key, value


def values_of(blocks: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Attributes and buffers of some modules by name; tensors are copied."""
    return {
        f"{name}.{key}": value.detach().clone() if isinstance(value, Tensor) else mark_of(value, {}, DEPTH)
        for name, part in blocks.items()
        for table in (vars(part), part._buffers)
        for key, value in _of_user(table)
    }


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Name of the first value that differs; "" if none does."""
    return next((name for name, value in now.items() if not _same(before.get(name), value)), "")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape
        return both and bool(((one == other) | ((one != one) & (other != other))).all())
    return bool(one == other)
