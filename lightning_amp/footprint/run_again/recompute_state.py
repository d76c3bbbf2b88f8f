"""Save the state before a block's forward pass, so that the block can run a second time with the same result.

A second forward pass is exact only if it reads the same values as the first. During the second pass

    parameters, arguments    are used as they are; in-place changes since the first pass are detected by tensor versions
    buffers                  that the first pass changes (batch norm's) have their values from before it
    attributes               of the block and its submodules, such as `training`, are those from before the first pass
    random state             of Python and NumPy is that from before it; the caller restores torch's

All changes that the second pass makes to this state are undone afterwards. `self.log` does nothing during it.

Lists and other objects that the block or its caller holds cannot be restored. If the first pass changes such an object,
or changes an argument in place, this is detected, and the block is reported as not repeatable.

Known limits: global variables, closures, state behind an iterator, and changes through `.data` are not detected.
"""

import os
import pickle
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_amp._torch import (
    GRADIENT,
    FakeTensor,
    counter_of,
    has_no_values,
    in_transform,
    is_compiled,
    parts_of,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
    version_of,
    without_torch_function,
)
from lightning_amp.footprint.forward_overrides import hooked, overrides_of
from lightning_amp.random_streams import drawn_between, host_streams, set_host_streams
from lightning_amp.slots import held_in_slots

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)
OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"forward", "_trainer", "_fabric"}
"""Attributes that every module has, or that Lightning sets."""
FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
STATISTICS = ("running_mean", "running_var")
"""Buffers that kernels change without increasing their version, in a layer in training mode."""
DEPTH = 5
"""Nesting depth to which changes of objects are detected."""
ROUNDING = 1e-4
"""Allowed relative difference of sums between two equal computations on devices other than the CPU."""
CACHE = " (if it is a cache for generating text: HuggingFace models make none with `config.use_cache = False`)"
Place = tuple[str, str]
"""Name of a module, and name of an attribute, buffer or parameter in it."""


def unrepeatable(block: nn.Module) -> str:
    """Return why a block cannot run a second time, as far as this is visible without running it; "" if it can."""
    if overrides_of(block) is None:
        return f"its `forward` is set on the instance to {vars(block)['forward']!r}"
    for name, child in block.named_modules():
        place = f"its submodule {name!r}" if name else "it"
        if is_compiled(child):
            return f"{place} is compiled, and what a compiled forward keeps is its own choice"
        if isinstance(child, torch.jit.ScriptModule):
            return f"{place} is a script of torch.jit, whose attributes cannot be put back"
        hooks = hooked([child], FORWARD_HOOKS)
        if name and hooks:
            return f"{place} has {hooks[0]}, which would run twice; those of the block itself run once"
    return ""


