"""Put functions in the place of a module's methods, on the instance, so that its class stays as it is."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn


def put_methods(module: nn.Module, changed: Mapping[str, Any]) -> Callable[[], None]:
    """Put functions, by name, in the place of a module's methods; returns what undoes it."""
    # past __setattr__, which a class may have its own of
    own = vars(module)
    before = {name: own[name] for name in changed if name in own}
    own.update(changed)

    def undo() -> None:
        for name in changed:
            own.pop(name, None)
        own.update(before)

    return undo


def method_of(module: nn.Module, name: str) -> Callable[..., Any]:
    """The function that a module runs as a method, called as `function(module, ...)`: put there, or of its class."""
    put = vars(module).get(name)
    found: Callable[..., Any] = getattr(type(module), name) if put is None else put.__func__
    return found
