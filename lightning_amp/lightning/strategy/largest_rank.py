"""Make the plan of a run for the rank whose first batch takes most, where values decide what a batch takes.

Rank 0 plans by its own first batch. In a mixture of experts, rows of another rank's batch may go to fewer experts,
which then hold more. Each rank counts its own first batch with the rules of the plan. If the largest of these counts
exceeds the budget, the rank that has it plans, and all ranks count again.

Collectives, if values decide (rank 0 says so) and there are several ranks: for each plan, an all-gather of the counted
bytes, or of the reason why there are none, and a broadcast of the largest count.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist

from lightning_amp.errors import AmpError
from lightning_amp.footprint.module_profile import ModuleProfile
from lightning_amp.lightning.consistency.replicas import decide_on_one_rank
from lightning_amp.lightning.strategy.context import PlanningContext
from lightning_amp.planning.modules.on_device import on_device
from lightning_amp.planning.modules.plan_module import counted_draft, counted_rules
from lightning_amp.planning.plan.plan import Explanation, Plan
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.table import PREDICTIONS, is_of_decoder

NOT_COUNTED = "a batch was not counted on every rank, and may take more there: "
MORE = "the peak is that of "
"""Beginnings of notes."""


def for_largest_rank(plan: Plan, facts: PlanningContext, decide: Callable[[], Plan]) -> Plan:
    """Return a plan, or another one, with the peak of the rank whose first batch takes most; all ranks call it.

    Args:
        plan: The plan of rank 0's first batch, equal on all ranks.
        decide: Makes the plan of this rank's first batch.

    Raises:
        AmpError: The error of the rank that plans again.
    """
    if facts.strategy.world_size == 1:
        return plan
    said = "the first batch of rank {}, which takes more than rank 0's"
    return for_largest_batch(plan, facts, decide, said, depends=_depends_on_rank, deciders=(0,))


def for_largest_batch(
    plan: Plan,
    facts: PlanningContext,
    decide: Callable[[], Plan],
    said: str,
    *,
    depends: Callable[[Plan, PlanningContext], bool] = lambda *_: True,
    deciders: Sequence[int] = (),
) -> Plan:
    """Return a plan, or another one, with the peak of the rank whose batch takes most; all ranks call it.

    Args:
        plan, decide: As in `for_largest_rank`.
        said: What the batch is, with a place for the number of its rank.
        depends: Whether a plan's peak depends on the rank; rank 0 decides.
        deciders: Ranks whose batch a plan was made for already.
    """
    strategy = facts.strategy
    agree = partial(decide_on_one_rank, rank=strategy.global_rank, broadcast=strategy.broadcast)
    tried = list[Plan]()
    while agree(partial(depends, plan, facts)):
        rank, largest, why = largest_of_ranks(plan, facts)
        tried.append(agree(partial(_for, plan, facts, said.format(rank), largest, why)))
        if tried[-1].fits is not False:
            return tried[-1]
        if rank in deciders:
            # its own plan is too large too
            break
        deciders = (*deciders, rank)
        plan = agree(decide, decider=rank)
        plan = replace(plan, notes=(*plan.notes, Explanation(f"planned for {said.format(rank)}")))
    return min(tried, key=lambda one: one.training_bytes, default=plan)


def _depends_on_rank(plan: Plan, facts: PlanningContext) -> bool:
    """Whether values decide what a rank's batch takes; of ranks that share a batch, rank 0's counts."""
    seen = facts.profiled[0]
    return seen is not None and seen.profile.noted and plan.mesh.model == 1 and plan.budget_bytes is not None


def largest_of_ranks(plan: Plan, facts: PlanningContext) -> tuple[int, ModuleProfile | None, str]:
    """Count this rank's batch; return the rank with the largest count, that count, and why others have none."""
    own: ModuleProfile | None = None
    why = ""
    try:
        assert facts.step is not None, "rank 0 has profiled it"
        own = facts.step.count_own(counted_rules(plan), facts.rates[0])
    except Exception as error:
        # raised by one rank alone, it would leave the others in the collective
        why = str(error) if isinstance(error, AmpError) else f"{type(error).__name__}: {error}"
    if facts.strategy.world_size == 1:
        return 0, own, why
    everyones: list[Any] = [None] * facts.strategy.world_size
    dist.all_gather_object(everyones, (-1 if own is None else own.larger_peak_bytes, why))
    peaks, reasons = zip(*everyones, strict=True)
    rank = max(range(len(peaks)), key=peaks.__getitem__)
    # what refers to tensors or functions stays here
    box = [own and replace(own, makes=None, reads=None, counted=None)]
    dist.broadcast_object_list(box, src=rank)
    missing = [f"rank {k}: {reason}" for k, reason in enumerate(reasons) if reason]
    return rank, box[0], "; ".join(missing)


def _for(plan: Plan, facts: PlanningContext, said: str, largest: ModuleProfile | None, why: str) -> Plan:
    """Return the plan with the peak of the largest count."""
    seen, notes = facts.profiled[0], list(plan.notes)
    assert seen is not None, "the plan depends on the rank"
    if why:
        notes.append(f"{NOT_COUNTED}{why}")
    if largest is None:
        return replace(plan, notes=tuple(notes))
    rules = tuple(rule for rule in plan.rules if rule.strategy in PREDICTIONS and not is_of_decoder(rule))
    with_largest = replace(seen, profile=largest)
    peak = counted_draft(with_largest, rules, ranks=plan.gradient_ranks, count=lambda _: largest).peak_bytes
    more = peak - plan.training_bytes
    if more <= 0:
        return replace(plan, notes=tuple(notes))
    # a batch before took less
    notes = [note for note in notes if not note.startswith(MORE)]
    notes.append(Explanation(f"{MORE}{said}: {format_bytes(more)} more"))
    validation = plan.validation and replace(plan.validation, training_bytes=peak)
    peak = max(peak, plan.predicted_peak_bytes)
    plan = replace(plan, predicted_peak_bytes=peak, validation=validation, notes=tuple(notes))
    return on_device(plan, facts.device, largest)
