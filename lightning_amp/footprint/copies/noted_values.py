"""Note what the values of a step decide, in a forward pass without gradients, and give it to a step on fake tensors.

Values decide numbers (`.item()`, `bool(tensor)`, `.tolist()`, `.numpy()`) and shapes (`x[mask]`, `nonzero`, packed
sequences). A forward pass without gradients keeps nothing for a backward pass, so that it takes little more than the
parameters and the batch. Each note has the operator, the line of the caller and the shape of the operator's first
tensor. A step on fake tensors gets them in order. Notes that it does not ask for are skipped: composite operators check
values of real tensors only. A block that runs again in the backward pass gets the notes of its first pass again.

Known limits: values that the backward pass or the optimizer decides by are not noted; values of the second step are
those of the first.
"""

import copy
import os
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from lightning_amp._torch import (
    CheckpointFrame,
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    autograd_node,
    autograd_order,
    pack_padded,
    recurrent_functions,
    tree_map,
)
from lightning_amp.footprint.copies.padded_rows import pack_rows, pad_rows
from lightning_amp.footprint.live_bytes import tensors_of, tensors_written
from lightning_amp.holding import replacing

SKIPPED = (*(f"{path}{os.sep}" for path in (*torch.__path__, *lightning.__path__, str(Path(__file__).parents[2]))), "<")
"""Beginnings of files of which no line is the caller: they run in other order on fake tensors, or with a technique."""
INDEX = torch.ops.aten.index.Tensor
BACKWARD_SELECTS = {
    **dict.fromkeys((torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default), INDEX),
    **dict.fromkeys(
        (torch.ops.aten.masked_scatter.default, torch.ops.aten.masked_scatter_.default),
        torch.ops.aten.masked_select.default,
    ),
}
"""Operators that write where a mask is true, with the operator that reads the gradient there in the backward pass."""
NODES_OF_A_WRITE = 3
"""Most autograd nodes that a write makes: that of the operator, and those of views that are written through."""
OF_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
MISSING = object()
"""Answer for what no note says."""


def decided_by_values(func: Any, args: Any) -> bool:
    """Whether an operator returns a number of a tensor, or a tensor whose shape depends on values."""
    if func is INDEX:
        # indices of integers give a known shape
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return func is pack_padded or not OF_VALUES.isdisjoint(getattr(func, "tags", ()))


def _may_decide(func: Any, args: Any) -> bool:
    """As `decided_by_values`; also true for operators of libraries, whose rules for fake tensors may need values."""
    return isinstance(func, OpOverload) and (func.namespace not in ("aten", "prim") or decided_by_values(func, args))


@dataclass(frozen=True)
class Layout:
    """Layout of a tensor that an operator has returned."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Layout":
        """Read it from a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


class Note(NamedTuple):
    """What an operator or a method returned; tensors are replaced by their layout."""

    asked: Any
    answer: Any


def _asked(what: Any, args: Any) -> Any:
    """Return what identifies a question in two runs of the same code."""
    first = next(iter(tensors_of(args)), None)
    # variants of an operator differ: lengths of CTC are tensors on fake tensors only
    name = str(what.overloadpacket) if isinstance(what, OpOverload) else what
    return name, None if first is None else tuple(first.shape), _line()


