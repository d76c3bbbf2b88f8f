"""Record the torch functions that a forward calls, and follow a later call of the forward along such records.

A captured graph holds as long as the forward's Python calls the same functions with the same arguments. Anything may
decide that: an attribute, a global variable, a class, the clock. So these values are not compared one by one: the
forward itself runs in every call, but no function of torch computes. Each is compared with the record, and returns an
empty tensor in place of its result:

    capture     y = relu(x); z = y * scale     record: relu(0) -> 1, mul(1, 2.0) -> 2, returns 2
    later       relu(0) -> empty, mul(1, 3.0)  not in the record: captured again, and goes on along that

What a forward does besides calling torch (counters, lists, random numbers of Python) it does once, as without a graph.
A forward that remembers tensors outside of its block, such as in a `functools.cache`, would remember an empty one: it
runs with empty caches, which are put back.

Known limits: values that torch's functions read themselves, such as flags of backends. A capture of a forward that
changes objects which `restoring_state` does not restore changes them once more.
"""

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_amp._torch import FakeTensor, fake_tensors, tree_leaves, unseen
from lightning_amp.default_dtype import default_dtype
from lightning_amp.footprint.chain.block_call import autocast_again, autocast_now
from lightning_amp.footprint.copies.batch_values import read_by_torch
from lightning_amp.holding import replacing

SAME = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, range)
FIXED = (type, FunctionType, BuiltinFunctionType, ModuleType, type(...))
"""Classes of objects that are compared by identity, because they do not change."""


DEVICE: Any = Tensor.device.__get__


class CannotFollow(Exception):
    """Reason why a forward cannot be followed along any record; never leaves this package."""


class Ref(NamedTuple):
    """A tensor by its place: the graph's arguments come first, then results in the order of the calls."""

    place: int


class Other(NamedTuple):
    """An object whose contents are not compared, or a tensor that no function has returned."""

    kind: type


class Call(NamedTuple):
    """One call of a function.

    Attributes:
        key: Function, its arguments, the modes, and the value of an attribute of one of the graph's arguments.
        result: What it returned, with a `Ref` in place of every tensor.
        runs: Whether no tensors are involved, as in a change of a mode; such a function runs when it is followed.
    """

    key: tuple[Any, ...]
    result: Any
    runs: bool


Calls = tuple[Call, ...]


class _Mode(TorchFunctionMode):
    """Places of the tensors of one run."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self._n_given, self._tensors = len(given), [*given]
        self._places: dict[int, Ref] = {}
        for k, tensor in enumerate(given):
            self._places.setdefault(id(tensor), Ref(k))

    def _put(self, tensor: Tensor) -> Ref:
        # the list keeps the tensor alive, so that its id is not reused
        self._places[id(tensor)] = found = Ref(len(self._tensors))
        self._tensors.append(tensor)
        return found

    def _described(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, Tensor):
            return self._places.get(id(value), Other(kind))
        if kind in SAME:
            # 1 and True are equal
            return kind, value
        if isinstance(value, list | tuple):
            return kind, *map(self._described, value)
        if isinstance(value, float | complex | np.generic):
            # -0.0 equals 0.0, and nan does not equal itself
            return kind, repr(value)
        if isinstance(value, Mapping):
            return kind, *value, *map(self._described, value.values())
        if isinstance(value, slice):
            return kind, *map(self._described, (value.start, value.stop, value.step))
        if isinstance(value, np.ndarray):
            return kind, value.dtype, value.shape, value.tobytes()
        return (kind, value) if isinstance(value, (*FIXED, *SAME)) else Other(kind)

    def _question(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """Return the first three parts of a call's key."""
        return func, self._described((*args, kwargs)), _modes()

    def _reads(self, func: Any, args: Any) -> bool:
        """Whether an attribute of one of the graph's arguments is read."""
        return getattr(func, "__name__", "") == "__get__" and self._described(args[0])[0] in range(self._n_given)


