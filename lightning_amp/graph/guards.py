"""Compute the key of a block's graph: a call with another key requires another graph.

The key contains: shapes, strides, dtypes, devices and requires_grad of arguments, parameters and buffers; which of them
are the same tensor; other arguments; training mode, attributes, classes and hooks of the block and its submodules;
contents of all these objects, such as a configuration, a module that is not a submodule, or the closure of a function;
gradient mode, default dtype and autocast.

Not in the key are attributes of classes, objects nested deeper than `DEPTH`, contents of other C objects, global
variables and the clock: what a block computes with those is compared by the functions that it calls (calls.py).
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import FunctionType, ModuleType
from typing import Any
from weakref import ReferenceType

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_amp._torch import tree_flatten
from lightning_amp.footprint.chain.block_call import autocast_now
from lightning_amp.footprint.copies.fake_copy import holds_something
from lightning_amp.footprint.copies.restore_state import OWNERS, contents
from lightning_amp.footprint.forward_overrides import overrides_of
from lightning_amp.footprint.run_again.recompute_state import state_of_generator
from lightning_amp.slots import slots_of

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
INTERNAL = frozenset(name for name, value in vars(nn.Module()).items() if not isinstance(value, PLAIN))
INTERNAL |= {"_trainer", "_fabric", "_flat_weights", "_flat_weight_refs"}
"""Attributes that are not in the key: those of every module, except hooks; a Trainer, which changes in every step; and
the weight lists that an RNN rebuilds when its parameters change."""
ITEMS = (list, tuple, set, frozenset, deque, bytearray)
OPAQUE = (nn.Module, Tensor, type, ModuleType, FunctionType, Trainer, DataLoader, Dataset, *OWNERS)
"""Classes compared by identity; modules outside the block also by their settings, functions also by their closure."""
DEPTH = 5
"""Levels of nested objects whose contents are in the key."""
_Module = tuple[str, nn.Module]
"""Prefix of the names inside the module, and the module."""
_Setting = tuple[str, type, tuple[str, ...], tuple[type, ...], tuple[Any, ...], bool]
"""Prefix of the names, class, attribute names, their classes and keys, and whether the module has hooks."""


class _Same:
    """Equality by identity. Keeps the object alive, so that its address is not reused."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def signature(block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return a key of everything that a graph of this call depends on."""
    values, spec = tree_flatten((tuple(args), dict(kwargs)))
    modules = _modules_of(block)
    state = _state_of(modules)
    tensors = [*state.values(), *(value for value in values if isinstance(value, Tensor))]
    # by position and not by id: the key outlives the tensors, and their addresses may be reused
    first: dict[int, int] = {}
    return (
        type(block),
        tuple([described(value) for value in values]),
        str(spec),
        tuple(state),
        tuple([_tensor(tensor) for tensor in state.values()]),
        tuple(_settings_of(modules, state)),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        autocast_now(),
        # which tensors are identical, by the position of the first
        tuple([first.setdefault(id(tensor), k) for k, tensor in enumerate(tensors)]),
    )


def without_plain_settings(key: Any) -> Any:
    """Return a signature without the values of plain attributes, such as the number of a layer; their classes stay."""
    *before, settings, grad, dtype, autocast, same = key
    kept = tuple(
        (
            *place,
            kinds,
            tuple(None if _first_of(kind) is PLAIN else v for kind, v in zip(kinds, values, strict=True)),
            hooks,
        )
        for *place, kinds, values, hooks in settings
    )
    return *before, kept, grad, dtype, autocast, same


