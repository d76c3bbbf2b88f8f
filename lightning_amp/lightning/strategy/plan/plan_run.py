"""Make the plan of a run from Trainer, data and module, on rank 0 in `setup`, before optimisers exist."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.errors import AmpError, PlanError
from lightning_amp.lightning._compat import rank_zero_info
from lightning_amp.lightning.consistency.replicas import decide_on_rank_zero
from lightning_amp.lightning.faults.interrupt import ended_by_sigterm
from lightning_amp.lightning.profiling.dry_steps import with_spec
from lightning_amp.lightning.profiling.outside_decoder import Made, with_blocks_outside
from lightning_amp.lightning.profiling.within_budget import within_budget
from lightning_amp.lightning.strategy.plan.context import PlanningContext
from lightning_amp.lightning.strategy.stepped import in_parts, is_slow
from lightning_amp.planning.memory.peak_model import predict
from lightning_amp.planning.modules.plan_module import (
    model_axis_size,
    plan_again,
    plan_module,
    split_by_planner,
)
from lightning_amp.planning.plan.plan import Explanation, Plan
from lightning_amp.planning.policies.build_rules import (
    remarks,
    with_balance,
    with_memory,
    with_requested,
    with_shared_statistics,
    with_speeds,
    without_shared_statistics,
)
from lightning_amp.planning.policies.make_plan import plan as make_plan
from lightning_amp.planning.policies.request import too_few_cells
from lightning_amp.planning.time.step_seconds import decoder_seconds, rest_seconds
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.chunk.spec import ChunkBlock
from lightning_amp.techniques.recompute.row import RecomputeBlock
from lightning_amp.techniques.table import (
    PREDICTIONS,
    STRATEGIES,
    in_order,
    parse_strategies,
)


def resolve_plan(
    facts: PlanningContext,
    *,
    notes: Sequence[str] = (),
    given: Plan | None = None,
    strategies: Sequence[str] | None = None,
    model_ranks: int | None = None,
) -> Plan:
    """The plan of one run, the same on every rank: the one that was requested, or one made on rank 0.

    Args:
        notes: Notes on the module, in the plan or in the refusal to make one.
        given: A plan to carry out instead of the one that was requested.
        strategies, model_ranks: To make a plan of, instead of what was requested.

    Raises:
        AmpError: The error of rank 0 when it made the plan.
        PlanError: The plan is for another number of ranks, or ranks differ in its inputs.
    """
    request, here, _ = facts.request, facts.here, facts.speeds
    if request.device_memory is not None and facts.step is not None and given is None:
        # of long loops it takes ten seconds and more
        rank_zero_info(f"planning a step within {format_bytes(facts.budget)}; nothing is trained yet")

    def decide() -> Plan:
        asked = request.plan if given is None else given
        with ended_by_sigterm(facts.trainer):
            if asked is None or strategies is not None:
                found = plan_run(facts, strategies, model_ranks)
            else:
                found = predict_anew(asked if isinstance(asked, Plan) else Plan.read(asked), facts)
            return with_memory(found, facts.memory)

    try:
        plan = decide_on_rank_zero(decide, rank=here.rank, broadcast=here.broadcast)
    except PlanError as error:
        raise (PlanError(f"{error}. {'; '.join(notes)}") if notes else error) from None
    facts.compare()
    plan = replace(plan, notes=(*plan.notes, *(note for note in notes if note not in plan.notes)))
    if plan.mesh.data * plan.mesh.model != here.n_ranks:
        raise PlanError(
            f"a plan for {plan.mesh.data} x {plan.mesh.model} ranks (data x model) is not supported, the run"
            f" has {here.n_ranks} ranks; make a plan for as many, or change `devices` of the Trainer"
        )
    if not request.share_batch_statistics:
        plan = without_shared_statistics(plan)
    balance = getattr(getattr(facts.trainer, "datamodule", None), "balance", None)
    balance = request.balance_cells if balance is None else balance
    return plan if balance == "auto" else with_balance(plan, balance=bool(balance))


def plan_run(
    facts: PlanningContext, strategies: Sequence[str] | None = None, model_ranks: int | None = None
) -> Plan:
    """Make the plan of one run; without a data directory it is made from the module only, and says so.

    Args:
        strategies, model_ranks: To make it of, instead of what was requested.

    Raises:
        DataError: The data directory cannot be read.
        PlanError: No plan answers the request.
    """
    request, here = facts.request, facts.here
    (profile, shape, notes), (rates, note) = facts.read, facts.rates
    asked: str | list[str] | None = request.strategies if strategies is None else list(strategies)
    named: tuple[str, ...] | None = None
    if shape.decoder is None:
        asked, named = split_by_planner(asked, policy=request.policy)
        asked = asked if asked is None else [*asked, *_without_profile(named or (), facts)]
    outside = facts.blocks_outside if strategies is None and shape.decoder is not None else ()
    if outside and (facts.outside is not None or facts.in_chunks or "chunk" not in outside):
        asked = [name for name in parse_strategies(request.strategies or ()) if name not in outside]
    size, stages = model_axis_size(request.model_parallel_size, asked, shape, facts.seen[0])
    if facts.steps is not None and STRATEGIES[facts.steps.name].data_axis:
        # of its grid, which may have been chosen
        size = facts.steps.ranks

    def make(budget: int, asked: Any = asked, size: Any = size, steps: Any = facts.steps) -> Plan:
        made = make_plan(
            profile,
            devices=here.n_ranks,
            device_memory=budget,
            policy=request.policy,
            strategies=asked,
            batch_size=shape.batch_size,
            model_parallel_size=size if model_ranks is None else model_ranks,
            shape=shape,
            rates=rates,
            node_devices=here.node_ranks,
        )
        made = with_requested(made, request.specs, shape, launches=rates.launches)
        made = with_spec(made, steps, facts.seen[1])
        made = with_speeds(made, shape, facts.speeds)
        return replace(made, notes=(*made.notes, *note, *notes))

    def made_of_decoder(budget: int) -> Made:
        whole = make(budget)
        local = [name for name in whole.strategies if not STRATEGIES[name].model_axis]
        alone = make_plan(
            profile, strategies=local or ["S1"], batch_size=shape.batch_size, shape=shape, rates=rates
        )
        return Made(whole, alone)

    if outside and facts.outside is not None and shape.decoder is not None:
        return with_blocks_outside(
            made_of_decoder(facts.budget),
            facts.outside,
            shape.decoder.fqn,
            rates,
            outside,
            share_statistics=request.share_batch_statistics,
        )
    if facts.beside is not None and strategies is None and shape.decoder is not None:
        return within_budget(made_of_decoder, facts.beside, shape.decoder.fqn, rates, facts.budget)
    made, seen = make(facts.budget), facts.seen[0]
    if seen is None:
        return replace(_evaluated(made, facts, named), uncounted=facts.not_profiled)
    assert facts.step is not None, "it has been seen"
    found = plan_module(
        made,
        seen,
        named=named,
        budget_named=request.device_memory is not None,
        count=facts.step.count,
        asked=replace(stages, micro_batches=request.micro_batches, speeds=facts.speeds, memory=facts.memory),
    )
    chooses = request.chooses and strategies is None
    if chooses and (found.fits is False or is_slow(found, seen)):
        return in_parts(found, facts.step, partial(make, facts.budget), rates, here)
    return found


def _without_profile(named: Sequence[str], facts: PlanningContext) -> list[str]:
    """Of the techniques that were requested, those that are planned all the same where there is no profile.

    Raises:
        PlanError: One of the others was requested, and the step could not be profiled.
    """
    if facts.seen[0] is not None:
        return []
    needing = [name for name in named if PREDICTIONS[name].counted]
    if needing and facts.not_profiled:
        raise PlanError(f"{', '.join(needing)} is not supported: {facts.not_profiled}")
    if "chunk" in needing and not facts.in_chunks and facts.evaluation is None:
        raise PlanError(
            "chunk requires, in a run that does not train, a budget or the plan of a fit: give"
            " AMPStrategy(device_memory=...), fit with this Trainer first, give"
            " AMPStrategy(plan='plan.json'), or run the module that lightning_amp.chunk(module, batch,"
            " budget=...) returns, without naming chunk"
        )
    # outside of a fit nothing is kept for a backward pass
    return [name for name in named if name not in needing]


def _evaluated(made: Plan, facts: PlanningContext, named: Sequence[str] | None) -> Plan:
    """The plan of a run that does not train: in chunks by the rules of the fit before it, else by a budget's own.

    Raises:
        PlanError: Chunks were requested by name, and the step cannot be counted.
    """
    rules = facts.in_chunks
    if facts.evaluation is not None and (named is None or "chunk" in named):
        try:
            found = facts.evaluation.within(facts.budget)
        except AmpError as error:
            if named is not None:
                raise PlanError(f"chunk is not supported: its bytes are not known: {error}") from error
            return replace(made, notes=(*made.notes, f"the peak is not known: {error}"))
        rules = found.rules
        whole = f": {format_bytes(found.whole_bytes)} without chunks" if rules else ""
        note = Explanation(f"{found.step} was counted with the first batch, without values{whole}")
        made = replace(
            made,
            evaluates=found.step,
            batch_size=found.batch_size or made.batch_size,
            predicted_base_bytes=found.held_bytes,
            predicted_peak_bytes=found.peak_bytes,
            # those of a training step are of other bytes
            notes=(*facts.rates[1], note),
        )
    if not rules:
        return made
    strategies = in_order({*made.strategies, "chunk"})
    return replace(made, strategies=strategies, rules=(*made.rules, *rules))


def predict_anew(plan: Plan, facts: PlanningContext) -> Plan:
    """A given plan with the prediction and the budget of this run: its own were for the model that it was made for."""
    (profile, shape, notes), (rates, note) = facts.read, facts.rates
    notes = notes + note + _not_counted(plan, shape) + too_few_cells(profile, plan.mesh, shape.batch_size)
    notes += remarks({rule.strategy: rule.spec for rule in plan.rules}, launches=rates.launches)
    if shape.batch_norms:
        # the plan may be of a model without
        plan = with_shared_statistics(plan)
    predicted = predict(shape, plan.strategies, model_ranks=plan.mesh.model, axes=plan.axes)
    again = replace(
        plan,
        batch_size=shape.batch_size,
        predicted_base_bytes=predicted.base_bytes,
        predicted_stratum_bytes=predicted.mean_stratum_bytes,
        predicted_peak_bytes=predicted.peak_bytes,
        strata_bytes=predicted.strata_bytes,
        budget_bytes=facts.budget,
        notes=(*(note for note in plan.notes if note not in notes), *notes),
        predicted_step_seconds=decoder_seconds(shape, plan.axes, plan.mesh, rates),
        predicted_rest_seconds=rest_seconds(shape, plan.mesh, rates),
        rates_device="" if shape.decoder is None else rates.device,
        candidates=(),
    )
    seen = facts.seen[0]
    if seen is None or facts.step is None:
        return replace(again, diagnosis=None, uncounted=facts.not_profiled)
    return plan_again(again, seen, count=facts.step.count, memory=facts.memory)


def _not_counted(plan: Plan, shape: ModelShape) -> list[str]:
    """What rules outside of a decoder save, which its prediction does not have."""
    named = [rule.fqn for rule in plan.rules if isinstance(rule.spec, RecomputeBlock | ChunkBlock)]
    if shape.decoder is None or not named:
        return []
    return [
        f"what {', '.join(named)} save outside of the decoder was not counted: the peak is predicted without"
    ]
