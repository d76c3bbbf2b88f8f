"""Run a module block by block in chunks, within one budget, if the whole module cannot be captured.

The module's forward runs once on fake tensors. Tensors that are alive when a block begins stay alive while it runs, so
the budget of the block is reduced by their bytes. Code between the blocks runs unchanged. A block that is called in
another way than in the fake run has no plan, and raises an error.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_amp.errors import AmpError, ModelError
from lightning_amp.footprint.bounded_step import why_values
from lightning_amp.footprint.chain.block_call import BlockCall
from lightning_amp.footprint.chain.chain import group_reasons
from lightning_amp.footprint.copies.copy_batch import fake_batch
from lightning_amp.footprint.copies.fake_copy import copy_of
from lightning_amp.footprint.copies.quick_fakes import QuickFakes
from lightning_amp.footprint.find_blocks import find_blocks
from lightning_amp.footprint.forward_overrides import Override, Position, add_override, overrides_of, remove_override
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.graph.capture import Capture
from lightning_amp.graph.captures import Captures
from lightning_amp.graph.guards import signature
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.chunk.regions.choose_chunks import CostModel, OverBudget
from lightning_amp.techniques.chunk.regions.region import Region
from lightning_amp.techniques.chunk.run.check import Checked
from lightning_amp.techniques.chunk.run.module_chunks import CHUNKS, ModuleChunks, Planned, plain, same_calls
from lightning_amp.techniques.chunk.run.planned import lower_within

Choose = Callable[[str, nn.Module, Any, Any], Checked | None]
"""Returns what a call of a block (name, block, args, kwargs) runs; None for its own forward."""
Known = Mapping[Any, tuple[Checked, Capture]]
"""Forward and capture of blocks, by the key of a call."""


def plan_blocks(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    budget_bytes: int,
    reason: str,
    costs: CostModel,
) -> Planned:
    """Plan a module that is not captured as a whole, for the given reason.

    Raises:
        PlanError: The budget cannot be met.
        ModelError: The module does not run on fake tensors, or none of its blocks can be captured.
    """
    with_gradients = torch.is_grad_enabled()
    # bytes are counted without gradients, as the budget is defined; signatures are taken in the caller's gradient mode
    with torch.no_grad():
        calls, whole_bytes = _dry_run(module, args, kwargs, lambda *_: None, reason)
    # because the signature of a block includes whether its arguments have gradients
    differentiated = _dry_run(module, args, kwargs, lambda *_: None, reason)[0] if with_gradients else calls
    blocks, captures = find_blocks(module), Captures()
    fake, names = QuickFakes(), [call.fqn for call, _ in calls]
    known = [captures.of(plain(blocks[call.fqn]), *call.arguments(fake)) for call, _ in differentiated]
    reasons = {"": reason} | {fqn: f.reason for fqn, f in zip(names, known, strict=True) if f.reason}
    # a block that fails to be captured in one call runs its own forward in all: its key may contain state that it
    # changes
    found = [None if fqn in reasons else f for fqn, f in zip(names, known, strict=True)]
    by_key: dict[Any, tuple[Checked, Capture]] = {}
    regions: dict[str, tuple[Region, ...]] = {}
    for capture in {id(f): f for f in found if f}.values():
        # one plan must fit every call of equal blocks, so it is made for the call with the most bytes alive outside
        own = [call for call, other in zip(calls, found, strict=True) if other is capture]
        fullest, outside_bytes = max(own, key=lambda one: one[1])
        try:
            # tensors outside of the block stay alive while it runs
            own_bytes = budget_bytes - outside_bytes
            lowered, chosen = lower_within(capture, own_bytes, costs=costs)
            by_key[capture.key] = Checked(lowered, own_bytes, chosen.whole_bytes), capture
        except OverBudget as error:
            least_bytes = outside_bytes + error.least_bytes
            raise OverBudget(
                f"{type(module).__name__!r} requires at least {least_bytes!r} bytes, more than the budget of"
                f" {format_bytes(budget_bytes)}: when its block {fullest.fqn!r} begins {format_bytes(outside_bytes)}"
                f" are alive outside of it, and it needs {format_bytes(error.least_bytes)} in chunks; raise the budget",
                least_bytes,
            ) from error
        regions |= {call.fqn: chosen.regions for call, _ in own}
    if not by_key:
        of_blocks = group_reasons((fqn, reason) for fqn, reason in reasons.items() if fqn)
        raise ModelError(
            f"cannot chunk {type(module).__name__!r}, which cannot be captured: {reasons['']};"
            f" {of_blocks or 'it calls no children of a ModuleList or Sequential'}; chunk a module inside it that can"
            " be, or change what is named here"
        )
    in_order = iter([by_key[f.key][0] if f else None for f in found])
    with torch.no_grad():
        if with_gradients:  # the budget is for inference, where results overwrite others
            peak_bytes = plan_blocks(module, args, kwargs, budget_bytes, reason, costs).chunks.peak_bytes
        else:
            _, peak_bytes = _dry_run(module, args, kwargs, lambda *_: next(in_order), reason)
    if peak_bytes > budget_bytes:
        raise OverBudget(
            f"{type(module).__name__!r} requires {format_bytes(peak_bytes)} outside of its blocks in chunks, more"
            f" than the budget of {format_bytes(budget_bytes)}, and is no graph as a whole ({reason}): raise the"
            " budget",
            peak_bytes,
        )
    code = {fqn: by_key[f.key][0].code for fqn, f in zip(names, found, strict=True) if f}
    chunks = ModuleChunks(
        budget_bytes=budget_bytes, peak_bytes=peak_bytes, whole_bytes=whole_bytes,
        regions=regions, code=code, reasons=reasons,
    )  # fmt: skip
    return Planned(chunks=chunks, run=partial(_run, by_key, frozenset(reasons)))


def _run(by_key: Known, alone: frozenset[str], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the module's own forward, in which each block looks up its generated forward."""

    def choose(fqn: str, block: nn.Module, args: Any, kwargs: Any) -> Checked | None:
        if fqn in alone:
            return None
        own = plain(block)
        found, capture = by_key.get(signature(own, args, kwargs), (None, None))
        if found is None or capture is None:
            raise ModelError(
                f"the block {fqn!r} of {type(module).__name__!r} was called with other shapes, types or settings than"
                " in the run on fake tensors that its chunks were planned by: the module's forward depends on values;"
                " chunk the block by itself instead"
            )
        same_calls(own, args, kwargs, [capture])
        return found

    with _in_chunks(module, choose):
        return type(module).forward(module, *args, **kwargs)