def state_of(block: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, in the order in which a graph takes them."""
    return _state_of(_modules_of(block))


def settings_of(block: nn.Module) -> list[_Setting]:
    """Return class, attributes and presence of hooks of a block and its submodules, as compared after a capture."""
    modules = _modules_of(block)
    return _settings_of(modules, _state_of(modules), states=True)


def first_change(before: list[_Setting], after: list[_Setting]) -> str:
    """Return the first attribute that differs between two lists of settings; "?" if none does."""
    was, now = (
        {start + name: found for start, _, *held, _ in settings for name, *found in zip(*held, strict=True)}
        for settings in (before, after)
    )
    return next((name for name in {**was, **now} if was.get(name) != now.get(name)), "?")


def _modules_of(block: nn.Module) -> list[_Module]:
    """Like `named_modules`, which takes three times as long."""
    found, seen = list[_Module](), set[int]()

    def walk(start: str, module: nn.Module) -> None:
        seen.add(id(module))
        found.append((start, module))
        for name, child in module._modules.items():
            if child is not None and id(child) not in seen:
                walk(f"{start}{name}.", child)

    walk("", block)
    return found


def _state_of(modules: Sequence[_Module]) -> dict[str, Tensor]:
    """Like `named_parameters` and `named_buffers`: a tensor with several names has the first of them."""
    found: dict[str, Tensor] = {}
    for kind in ("_parameters", "_buffers"):
        seen = set[int]()
        for start, module in modules:
            for name, tensor in getattr(module, kind).items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[start + name] = tensor
    return found


STATES = -1
"""Key in `seen`: the states of generators are compared too, which any draw in the process changes."""


def _settings_of(modules: Sequence[_Module], state: Mapping[str, Tensor], *, states: bool = False) -> list[_Setting]:
    # submodules and state are entered by name, so that equal blocks have equal keys
    seen: dict[int, Any] = {id(own): name for own_of in (modules, state.items()) for name, own in own_of}
    if states:
        seen[STATES] = True
    return _settings(modules, seen)


def _settings(modules: Sequence[_Module], seen: dict[int, Any]) -> list[_Setting]:
    found = list[_Setting]()
    for start, child in modules:
        own = vars(child)
        names, hooks = _names(tuple(own))
        values: Sequence[Any] = list(map(own.__getitem__, names))
        kinds = tuple(map(type, values))
        # runs in every step, so the common case is checked with few Python operations
        if not _all_plain(kinds):
            held = list(_held(child, zip(names, kinds, values, strict=True), seen))
            names, kinds, values = zip(*held, strict=True)
        found.append((start, type(child), names, kinds, tuple(values), any(map(own.__getitem__, hooks))))
    return found


def _held(module: nn.Module, own: Iterable[tuple[str, type, Any]], seen: dict[int, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield names, classes and keys of a module's attributes."""
    for name, kind, value in own:
        if _first_of(kind) is PLAIN:
            yield name, kind, value
        elif name == "forward" and (overrides := overrides_of(module)):
            # compared by its overrides, because each copy of a module has another `forward` object
            yield name, kind, tuple((one.position, _Same(one.run)) for one in overrides)
        else:
            yield name, kind, _plain(value, seen, DEPTH)


@cache
def _names(names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the attribute names that not every module has, and the names of hook attributes."""
    hooks = tuple(name for name in names if name[0] == "_" and name.endswith("_hooks"))
    # names with two underscores are torch's own, such as the state of fully_shard
    return tuple(name for name in names if name not in INTERNAL and name not in hooks and name[:2] != "__"), hooks


@cache
def _all_plain(kinds: Collection[type]) -> bool:
    return all(_first_of(kind) is PLAIN for kind in kinds)


def described(value: Any, *, states: bool = False) -> tuple[Any, ...]:
    """Return the key of an argument; with `states` also of random generators, to detect whether a forward draws."""
    if isinstance(value, Tensor):
        return _tensor(value)
    found: tuple[Any, ...] = _plain(value, {STATES: True} if states else {}, DEPTH)
    return found


def _tensor(value: Tensor) -> tuple[Any, ...]:
    laid_out = value.stride() if value.layout is torch.strided else value.layout
    # the device includes its index, which is an argument of operators that make tensors
    return "tensor", value.shape, laid_out, value.dtype, value.device, value.requires_grad


@cache
def _first_of(kind: type) -> Any:
    """Return the first group of classes that contains a class; cached, because `isinstance` takes longer."""
    groups = (PLAIN, nn.Module, ITEMS, Mapping, np.ndarray, ReferenceType, FunctionType, OPAQUE)
    return next((group for group in groups if issubclass(kind, group)), None)


def _plain(value: Any, seen: dict[int, Any], depth: int) -> Any:
    """Return the key of a value; `seen` maps ids of objects that are in the key already to their keys."""
    of: Any = type(value)
    kind, group = of.__name__, _first_of(of)
    if group is PLAIN:
        # 1, 1.0 and True are equal, but give different graphs
        return kind, value
    # by the set of classes, so that a growing list does not add a cache entry for each length
    if group is ITEMS and _all_plain(frozenset(kinds := tuple(map(type, value)))):
        return kind, kinds, tuple(value)
    if group in (ITEMS, Mapping):
        if id(value) in seen:
            return kind, seen[id(value)]
        # only during the walk, because it may contain itself; afterwards its address may be reused
        seen[id(value)] = "itself"
        items = [*value, *value.values()] if group is Mapping else value
        found = tuple([_plain(item, seen, depth) for item in items])
        del seen[id(value)]
        return kind, found
    if group is np.ndarray:
        # identity is not sufficient, because the array may be written to
        return kind, _Same(value), hash(value.tobytes())
    # by its referent: equal blocks have different reference objects
    if group is ReferenceType:
        return kind, _plain(value(), seen, depth)
    if id(value) in seen:
        return kind, seen[id(value)]
    # a module in a plain list is not a submodule, so `train`, `to` and `modules` skip it. Its tensors are not in the
    # key, because a graph that reads one is refused as a constant
    if group is nn.Module:
        modules = [(start, child) for start, child in _modules_of(value) if id(child) not in seen]
        seen.update((id(child), _Same(child)) for _, child in modules)
        return kind, _Same(value), tuple(_settings(modules, seen))
    if group is OPAQUE or depth == 0 or (group is FunctionType and not holds_something(value)):
        return kind, _Same(value)
    fixed = getattr(of, "__dataclass_params__", None)
    # a frozen dataclass is compared by its contents, such as a `TensorLike` of another step
    same = of if fixed is not None and fixed.frozen else seen.setdefault(id(value), _Same(value))
    held = [(name, _plain(item, seen, depth - 1)) for name, item in _contents(value)]
    # for the comparison after a capture: a number that the forward draws would become a constant of the graph
    return kind, same, tuple(held), state_of_generator(value) if STATES in seen else None


def _contents(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, by name."""
    kind: Any = type(value)
    if kind is FunctionType:
        yield "", (value.__defaults__, value.__kwdefaults__, *map(contents, value.__closure__ or ()))
        return
    if hasattr(value, "__dict__"):
        yield from vars(value).items()
    # not by `__reduce_ex__`, which covers more classes: it is user code and returns new objects, so keys would never
    # match
    for name in slots_of(kind):
        yield name, getattr(value, name, None)
