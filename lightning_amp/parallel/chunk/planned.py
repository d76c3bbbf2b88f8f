"""Regions for one graph under a budget, and the bytes that the generated forward then takes."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_amp._torch import FakeTensorMode, own_class
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.graph.capture import Capture
from lightning_amp.graph.table import Table
from lightning_amp.parallel.chunk.lower import Lowered, lower, table_of
from lightning_amp.planning.chunks.choose_chunks import STEPS, OverBudget, choose_chunks
from lightning_amp.planning.chunks.region import ChunkPlan, Region


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleChunks:
    """How a module keeps within a budget, for one signature.

    Attributes:
        budget_bytes: Asked for.
        peak_bytes: Most bytes alive in one forward pass without gradients, beyond parameters, buffers and arguments.
        whole_bytes: The same without chunks.
        regions: What runs in chunks, by block; the whole module is the block "".
        code: The forward that was generated, by block.
        reasons: Why the module, or a block of it, is no graph.
    """

    budget_bytes: int
    peak_bytes: int
    whole_bytes: int
    regions: Mapping[str, tuple[Region, ...]]
    code: Mapping[str, str] = field(repr=False)
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A plan, and what carries it out: called as `run(module, args, kwargs)`."""

    chunks: ModuleChunks
    run: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]


def plain(module: nn.Module) -> nn.Module:
    """The module with its class's forward: the same children, parameters and settings.

    Hooks on the module itself are left out: they run around whatever the forward is.
    """
    kind, left_out = own_class(module)
    found = object.__new__(kind)
    vars(found).update(
        # hooks of every kind: those of state_dict hold what `fully_shard` knows of a module
        (name, OrderedDict() if name.startswith("_") and "_hooks" in name else value)
        for name, value in vars(module).items()
        if name not in ("forward", *left_out) and not isinstance(value, ModuleChunks)
    )
    return found


def plan_graph(capture: Capture, budget_bytes: int, *, train: bool = False) -> Planned:
    """The plan of a module that is one graph; with `train` the budget is for forward and backward pass.

    Raises:
        PlanError: The budget cannot be met.
    """
    lowered, found = lower_within(capture, budget_bytes, train=train)
    chunks = ModuleChunks(
        budget_bytes=budget_bytes,
        peak_bytes=found.peak_bytes,
        whole_bytes=found.whole_bytes,
        regions={"": found.regions},
        code={"": lowered.code},
    )
    return Planned(chunks=chunks, run=lambda module, args, kwargs: lowered(module, *args, **kwargs))


def lower_within(capture: Capture, budget_bytes: int, *, train: bool = False) -> tuple[Lowered, ChunkPlan]:
    """The generated forward that takes the least time within a budget, and its plan with the bytes that it then takes.

    Args:
        capture: With a graph; for training captured with gradients.
        budget_bytes: Of a forward pass without gradients.
        train: The budget is for forward and backward pass.

    Raises:
        OverBudget: The budget cannot be met.
    """
    table = table_of(capture)
    counted, measure = (table, step_bytes) if train else (_inference_table(capture, table), forward_bytes)
    asked = budget_bytes
    while True:
        try:
            found = choose_chunks(counted, asked, train=train)
        except OverBudget as error:
            if asked == budget_bytes:
                raise
            least = error.least_bytes + budget_bytes - asked
            raise OverBudget(
                f"a budget of {budget_bytes!r} bytes was asked for block {capture.kind.__name__!r}, which was predicted"
                f" to need less than it does, and needs {least!r} at least, in pieces; allow that much",
                least,
            ) from error
        lowered = lower(capture, counted, found.regions)
        measured = measure(lowered)
        if measured <= budget_bytes:
            # where there are gradients the same regions run, and nothing is written over
            run = lowered if counted is table else lower(capture, table, found.regions)
            return run, replace(found, peak_bytes=measured)
        # a prediction that is too small costs other searches, never the promise
        asked = min(asked, found.peak_bytes) - max(1, (measured - budget_bytes) // STEPS)


def forward_bytes(lowered: Lowered) -> int:
    """Most bytes alive in a forward pass without gradients, beyond what it is given; it is run on fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        tensors = _arguments(lowered)
        with LiveBytes() as live:
            lowered.forward(*tensors)
    return int(live.peak)


def step_bytes(lowered: Lowered) -> int:
    """Most bytes alive in a forward and a backward pass, beyond what both are given; they are run on fake tensors.

    Results are held meanwhile. Gradients of arguments and parameters count, those of the results do not.
    """
    live = LiveBytes()
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = _arguments(lowered)
        for tensor, needs_grad in zip(tensors, lowered.capture.needs_grad, strict=True):
            tensor.requires_grad_(needs_grad)
        with live:
            results = lowered.forward(*tensors)
        learned = [t for t in results if isinstance(t, Tensor) and t.requires_grad]
        seeds = [torch.empty_like(result) for result in learned]
        with live:
            torch.autograd.backward(learned, seeds)
    return int(live.peak)


def _inference_table(capture: Capture, table: Table) -> Table:
    """What an operator makes for the backward pass is made and dropped, which a row with gradients does not show."""
    if not torch.is_grad_enabled():
        return table
    with torch.no_grad():
        return table_of(capture)


def _arguments(lowered: Lowered) -> list[Tensor]:
    """What a generated forward is given; fake in a fake mode, where a region runs some of its chunks."""
    assert lowered.capture.graph is not None, "what was lowered has a graph"
    given = [node.meta["val"] for node in lowered.capture.graph.graph.nodes if node.op == "placeholder"]
    return [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in given]
