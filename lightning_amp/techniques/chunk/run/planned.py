"""Plan regions for one graph under a budget, and predict the bytes of the generated forward."""

from dataclasses import replace

import torch
from torch import Tensor

from lightning_amp.footprint.copies.quick_fakes import QuickFakes
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.graph.capture import Capture
from lightning_amp.graph.peak import block_bytes
from lightning_amp.graph.table import Table
from lightning_amp.techniques.chunk.regions.choose_chunks import CPU_SECONDS, CostModel, OverBudget, choose_chunks, rung
from lightning_amp.techniques.chunk.regions.chunk_bytes import result_bytes
from lightning_amp.techniques.chunk.regions.region import ChunkPlan
from lightning_amp.techniques.chunk.run.check import Checked
from lightning_amp.techniques.chunk.run.lower import Lowered, lower, table_of
from lightning_amp.techniques.chunk.run.module_chunks import ModuleChunks, Planned
from lightning_amp.techniques.chunk.run.nested import lower_nested, outermost
from lightning_amp.techniques.chunk.run.two_steps import in_two_steps, norms_of

Found = tuple[Lowered, ChunkPlan]
NORMS = ("none", "above", "all")
"""Which group norms are computed in two steps: none, those at which the block is above the budget, all."""


def plan_graph(capture: Capture, budget_bytes: int, *, train: bool = False, costs: CostModel = CPU_SECONDS) -> Planned:
    """The plan of a module that is one graph; with `train` the budget is for forward and backward pass.

    Raises:
        PlanError: The budget cannot be met.
    """
    lowered, found = lower_within(capture, budget_bytes, train=train, costs=costs)
    chunks = ModuleChunks(
        budget_bytes=budget_bytes,
        peak_bytes=found.peak_bytes,
        whole_bytes=found.whole_bytes,
        regions={"": found.regions},
        code={"": lowered.code},
    )
    return Planned(chunks=chunks, run=Checked(lowered, budget_bytes, found.whole_bytes))


def lower_within(capture: Capture, budget_bytes: int, *, train: bool = False, costs: CostModel = CPU_SECONDS) -> Found:
    """The generated forward that takes the least time within a budget, and its plan with the bytes that it then takes.

    In inference chunks are nested where nothing else is within the budget; the plan's region is the outer one then.
    Where that is not enough, group norm is computed in two steps: first those at which the block is above the budget,
    then all.

    Plans are made for numbers of bytes that are the same for all budgets, from the largest within the budget down to
    one that the meter finds within it too, and at last that of the least bytes: what a budget accepts, a larger one
    does too, and is no slower.

    Args:
        capture: With a graph; for training captured with gradients.
        budget_bytes: Of a forward pass without gradients.
        train: The budget is for forward and backward pass.
        costs: What is made small.

    Raises:
        OverBudget: The budget cannot be met.
    """
    least: OverBudget | None = None
    for which in NORMS[:1] if train else NORMS:
        for form in (_with_norms, _nested)[: 1 if train else 2]:
            try:
                if found := form(capture, budget_bytes, costs, which, train=train):
                    return found
            except OverBudget as error:
                if least is None or error.least_bytes < least.least_bytes:
                    # frames of a traceback would keep tensors of the step alive while other forms run
                    least = error.with_traceback(None)
        if not norms_of(capture):
            break
    assert least is not None, "a form was tried"
    raise least


