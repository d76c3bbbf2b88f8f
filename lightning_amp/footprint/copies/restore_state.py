"""Restore state that a step of a copied module changes outside the copy, and copy the mutable state of objects.

Otherwise the module that trains would read a changed class counter, list of features or cache, which may contain
tensors without values. Containers, random generators and objects of the user's classes are restored with their
contents.

Known limits: modules (.py files) that define no class or function of the step; containers of more than `DATA` entries;
contents of containers of more than `LONG` entries; objects nested deeper than `DEPTH`; values of tensors.
"""

import copy
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor, nn

from lightning_amp.slots import held_in_slots, slots_of

LIBRARIES = {"torch", "lightning", "torchmetrics", "lightning_amp", *sys.stdlib_module_names}
"""Packages whose functions, classes and files are not restored."""
CONTAINERS = (dict, list, set, deque, defaultdict, OrderedDict, Counter)
CACHED = type(cache(len))
LONG, DATA, DEPTH = 64, 100_000, 3


def is_of_user(owner: Any) -> bool:
    """Whether a class or function does not belong to one of these libraries."""
    return (getattr(owner, "__module__", None) or "").partition(".")[0] not in LIBRARIES


def has_code_of_user(kind: type) -> bool:
    """Whether a class or a base of it is the user's; `fully_shard` replaces a module's class by a subclass in torch."""
    return any(map(is_of_user, kind.__mro__))


@contextmanager
def restoring_state(*owners: Any) -> Iterator["Before"]:
    """Restore on exit the state of the classes, functions and files of modules, other objects or functions."""
    parts = _parts_of(owners)
    before = Before()
    # a step reaches tensors of a module that it finds by a global name, or that its copy shares
    own = [tensors for part in parts if isinstance(part, nn.Module) for tensors in (part._parameters, part._buffers)]
    gradients = [(p, p.grad) for tensors in own for p in tensors.values() if p is not None and p.is_leaf]
    for tensors in own:
        before.keep(tensors, 0)
    before.keep_code(owners)
    # a step would accumulate into them in place
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield before
    finally:
        before.differs = True in [undo() is True for undo in before.undo]
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _parts_of(owners: Iterable[Any]) -> list[Any]:
    parts = [part for one in owners for part in (one.modules() if isinstance(one, nn.Module) else (one,))]
    return parts + [part.__func__ for part in parts if isinstance(part, MethodType)]


@contextmanager
def forgetting(*owners: Any) -> Iterator["Before"]:
    """Like `restoring_state`, and begin with empty caches of functions."""
    with restoring_state(*owners) as before:
        for cached in before.caches:
            cached.cache_clear()
        yield before


def contents(cell: CellType) -> list[Any]:
    """Return the content of a closure cell as a list; empty if the cell is empty."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


class Before:
    """Snapshot of objects, with functions that restore it.

    Attributes:
        undo: Functions that restore one object each; they return True if its attributes or entries had changed.
        caches: Functions that cache results.
        differs: Whether an object had changed, known at the end of `restoring_state`.
    """

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._seen: set[int] = set()
        self.undo: list[Callable[[], Any]] = []
        self.caches: list[Any] = []
        self.differs = False

    def keep_code(self, owners: Iterable[Any]) -> None:
        """Add the classes of modules and other objects, functions, and the files that define them."""
        found = {
            kind
            for part in _parts_of(owners)
            for kind in ([part] if isinstance(part, FunctionType) else type(part).__mro__)
            if is_of_user(kind)
        }
        self._files |= {kind.__module__ for kind in found}
        for name in sorted(self._files & sys.modules.keys()):
            self.keep_names(sys.modules[name], DEPTH)
        for owner in found:
            self.keep(owner, DEPTH)

    def keep(self, value: Any, depth: int) -> None:
        """Add a value, and objects in it to a depth of `depth`."""
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        # by `type`, not isinstance: reading `__class__` would create a lazy object
        kind = type(value)
        if issubclass(kind, staticmethod | classmethod):
            self.keep(value.__func__, depth)
        elif issubclass(kind, property):
            self.keep(value.fget, depth)
        elif issubclass(kind, tuple):
            self._keep_entries(value, depth)
        elif kind in CONTAINERS:
            if len(value) <= DATA:
                self.undo.append(partial(refill, value, copy.copy(value)))
                self._keep_entries(value, depth)
        elif issubclass(kind, CACHED):
            self.caches.append(value)
            self.undo.append(partial(_clear_if_filled, value, value.cache_info()))
        elif issubclass(kind, np.random.Generator):
            self.undo.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif issubclass(kind, torch.Generator | np.random.RandomState):
            self.undo.append(partial(value.set_state, value.get_state()))
        elif issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom):
            self.undo.append(partial(value.setstate, value.getstate()))
        elif issubclass(kind, CellType):
            for content in contents(value):
                self.undo.append(partial(setattr, value, "cell_contents", content))
                self.keep(content, depth)
        elif depth and self._is_looked_into(value):
            if issubclass(kind, FunctionType):
                for part in (value.__defaults__, value.__kwdefaults__, *(value.__closure__ or ())):
                    self.keep(part, depth)
            self.keep_names(value, depth - 1)

    def keep_names(self, owner: Any, depth: int) -> None:
        """Add the attributes of an object."""
        state = _names(owner)
        self.undo.append(partial(_set_names, owner, state))
        for value in state.values():
            self.keep(value, depth)

    def _is_looked_into(self, value: Any) -> bool:
        """Whether a value is a class or function of the files, or an object of a user class; modules are copied."""
        kind: Any = type(value)
        if issubclass(kind, type | FunctionType):
            return value.__module__ in self._files
        if not is_of_user(kind) or issubclass(kind, nn.Module | Tensor | ModuleType):
            return False
        return any("__dict__" in vars(base) for base in kind.__mro__) or bool(slots_of(kind))

    def _keep_entries(self, values: Any, depth: int) -> None:
        if len(values) <= LONG:
            for value in values.values() if isinstance(values, dict) else values:
                self.keep(value, depth)


def _names(owner: Any) -> dict[str, Any]:
    held = vars(owner) if hasattr(owner, "__dict__") else {}
    names = {name: value for name, value in held.items() if not name.startswith("__")}
    return names if isinstance(owner, type) else names | held_in_slots(owner)


def _set_names(owner: Any, state: dict[str, Any]) -> bool:
    kind: Any = type(owner)
    now, is_class, slots = _names(owner), isinstance(owner, type), slots_of(kind)
    changed = now.keys() != state.keys()
    for name in now.keys() - state.keys():
        if is_class or name in slots:
            delattr(owner, name)
        else:
            del vars(owner)[name]
    for name, value in state.items():
        if name not in now or now[name] is not value:
            changed = True
            if is_class:
                setattr(owner, name, value)
            elif name in slots:
                # past a `__setattr__` of its class
                object.__setattr__(owner, name, value)
            else:
                vars(owner)[name] = value
    return changed


def refill(value: Any, entries: Any) -> bool:
    """Restore a container's entries if they have changed; return whether they had."""
    # by identity: comparing entries may compare tensors, which have no truth value. The copy keeps old entries alive,
    # so that no new entry can have the id of an old one
    if _ids(value) == _ids(entries):
        return False
    value.clear()
    (value.extend if isinstance(value, list | deque) else value.update)(entries)
    return True


