"""Define a module's chunk plan; return the module without chunks, and the capture that a call of it goes along."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_amp._torch import own_class, tree_leaves
from lightning_amp.errors import ModelError
from lightning_amp.footprint.copies.restore_state import forgetting
from lightning_amp.footprint.forward_overrides import Position, overrides_of, set_overrides
from lightning_amp.graph.calls import CannotFollow, follow
from lightning_amp.graph.capture import Capture
from lightning_amp.graph.guards import state_of
from lightning_amp.techniques.chunk.regions.region import Region
from lightning_amp.techniques.ranks.received import nothing_kept

CHUNKS = ("chunk", "lightning_amp.chunk")
"""Names of the technique in overrides: as a rule, and as the function."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleChunks:
    """Chunk plan of a module for one signature: its regions, peak memory and generated code.

    Attributes:
        budget_bytes: The budget.
        peak_bytes: Most bytes alive in one forward pass without gradients, beyond parameters, buffers and arguments.
        whole_bytes: The same without chunks.
        regions: What runs in chunks, by block; the whole module is the block "".
        code: The generated forward, by block.
        reasons: Why the module or a block could not be captured as a graph.
    """

    budget_bytes: int
    peak_bytes: int
    whole_bytes: int
    regions: Mapping[str, tuple[Region, ...]]
    code: Mapping[str, str] = field(repr=False)
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A plan and its forward.

    Attributes:
        chunks: The plan.
        run: Forward, called like the module's; it may be a `Checked`, to be checked before a call.
        capture: Graph of the plan; None if it is planned block by block.
        others: Plans for calls with the same key in which the module's Python does something else.
    """

    chunks: ModuleChunks
    run: Callable[..., Any]
    capture: Capture | None = None
    others: "list[Planned]" = field(default_factory=list)


def same_calls(
    module: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any],
    captures: Sequence[Capture],
    more: Callable[[], Capture] | None = None,
) -> int:
    """Return the index of the capture that a call of a module, without chunks, goes along (graph/calls.py).

    Args:
        module: The module.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        captures: Captures of calls with the same key.
        more: Returns another capture of this call, which counts as the last one.

    Raises:
        ModelError: There is none.
    """
    known = [one.calls for one in captures]
    given = [*state_of(module).values(), *(v for v in tree_leaves((args, dict(kwargs))) if isinstance(v, Tensor))]
    remembers = any(one.remembers for one in captures)
    try:
        with forgetting(module) if remembers else nullcontext():
            at, kept = follow(lambda: module(*args, **kwargs), given, known, more and (lambda: more().calls))
        why = "keeps a tensor that it computes, which a chunked forward does not compute" if kept > remembers else ""
    except CannotFollow as error:
        why = str(error)
    if why:
        raise ModelError(
            f"chunk does not support {type(module).__name__!r}: its forward {why}; let it read what changes as an"
            " argument, or leave chunk out of this module"
        )
    return at


def plain(module: nn.Module) -> nn.Module:
    """Return the module without chunks and hooks, with the same children, parameters and settings.

    Its forward is its class's, or that of another technique. Overrides that run around a forward are omitted.
    """
    kind, left_out = own_class(module)
    found = object.__new__(kind)
    vars(found).update(
        # all kinds of hooks: the state_dict hooks hold data of `fully_shard`
        (name, OrderedDict() if name.startswith("_") and "_hooks" in name else value)
        for name, value in vars(module).items()
        if name not in ("forward", *left_out) and not isinstance(value, ModuleChunks)
    )
    # overrides that run a forward twice are outside of chunks, and not part of what chunks replace
    inside = (one for one in overrides_of(module) or () if one.position < Position.TWICE)
    set_overrides(found, (one for one in inside if one.strategy not in CHUNKS))
    return found


@contextmanager
def no_part_of_the_step() -> Iterator[None]:
    """Context for computations that are not part of the current step, such as planning; keeps the gradient mode."""
    with_gradients = torch.is_grad_enabled()
    with ExitStack() as stack:
        # inference tensors have no version counter, by which a capture detects in-place changes
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(with_gradients))
        # without the hooks of a recomputed block, which would count the tensors saved here, and without caching
        # received ones
        stack.enter_context(saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
        stack.enter_context(nothing_kept())
        yield
