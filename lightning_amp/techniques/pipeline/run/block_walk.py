"""Run a stage's blocks of an unmodified step, in order, and replace blocks of other stages by placeholders.

    blocks before the stage    return placeholders of their results
    the last one of these      returns what the stage before has sent
    blocks of the stage        run
    the last one of these      ends the step by an exception (`Leave`), unless it is the last of all

Code between two blocks thus runs on the later block's rank. Only the result of the block before the cut is sent to the
next stage. If a block of the stage reads another result of earlier blocks, or if a step calls a block twice, out of
order, or not at all, an error is raised. Attributes that blocks of other ranks set are placeholders during the step.
"""

import re
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_amp._torch import in_transform, tree_leaves, tree_map
from lightning_amp.errors import InstallError
from lightning_amp.footprint.forward_overrides import Position
from lightning_amp.techniques.pipeline.run.block_on_zeros import refuse_numbers, run_on_zeros, zeros_for_placeholders
from lightning_amp.techniques.pipeline.run.messages import packed_draws
from lightning_amp.techniques.ranks.placeholders import NeedsValuesError, Placeholders, without_values

Receive = Callable[[Any], Any]
"""Function from placeholders of a block's result to the result that another rank has computed."""
Run = Callable[..., Any]
"""Function that calls a block with arguments, and returns its result."""
Attribute = tuple[dict[str, Any], str, Any]
"""An attribute dict, a name in it, and its value."""
GONE = object()
"""Value of an attribute that does not exist."""
WITHOUT_VALUES = ("FakeTensor", "meta tensor", "device meta", "_local_scalar_dense", "data-dependent")
"""Parts of torch's error messages about tensors without values."""

UNUSED = "Set allow_unused=True"
"""Part of torch's error message for an input that the gradient does not reach."""


class Leave(BaseException):
    """Raised after a stage's last block, to end the step; not an `Exception`, which a user's step may catch."""


@dataclass(frozen=True, slots=True)
class Span:
    """Blocks [first, end) of one stage, and the number of all blocks."""

    first: int
    end: int
    blocks: int

    @property
    def is_last(self) -> bool:
        """Whether the step continues to its end after these blocks."""
        return self.end == self.blocks


@dataclass(eq=False)
class _Pass:
    span: Span
    receive: Receive
    leaves: bool
    with_gradients: bool
    placeholders: ExitStack = field(default_factory=ExitStack)
    set_before: list[Attribute] = field(default_factory=list)
    next: int = 0
    result: Any = None