class FirstPass:
    """Snapshot of a block's state before its first pass. Call `settle` after that pass.

    Args:
        block: The block.
        given: Its arguments, in any containers.
        changing: Buffers that earlier first passes changed, by the modes of the block's modules; `settle` updates it.

    Attributes:
        arguments: The flattened arguments; their structure is in `containers`.
    """

    def __init__(self, block: nn.Module, given: Any, changing: dict[Any, frozenset[Place]]) -> None:
        self._given = given
        self.arguments, self.containers = tree_flatten(given)
        self._modules, self._changing = dict(block.named_modules()), changing
        self._mode = tuple(child.training for child in self._modules.values())
        self._tables = _snapshot(self._modules)
        self._tensors: dict[Place, Tensor] = {}
        objects: dict[Place, Any] = {("", f"argument {k}"): a for k, a in enumerate(self.arguments)}
        for name, _, values in self._tables:
            # torch keeps its state (such as that of fully_shard) under names that start with two underscores
            for key in (k for k in values if k not in OF_EVERY_MODULE and not k.startswith("__")):
                value = values[key]
                if isinstance(value, Tensor):
                    self._tensors[name, key] = value
                elif not isinstance(value, nn.Module) or values.get("_modules") is not None:
                    # a module that is not a child, such as the parent that the block refers to
                    objects[name, key] = value
        self._objects = {place: value for place, value in objects.items() if not _is_fixed(value)}
        self._marks, self._loggers = self._marks_now()
        self._arguments, self._versions = _versions(self.arguments), self._versions_now()
        self._random: Any = host_streams()
        self._known = changing.get(self._mode)
        self._gradients = self._gradients_now()
        # a tensor that replaces a parameter may be gathered when it is read, so it is not copied
        read = {id(value) for child in self._modules.values() for value in child._parameters.values()}
        self._before = {
            place: tensor.detach().clone()
            for place, tensor in self._tensors.items()
            if not isinstance(tensor, nn.Parameter)
            and id(tensor) not in read
            # in the first pass of a mode the changing buffers are not determined yet, so all are copied
            and (self._known is None or place in self._known)
        }

    def settle(self) -> str:
        """Return why the block cannot run a second time, "" if it can; call this after the first pass."""
        arguments, containers = tree_flatten(self._given)
        self._given = None
        if containers != self.containers or [*map(id, arguments)] != [*map(id, self.arguments)]:
            return "it changes a list or a dictionary that it is called with"
        given = _difference(self._arguments, _versions(arguments))
        if given:
            return f"it changes its {given} in place"
        versions, (marks, _) = self._versions_now(), self._marks_now()
        objects = [place for place, mark in marks.items() if mark != self._marks[place]]
        if objects:
            return self._put_back(objects[0])
        gradients = self._gradients_now()
        if added := [place for place in gradients if gradients[place] != self._gradients.get(place)]:
            return f"it starts a backward pass, which adds to the gradient of {_name(added[0])}"
        changed = frozenset(p for p, version in versions.items() if version != self._versions[p])
        # kernels may change buffers without a new version: values are compared in the first pass of a mode only
        changed |= self._known if self._known is not None else {p for p in self._before if self._differs(p)}
        if changed - self._before.keys():
            return f"it changes {_name(min(changed - self._before.keys()))} in place"
        self._changing[self._mode] = changed
        self._before = {place: values for place, values in self._before.items() if place in changed}
        if not drawn_between(self._random, host_streams()):
            # the second pass draws no random numbers either
            self._random = None
        return ""

    def _gradients_now(self) -> dict[Place, tuple[int, int]]:
        # not by the property of a sharded tensor, which refuses to be read in a step
        with without_torch_function():
            leaves = {place: tensor for place, tensor in self._tensors.items() if tensor.is_leaf}
            found = {place: GRADIENT.__get__(tensor) for place, tensor in leaves.items()}
        return {place: (id(grad), version_of(grad)) for place, grad in found.items() if grad is not None}

    def let_go(self) -> None:
        """Keep of arguments only their versions: what checkpoint saves of them may leave until the second pass.

        Keep of attributes no graph: that of a loss which was never differentiated holds its step, and so all before it.
        """
        self.arguments = [counter_of(a) if _may_leave(a) else a for a in self.arguments]
        cut: dict[int, tuple[Tensor, Tensor]] = {}
        for name, _, values in self._tables:
            for key in (k for k in values if k not in OF_EVERY_MODULE):
                values[key] = found = _without_graph(values[key], cut, DEPTH)
                for known in (self._tensors, self._objects):
                    if (name, key) in known:
                        known[name, key] = found
        if cut:
            self._marks, self._loggers = self._marks_now()

    def stale(self, *, objects: bool = True) -> str:
        """Return what has changed since the first pass and cannot be restored; "" if nothing.

        With `objects=False`, changes inside lists and other objects are ignored.
        """
        # not those of the second pass: saved-tensor hooks may return copies, which have other versions
        given, versions = _difference(self._arguments, _versions(self.arguments)), self._versions_now()
        # the buffers in `_before` are restored for the second pass, so they may have changed since
        changed = [p for p, v in versions.items() if v != self._versions[p] and p not in self._before]
        if objects:
            changed += [place for place, mark in self._marks_now()[0].items() if mark != self._marks[place]]
        return given or (_name(changed[0]) if changed else "")

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore the state from before the first pass; on exit, restore the current state."""
        now = _snapshot(self._modules)
        now += [("", vars(logger), dict(vars(logger))) for logger in self._loggers]
        random_now = host_streams() if self._random else None
        # a buffer with two names stays one tensor
        fresh = {id(self._tensors[place]): values.clone() for place, values in self._before.items()}
        own = {place: fresh[id(self._tensors[place])] for place in self._before}
        for name, table, values in self._tables:
            _put(table, {k: own.get((name, k), v) for k, v in values.items()} if own else values)
        for logger in self._loggers:
            vars(logger).update(log=_no_log, log_dict=_no_log)
        try:
            if random_now:
                set_host_streams(self._random)
            yield
        finally:
            if random_now:
                set_host_streams(random_now)
            for _, table, values in now:
                _put(table, values)

    def _put_back(self, place: Place) -> str:
        """Describe a changed object for a message; an argument is described by its name and type."""
        module, key = place
        if module or not key.startswith("argument "):
            return f"it changes what {_name(place)} holds, which cannot be put back"
        k = int(key.removeprefix("argument "))
        numbered = tree_unflatten(list(range(len(self.arguments))), self.containers)
        (_, name, *_), _ = tree_flatten_with_path(numbered)[0][k]
        named = getattr(name, "key", getattr(name, "idx", k))
        kind = type(self.arguments[k]).__name__
        hint = CACHE if kind.endswith("Cache") else ""
        return f"it changes what its argument {named!r}, a {kind}, holds, which cannot be put back{hint}"

    def _differs(self, place: Place) -> bool:
        """Whether the first pass changed a buffer's values."""
        if place[1] in STATISTICS and self._modules[place[0]].training:
            # a first batch of zeros may leave the statistics unchanged, although later batches change them
            return True
        now = self._tensors[place]
        return not has_no_values(now) and not torch.equal(self._before[place], now)

    def _versions_now(self) -> dict[Place, int]:
        return {place: version_of(tensor) for place, tensor in self._tensors.items()}

    def _marks_now(self) -> tuple[dict[Place, Any], list[LightningModule]]:
        """Return marks of all objects, and the LightningModules among them."""
        # the block's modules are skipped: their attributes are compared separately, name by name
        seen: dict[int, Any] = {id(child): child for child in self._modules.values()}
        marks = {place: mark_of(value, seen, DEPTH) for place, value in self._objects.items()}
        return marks, [value for value in seen.values() if isinstance(value, LightningModule)]


