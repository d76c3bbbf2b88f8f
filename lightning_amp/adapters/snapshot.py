"""What a foreign module was when ours was made of it, to tell whether it still is.

    by identity     parameters and children by name, and the lists of indices
    by value        numbers and texts that are attributes of the module, and of layers that ours stand in for
    hooks           on these layers there are none, but for Lightning's and this package's own, which only look

Parameters that move to a device or change their type keep their identity. A deep copy of the module has a copy of the
snapshot, which then knows the copied objects.

Known limits: classes, buffers, what is inside of attributes of other types, and lists changed in place are not seen.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import nn

from lightning_amp.adapters.higlue import REPLACED
from lightning_amp.adapters.layout import LISTS
from lightning_amp.errors import InstallError
from lightning_amp.parallel.hooks import KINDS

SHOWN = 3
PLAIN = (int, float, str)
GONE = None
"""In place of what is not there; a parameter that is None is none."""
TORCH = frozenset(vars(nn.Module()))
WATCHERS = ("lightning_amp", "lightning", "pytorch_lightning")
"""Packages whose hooks change nothing: the check for finite numbers, profilers, summaries."""


class Snapshot:
    """A foreign decoder as it is now.

    Attributes:
        parameters: Its parameters, by name.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parameters = list(module.named_parameters())
        self._found = dict(_found(module))

    def check(self, module: nn.Module) -> None:
        """Refuse a module that is another one by now.

        Raises:
            InstallError: A parameter, a child, a setting or the hooks of it have changed.
        """
        found = dict(_found(module))
        changes = [
            f"{name!r} {_change(self._found.get(name, GONE), found.get(name, GONE))}"
            for name in self._found | found
            if not _same(self._found.get(name, GONE), found.get(name, GONE))
        ]
        changes += [f"{name!r} has hooks, which would not run" for name in _hooked(module)]
        if changes:
            raise InstallError(
                f"the decoder {type(module).__name__!r} has changed since the plan was installed:"
                f" {', '.join(changes[:SHOWN])}"
                f"{f' and {len(changes) - SHOWN} more' if len(changes) > SHOWN else ''}; what the plan runs in its"
                " place was made before that: make such changes before fit, in `__init__`, `configure_model` or"
                " `setup`, or train with strategies='S1', which runs the decoder's own forward"
            )


def _found(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for fqn, child in module.named_modules(remove_duplicate=False):
        prefix = f"{fqn}." if fqn else ""
        for name, value in chain(child._parameters.items(), child._modules.items()):
            yield prefix + name, value
    for fqn, child in chain([("", module)], _replaced(module)):
        prefix = f"{fqn}." if fqn else ""
        for name, value in vars(child).items():
            if isinstance(value, PLAIN) and name not in TORCH:
                yield prefix + name, value
    for name in LISTS:
        # a property may make a new list every time
        yield name, vars(module).get(name)


def _replaced(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name in REPLACED:
        layers = getattr(module, name, None)
        if isinstance(layers, nn.Module):
            yield from layers.named_modules(prefix=name)


def _hooked(module: nn.Module) -> list[str]:
    return [
        fqn
        for fqn, child in _replaced(module)
        if any(not _watches(hook) for kind in KINDS for hook in getattr(child, kind).values())
    ]


def _watches(hook: Any) -> bool:
    source = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return source.split(".")[0] in WATCHERS


def _same(a: object, b: object) -> bool:
    return a is b or (isinstance(a, PLAIN) and isinstance(b, PLAIN) and a == b)


def _change(old: object, new: object) -> str:
    if old is GONE or new is GONE:
        return "was added" if old is GONE else "is not there any more"
    if isinstance(old, PLAIN) and isinstance(new, PLAIN):
        return f"was {old!r} and is {new!r}"
    return f"is another {type(new).__name__} than it was"
