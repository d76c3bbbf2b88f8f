"""What a forward changes on the modules it runs: ours, in its place, would leave all of that as it is.

Attributes, parameters, buffers and children are compared by their contents, as pickle sees them. Tensors are known by
identity and torch's count of changes in place; modules, functions, and what cannot be pickled, by identity.

Known limits: what is changed and changed back, and what is not reached from the module (class attributes, globals), are
not seen.
"""

import io
import pickle
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lightning_amp.adapters.deferred import version

REGISTERED = ("_parameters", "_buffers", "_modules")
TORCH = frozenset(vars(nn.Module())).difference(REGISTERED)
PLAIN = (int, float, str, bytes)


class Contents(pickle.Pickler):
    """The contents of all attributes of a module and of those in it, by name, as bytes."""

    def __init__(self, module: nn.Module) -> None:
        # an object that is gone could leave its identity to another one
        self._known: list[object] = []
        self.found: dict[str, bytes] = {name: self._bytes(value) for name, value in _attributes(module)}

    def _bytes(self, value: object) -> bytes:
        stream = io.BytesIO()
        super().__init__(stream)
        self.dump(value)
        return stream.getvalue()

    def persistent_id(self, value: Any) -> tuple[int, int] | None:
        """What stands for a value that is known by identity."""
        if isinstance(value, PLAIN) or (not isinstance(value, Tensor | nn.Module) and _has_contents(value)):
            return None
        self._known.append(value)
        return id(value), version(value) if isinstance(value, Tensor) else 0


def changed(before: Contents, after: Contents) -> list[str]:
    """Names of what is not as it was."""
    return [name for name in before.found | after.found if before.found.get(name) != after.found.get(name)]


def _has_contents(value: Any) -> bool:
    try:
        # of functions and classes there is a name or an error
        return not isinstance(value.__reduce_ex__(pickle.HIGHEST_PROTOCOL), str)
    except Exception:
        return False


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for fqn, child in module.named_modules():
        for name, value in vars(child).items():
            if name not in TORCH:
                for own, one in value.items() if name in REGISTERED else [(name, value)]:
                    yield f"{fqn}.{own}" if fqn else own, one
