"""Store the chunks of a module, and return the module without them."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_amp._torch import own_class
from lightning_amp.footprint.forward_overrides import Position, overrides_of, set_overrides
from lightning_amp.techniques.chunk.regions.region import Region
from lightning_amp.techniques.ranks.received import nothing_kept

CHUNKS = ("chunk", "lightning_amp.chunk")
"""Names of the technique: of a rule, and of the function."""


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
    """A plan, and what carries it out, called as the module's forward is; a `Checked` can be checked before."""

    chunks: ModuleChunks
    run: Callable[..., Any]


def plain(module: nn.Module) -> nn.Module:
    """The module with its class's forward, or what a technique other than chunk computes in its place: the same
    children, parameters and settings.

    What runs around a forward is left out, and so are hooks on the module itself.
    """
    kind, left_out = own_class(module)
    found = object.__new__(kind)
    vars(found).update(
        # hooks of every kind: those of state_dict hold what `fully_shard` knows of a module
        (name, OrderedDict() if name.startswith("_") and "_hooks" in name else value)
        for name, value in vars(module).items()
        if name not in ("forward", *left_out) and not isinstance(value, ModuleChunks)
    )
    # what runs a forward twice runs around chunks, and is no part of what they replace
    inside = (one for one in overrides_of(module) or () if one.position < Position.TWICE)
    set_overrides(found, (one for one in inside if one.strategy not in CHUNKS))
    return found


@contextmanager
def no_part_of_the_step() -> Iterator[None]:
    """For what is computed of a plan rather than of the step that it is made in; gradients stay on or off."""
    with_gradients = torch.is_grad_enabled()
    with ExitStack() as stack:
        # tensors of inference mode count no changes, by which a capture sees what a forward changes in place
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(with_gradients))
        # a block that is computed again has hooks, which would count what is kept here, and keeps what is received
        stack.enter_context(saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
        stack.enter_context(nothing_kept())
        yield
