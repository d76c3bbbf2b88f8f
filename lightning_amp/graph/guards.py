"""Compute the key of a block's graph: a new key requires a new graph.

Shapes, strides, dtypes, devices and gradients of arguments, parameters and buffers; which of them are one tensor; other
arguments; training mode and all plain attributes of the block and its submodules, their classes, and whether they have
hooks; what objects among all these hold, such as a configuration; gradient mode and autocast.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_amp._torch import tree_flatten
from lightning_amp.footprint.chain.block_call import autocast_now
from lightning_amp.footprint.forward_overrides import overrides_of

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
INTERNAL = frozenset(name for name, value in vars(nn.Module()).items() if not isinstance(value, PLAIN))
"""Attributes that every module has, of which only hooks matter here."""
ITEMS = (list, tuple, set, frozenset)
OPAQUE = (nn.Module, Tensor, type, ModuleType, FunctionType)
"""Of these, it matters only which one it is."""
DEPTH = 5
"""How many objects deep it is looked at what they hold."""
_Module = tuple[str, nn.Module]
"""Start of the names within, and the module."""
_Setting = tuple[str, type, tuple[str, ...], tuple[type, ...], tuple[Any, ...], bool]
"""Start of the names within, class, names, classes and keys of attributes, and whether it has hooks."""


class _Same:
    """Equal for one and the same object, which is kept: another one cannot take its address."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def signature(block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """All that a graph of this call depends on, as a key."""
    values, spec = tree_flatten((tuple(args), dict(kwargs)))
    modules = _modules_of(block)
    state = _state_of(modules)
    tensors = [*state.values(), *(value for value in values if isinstance(value, Tensor))]
    first: dict[int, int] = {}
    return (
        type(block),
        tuple([described(value) for value in values]),
        str(spec),
        tuple(state),
        tuple([_tensor(tensor) for tensor in state.values()]),
        tuple(_settings_of(modules)),
        torch.is_grad_enabled(),
        autocast_now(),
        # which tensors are one and the same, by the first of them
        tuple([first.setdefault(id(tensor), k) for k, tensor in enumerate(tensors)]),
    )


def state_of(block: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, in the order in which a graph takes them."""
    return _state_of(_modules_of(block))


def settings_of(block: nn.Module) -> list[_Setting]:
    """Of a block and its submodules: class, attributes on which a branch may depend, and whether they have hooks."""
    return _settings_of(_modules_of(block))


def first_change(before: list[_Setting], after: list[_Setting]) -> str:
    """The first attribute that differs between two lists of settings; "?" if none does."""
    was, now = (
        {start + name: found for start, _, *held, _ in settings for name, *found in zip(*held, strict=True)}
        for settings in (before, after)
    )
    return next((name for name in {**was, **now} if was.get(name) != now.get(name)), "?")


def _modules_of(block: nn.Module) -> list[_Module]:
    """As `named_modules`, which takes three times as long."""
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
    """As `named_parameters` and `named_buffers`: a tensor that has several names has the first of them."""
    found: dict[str, Tensor] = {}
    for kind in ("_parameters", "_buffers"):
        seen = set[int]()
        for start, module in modules:
            for name, tensor in getattr(module, kind).items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[start + name] = tensor
    return found


def _settings_of(modules: Sequence[_Module]) -> list[_Setting]:
    found, seen = list[_Setting](), set[int]()
    for start, child in modules:
        own = vars(child)
        names, hooks = _names(tuple(own))
        values: Sequence[Any] = list(map(own.__getitem__, names))
        kinds = tuple(map(type, values))
        # called in every step: what most modules have is looked through in C
        if not _all_plain(kinds):
            held = list(_held(child, zip(names, kinds, values, strict=True), seen))
            names, kinds, values = zip(*held, strict=True)
        found.append((start, type(child), names, kinds, tuple(values), any(map(own.__getitem__, hooks))))
    return found


def _held(module: nn.Module, own: Iterable[tuple[str, type, Any]], seen: set[int]) -> Iterator[tuple[Any, ...]]:
    """Names, classes and keys of a module's attributes, of those with an underscore the plain ones."""
    for name, kind, value in own:
        if _first_of(kind) is PLAIN:
            yield name, kind, value
        elif name == "forward" and (overrides := overrides_of(module)):
            # the object in which they are set is another in every copy
            yield name, kind, tuple((one.position, _Same(one.run)) for one in overrides)
        elif name[0] != "_":
            yield name, kind, _plain(value, seen, DEPTH)


@cache
def _names(names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of a module's attributes those that not every module has, and those of hooks."""
    hooks = tuple(name for name in names if name[0] == "_" and name.endswith("_hooks"))
    return tuple(name for name in names if name not in INTERNAL and name not in hooks), hooks


@cache
def _all_plain(kinds: tuple[type, ...]) -> bool:
    return all(_first_of(kind) is PLAIN for kind in kinds)


def described(value: Any) -> tuple[Any, ...]:
    """What a graph depends on of an argument."""
    if isinstance(value, Tensor):
        return _tensor(value)
    found: tuple[Any, ...] = _plain(value, set(), DEPTH)
    return found


def _tensor(value: Tensor) -> tuple[Any, ...]:
    return "tensor", value.shape, value.stride(), value.dtype, value.device.type, value.requires_grad


@cache
def _first_of(kind: type) -> Any:
    """Of the groups of classes the first that has this one; a class that is looked up costs less than `isinstance`."""
    return next((group for group in (PLAIN, ITEMS, Mapping, np.ndarray, OPAQUE) if issubclass(kind, group)), None)


def _plain(value: Any, seen: set[int], depth: int) -> Any:
    """A key of a value; `seen` are objects whose attributes stand in it already."""
    of: Any = type(value)
    kind, group = of.__name__, _first_of(of)
    if group is PLAIN:
        # 1, 1.0 and True are equal, and make different graphs
        return kind, value
    if group is ITEMS:
        kinds = tuple(map(type, value))
        if _all_plain(kinds):
            return kind, kinds, tuple(value)
        return kind, tuple([_plain(item, seen, depth) for item in value])
    if group is Mapping:
        return kind, tuple([(str(key), _plain(item, seen, depth)) for key, item in value.items()])
    if group is np.ndarray:
        # which array it is does not say what it holds: it may be written to
        return kind, _Same(value), value.tobytes()
    if group is OPAQUE or id(value) in seen or depth == 0 or not hasattr(value, "__dict__"):
        return kind, _Same(value)
    seen.add(id(value))
    held = [(name, _plain(item, seen, depth - 1)) for name, item in vars(value).items()]
    return kind, _Same(value), tuple(held)
