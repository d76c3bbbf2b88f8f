"""Plan regions for one captured graph under a budget, and measure the peak of the generated forward on fake tensors."""

from dataclasses import replace

import torch
from torch import Tensor

from lightning_amp.footprint.copies.quick_fakes import QuickFakes
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.graph.capture import Capture, alias
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
"""Group norms that are computed in two steps: none, those at which the block exceeds the budget, or all."""


def plan_graph(capture: Capture, budget_bytes: int, *, train: bool = False, costs: CostModel = CPU_SECONDS) -> Planned:
    """Plan a module that is one graph; with `train`, the budget bounds the forward and backward pass.

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
    return Planned(chunks=chunks, run=Checked(lowered, budget_bytes, found.whole_bytes), capture=capture)


def lower_within(capture: Capture, budget_bytes: int, *, train: bool = False, costs: CostModel = CPU_SECONDS) -> Found:
    """Return the fastest generated forward within a budget, and its plan with the measured bytes.

    In inference, chunks are nested if no other plan fits the budget; the plan then has the outer region. If that is not
    enough, group norms are computed in two steps: first those at which the block exceeds the budget, then all.

    Plans are made for a fixed ladder of budgets (`rung`), from the largest one within the budget downwards until the
    measured bytes fit too, and finally for the least bytes. So if a budget can be met, a larger one can too, and its
    plan is no slower.

    Args:
        capture: Capture with a graph; for training captured with gradients.
        budget_bytes: Budget of a forward pass without gradients.
        train: The budget bounds the forward and backward pass.
        costs: Quantity to minimize.

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
                    # without its traceback, whose frames would keep tensors alive while other forms are planned
                    least = error.with_traceback(None)
        if not norms_of(capture):
            break
    assert least is not None, "a form was tried"
    raise least


def _with_norms(capture: Capture, budget_bytes: int, costs: CostModel, which: str, *, train: bool) -> Found:
    """Plan a graph in which some group norms are computed in two steps."""
    norms, found = norms_of(capture), set(range(len(norms_of(capture)) if which == "all" else 0))
    if which == "above":
        # norms for which a row from the norm up to the next one exceeds the budget; the others are faster in one step
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
    # with gradients the same regions run, and nothing is overwritten
    lowered = lowered if counted is table else lower(split, table, plan.regions)
    return replace(lowered, norms=frozenset(found)), plan


def _within(
    capture: Capture, table: Table, budget_bytes: int, costs: CostModel, *, train: bool
) -> tuple[Lowered, ChunkPlan]:
    """Return the generated forward with regions that are chosen from a table, and its plan."""
    # a block that fits without chunks is planned for the budget itself: the next lower rung could require chunks
    fits = block_bytes(table.rows, table.outputs, train=train).peak_bytes <= budget_bytes
    limit, is_least = budget_bytes if fits else rung(budget_bytes), False
    while True:
        try:
            found = choose_chunks(table, limit, train=train, costs=costs)
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
        # a prediction that is too low costs further searches, but the budget is always met
        limit = rung(min(limit, found.peak_bytes) - 1)


def _nested(capture: Capture, budget_bytes: int, costs: CostModel, which: str, *, train: bool) -> Found | None:
    """Plan one sample at a time, each in chunks; None if samples are not independent."""
    with torch.no_grad():
        table = table_of(capture, near=True)
        outer = outermost(table)
        if outer is None:
            return None
        # the full results are alive while every sample runs
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
        # an unlimited budget gives a plan without regions, for the values of the original block
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
    """Measure the peak of a forward pass, or in training of a forward and backward pass, on fake tensors.

    Arguments, parameters and buffers do not count. In training, results are held until the end; gradients of arguments
    and parameters count, those of results do not.
    """
    live = LiveBytes()
    with QuickFakes(), torch.set_grad_enabled(train):
        tensors = lowered.capture.arguments()
        for tensor, needs_grad in zip(tensors, lowered.capture.needs_grad, strict=True):
            tensor.requires_grad_(train and needs_grad)
        if any(name.startswith("input ") for name in lowered.capture.changed):
            tensors = [alias(tensor) if tensor.requires_grad else tensor for tensor in tensors]
        with live:
            results = lowered.forward(*tensors)
        if train:
            learned = [t for t in results if isinstance(t, Tensor) and t.requires_grad]
            seeds = [torch.empty_like(result) for result in learned]
            with live:
                torch.autograd.backward(learned, seeds)
    return int(live.peak)


def _inference_table(capture: Capture, table: Table) -> Table:
    """Return the table for inference, with results that an operator computes for the backward pass and then drops."""
    if not torch.is_grad_enabled():
        return table
    with torch.no_grad():
        return table_of(capture, near=True)
