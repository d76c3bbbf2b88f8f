"""What was found out by trying a module, kept for modules of the same class with the same settings."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

Found = TypeVar("Found")

_FOUND: dict[tuple[Any, ...], Any] = {}
_COMMON = frozenset(vars(nn.Module()))


def found_out(module: nn.Module, probe: Callable[[nn.Module], Found]) -> Found:
    """What `probe` returns for a module; 32 strata have 32 modules that are alike, of which one is tried.

    Args:
        module: Tried every time if it has parameters, buffers or children: only without does its class, with its
            settings, say what it computes.
        probe: The same object for the same question.
    """
    settings = settings_of(module)
    if settings is None or list(module.children()) or module.state_dict():
        return probe(module)
    return remembered((probe, type(module), module.training, *settings), lambda: probe(module))


def remembered(key: tuple[Any, ...], find_out: Callable[[], Found]) -> Found:
    """What was found out for a key, or is now."""
    if key not in _FOUND:
        _FOUND[key] = find_out()
    found: Found = _FOUND[key]
    return found


def settings_of(module: nn.Module) -> tuple[Any, ...] | None:
    """The attributes that a module's class has given it, where all of them are plain values."""
    own = {name: value for name, value in vars(module).items() if name not in _COMMON}
    if not all(isinstance(value, bool | int | float | str | slice | type | None) for value in own.values()):
        return None
    # slices cannot be keys
    return tuple(sorted((name, v if isinstance(v, type) else repr(v)) for name, v in own.items()))