def _snapshot(modules: Mapping[str, nn.Module]) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return (module name, table, its copy) for attributes, parameters, buffers and children of each module."""
    return [
        (name, table, dict(table))
        for name, child in modules.items()
        for table in (vars(child), child._parameters, child._buffers, child._modules)
    ]


def _put(table: dict[str, Any], values: dict[str, Any]) -> None:
    """Set a table to `values`, unless it holds the same objects already."""
    if [*table, *map(id, table.values())] != [*values, *map(id, values.values())]:
        table.clear()
        table.update(values)


def _versions(arguments: Sequence[Any]) -> dict[str, int]:
    return {f"argument {k}": version_of(a) for k, a in enumerate(arguments) if isinstance(a, Tensor)}


def _may_leave(value: Any) -> bool:
    dense = type(value) in (Tensor, FakeTensor) and value.layout is torch.strided
    return dense and not value.is_inference() and not in_transform()


def _without_graph(value: Any, cut: dict[int, tuple[Tensor, Tensor]], depth: int) -> Any:
    """Return an equal value whose tensors are leaves with the same memory and counter; `cut` has those found so far."""
    if type(value) in (list, tuple, dict) and depth:
        parts = [*value.values()] if isinstance(value, dict) else [*value]
        found = [_without_graph(part, cut, depth - 1) for part in parts]
        if [*map(id, found)] == [*map(id, parts)]:
            return value
        return dict(zip(value, found, strict=True)) if isinstance(value, dict) else type(value)(found)
    if not isinstance(value, Tensor) or not _may_leave(value) or value.grad_fn is None:
        return value
    if id(value) not in cut:
        cut[id(value)] = value, value.detach().requires_grad_()
    return cut[id(value)][1]


def _difference(before: Mapping[str, int], now: Mapping[str, int]) -> str:
    return next((name for name in before if before[name] != now[name]), "")


def mark_of(value: Any, seen: dict[int, Any], depth: int) -> Any:
    """Return a value that differs when an object has changed."""
    if isinstance(value, PLAIN):
        # nan is not equal to itself, and would count as a change each time
        return value if value == value else "nan"
    if isinstance(value, Tensor):
        # `seen` keeps the tensor alive: otherwise a new tensor could get the same id
        seen[id(value)] = value
        return id(value), version_of(value)
    if id(value) in seen or depth == 0:
        return id(value)
    seen[id(value)] = value
    if isinstance(value, nn.Module):
        # of a module outside the block, only its buffers and public attributes are compared
        public = {**value._buffers, **{name: part for name, part in vars(value).items() if name[0] != "_"}}
        return id(value), *map(_outline, public.values())
    if isinstance(value, Mapping):
        return [(mark_of(k, seen, depth - 1), mark_of(v, seen, depth - 1)) for k, v in value.items()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [mark_of(part, seen, depth - 1) for part in value]
    return id(value), _held(value, seen, depth)


def _outline(value: Any) -> Any:
    """Return a mark as `mark_of` does, without the contents of objects."""
    if isinstance(value, (*PLAIN, Tensor)):
        return mark_of(value, {}, 0)
    return id(value), len(value) if isinstance(value, list | dict | set | deque) else None


def state_of_generator(value: Any) -> Any:
    """Return the state of a random generator, which no attribute shows; None for other objects.

    `random.SystemRandom` has no state.
    """
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    if isinstance(value, np.random.Generator | np.random.RandomState):
        # not `repr`, which shortens long states
        return pickle.dumps(value)
    if isinstance(value, torch.Generator):
        return value.initial_seed(), bytes(value.get_state().tolist())
    return None


def _held(value: Any, seen: dict[int, Any], depth: int) -> Any:
    """Return a mark of the contents of an object that is not a container."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if (drawn := state_of_generator(value)) is not None:
        return drawn
    if isinstance(value, os.PathLike):
        # its slots are filled on first access
        return os.fspath(value)
    # the contents of slots are not compared: they may be shared objects, such as a mesh with its process groups
    own = [(name, _outline(part)) for name, part in held_in_slots(value).items()]
    inside = mark_of(vars(value), seen, depth - 1) if hasattr(value, "__dict__") else None
    return (own, inside) if own else inside


