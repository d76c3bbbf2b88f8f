"""Take a snapshot of a foreign module when ours is built from it, to detect later changes.

    by identity     parameters and children by name, and the lists of indices or resolutions
    by value        numbers and texts that are attributes of the module or of one in it; buffers, and tensors that are
                    attributes
    hooks           none on modules that ours does not run, except those of Lightning and this package, which only look

Parameters that move to a device or change their type keep their identity. Buffers are new objects then: what is not the
object it was, or was written to, is compared once with the values that were kept, rounded as such a change rounds. So
nothing waits for a device in steps between which nothing changed. A deep copy of the module has a copy of the snapshot,
which then knows the copied objects.

Known limits: classes, what is inside of attributes of other types, and lists changed in place are not seen; nor is a
buffer that was added, or changed through `tensor.data`, or by less than float32 rounds.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_amp.adapters.forms.column_layout import LISTS
from lightning_amp.adapters.lazy_distribution import version
from lightning_amp.errors import InstallError
from lightning_amp.footprint.recompute_state import DEPTH, mark_of
from lightning_amp.techniques.contract.change import KINDS

SHOWN = 3
PLAIN = (int, float, str)
GONE = None
"""In place of what is not there; a parameter that is None is none."""
TORCH = frozenset(vars(nn.Module()))
WATCHERS = ("lightning_amp", "lightning", "pytorch_lightning")
"""Packages whose hooks change nothing: the check for finite numbers, profilers, summaries."""


class Snapshot:
    """A foreign decoder as it is now."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = list(module.named_parameters())
        self._found, tensors = _found(module)
        self._tensors = {name: _Kept(tensor) for name, tensor in tensors.items()}

    def check(self, module: nn.Module, decoder: nn.Module) -> None:
        """Refuse a module that is another one by now.

        Raises:
            InstallError: A parameter, a child, a setting, a buffer or the hooks of it have changed.
        """
        found, tensors = _found(module)
        changes = [
            f"{name!r} {_change(self._found.get(name, GONE), found.get(name, GONE))}"
            for name in self._found | found
            if not _same(self._found.get(name, GONE), found.get(name, GONE))
        ]
        changes += [
            f"{name!r} has other values than it had"
            for name, kept in self._tensors.items()
            if not kept.is_still(tensors.get(name))
        ]
        changes += [f"{name!r} has hooks, which would not run" for name in hooked(module, decoder)]
        if changes:
            raise InstallError(
                f"the decoder {type(module).__name__!r} has changed since the plan was installed:"
                f" {', '.join(changes[:SHOWN])}"
                f"{f' and {len(changes) - SHOWN} more' if len(changes) > SHOWN else ''}; what the plan runs in its"
                " place was made before that: make such changes before fit, in `__init__`, `configure_model` or"
                " `setup`, or train with strategies='S1', which runs the decoder's own forward"
            )


class Marks:
    """All that a module and those in it hold, also inside of other objects; the lists of indices are left out.

    To be asked again before the module is changed by anyone else.
    """

    def __init__(self, module: nn.Module) -> None:
        # other objects could take the place of what is not kept
        self._kept: list[object] = []
        self._marks = self._of(module)

    def changed(self, module: nn.Module) -> list[str]:
        """Names of what is not as it was."""
        after = self._of(module)
        return [name for name in self._marks | after if self._marks.get(name) != after.get(name)]

    def _of(self, module: nn.Module) -> dict[str, Any]:
        seen: dict[int, Any] = {id(child): child for child in module.modules()}
        found: dict[str, Any] = {}
        for fqn, child in module.named_modules():
            own = {name: value for name, value in vars(child).items() if name not in TORCH}
            for name, value in (own | child._parameters | child._buffers | child._modules).items():
                if fqn or name not in LISTS:
                    found[f"{fqn}.{name}" if fqn else name] = value
        self._kept += [seen, found]
        return {name: mark_of(value, seen, DEPTH) for name, value in found.items()}


class _Kept:
    """A tensor as it was, which may move to another device or change its type."""

    def __init__(self, tensor: Tensor) -> None:
        self._values = tensor.detach().cpu().clone()
        self._object, self._version = tensor, version(tensor)

    def is_still(self, tensor: Tensor | None) -> bool:
        """Whether this is the tensor, or one of the same values."""
        if tensor is None:
            return False
        if tensor is self._object and version(tensor) == self._version:
            return True
        same = torch.equal(
            _rounded(self._values, tensor.dtype), _rounded(tensor.detach().cpu(), tensor.dtype)
        )
        if same:
            self._object, self._version = tensor, version(tensor)
        return same


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """As values are that have been of this type, and maybe of float32 before."""
    if not values.is_floating_point():
        return values
    return values.float().to(dtype if dtype.itemsize < torch.float32.itemsize else torch.float32)


def _found(module: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What is known by identity or equality, and tensors that are no parameters."""
    found: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for fqn, child in module.named_modules(remove_duplicate=False):
        prefix = f"{fqn}." if fqn else ""
        for name, value in chain(child._parameters.items(), child._modules.items()):
            found[prefix + name] = value
        own = ((name, value) for name, value in vars(child).items() if name not in TORCH)
        for name, value in chain(child._buffers.items(), own):
            if isinstance(value, PLAIN):
                found[prefix + name] = value
            elif isinstance(value, Tensor):
                tensors[prefix + name] = value
    for name in (*LISTS, "res_specs"):
        # a property may make a new list every time
        found[name] = vars(module).get(name)
    return found, tensors


def _same(a: object, b: object) -> bool:
    return a is b or (isinstance(a, PLAIN) and isinstance(b, PLAIN) and a == b)


def _change(old: object, new: object) -> str:
    if old is GONE or new is GONE:
        return "was added" if old is GONE else "is not there any more"
    if isinstance(old, PLAIN) and isinstance(new, PLAIN):
        return f"was {old!r} and is {new!r}"
    return f"is another {type(new).__name__} than it was"


def hooked(module: nn.Module, decoder: nn.Module) -> list[str]:
    """Names of modules in a foreign decoder with hooks that would not run, for ours has them not.

    These are attention and gated activations, which ours computes, and whatever else is not among the layers that ours
    shares: a dropout of probability 0, a softmax as a module, the layers of the other kind of key. The foreign decoder
    is called itself, and hooks on it run.
    """
    found = dict(_hooked(module))
    run = set(decoder.modules()) if found else set()
    return [fqn for fqn, child in found.items() if child not in run]


def _hooked(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for fqn, child in module.named_modules():
        if fqn and any(not _watches(hook) for kind in KINDS for hook in getattr(child, kind).values()):
            yield fqn, child


def _watches(hook: Any) -> bool:
    source = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return source.split(".")[0] in WATCHERS