def _with_norms(capture: Capture, budget_bytes: int, costs: CostModel, which: str, *, train: bool) -> Found:
    """The forward of a graph of which some group norms are in two steps."""
    norms, found = norms_of(capture), set(range(len(norms_of(capture)) if which == "all" else 0))
    if which == "above":
        # of which a row is above the budget, up to the next one: all others are less whole, and faster
        k, table = -1, _inference_table(capture, table_of(capture, near=True))
        forward = block_bytes(table.rows, table.outputs, train=False).forward
        for node, n_bytes in zip(capture.nodes, forward, strict=True):
            k += k + 1 < len(norms) and node is norms[k + 1]
            if n_bytes > budget_bytes and k >= 0:
                found.add(k)
    split = in_two_steps(capture, found)
    table = table_of(split, near=not train)
    counted = table if train else _inference_table(split, table)
    lowered, plan = _within(split, counted, budget_bytes, costs, train=train)
    # where there are gradients the same regions run, and nothing is written over
    lowered = lowered if counted is table else lower(split, table, plan.regions)
    return replace(lowered, norms=frozenset(found)), plan


def _within(
    capture: Capture, table: Table, budget_bytes: int, costs: CostModel, *, train: bool
) -> tuple[Lowered, ChunkPlan]:
    """The forward with the regions that are chosen from a table."""
    # of a block that fits as it is the budget itself is asked for: the next rung below could need chunks
    fits = block_bytes(table.rows, table.outputs, train=train).peak_bytes <= budget_bytes
    asked, is_least = budget_bytes if fits else rung(budget_bytes), False
    while True:
        try:
            found = choose_chunks(table, asked, train=train, costs=costs)
        except OverBudget as error:
            if error.least is None:
                raise
            found, is_least = error.least, True
        lowered = lower(capture, table, found.regions)
        measured = measured_bytes(lowered, train=train)
        if measured <= budget_bytes:
            return lowered, replace(found, peak_bytes=measured)
        if is_least:
            raise _over(capture, measured, f" ({found.whole_bytes!r} as it is)", budget_bytes)
        # a prediction that is too small costs other searches, never the promise
        asked = rung(min(asked, found.peak_bytes) - 1)


def _nested(capture: Capture, budget_bytes: int, costs: CostModel, which: str, *, train: bool) -> Found | None:
    """The forward of one sample after the other, each in chunks; None where samples are not apart."""
    with torch.no_grad():
        table = table_of(capture, near=True)
        outer = outermost(table)
        if outer is None:
            return None
        beside = sum(result_bytes(table.rows[i]) for i in outer.outputs(table))

        def plan(piece: Capture) -> Found:
            return _with_norms(piece, budget_bytes - beside, costs, which, train=train)

        try:
            lowered, inner = lower_nested(capture, table, outer, plan)
        except OverBudget as error:
            raise _over(capture, error.least_bytes + beside, "", budget_bytes) from None
        least_bytes = measured_bytes(lowered)
        if least_bytes > budget_bytes:
            raise _over(capture, least_bytes, "", budget_bytes)
        whole = choose_chunks(table, 2**62, train=False, costs=costs)
    found = replace(whole, regions=(outer,), peak_bytes=least_bytes, seconds=outer.n_chunks * inner.seconds)
    if torch.is_grad_enabled():
        lowered = lower(capture, table_of(capture, near=True), found.regions)
    return lowered, found


def _over(capture: Capture, least_bytes: int, as_it_is: str, budget_bytes: int) -> OverBudget:
    return OverBudget(
        f"block {capture.kind.__name__!r} requires at least {least_bytes!r} bytes in chunks{as_it_is}, more than the"
        f" budget of {budget_bytes!r} bytes; raise the budget",
        least_bytes,
    )


def measured_bytes(lowered: Lowered, *, train: bool = False) -> int:
    """Most bytes alive in a forward pass without gradients, or in training in a forward and a backward pass, beyond
    what both are given; they are run on fake tensors.

    In training results are held meanwhile. Gradients of arguments and parameters count, those of the results do not.
    """
    live = LiveBytes()
    with QuickFakes(), torch.set_grad_enabled(train):
        tensors = lowered.capture.arguments()
        for tensor, needs_grad in zip(tensors, lowered.capture.needs_grad, strict=True):
            tensor.requires_grad_(train and needs_grad)
        with live:
            results = lowered.forward(*tensors)
        if train:
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
        return table_of(capture, near=True)