def _name(place: Place) -> str:
    module, key = place
    return repr(f"{module}.{key}" if module else key)


def _is_fixed(value: Any) -> bool:
    """Whether a value is a tensor or is immutable."""
    if isinstance(value, tuple):
        return all(isinstance(part, PLAIN) for part in value)
    return isinstance(value, (*PLAIN, Tensor))


def _no_log(*_: Any, **__: Any) -> None:
    """Do nothing: the first pass has logged the value already."""


def digests(result: Any) -> list[tuple[str, float, float]]:
    """Return device type, sum and norm of each floating-point tensor (or local shard) of a result that has values."""
    tensors = [
        part for t in tree_leaves(result) if isinstance(t, Tensor) and t.layout is torch.strided for part in parts_of(t)
    ]
    with torch.no_grad():
        return [
            (t.device.type, float(t.sum(dtype=torch.float64)), float(t.norm(dtype=torch.float64)))
            # one-byte dtypes do not promote
            for t in (t.float() if t.itemsize == 1 else t for t in tensors if t.is_floating_point())
            # zeros of forward-mode AD have no memory, and reading them in a dispatch mode ends the process
            if not has_no_values(t) and not t._is_zerotensor()
        ]


def same_digests(expected: Sequence[tuple[str, float, float]], found: Sequence[tuple[str, float, float]]) -> bool:
    """Whether two passes returned the same digests: bitwise equal on a CPU, within `ROUNDING` on other devices."""
    rtol = 0.0 if all(device == "cpu" for device, *_ in expected) else ROUNDING
    return len(expected) == len(found) and all(
        torch.allclose(torch.tensor(a[1:]), torch.tensor(b[1:]), rtol=rtol, atol=0.0, equal_nan=True)
        for a, b in zip(expected, found, strict=True)
    )