@contextmanager
def _in_chunks(module: nn.Module, choose: Choose) -> Iterator[None]:
    """Let blocks run what `choose` returns, inside this context."""

    def run(fqn: str, inside: Any, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = choose(fqn, block, args, kwargs)
        return inside(block, *args, **kwargs) if found is None else found(block, *args, **kwargs)

    with ExitStack() as stack:
        # once per block, even if it has two names
        for block, fqn in {block: fqn for fqn, block in find_blocks(module).items()}.items():
            if overrides_of(block) is not None:
                new = Override(CHUNKS[1], partial(run, fqn), Position.WITHIN)
                add_override(fqn, block, new)
                stack.callback(remove_override, block, new)
        yield


def _dry_run(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], choose: Choose, reason: str
) -> tuple[list[tuple[BlockCall, int]], int]:
    """Run a copy on fake tensors; return the calls of its blocks with the bytes alive before each, and the peak."""
    calls: list[tuple[BlockCall, int]] = []
    fake, live = QuickFakes(), LiveBytes()
    twin = copy_of(module, fake)
    given_args, given_kwargs = fake_batch(args, fake, None), fake_batch(dict(kwargs), fake, None)

    def note(fqn: str, block: nn.Module, args: Any, kwargs: Any) -> Checked | None:
        # stores no tensor: it would stay alive until the end, and be counted
        calls.append((BlockCall.of(fqn, args, kwargs), live.current))
        return choose(fqn, block, args, kwargs)

    try:
        with fake, live, _in_chunks(twin, note):
            type(twin).forward(twin, *given_args, **given_kwargs)
    except AmpError:
        raise
    except Exception as error:
        raise ModelError(
            f"cannot chunk {type(module).__name__!r}, which is no graph ({reason}), nor does it run on fake"
            f" tensors, by which its blocks would be planned: {why_values(error)}; chunk a module inside it"
        ) from error
    return calls, live.peak