class Recorder(_Mode):
    """Records the functions that are called while it is active.

    Attributes:
        calls: The calls, in order.
        unlike: Why a later run could not be compared with them; "" if it can.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__(given)
        self.calls: list[Call] = []
        self.unlike = ""
        self._busy = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        question = self._question(func, args, kwargs := kwargs or {})
        self._busy = True
        try:
            result = func(*args, **kwargs)
        finally:
            self._busy = False
        self._note(func, args, question, result)
        return result

    def notes_device(self, tensor: Tensor, found: torch.device) -> None:
        """Record that the device of a fake tensor is read, whose class has an attribute of its own for it."""
        if not self._busy and id(tensor) in self._places:
            self._note(DEVICE, (tensor,), self._question(DEVICE, (tensor,), {}), found)

    def _note(self, func: Any, args: Any, question: tuple[Any, ...], result: Any) -> None:
        returned = _mapped(result, lambda tensor: self._places.get(id(tensor)) or self._put(tensor))
        found = self._described(result)
        runs = not (_first(question[1], Ref) or _first(found, Ref))
        what = next((part for part in (_first(question[1], Other), not runs and _first(found, Other)) if part), None)
        if what and not self.unlike:
            self.unlike = f"its forward calls {_name(func)!r} with, or for, a {what.kind.__name__!r}"
        value = found if self._reads(func, args) and not _first(found, Ref) else None
        self.calls.append(Call((*question, value), returned, runs))

    def ends(self, result: Any) -> Calls:
        """Return all calls, after the forward has returned `result`."""
        key = ("returns", *map(self._described, tree_leaves(result)))
        if any(isinstance(leaf, Tensor) and id(leaf) not in self._places for leaf in tree_leaves(result)):
            self.unlike = self.unlike or "its forward returns a tensor that no function of torch has returned"
        return *self.calls, Call(key, None, False)


class _Follower(_Mode):
    """Follows a run along one of several records, or a new one (`follow`)."""

    def __init__(self, given: Sequence[Tensor], known: list[Calls], more: Callable[[], Calls] | None, real: bool):
        super().__init__(given)
        self._known, self._more, self._real = known, more, real
        self._n, self.at, self.error = 0, 0, ""
        self._began = torch.is_grad_enabled(), autocast_now(), torch.get_default_dtype()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        question = self._question(func, args, kwargs := kwargs or {})
        if self._real:
            # other attributes than those in the key of a graph, such as `is_leaf`, are read of the tensor itself
            found = self._described(func(*args)) if self._reads(func, args) else None
            question = *question, None if _first(found, Other) else found
        call = self._next(question)
        return func(*args, **kwargs) if call.runs else _mapped(call.result, self._tensor, Ref)

    def ends(self, result: Any) -> None:
        """Compare what the forward has returned."""
        if not self.error:
            self._next(("returns", *map(self._described, tree_leaves(result))))
        if self.error:
            # also if the forward has caught it
            raise CannotFollow(self.error)

    def remembers(self) -> bool:
        """Return whether a tensor that a function has returned is referred to from elsewhere."""
        # by the list and as the argument
        return any(sys.getrefcount(self._tensors[k]) > 2 for k in range(self._n_given, len(self._tensors)))

    def gives_back(self) -> bool:
        """Keep the empty tensors for another run, without those that have got an attribute; return False."""
        EMPTY.extend(tensor for tensor in self._tensors[self._n_given :] if not vars(tensor))
        return False

    def _tensor(self, ref: Ref) -> Tensor:
        if ref.place == len(self._tensors):
            self._put(EMPTY.pop() if EMPTY else _empty())
        return self._tensors[ref.place]

    def _next(self, key: tuple[Any, ...]) -> Call:
        if not (self._known and self._fits(self._known[self.at], key)):
            self._turn(key)
        self._n += 1
        return self._known[self.at][self._n - 1]

    def _fits(self, calls: Calls, key: tuple[Any, ...]) -> bool:
        return self._n < len(calls) and calls[self._n].key[: len(key)] == key

    def _turn(self, key: tuple[Any, ...]) -> None:
        """Go on along another record with the same calls so far."""
        before = self._known[self.at][: self._n] if self._known else ()
        for _ in range(2):
            for at, calls in enumerate(self._known):
                if self._fits(calls, key) and all(a.key == b.key for a, b in zip(before, calls, strict=False)):
                    self.at = at
                    return
            if self._more is None:
                break
            grad, autocast, dtype = self._began
            try:
                with default_dtype(dtype), torch.set_grad_enabled(grad), autocast_again(autocast):
                    self._known.append(self._more())
            finally:
                self._more = None
        self.at = 0
        was = self._known[-1][self._n].key if self._n < len(self._known[-1]) else ("no function",)
        self.error = f"calls {_shown(was)} once, and {_shown(key)} another time"
        raise CannotFollow(self.error)


def follow(
    run: Callable[[], Any],
    given: Sequence[Tensor],
    known: list[Calls],
    more: Callable[[], Calls] | None = None,
    *,
    real: bool = True,
) -> tuple[int, bool]:
    """Run a forward without computing anything.

    Returns the index of the record that it goes along, and whether the forward has kept a tensor.

    Args:
        run: Calls the forward with the given tensors.
        given: Arguments of the graph: parameters, buffers and tensors of the call.
        known: Records; one that `more` returns is appended.
        more: Called at most once, when no record fits: returns another record, by a capture of the same call.
        real: Whether the tensors are those of a call, and not empty ones.

    Raises:
        CannotFollow: No record fits.
    """
    follower = _Follower(given, known, more, real)
    with replacing(fake_tensors, FakeTensor=FollowedTensor), follower:
        result = run()
    follower.ends(result)
    del result
    if follower.remembers():
        # a cycle of objects holds its tensors until it is collected
        gc.collect()
    return follower.at, follower.remembers() or follower.gives_back()


class _Followed(type(FakeTensor)):  # type: ignore[misc]
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, FakeTensor if read_by_torch() else Tensor)


class FollowedTensor(FakeTensor, metaclass=_Followed):
    """Stands for torch's FakeTensor during a capture and a later run, so that both go the same way.

    Libraries that ask whether a tensor is fake compute the same without reading values then, as while they are traced.
    """


EMPTY: list[Tensor] = []
"""Empty tensors to be used again."""


def _empty() -> Tensor:
    with unseen():
        return torch.empty(0)


def empty_for(tensor: Tensor) -> Tensor:
    """Return an empty tensor in place of an argument, a parameter for a parameter."""
    with unseen():
        return nn.Parameter(_empty(), tensor.requires_grad) if isinstance(tensor, nn.Parameter) else _empty()


def _modes() -> tuple[Any, ...]:
    found = torch.is_grad_enabled(), torch.get_default_dtype()
    # called for every function, so the common case is short
    casts = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return (*found, autocast_now()) if casts else found


def _mapped(value: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """Map the parts of a class in what a function returns."""
    of: Any = type(value)
    if isinstance(value, kind):
        return change(value)
    if of in (list, tuple):
        return of([_mapped(part, change, kind) for part in value])
    if isinstance(value, tuple) and of is not torch.Size:
        parts = [_mapped(part, change, kind) for part in value]
        return of(*parts) if hasattr(of, "_fields") else of(parts)
    return {key: _mapped(part, change, kind) for key, part in value.items()} if of is dict else value


def _first(found: Any, kind: type) -> Any:
    """Return the first part of a class in a described value; None if there is none."""
    if isinstance(found, kind):
        return found
    if type(found) is tuple:
        return next((part for part in (_first(own, kind) for own in found) if part is not None), None)
    return None


def _name(func: Any) -> str:
    owner = getattr(func, "__self__", None)
    return str(getattr(owner if getattr(func, "__name__", "") == "__get__" else func, "__name__", func))


def _shown(key: tuple[Any, ...]) -> str:
    """Return a call as in Python code."""

    def text(part: Any) -> str:
        if isinstance(part, Ref):
            return "tensor"
        if isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], type):
            return str(part[1])
        return f"[{', '.join(map(text, part[1:]))}]" if isinstance(part, tuple) and part else str(part)

    if isinstance(key[0], str):
        return key[0]
    arguments = [text(part) for part in key[1][1:] if part != (dict,)]
    return f"{_name(key[0])}({', '.join(arguments)})"
