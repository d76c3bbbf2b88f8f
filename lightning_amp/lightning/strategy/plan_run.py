"""Make the plan of a run from Trainer, data and module, on rank 0 in `setup`, before optimisers exist."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from lightning.pytorch.trainer.states import TrainerFn

from lightning_amp.errors import AmpError, PlanError, ShardError
from lightning_amp.lightning.consistency.replicas import decide_on_one_rank
from lightning_amp.lightning.profiling.evaluation_of_module import EvaluationOfModule
from lightning_amp.lightning.profiling.make_step_plan import (
    StepPlan,
    base_plan,
    counts_on_top_of,
    make_step_plan,
    plan_on_device,
    with_compiled,
)
from lightning_amp.lightning.profiling.split_samples import with_split_evaluation
from lightning_amp.lightning.strategy.context import PlanningContext
from lightning_amp.lightning.strategy.largest_rank import for_largest_rank
from lightning_amp.lightning.strategy.validation_of_fit import with_validation
from lightning_amp.planning.base import rules as base_rules
from lightning_amp.planning.base.base_plan import kept_bytes
from lightning_amp.planning.base.plan_request import PlanRequest
from lightning_amp.planning.modules.on_device import on_device
from lightning_amp.planning.modules.plan_decoder import predict_decoder_again, split_by_decoder
from lightning_amp.planning.modules.plan_module import plan_again, split_by_planner
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.build_rules import ends_of
from lightning_amp.planning.policies.make_plan import predicted_fields
from lightning_amp.progress import shown_if_long
from lightning_amp.techniques.host_memory.limit import refuse_beyond
from lightning_amp.techniques.table import EVALUATED, PREDICTIONS, STRATEGIES, in_order, is_of_decoder


def resolve_plan(
    facts: PlanningContext,
    *,
    notes: Sequence[str] = (),
    given: Plan | None = None,
    strategies: Sequence[str] | None = None,
    model_ranks: int | None = None,
) -> Plan:
    """Return the plan of one run, equal on all ranks: the requested plan, or one made on rank 0.

    Args:
        notes: Notes on the module, for the plan or for the error message.
        given: A plan to use instead of the requested one.
        strategies, model_ranks: Make a plan with these instead of the requested ones.

    Raises:
        AmpError: The error that rank 0 raised.
        PlanError: The plan is for another number of ranks, or ranks differ in its inputs.
    """
    request, strategy, _ = facts.request, facts.strategy, (facts.speeds, facts.memory, facts.host_room)

    @shown_if_long("planning", show=facts.trainer.progress_bar_callback is not None)
    def decide() -> Plan:
        requested, module = request.given_plan if given is None else given, facts.trainer.lightning_module
        inputs = facts.inputs(strategies, model_ranks)
        if requested is None or strategies is not None:
            return plan_on_device(inputs, made, device=facts.device, module=module).plan
        again = with_validation(base_rules.with_memory(predict_anew(requested, facts), facts.memory), facts)
        seen = facts.profiled[0]
        counted = StepPlan(plan=again, step=facts.step, seen=seen).counted
        placed = on_device(again, facts.device, counted)
        return with_compiled(placed, inputs, module, None if seen is None else seen.chain)

    def made(inputs: PlanRequest) -> StepPlan:
        found = (_plan_of_decoder if inputs.shape.decoder else _plan_of_module)(facts, inputs)
        if facts.counts_decoder:
            facts.keep_profiled(found.seen)
        return replace(found, plan=with_validation(found.plan, facts))

    try:
        plan = decide_on_one_rank(decide, rank=strategy.global_rank, broadcast=strategy.broadcast)
        plan = for_largest_rank(plan, facts, decide)
    except PlanError as error:
        raise (PlanError(f"{error}. {'; '.join(notes)}") if notes else error) from None
    # compared afterwards: an error of rank 0 is then raised as such, not as a difference between ranks
    facts.compare()
    plan = replace(plan, notes=(*plan.notes, *(note for note in notes if note not in plan.notes)))
    if plan.mesh.ranks != strategy.world_size:
        raise PlanError(
            f"a plan for {plan.mesh.data} x {plan.mesh.model} ranks (data x model) is not supported, the run"
            f" has {strategy.world_size} ranks; make a plan for as many, or change `devices` of the Trainer"
        )
    if not request.share_batch_statistics:
        plan = base_rules.without_shared_statistics(plan)
    own = None if facts.data is None else facts.data.balance
    balance = request.balance_cells if own is None else own
    return plan if balance == "auto" else base_rules.with_balance(plan, balance=bool(balance))


def _plan_of_module(facts: PlanningContext, given: PlanRequest) -> StepPlan:
    seen = facts.profiled[0]
    if seen is not None:
        assert facts.step is not None, "it has been seen"
        return make_step_plan(given, facts.step, seen)
    requested, named = split_by_planner(given.strategies, policy=given.policy)
    if requested is not None:
        requested += _without_profile(named or (), facts)
    if facts.evaluation is not None:
        return StepPlan(plan=_of_evaluation(facts, given, facts.evaluation, requested, named))
    made = _evaluated(_without_step(facts, replace(given, strategies=requested)), facts, given, named)
    return StepPlan(plan=replace(made, uncounted=facts.not_profiled))


def _of_evaluation(
    facts: PlanningContext,
    given: PlanRequest,
    evaluation: EvaluationOfModule,
    asked: Sequence[str] | None,
    named: Sequence[str] | None,
) -> Plan:
    """Plan a run that does not train: by the requested technique with its own steps, or in chunks or split samples."""
    steps, (rates, notes) = facts.steps, facts.rates
    made = partial(_without_step, facts, replace(given, strategies=asked))
    if steps is not None and steps.name in (asked or ()) and not STRATEGIES[steps.name].data_axis:
        try:
            return evaluation.split(steps, made, rates, notes)
        except AmpError as error:
            if not steps.chosen or isinstance(error, ShardError):
                raise
            uncounted = made()
            return replace(uncounted, notes=(*uncounted.notes, f"the peak is not known: {error}"))
    whole = _evaluated(made(), facts, given, named)
    free = facts.request.chooses and given.strategies is None and given.model_parallel_size == "auto"
    if not free or not whole.evaluates or (whole.fits and EVALUATED not in whole.strategies):
        return whole
    return with_split_evaluation(
        whole,
        evaluation,
        base=lambda name, dry: _without_step(facts, given.split(name, dry)),
        node_ranks=facts.strategy.num_processes,
        rates=rates,
        notes=notes,
    )


def _plan_of_decoder(facts: PlanningContext, given: PlanRequest) -> StepPlan:
    if facts.counts_decoder:
        assert facts.step is not None, "it is counted"
        found = make_step_plan(given, facts.step, None)
        notes = facts.notes_on_closed_forms if found.seen is None else []
        return replace(found, plan=replace(found.plan, notes=(*found.plan.notes, *notes)))
    requested, named = split_by_decoder(given.strategies, policy=given.policy)
    if requested is not None:
        requested += _without_profile(named or (), facts)
    made = _without_step(facts, replace(given, strategies=requested))
    return StepPlan(plan=_evaluated(made, facts, given, named or None))


def _without_step(facts: PlanningContext, given: PlanRequest) -> Plan:
    """Make the plan that needs no count of a step."""
    return base_rules.with_memory(base_plan(given, uncounted=facts.profiled[1]), given.memory)


def _without_profile(named: Sequence[str], facts: PlanningContext) -> list[str]:
    """Return the requested techniques that can be planned without a profile.

    Raises:
        PlanError: A requested technique requires a profile, and the step could not be profiled.
    """
    if facts.profiled[0] is not None:
        return []
    needing = [name for name in named if PREDICTIONS[name].counted]
    if needing and facts.not_profiled:
        raise PlanError(f"{', '.join(needing)} is not supported: {facts.not_profiled}")
    if EVALUATED in needing and not facts.in_chunks and facts.evaluation is None:
        raise PlanError(
            f"{EVALUATED} requires, in a run that does not train, a budget or the plan of a fit: give"
            " AMPStrategy(device_memory=...), fit with this Trainer first, give AMPStrategy(plan='plan.json'), or run"
            f" the module that lightning_amp.chunk(module, batch, budget=...) returns, without naming {EVALUATED}"
        )
    # outside a fit nothing is saved for a backward pass, so that techniques which need a count have no effect
    return [name for name in named if name not in needing]


def _evaluated(made: Plan, facts: PlanningContext, given: PlanRequest, named: Sequence[str] | None) -> Plan:
    """Add chunked evaluation to the plan of a run that does not train, by the fit's rules or for a budget.

    Raises:
        PlanError: Chunks were requested by name, and the step cannot be counted.
    """
    rules = facts.in_chunks
    if facts.evaluation is not None and (named is None or EVALUATED in named):
        try:
            made, rules = facts.evaluation.within(min(given.memory), made, *facts.rates)
        except AmpError as error:
            if named is not None:
                raise PlanError(f"{EVALUATED} is not supported: its bytes are not known: {error}") from error
            return replace(made, notes=(*made.notes, f"the peak is not known: {error}"))
    if not rules:
        return made
    strategies = in_order({*made.strategies, EVALUATED})
    return replace(made, strategies=strategies, rules=(*made.rules, *rules))


def predict_anew(plan: Plan, facts: PlanningContext) -> Plan:
    """Update a given plan with the prediction and budget of this run; its old ones belong to another model."""
    if facts.trainer.state.fn == TrainerFn.FITTING:
        refuse_beyond(plan.rules, facts.host_room)
    (profile, shape, notes), (rates, note) = facts.read, facts.rates
    notes = notes + note + base_rules.too_few_cells(profile, plan.mesh, shape.batch_size)
    notes += base_rules.remarks({rule.strategy: rule.spec for rule in plan.rules}, launches=rates.launches)
    if shape.batch_norms:
        # the plan may come from a model without batch normalisation
        plan = base_rules.with_shared_statistics(plan)
    if shape.decoder:
        fields = predicted_fields(shape, plan.strategies, plan.axes, plan.mesh, rates, ends=ends_of(plan))
    else:
        # `plan_again` below replaces them
        fields = kept_bytes(shape, plan.strategies, plan.mesh)
    again = replace(
        plan,
        batch_size=shape.batch_size,
        budget_bytes=facts.budget,
        on_device=None,
        notes=(*(note for note in plan.notes if note not in notes), *notes),
        candidates=(),
        **fields,
    )
    if shape.decoder:
        return _decoder_again(again, facts)
    seen = facts.profiled[0]
    if seen is None or facts.step is None:
        return replace(again, diagnosis=None, uncounted=facts.not_profiled)
    return plan_again(again, seen, count=facts.step.count, memory=facts.memory)


def _decoder_again(plan: Plan, facts: PlanningContext) -> Plan:
    """Count the step of a given plan of a module with a decoder; outside a fit the closed forms' bytes stay."""
    why = "the step is counted in a fit, before its first plan"
    if facts.counts_decoder and facts.step is not None:
        try:
            found = predict_decoder_again(plan, counts_on_top_of(facts.inputs(), facts.step), facts.read[1])
        except AmpError as error:
            why = str(error)
        else:
            facts.keep_profiled(found[1])
            return found[0]
    beyond = [rule.fqn for rule in plan.rules if rule.strategy in PREDICTIONS and not is_of_decoder(rule)]
    note = f"what {', '.join(beyond)} save beyond the decoder is not predicted: {why}"
    return replace(plan, diagnosis=None, notes=(*plan.notes, *[note] * bool(beyond)))
