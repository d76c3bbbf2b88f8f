"""Note what the values of two steps decide, and give it to two steps on fake tensors.

Values decide numbers (`.item()`, `bool(tensor)`, `.tolist()`, `.numpy()`) and shapes (`x[mask]`, `nonzero`, packed
sequences). Notes are taken in forward passes without gradients, which keep nothing for a backward pass and take little
more than the parameters and the batch. If gradients or the optimizer decide something, they are taken in whole steps.
The second step sees what the first has changed, such as the pointer of a queue.

Each note has the operator, the line of the caller and the shape of the operator's first tensor. A step on fake tensors
gets those of its batch in order. Notes that it does not ask for are skipped: composite operators check values of real
tensors only. A block that runs again in the backward pass gets the notes of its first pass again.
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
from lightning_amp.random_streams import drawn_between, random_streams, seed_streams

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
GROWS, MOST_BEFORE = 1 / 1000, 64
"""Share by which a step has to do more than the one before, and the most batches for which that is waited for."""
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

    question: Any
    answer: Any


def _question(what: Any, args: Any) -> Any:
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


class Notes(NamedTuple):
    """The notes of a batch, and where those of each `training_step` begin: LBFGS runs several."""

    of_batch: list[Note]
    of_steps: list[int]


class NoteTaker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that notes what values decide, and puts back what the step writes to given tensors.

    Args:
        kept: Tensors that shall be as before at the end.
        gradients: Whether the forward pass records a graph, for gradients that it takes itself.
        whole: Whether backward passes and the optimizer run too.
        draw: Seed of each step's random numbers, so that both steps train the same blocks; 0 leaves the streams as
            they are.

    Attributes:
        made_bytes: Bytes of what operators have returned in each batch.
        n_before: Number of batches before those that are counted, in which what the step keeps has grown.
    """

    def __init__(self, kept: Iterable[Tensor], *, gradients: bool, whole: bool = False, draw: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gradients, self.whole, self.draw = gradients, whole, draw
        self.made_bytes, self.n_before, self._drew = [0], 0, False
        self.batches = [Notes([], [])]
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
        self.made_bytes[-1] += sum(tensor.numel() * tensor.itemsize for tensor in tensors_of((found,)))
        if _may_decide(func, args):
            self.note(func, args, tree_map(lambda x: Layout.of(x) if _is_plain(x) else x, found))
            if func is pack_padded:
                notes = self.batches[-1].of_batch
                notes[-1] = notes[-1]._replace(answer=(notes[-1].answer[0], found[1].clone()))
        return found

    def note(self, what: Any, args: Any, answer: Any) -> None:
        """Add a note."""
        self.batches[-1].of_batch.append(Note(_question(what, args), answer))

    def _keep(self, written: Iterable[Tensor]) -> None:
        for tensor in written:
            key = id(tensor.untyped_storage()) if tensor.layout is torch.strided else None
            if key in self._kept and key not in self._before:
                self._before[key] = self._kept[key], self._kept[key].detach().clone()

    def begin_batch(self) -> None:
        """Note that another batch begins."""
        self.batches.append(Notes([], []))
        self.made_bytes.append(0)
        seed_streams(self.draw)

    def has_enough(self, counted: int) -> bool:
        """Whether the last batches can be counted: as many as are asked for, and no step does more than the one before.

        A memory of earlier batches grows until it is full, and so does what is computed with it.
        """
        if len(self.batches) < counted:
            return False
        self.n_before = len(self.batches) - counted
        grows = self.made_bytes[-1] > (1 + GROWS) * self.made_bytes[-2] and self.n_before < MOST_BEFORE
        # batches that add up gradients belong together
        return not (grows or self.n_before % (counted // 2))

    @property
    def varies(self) -> bool:
        """Whether random numbers were drawn, and the last batch, which is the one before again, got other notes."""
        one, other = (*self.batches, *self.batches)[-2:]
        return self._drew and repr(one.of_batch) != repr(other.of_batch)

    def begin_step(self) -> None:
        """Note that `training_step` begins."""
        self.batches[-1].of_steps.append(len(self.batches[-1].of_batch))

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

        seed_streams(self.draw)
        streams = random_streams()
        try:
            # these read memory without an operator
            replaced: dict[str, Any] = {"tolist": noting("tolist"), "numpy": noting("numpy")}
            if not self.whole:
                replaced["backward"] = lambda *_, **__: None
            with replacing(Tensor, **replaced), self:
                yield
        finally:
            self._drew = bool(drawn_between(streams, random_streams()))
            for tensor, before in self._before.values():
                tensor.data.copy_(before)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


class Answers:
    """The notes of steps, which steps on fake tensors get in order; further batches get those of the last one.

    Attributes:
        why: Why the step needs them; "" if there are none.
        shapes_depend: Whether values decide a shape.
        gradients, n_before, draw: As in NoteTaker.
    """

    def __init__(self, taken: NoteTaker, why: str) -> None:
        self.why = why
        self._batches, self.draw = taken.batches, taken.draw
        self.gradients, self.n_before = taken.gradients, taken.n_before
        self._places: list[dict[Any, list[int]]] = [defaultdict(list) for _ in self._batches]
        for places, notes in zip(self._places, self._batches, strict=True):
            for place, note in enumerate(notes.of_batch):
                # with its line, and without, for operators that a technique runs again
                places[note.question].append(place)
                places[note.question[:2]].append(place)
        self._batch, self._step, self._at, self._anywhere = -1, -1, 0, False
        self._of_node: dict[int, Any] = {}
        self.shapes_depend = any(_has_layout(note.answer) for notes in self._batches for note in notes.of_batch)

    @classmethod
    def without_notes(cls, n_before: int, draw: int = 0) -> "Answers":
        """Return what lets a step be counted after some batches, or with the random numbers of a draw."""
        taker = NoteTaker((), gradients=True, draw=draw)
        taker.n_before = n_before
        # as many batches as come before, and those that are counted
        taker.batches = [Notes([], [])] * (n_before + 1)
        return cls(taker, "")

    def of(self, what: Any, args: Any) -> Any:
        """Return what a note says, or MISSING."""
        question = _question(what, args)
        places = self._places[self._batch].get(question[:2] if self._anywhere else question, ())
        found = bisect_left(places, self._at)
        if found == len(places):
            return MISSING
        self._at = places[found] + 1
        return self._batches[self._batch].of_batch[places[found]].answer

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

    def begin_batch(self) -> None:
        """Begin with the first note of the next batch."""
        seed_streams(self.draw)
        self._batch, self._step, self._at = min(self._batch + 1, len(self._batches) - 1), -1, 0

    @property
    def before_count(self) -> bool:
        """Whether this batch comes before those that are counted; only its forward pass runs."""
        return self._batch < self.n_before

    def begin_step(self) -> None:
        """Begin with the first note of the batch's next `training_step`."""
        steps = self._batches[self._batch].of_steps
        self._step = min(self._step + 1, len(steps) - 1)
        self._at = steps[self._step] if steps else 0

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
        self._batch = -1
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


def before_count() -> bool:
    """Whether the batch comes before those that are counted."""
    answers = answers_now()
    return answers is not None and answers.before_count


def _has_layout(answer: Any) -> bool:
    return isinstance(answer, Layout) or (isinstance(answer, list | tuple) and any(map(_has_layout, answer)))
