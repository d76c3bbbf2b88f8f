"""What a forward changes on the modules it runs: ours, in its place, would leave all of that as it is.

    numbers, texts       by value
    tensors              by identity, and by torch's count of changes in place
    dicts, lists, sets   by identity, and by what is in them
    other objects        by identity, and by their attributes

Known limits: what is changed and changed back, arrays of numpy changed in place, and what is not reached from the
module (class attributes, globals) are not seen.
"""

from collections import deque
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from lightning_amp.adapters.deferred import version

PLAIN = (int, float, str)
REGISTERED = ("_parameters", "_buffers", "_modules")
TORCH = frozenset(vars(nn.Module())).difference(REGISTERED)
LEAVES = (*PLAIN, nn.Module, ModuleType, type)
Marks = dict[str, tuple[Any, int]]


def marks(module: nn.Module) -> Marks:
    """All that a module and those in it have as attributes, by name, with a number that changes where they do."""
    found: Marks = {}
    seen: set[int] = set()
    for fqn, child in module.named_modules():
        for name, value in vars(child).items():
            if name in TORCH:
                continue
            for own, one in value.items() if name in REGISTERED else [(name, value)]:
                found.update(_walk(f"{fqn}.{own}" if fqn else own, one, seen))
    return found


def changes(before: Marks, after: Marks) -> list[str]:
    """Names of what is not as it was."""
    return [name for name in before | after if not _same(before.get(name), after.get(name))]


def _walk(name: str, value: Any, seen: set[int]) -> Iterator[tuple[str, tuple[Any, int]]]:
    if isinstance(value, Tensor):
        yield name, (value, version(value))
        return
    if isinstance(value, list | tuple) and all(isinstance(one, PLAIN) for one in value):
        # may be the names of all features
        yield name, (value, hash(tuple(value)))
        return
    yield name, (value, 0)
    if isinstance(value, LEAVES) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _walk(f"{name}[{key!r}]", one, seen)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for i, one in enumerate(value):
            yield from _walk(f"{name}[{i}]", one, seen)
    for key, one in getattr(value, "__dict__", {}).items():
        yield from _walk(f"{name}.{key}", one, seen)


def _same(a: tuple[Any, int] | None, b: tuple[Any, int] | None) -> bool:
    if a is None or b is None:
        return a is b
    (one, count), (other, later) = a, b
    same = one is other or (isinstance(one, PLAIN) and type(one) is type(other) and one == other)
    return same and count == later