class BlockWalk:
    """State shared by the blocks of a list; `run` makes one pass, and outside of a pass blocks run as usual.

    Args:
        name: Type of the list of blocks, for messages.
        blocks: Number of blocks.

    Attributes:
        random_state_before, random_state_after: Random state when the first of all blocks was called, and when the
            last one had returned.
        versions_after: Tensors that the last block has returned, and their versions then.
    """

    def __init__(self, name: str, blocks: int) -> None:
        self.name, self.blocks = name, blocks
        self._pass: _Pass | None = None
        self._shapes: dict[Any, Any] = {}
        self._mode: Placeholders | None = None
        self.random_state_before = self.random_state_after = torch.empty(0)
        self.versions_after: list[tuple[torch.Tensor, int]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "BlockWalk":
        # the copy is in no pass
        return type(self)(self.name, self.blocks)

    def __reduce__(self) -> Any:
        return type(self), (self.name, self.blocks)

    def run(
        self, span: Span, step: Callable[[], Any], *, receive: Receive, device: torch.device, leave: bool = False
    ) -> tuple[Any, Any]:
        """Run one pass through the step.

        Args:
            span: Blocks to run; with an empty span at the end no block runs, and the step continues from `receive`.
            step: Calls the user's step.
            receive: Returns the result of the block before the span; not called if the span starts with block 0.
            device: Device of the run.
            leave: Whether to end the step also after the last of all blocks.

        Returns:
            The result of the span's last block, and, on the last stage, the result of the step.

        Raises:
            InstallError: The step does not call all blocks once and in order.
        """
        now = self._pass = _Pass(span, receive, leave or not span.is_last, torch.is_grad_enabled())
        try:
            with now.placeholders:
                # the first stage computes everything that its blocks read, and needs no placeholders
                if span.first:
                    # created once: it remembers which parameters are not on this rank
                    self._mode = self._mode or Placeholders(device)
                    now.placeholders.enter_context(self._mode)
                returned = step()
        except Leave:
            return now.result, None
        except Exception as error:
            if UNUSED in str(error):
                raise InstallError(
                    "pipeline: the step computes gradients (torch.autograd.grad, as for a gradient penalty) through"
                    f" blocks of {self.name!r}, which other ranks hold: compute such a term without gradients of"
                    " blocks, or leave 'pipeline' out"
                ) from error
            if isinstance(error, InstallError) or not any(word in str(error) for word in WITHOUT_VALUES):
                raise
            raise InstallError(
                f"pipeline: the step reads, outside the blocks of {self.name!r}, a tensor of an earlier stage that"
                f" no block returns{_operator_in(error)}. Let blocks return it, or leave 'pipeline' out"
            ) from error
        finally:
            self._pass = None
            # in reverse order: an attribute that several blocks set gets its oldest value last
            for attribute in reversed(now.set_before):
                _set(*attribute)
        if now.next < self.blocks:
            raise InstallError(
                f"pipeline: the step called {now.next!r} of the {self.blocks!r} blocks of {self.name!r}; it must"
                " call all of them, in order: leave 'pipeline' out"
            )
        return now.result, returned

    def call(self, index: int, block: nn.Module, run: Run, args: Any, kwargs: Any) -> Any:
        """Handle the call of block `index`: run it with `run`, or return a placeholder or received values."""
        now = self._pass
        if now is None:
            return run(block, *args, **kwargs)
        if in_transform():
            raise InstallError(
                f"pipeline: block {index!r} of {self.name!r} is called inside a function that torch.func (vmap,"
                " grad, jvp, ...) transformed, which a stage cannot leave: call the blocks outside of it, or leave"
                " 'pipeline' out"
            )
        if index != now.next:
            raise InstallError(
                f"pipeline: the step called block {index!r} of {self.name!r} where block {now.next!r} was next; it"
                " must call every block once, in order: leave 'pipeline' out"
            )
        now.next += 1
        if index == 0:
            self.random_state_before = packed_draws()
        # The block right before the stage needs placeholders too: they have the shapes that `receive` expects, and
        # their digest is compared with that of the sender.
        if index < now.span.first:
            made = self._placeholder(now, index, block, args, kwargs)
            if index < now.span.first - 1:
                return made
            # tensors have values from here on, and operators need not pay for the mode
            now.placeholders.close()
            return now.receive(made)
        for found in without_values((args, kwargs)):
            raise InstallError(
                f"pipeline: block {index!r} of {self.name!r} reads a tensor of shape {tuple(found.shape)!r} that an"
                " earlier stage computed and that the block before it does not return; only results of blocks pass"
                " from stage to stage: let blocks return it, or leave 'pipeline' out"
            )
        if now.with_gradients and not torch.is_grad_enabled():
            self._refuse_reentrant(index)
        now.result = run(block, *args, **kwargs)
        if index == now.span.end - 1 and now.leaves:
            raise Leave
        if index == self.blocks - 1:
            self.random_state_after = packed_draws()
            tensors = [leaf for leaf in tree_leaves(now.result) if isinstance(leaf, torch.Tensor)]
            self.versions_after = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
        return now.result

    def _placeholder(self, now: _Pass, index: int, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return placeholders of a block's result, cached by input shapes, and set placeholders as its attributes."""
        # The key must contain everything on which a result's shape or type can depend. Anything missing is detected
        # when the stage receives, because the sender's digest is that of the real result.
        on = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        key = (
            index,
            block.training,
            torch.is_inference_mode_enabled(),
            on,
            *map(_print_of, tree_leaves((args, kwargs))),
        )
        made, sets, draws = self._shapes.get(key) or self._run_on_placeholders(block, args, kwargs)
        # a number may change in every step, such as a rate that a callback sets
        numbers = any(isinstance(value, int | float | complex) for value in [*tree_leaves(made), *(s[2] for s in sets)])
        if None not in key and not numbers:
            self._shapes[key] = made, sets, draws
        assert self._mode is not None, "on since the pass began"
        self._mode.missed += draws
        # A step may read what a block has set, such as attention weights that are kept for a plot: it must get a
        # placeholder, which raises an error, instead of the value of an earlier step.
        for table, name, value in sets:
            now.set_before.append((table, name, table.get(name, GONE)))
            _set(table, name, value)
        return made

    def _run_on_placeholders(self, block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, list[Attribute], int]:
        """Run a block on placeholders; returns its result, the attributes that it sets, and its number of draws."""
        mode = self._mode
        assert mode is not None, "on since the pass began"
        missed, mode.in_block = mode.missed, True
        # the block must not keep any of the placeholders
        before = [(table, dict(table)) for part in block.modules() for table in (vars(part), part._buffers)]
        with torch.no_grad():
            # `of` replaces tensors with values by placeholders, so writes into these do not reach the tensors
            inputs, on_zeros, drawn = tree_map(mode.of, (args, kwargs)), False, False
            stands = _stand_ins((args, kwargs), inputs)
            try:
                made = type(block).forward(block, *inputs[0], **inputs[1])
            except NeedsValuesError:
                # its attributes may be half set
                for table, held in before:
                    table.clear()
                    table.update(held)
                inputs, on_zeros = zeros_for_placeholders((args, kwargs), mode.device), True
                stands = _stand_ins((args, kwargs), inputs)
                made, drawn = run_on_zeros(block, inputs[0], inputs[1], mode.device)
            except RuntimeError as error:
                if "cannot register a hook" not in str(error):
                    raise
                raise InstallError(
                    f"pipeline: a block of {self.name!r}, a {type(block).__name__!r} of another rank, registers a hook"
                    " on a tensor, which has no gradient on this rank; write it as a torch.autograd.Function, or leave"
                    " 'pipeline' out"
                ) from error
        for value, stand, version in stands:
            if stand._version != version:
                raise InstallError(
                    f"pipeline: a block of {self.name!r}, a {type(block).__name__!r} of another rank, writes in place"
                    f" into an argument of shape {tuple(value.shape)!r}, which this rank has made too and would go on"
                    " reading as it was; let blocks write into copies, or leave 'pipeline' out"
                )
        sets = [
            (table, name, table.get(name, GONE))
            for table, held in before
            for name in {**held, **table}
            if table.get(name, GONE) is not held.get(name, GONE)
        ]
        for table, held in before:
            table.clear()
            table.update(held)
        draws, mode.missed, mode.in_block = mode.missed - missed + drawn, missed, False
        if on_zeros:
            refuse_numbers(block, (made, [value for _, _, value in sets]))
        if draws or on_zeros:
            # numbers that depend on draws differ on the block's rank, and those of zeros mean nothing
            made = tree_map(mode.of, made)
            sets = [(table, name, tree_map(mode.of, value)) for table, name, value in sets]
        return made, sets, draws

    def _refuse_reentrant(self, index: int) -> None:
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code.co_filename.endswith("checkpoint.py") and frame.f_code.co_name == "forward":
                raise InstallError(
                    f"pipeline: block {index!r} of {self.name!r} runs inside"
                    " torch.utils.checkpoint(use_reentrant=True), which is not supported: use use_reentrant=False,"
                    " or strategies='pipeline,recompute'"
                )


@dataclass(frozen=True, eq=False, slots=True)
class StageBlock:
    """Forward override of a block, which passes its calls to the walk."""

    position = Position.STAGE
    walk: BlockWalk
    index: int

    def __call__(self, run: Run, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """See `BlockWalk.call`."""
        return self.walk.call(self.index, block, run, args, kwargs)


def _operator_in(error: Exception) -> str:
    """Return the operator that torch's message names, for messages; "" if it names none."""
    found = re.search(r"(?:Found in|aten[.:]+)\s*([\w.:]*\w)", str(error))
    return f" (in {found[1].removeprefix('aten.')!r})" if found else ""


def _stand_ins(values: Any, inputs: Any) -> list[tuple[Any, Any, int]]:
    """Return the tensors that others replace, these others, and their versions."""
    pairs = zip(tree_leaves(values), tree_leaves(inputs), strict=True)
    return [(value, stand, stand._version) for value, stand in pairs if stand is not value]


def _set(table: dict[str, Any], name: str, value: Any) -> None:
    if value is GONE:
        table.pop(name, None)
    else:
        table[name] = value


def _print_of(leaf: Any) -> Any:
    """Return the properties of an input on which a result's shape can depend; None if they cannot be determined."""
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype
    return (type(leaf), leaf) if isinstance(leaf, int | float | str | bool | torch.dtype | None) else None


def spans(ends: Iterable[int]) -> tuple[Span, ...]:
    """Return the stages of a pipeline, given one past the last block of each."""
    listed = list(ends)
    return tuple(Span(first, end, listed[-1]) for first, end in zip([0, *listed], listed, strict=False))
