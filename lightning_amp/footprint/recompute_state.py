"""Save the state before a block's forward pass, so that it can run a second time with the same result.

A second pass is the same function only if it reads the same. It finds

    parameters, arguments    as they are; that they have been changed in place since is noticed, by their versions
    buffers                  those that the first pass changes (batch norm's) with their values from before it
    attributes               of the block and its submodules, `training` among them, as they were before the first pass
    random numbers           of Python and NumPy as they were; those of torch are the caller's part

and what it changes of all this is undone, so that everything happens once. `self.log` does nothing in it.

Lists and other objects that the block or its caller holds cannot be put back: that the first pass changes one, or an
argument in place, is noticed, and then no second pass is exact.

Known limits: what lies in global variables, in closures or behind an iterator is not seen, and neither is a change by
way of `.data`.
"""

import os
import pickle
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import MemberDescriptorType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn

from lightning_amp._torch import (
    has_no_values,
    is_compiled,
    parts_of,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
    version_of,
)
from lightning_amp.footprint.forward_overrides import hooked, overrides_of

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)
OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"forward", "_trainer", "_fabric"}
"""Attributes that every module has, or that are none of the user's."""
FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
STATISTICS = ("running_mean", "running_var")
"""Buffers that kernels change without a new version, in a layer that trains."""
DEPTH = 5
"""How many objects deep a change of an object is looked for."""
ROUNDING = 1e-4
"""Relative difference of a sum that other devices than the CPU may give in two equal computations."""
CACHE = " (if it is a cache for generating text: HuggingFace models make none with `config.use_cache = False`)"
Place = tuple[str, str]
"""A module's name, and a name in it."""


def unrepeatable(block: nn.Module) -> str:
    """Why a block cannot run a second time, as far as that is seen without running it; "" if it can."""
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
    """Made before a first pass of a block; `settle` is called after it.

    Args:
        block: The block.
        given: What it is called with, in any containers.
        changing: Buffers that first passes have changed so far, by the block's mode; `settle` adds to it.

    Attributes:
        arguments: What it is called with, without containers, which are `containers`.
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
            # torch keeps its own state under names with two underscores, such as that of fully_shard
            for key in (k for k in values if k not in OF_EVERY_MODULE and not k.startswith("__")):
                value = values[key]
                if isinstance(value, Tensor):
                    self._tensors[name, key] = value
                elif not isinstance(value, nn.Module) or values.get("_modules") is not None:
                    # a module that is no child of it, such as the one that it is part of
                    objects[name, key] = value
        self._objects = {place: value for place, value in objects.items() if not _is_fixed(value)}
        self._marks, self._loggers = self._marks_now()
        self._arguments, self._versions = _versions(self.arguments), self._versions_now()
        self._random: Any = random_state()
        self._known = changing.get(self._mode)
        # what stands in the place of a parameter may be gathered when it is read
        read = {id(value) for child in self._modules.values() for value in child._parameters.values()}
        self._before = {
            place: tensor.detach().clone()
            for place, tensor in self._tensors.items()
            if not isinstance(tensor, nn.Parameter)
            and id(tensor) not in read
            # in the first pass of a mode it is not known which buffers change, and all are copied
            and (self._known is None or place in self._known)
        }

    def settle(self) -> str:
        """After the first pass: why there can be no second one, "" if there can."""
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
        changed = frozenset(p for p, version in versions.items() if version != self._versions[p])
        # kernels change statistics, and perhaps others, without a new version: values are compared once, and then known
        changed |= self._known if self._known is not None else {p for p in self._before if self._differs(p)}
        if changed - self._before.keys():
            return f"it changes {_name(min(changed - self._before.keys()))} in place"
        self._changing[self._mode] = changed
        self._before = {place: values for place, values in self._before.items() if place in changed}
        if same_random(self._random, random_state()):
            # the second pass draws none either
            self._random = None
        return ""

    def stale(self, *, objects: bool = True) -> str:
        """What has been changed since the first pass and cannot be put back; "" if nothing.

        Without `objects` what lists and other objects hold may have been.
        """
        # not of what the second pass is given: hooks on saved tensors may hand back copies, with counts of their own
        given, versions = _difference(self._arguments, _versions(self.arguments)), self._versions_now()
        # what `_before` has is put back for the second pass, and may have changed since
        changed = [p for p, v in versions.items() if v != self._versions[p] and p not in self._before]
        if objects:
            changed += [place for place, mark in self._marks_now()[0].items() if mark != self._marks[place]]
        return given or (_name(changed[0]) if changed else "")

    @contextmanager
    def again(self) -> Iterator[None]:
        """Everything as it was before the first pass; afterwards it is as it is now."""
        now = _snapshot(self._modules)
        now += [("", vars(logger), dict(vars(logger))) for logger in self._loggers]
        random_now = random_state() if self._random else None
        # a buffer in two places stays one
        fresh = {id(self._tensors[place]): values.clone() for place, values in self._before.items()}
        own = {place: fresh[id(self._tensors[place])] for place in self._before}
        for name, table, values in self._tables:
            _put(table, {k: own.get((name, k), v) for k, v in values.items()} if own else values)
        for logger in self._loggers:
            vars(logger).update(log=_no_log, log_dict=_no_log)
        try:
            set_random(self._random)
            yield
        finally:
            set_random(random_now)
            for _, table, values in now:
                _put(table, values)

    def _put_back(self, place: Place) -> str:
        """That an object was changed, for a person: an argument with its name and type."""
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
        """Whether the first pass has changed a buffer's values."""
        if place[1] in STATISTICS and self._modules[place[0]].training:
            # a first step of zeros may leave their values as they are
            return True
        now = self._tensors[place]
        return not has_no_values(now) and not torch.equal(self._before[place], now)

    def _versions_now(self) -> dict[Place, int]:
        return {place: version_of(tensor) for place, tensor in self._tensors.items()}

    def _marks_now(self) -> tuple[dict[Place, Any], list[LightningModule]]:
        """What all objects hold, and the LightningModules among them."""
        # its own modules count as seen: what they hold is compared by itself, name by name
        seen: dict[int, Any] = {id(child): child for child in self._modules.values()}
        marks = {place: mark_of(value, seen, DEPTH) for place, value in self._objects.items()}
        return marks, [value for value in seen.values() if isinstance(value, LightningModule)]