def _ids(values: Any) -> list[int]:
    both = [*values, *values.values()] if isinstance(values, dict) else values
    return [id(value) for value in both]


def _clear_if_filled(cached: Any, before: Any) -> None:
    # compare misses too: a full cache keeps its number of entries
    if cached.cache_info()[1:] != before[1:]:
        # single entries cannot be removed from a cache, so it is cleared if the step may have added some
        cached.cache_clear()


GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
OWNERS = (nn.Module, LightningDataModule)
SHARED = (*OWNERS, Trainer, torch.Tensor, np.ndarray, type)


def copied_state(value: Any, memo: dict[int, Any]) -> Any:
    """Copy an object's mutable state (attributes, small containers, random generators), and share everything else.

    Copies with one memo, keyed by the id of the original, refer to each other.
    """
    if id(value) in memo:
        return memo[id(value)]
    # SystemRandom has no state
    if isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom):
        memo[id(value)] = value.clone_state() if isinstance(value, torch.Generator) else copy.deepcopy(value)
    elif type(value) is tuple and len(value) <= LONG:
        memo[id(value)] = tuple([copied_state(part, memo) for part in value])
    elif type(value) in CONTAINERS and len(value) <= DATA:
        # into the memo before it is filled, because it may contain itself
        memo[id(value)] = found = copy.copy(value)
        if len(value) <= LONG and isinstance(value, dict):
            # Counter.update would add to the counts
            dict.update(found, {key: copied_state(part, memo) for key, part in value.items()})
        elif len(value) <= LONG and not isinstance(value, set):
            # a set keeps its members, as a dict keeps its keys: code may find them by identity
            refill(found, [copied_state(part, memo) for part in value])
    elif isinstance(value, MethodType):
        owner = value.__self__
        # a method may change its module or data module, whose mutable state is therefore copied
        is_owner = isinstance(owner, OWNERS) and id(owner) not in memo
        own = _shallow(owner, memo) if is_owner else copied_state(owner, memo)
        memo[id(value)] = MethodType(value.__func__, own)
    elif _remembers(value):
        _shallow(value, memo)
    return memo.get(id(value), value)


def _shallow(value: Any, memo: dict[int, Any]) -> Any:
    try:
        found = memo[id(value)] = copy.copy(value)
        if hasattr(value, "__dict__"):
            vars(found).update({name: copied_state(part, memo) for name, part in vars(value).items()})
        for name, part in held_in_slots(value).items():
            object.__setattr__(found, name, copied_state(part, memo))
    except Exception:
        # share it then: half a copy is worse than none
        found = memo[id(value)] = value
    return found


def _remembers(value: Any) -> bool:
    """Whether an object has attributes or slots, and Python's default way of copying, which has no side effects."""
    kind: Any = type(value)
    return (
        (hasattr(value, "__dict__") or (is_of_user(kind) and bool(slots_of(kind))))
        and not isinstance(value, SHARED)
        and not callable(getattr(kind, "__copy__", None))
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and not hasattr(kind, "__setstate__")
        # its __del__ may close a file that the copy shares
        and not hasattr(kind, "__del__")
        and getattr(kind, "__getstate__", None) is getattr(object, "__getstate__", None)
        and kind.__module__ != "builtins"
    )