def _line() -> Any:
    """Return the innermost file and line that belongs to the user or to a library built on torch."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(SKIPPED):
        frame = frame.f_back
    return frame and (frame.f_code.co_filename, frame.f_lineno)


class NoteTaker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that notes what values decide, and puts back what the step writes to given tensors.

    Args:
        kept: Tensors that shall be as before at the end.
        gradients: Whether the forward pass records a graph, for gradients that it takes itself.
    """

    def __init__(self, kept: Iterable[Tensor], *, gradients: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gradients = gradients
        self.notes: list[Note] = []
        self.first_in_step = 0
        self._kept = {id(tensor.untyped_storage()): tensor for tensor in kept if tensor.layout is torch.strided}
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note its result."""
        if func._schema.is_mutable:
            self._keep(tensors_written(func, args, kwargs or {}))
        selects = BACKWARD_SELECTS.get(func)
        if selects is not None and decided_by_values(selects, args):
            self.note("mask", args, Layout.of(selects(*args[:2])))
        found = func(*args, **(kwargs or {}))
        if _may_decide(func, args):
            self.note(func, args, tree_map(lambda x: Layout.of(x) if _is_plain(x) else x, found))
            if func is pack_padded:
                self.notes[-1] = self.notes[-1]._replace(answer=(self.notes[-1].answer[0], found[1].clone()))
        return found

    def note(self, what: Any, args: Any, answer: Any) -> None:
        """Add a note."""
        self.notes.append(Note(_asked(what, args), answer))

    def _keep(self, written: Iterable[Tensor]) -> None:
        for tensor in written:
            key = id(tensor.untyped_storage()) if tensor.layout is torch.strided else None
            if key in self._kept and key not in self._before:
                self._before[key] = self._kept[key], self._kept[key].detach().clone()

    def begin_step(self) -> None:
        """Note that `training_step` begins."""
        self.first_in_step = len(self.notes)

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Take notes of what runs in this thread."""

        def noting(name: str) -> Callable[..., Any]:
            usual = getattr(Tensor, name)

            def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                found = usual(tensor, *args, **kwargs)
                self.note(name, (tensor,), copy.deepcopy(found))
                return found

            return read

        try:
            # these read memory without an operator
            read = {"tolist": noting("tolist"), "numpy": noting("numpy")}
            with replacing(Tensor, **read, backward=lambda *_, **__: None), self:
                yield
        finally:
            for tensor, before in self._before.values():
                tensor.data.copy_(before)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


class Answers:
    """The notes of a step, which a step on fake tensors gets in order.

    Attributes:
        why: Why the step needs them.
        shapes_depend: Whether values decide a shape.
    """

    def __init__(self, taken: NoteTaker, why: str) -> None:
        self.why = why
        self._notes, self._first_in_step = taken.notes, taken.first_in_step
        self._places: dict[Any, list[int]] = defaultdict(list)
        for place, note in enumerate(self._notes):
            # with its line, and without, for operators that a technique runs again
            self._places[note.asked].append(place)
            self._places[note.asked[:2]].append(place)
        self._at, self._anywhere = 0, False
        self._of_node: dict[int, Any] = {}
        self.shapes_depend = any(_has_layout(note.answer) for note in self._notes)

    def of(self, what: Any, args: Any) -> Any:
        """Return what a note says, or MISSING."""
        asked = _asked(what, args)
        places = self._places.get(asked[:2] if self._anywhere else asked, ())
        found = bisect_left(places, self._at)
        if found == len(places):
            return MISSING
        self._at = places[found] + 1
        return self._notes[places[found]].answer

    def remember(self, func: Any, args: Any) -> None:
        """Keep what the backward pass of a write by a mask reads, by the number of its autograd node."""
        if decided_by_values(BACKWARD_SELECTS[func], args):
            # the node is there before its operator runs
            self._of_node[autograd_order() - 1] = self.of("mask", args)

    def of_backward(self) -> Any:
        """Return what the backward pass of such a write reads, or MISSING."""
        node = autograd_node()
        order = -1 if node is None else node._sequence_nr()
        found = (self._of_node[i] for i in range(order, order - NODES_OF_A_WRITE, -1) if i in self._of_node)
        return next(found, MISSING)

    def restart(self, *, in_step: bool = False) -> None:
        """Begin with the first note of a batch, or of its `training_step`."""
        self._at = self._first_in_step if in_step else 0

    def get_state(self) -> Any:
        """Return the place in the notes, for an operator that runs again; as a random generator's."""
        return self._at, True

    def set_state(self, state: Any) -> None:
        """Continue at a place."""
        self._at, self._anywhere = state

    @contextmanager
    def again(self, at: int) -> Iterator[None]:
        """Continue at a place, and return afterwards."""
        before = self._at, self._anywhere
        # the backward pass runs a block again from another line
        self._at, self._anywhere = at, True
        try:
            yield
        finally:
            self._at, self._anywhere = before

    @contextmanager
    def given(self) -> Iterator[None]:
        """Answer what runs on fake tensors; blocks that torch's checkpoint runs again get the same answers."""

        def answering(name: str) -> Callable[..., Any]:
            usual = getattr(FakeTensor, name)

            def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                found = self.of(name, (tensor,))
                return usual(tensor, *args, **kwargs) if found is MISSING else copy.deepcopy(found)

            return read

        def repeated(function: Callable[..., Any]) -> Callable[..., Any]:
            at = self._at

            def run(*args: Any, **kwargs: Any) -> Any:
                with self.again(at):
                    return function(*args, **kwargs)

            return run

        frame, forward = CheckpointFrame.__init__, CheckpointFunction.forward

        def framed(one: Any, function: Any, *args: Any, **kwargs: Any) -> None:
            frame(one, repeated(function), *args, **kwargs)

        def forwarded(context: Any, function: Any, *args: Any) -> Any:
            again = repeated(function)
            found = forward(context, function, *args)  # type: ignore[no-untyped-call]
            context.run_function = again
            return found

        _ACTIVE.append(self)
        try:
            with (
                replacing(FakeTensor, tolist=answering("tolist"), numpy=answering("numpy")),
                replacing(recurrent_functions, _pad_packed_sequence=pad_rows, _pack_padded_sequence=pack_rows),
                replacing(CheckpointFrame, __init__=framed),
                replacing(CheckpointFunction, forward=staticmethod(forwarded)),
            ):
                yield
        finally:
            _ACTIVE.remove(self)


_ACTIVE: list[Answers] = []


def answers_now() -> Answers | None:
    """Return the answers for the step that is being counted; None if it needs none."""
    return _ACTIVE[-1] if _ACTIVE else None


def _has_layout(answer: Any) -> bool:
    return isinstance(answer, Layout) or (isinstance(answer, list | tuple) and any(map(_has_layout, answer)))