def _snapshot(modules: Mapping[str, nn.Module]) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Every table of names of every module, and what it holds."""
    return [
        (name, table, dict(table))
        for name, child in modules.items()
        for table in (vars(child), child._parameters, child._buffers, child._modules)
    ]


def _put(table: dict[str, Any], values: dict[str, Any]) -> None:
    """Let a table hold some values; most of the time it does."""
    if [*table, *map(id, table.values())] != [*values, *map(id, values.values())]:
        table.clear()
        table.update(values)


def _versions(arguments: Sequence[Any]) -> dict[str, int]:
    return {f"argument {k}": version_of(a) for k, a in enumerate(arguments) if isinstance(a, Tensor)}


def _difference(before: Mapping[str, int], now: Mapping[str, int]) -> str:
    return next((name for name in before if before[name] != now[name]), "")


def mark_of(value: Any, seen: dict[int, Any], depth: int) -> Any:
    """Something that is another if an object is changed."""
    if isinstance(value, PLAIN):
        # nan differs from itself, and would count as a change each time
        return value if value == value else "nan"
    if isinstance(value, Tensor):
        # kept as all else that is known by identity: another one could take its place
        seen[id(value)] = value
        return id(value), version_of(value)
    if id(value) in seen or depth == 0:
        return id(value)
    seen[id(value)] = value
    if isinstance(value, nn.Module):
        # of one that is not the block's what others read: its buffers, and attributes of the user's
        public = {**value._buffers, **{name: part for name, part in vars(value).items() if name[0] != "_"}}
        return id(value), *map(_outline, public.values())
    if isinstance(value, Mapping):
        return [(mark_of(k, seen, depth - 1), mark_of(v, seen, depth - 1)) for k, v in value.items()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [mark_of(part, seen, depth - 1) for part in value]
    return id(value), _held(value, seen, depth)


def _outline(value: Any) -> Any:
    """As `mark_of`, without a look at what is inside."""
    if isinstance(value, (*PLAIN, Tensor)):
        return mark_of(value, {}, 0)
    return id(value), len(value) if isinstance(value, list | dict | set | deque) else None


def state_of_generator(value: Any) -> Any:
    """The state of a random generator, which stands in no attribute; None of anything else.

    The machine's own, `random.SystemRandom`, has none.
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
    """What an object holds that is no container."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if (drawn := state_of_generator(value)) is not None:
        return drawn
    if isinstance(value, os.PathLike):
        # its slots are filled when they are first read
        return os.fspath(value)
    kind: Any = type(value)
    # without those of functions and methods, which say nothing of what is remembered
    slots = [name for name in slots_of(kind) if name[:2] != "__" and hasattr(value, name)]
    # what slots hold is not looked into: it may be of others, such as a mesh with its groups
    own = [(name, _outline(getattr(value, name))) for name in slots]
    inside = mark_of(vars(value), seen, depth - 1) if hasattr(value, "__dict__") else None
    return (own, inside) if own else inside


@cache
def slots_of(kind: type) -> tuple[str, ...]:
    """Names of what objects of a class hold besides their dictionary: `__slots__`, and what a `partial` binds."""
    return tuple(n for base in kind.__mro__ for n, own in vars(base).items() if isinstance(own, MemberDescriptorType))


def _name(place: Place) -> str:
    module, key = place
    return repr(f"{module}.{key}" if module else key)


def _is_fixed(value: Any) -> bool:
    """Whether a value is a tensor, or cannot be changed."""
    if isinstance(value, tuple):
        return all(isinstance(part, PLAIN) for part in value)
    return isinstance(value, (*PLAIN, Tensor))


def random_state() -> tuple[Any, Any]:
    """Where the random numbers of Python and NumPy are."""
    return random.getstate(), np.random.get_state()


def same_random(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """Whether none were drawn between the two."""
    return one[0] == other[0] and all(map(np.array_equal, one[1], other[1]))


def set_random(states: tuple[Any, Any] | None) -> None:
    """Put them back to where they were; None changes nothing."""
    if states is not None:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _no_log(*_: Any, **__: Any) -> None:
    """What is logged in the first pass, is logged."""


def digests(result: Any) -> list[tuple[str, float, float]]:
    """Two sums over every tensor of a result, or what this rank holds of it; none of tensors without values."""
    tensors = [
        part for t in tree_leaves(result) if isinstance(t, Tensor) and t.layout is torch.strided for part in parts_of(t)
    ]
    with torch.no_grad():
        return [
            (t.device.type, float(t.sum(dtype=torch.float64)), float(t.norm(dtype=torch.float64)))
            # types of one byte are not promoted
            for t in (t.float() if t.itemsize == 1 else t for t in tensors if t.is_floating_point())
            if not has_no_values(t)
        ]


def same_digests(expected: Sequence[tuple[str, float, float]], found: Sequence[tuple[str, float, float]]) -> bool:
    """Whether two passes gave the same: to the last bit of both sums on a CPU."""
    rtol = 0.0 if all(device == "cpu" for device, *_ in expected) else ROUNDING
    return len(expected) == len(found) and all(
        torch.allclose(torch.tensor(a[1:]), torch.tensor(b[1:]), rtol=rtol, atol=0.0, equal_nan=True)
        for a, b in zip(expected, found, strict=True)
    )


@contextmanager
def types_of_the_step(precision: Precision) -> Iterator[None]:
    """Around a backward pass, in which parts of the step may run again: the default type of the step.

    Lightning's precisions "64-true", "16-true" and "bf16-true" set it for the step alone: a tensor that a block makes
    without a type would be of another type when the block is computed again.
    """
    before = torch.get_default_dtype()
    with precision.forward_context():
        of_the_step = torch.get_default_dtype()
    torch.set_default_dtype(of_the_step)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
