"""Compute the key of a block's graph: a new key requires a new graph.

Shapes, strides, dtypes, devices and gradients of arguments, parameters and buffers; which of them are one tensor; other
arguments; training mode and all plain attributes of the block and its submodules, their classes, and whether they have
hooks; what objects among all these hold, such as a configuration; gradient mode and autocast.
"""

from collections.abc import Mapping, Sequence
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
    state = state_of(block)
    return (
        type(block),
        tuple(map(described, values)),
        str(spec),
        tuple((name, *described(tensor)) for name, tensor in state.items()),
        tuple(settings_of(block)),
        torch.is_grad_enabled(),
        autocast_now(),
        _aliases([*state.values(), *(value for value in values if isinstance(value, Tensor))]),
    )


def state_of(block: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, in the order in which a graph takes them."""
    return {**dict(block.named_parameters()), **dict(block.named_buffers())}


def settings_of(block: nn.Module) -> list[tuple[str, Any]]:
    """Classes of a block and its submodules, their plain attributes, on which a branch may depend, and their hooks."""
    found, seen = list[tuple[str, Any]](), set[int]()
    for fqn, child in block.named_modules():
        found.append((fqn, type(child)))
        start = f"{fqn}." if fqn else ""
        # called in every step: what most attributes are comes first
        for name, value in vars(child).items():
            kind: Any = type(value)
            if name in INTERNAL:
                if value and name.endswith("_hooks"):
                    found.append((start + name, True))
            elif name == "forward" and (overrides := overrides_of(child)):
                # the object in which they are set is another in every copy
                found.append((start + name, tuple((one.position, _Same(one.run)) for one in overrides)))
            elif _first_of(kind) is PLAIN:
                found.append((start + name, (kind.__name__, value)))
            elif name[0] != "_":
                found.append((start + name, _plain(value, seen, DEPTH)))
            elif name.endswith("_hooks") and value:
                found.append((start + name, True))
    return found


def described(value: Any) -> tuple[Any, ...]:
    """What a graph depends on of an argument."""
    if isinstance(value, Tensor):
        return "tensor", value.shape, value.stride(), value.dtype, value.device.type, value.requires_grad
    found: tuple[Any, ...] = _plain(value, set(), DEPTH)
    return found


@cache
def _first_of(kind: type) -> Any:
    """Of the groups of classes the first that has this one; a class that is looked up costs less than `isinstance`."""
    return next(
        (group for group in (PLAIN, ITEMS, Mapping, np.ndarray, OPAQUE) if issubclass(kind, group)), None
    )


def _plain(value: Any, seen: set[int], depth: int) -> Any:
    """A key of a value; `seen` are objects whose attributes stand in it already."""
    of: Any = type(value)
    kind, group = of.__name__, _first_of(of)
    if group is PLAIN:
        # 1, 1.0 and True are equal, and make different graphs
        return kind, value
    if group is ITEMS:
        return kind, tuple([_plain(item, seen, depth) for item in value])
    if group is Mapping:
        return kind, tuple([(str(key), _plain(item, seen, depth)) for key, item in value.items()])
    if group is np.ndarray:
        return kind, _Same(value), value.tobytes()
    if group is OPAQUE or id(value) in seen or depth == 0 or not hasattr(value, "__dict__"):
        return kind, _Same(value)
    seen.add(id(value))
    held = [(name, _plain(item, seen, depth - 1)) for name, item in vars(value).items()]
    return kind, _Same(value), tuple(held)


def _aliases(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Which tensors are one and the same, by the first of them."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(tensor), k) for k, tensor in enumerate(tensors))
