"""Make the plan of a run from Trainer, data and module, on rank 0 in `setup`, before optimisers exist."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import combinations
from math import inf
from types import SimpleNamespace

from lightning_amp.errors import AmpError, PlanError
from lightning_amp.lightning._compat import rank_zero_info
from lightning_amp.lightning.consistency.replicas import decide_on_rank_zero
from lightning_amp.lightning.profiling.blocks_outside import DecoderPlan, with_blocks_outside, within_budget
from lightning_amp.lightning.profiling.dry_steps import DrySteps, with_spec
from lightning_amp.lightning.strategy.context import PlanningContext
from lightning_amp.lightning.strategy.validation_of_fit import with_validation
from lightning_amp.planning.memory.peak_model import predict
from lightning_amp.planning.modules.plan_module import model_axis_size, plan_again, plan_module, split_by_planner
from lightning_amp.planning.plan.plan import Axes, Explanation, Plan
from lightning_amp.planning.policies import build_rules
from lightning_amp.planning.policies.auto import TIE
from lightning_amp.planning.policies.make_plan import plan as make_plan
from lightning_amp.planning.time.step_seconds import predicted_times
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.table import (
    EVALUATED,
    PREDICTIONS,
    STRATEGIES,
    in_order,
    is_of_block,
    parse_strategies,
    together,
)

SLOW_SECONDS = 0.5
"""Seconds of a step beyond its computation, above which a plan counts as slow."""


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
    request, strategy, _ = facts.request, facts.strategy, facts.speeds
    if request.device_memory is not None and facts.step is not None and given is None:
        # for long loops planning takes ten seconds and more
        rank_zero_info(f"planning a step within {format_bytes(facts.budget)}; nothing is trained yet")

    def decide() -> Plan:
        asked = request.given_plan if given is None else given
        if asked is None or strategies is not None:
            made = _plan_of_decoder if facts.read[1].decoder else _plan_of_module
            found = made(facts, strategies, model_ranks)
        else:
            found = predict_anew(asked, facts)
        return with_validation(build_rules.with_memory(found, facts.memory), facts)

    try:
        plan = decide_on_rank_zero(decide, rank=strategy.global_rank, broadcast=strategy.broadcast)
    except PlanError as error:
        raise (PlanError(f"{error}. {'; '.join(notes)}") if notes else error) from None
    # compared afterwards: an error of rank 0 is then raised as such, not as a difference between ranks
    facts.compare()
    plan = replace(plan, notes=(*plan.notes, *(note for note in notes if note not in plan.notes)))
    if plan.mesh.data * plan.mesh.model != strategy.world_size:
        raise PlanError(
            f"a plan for {plan.mesh.data} x {plan.mesh.model} ranks (data x model) is not supported, the run"
            f" has {strategy.world_size} ranks; make a plan for as many, or change `devices` of the Trainer"
        )
    if not request.share_batch_statistics:
        plan = build_rules.without_shared_statistics(plan)
    own = None if facts.data is None else facts.data.balance
    balance = request.balance_cells if own is None else own
    return plan if balance == "auto" else build_rules.with_balance(plan, balance=bool(balance))


def _plan_of_module(facts: PlanningContext, strategies: Sequence[str] | None, model_ranks: int | None) -> Plan:
    request, seen = facts.request, facts.seen[0]
    asked, named = split_by_planner(request.strategies if strategies is None else strategies, policy=request.policy)
    if asked is not None:
        asked += _without_profile(named or (), facts)
    size, stages = model_axis_size(request.model_parallel_size, asked, seen, policy=request.policy)
    # after a fit whose policy chose a grid, an evaluation has full parameters and no grid
    grid = facts.grid_ranks if asked is not None else None
    size = grid or size if model_ranks is None else model_ranks
    base = _without_step(facts, asked, size, steps=facts.steps)
    if seen is None:
        return replace(_evaluated(base, facts, named), uncounted=facts.not_profiled)
    assert facts.step is not None, "it has been seen"
    found = plan_module(
        base,
        seen,
        named=named,
        budget_named=request.device_memory is not None,
        count=facts.step.count,
        asked=replace(stages, micro_batches=request.micro_batches, speeds=facts.speeds, memory=facts.memory),
    )
    # profiling a technique with its own steps takes seconds: do it only if no plan fits, or if a plan with more than
    # data parallelism takes much longer than computation
    slow = set(found.strategies) > {"S1"} and _pace(found) - seen.seconds > max(seen.seconds, SLOW_SECONDS)
    free = request.chooses and strategies is None and request.model_parallel_size == "auto"
    if free and (found.fits is False or slow):
        return in_parts(found, facts)
    return found


def _plan_of_decoder(facts: PlanningContext, strategies: Sequence[str] | None, model_ranks: int | None) -> Plan:
    """Plan a decoder by closed forms, and the blocks outside it by counting the step."""
    request, outside = facts.request, facts.blocks_outside if strategies is None else ()
    asked: Sequence[str] | None = strategies
    if strategies is None and request.strategies is not None:
        asked = parse_strategies(request.strategies)
    # techniques of blocks outside are added later, on top of the decoder's techniques
    if outside and (facts.outside is not None or facts.in_chunks or EVALUATED not in outside):
        asked = [name for name in asked or () if name not in outside]
    size = facts.grid_ranks or request.model_parallel_size if model_ranks is None else model_ranks
    make = partial(_without_step, facts, asked, size, steps=facts.steps)
    # evaluations, and leaner plans during a fit, do not count blocks outside again
    if facts.outside is None or strategies is not None:
        return _evaluated(make(), facts, None)
    (profile, shape, _), (rates, _), step = facts.read, facts.rates, facts.outside
    decoder = shape.decoder.fqn

    def made_of_decoder(budget: int) -> DecoderPlan:
        whole = make(budget=budget)
        local = [name for name in whole.strategies if not STRATEGIES[name].model_axis] or ["S1"]
        alone = make_plan(profile, strategies=local, batch_size=shape.batch_size, shape=shape, rates=rates)
        return DecoderPlan(whole, alone, step, decoder, rates)

    if outside:
        shares = request.share_batch_statistics
        return with_blocks_outside(made_of_decoder(facts.budget), outside, share_statistics=shares)
    return within_budget(made_of_decoder, facts.budget)


def _without_step(
    facts: PlanningContext,
    asked: Sequence[str] | None,
    size: int | str,
    *,
    steps: DrySteps | None,
    budget: int | None = None,
) -> Plan:
    """Make the plan that needs no count of a step, with these strategies and `size` ranks of the model axis."""
    request, strategy = facts.request, facts.strategy
    (profile, shape, notes), (rates, note) = facts.read, facts.rates
    made = make_plan(
        profile,
        devices=strategy.world_size,
        device_memory=facts.budget if budget is None else budget,
        policy=request.policy,
        strategies=None if asked is None else list(asked),
        batch_size=shape.batch_size,
        model_parallel_size=size,
        shape=shape,
        rates=rates,
        node_devices=strategy.num_processes,
    )
    made = build_rules.with_requested(made, request.specs, shape, launches=rates.launches)
    made = with_spec(made, steps, facts.seen[1])
    made = build_rules.with_speeds(made, shape, facts.speeds)
    return replace(made, notes=(*made.notes, *note, *notes))


def _without_profile(named: Sequence[str], facts: PlanningContext) -> list[str]:
    """Return the requested techniques that can be planned without a profile.

    Raises:
        PlanError: A requested technique requires a profile, and the step could not be profiled.
    """
    if facts.seen[0] is not None:
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


def _evaluated(made: Plan, facts: PlanningContext, named: Sequence[str] | None) -> Plan:
    """Add chunked evaluation to the plan of a run that does not train, by the fit's rules or for a budget.

    Raises:
        PlanError: Chunks were requested by name, and the step cannot be counted.
    """
    rules = facts.in_chunks
    if facts.evaluation is not None and (named is None or EVALUATED in named):
        try:
            made, rules = facts.evaluation.within(facts.budget, made, *facts.rates)
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
    (profile, shape, notes), (rates, note) = facts.read, facts.rates
    blocks, axes = [rule.fqn for rule in plan.rules if is_of_block(rule)], plan.axes
    if not shape.decoder:
        # the axes describe the decoder of another module; `plan_again` below replaces this prediction
        axes = Axes()
    elif blocks:
        what = f"what {', '.join(blocks)} save outside of the decoder was not counted"
        notes = [*notes, f"{what}: the peak is predicted without"]
    notes = notes + note + build_rules.too_few_cells(profile, plan.mesh, shape.batch_size)
    notes += build_rules.remarks({rule.strategy: rule.spec for rule in plan.rules}, launches=rates.launches)
    if shape.batch_norms:
        # the plan may come from a model without batch normalisation
        plan = build_rules.with_shared_statistics(plan)
    predicted = predict(shape, plan.strategies, model_ranks=plan.mesh.model, axes=axes, ends=build_rules.ends_of(plan))
    again = replace(
        plan,
        batch_size=shape.batch_size,
        predicted_base_bytes=predicted.base_bytes,
        predicted_stratum_bytes=predicted.mean_stratum_bytes,
        predicted_peak_bytes=predicted.peak_bytes,
        strata_bytes=predicted.strata_bytes,
        budget_bytes=facts.budget,
        notes=(*(note for note in plan.notes if note not in notes), *notes),
        candidates=(),
        **predicted_times(shape, axes, plan.mesh, rates),
    )
    seen = facts.seen[0]
    if seen is None or facts.step is None:
        return replace(again, diagnosis=None, uncounted=facts.not_profiled)
    return plan_again(again, seen, count=facts.step.count, memory=facts.memory)


def in_parts(whole: Plan, facts: PlanningContext) -> Plan:
    """Return the fastest fitting plan that splits samples or layers, if no other plan fits or the others are slower.

    `whole`: the best plan without such a technique, or the one that needs least; returned with notes if none is better.
    """
    ranks, node_ranks, step = facts.strategy.world_size, facts.strategy.num_processes, facts.step
    assert step is not None, "it was profiled"
    found = list[tuple[str, Plan]]()
    for name, row in STRATEGIES.items():
        # techniques on the data axis may cross nodes, and may be faster than a plan that fits
        n = ranks if row.data_axis else node_ranks
        if not row.steps or n < 2 or not (row.data_axis or whole.fits is False):
            continue
        steps = DrySteps.asked((name,), SimpleNamespace(), node_ranks, run_ranks=ranks, budget=whole.budget_bytes)
        assert steps is not None, "it has steps"
        counted = step.with_steps(steps)
        try:
            seen = counted.profiled(facts.rates[0])
            base = _without_step(facts, ["S1", name], steps.ranks, steps=steps)
            made = [plan_module(base, seen, named=(), count=counted.count)]
            others = [other for other in together(name) if other in PREDICTIONS]
            # add further techniques only if fewer do not fit; of equally many, take the fastest plan
            for n in range(1, len(others) + 1):
                if any(plan.fits for plan in made):
                    break
                for more in combinations(others, n):
                    # combinations that this step does not support are skipped
                    with suppress(AmpError):
                        made.append(plan_module(base, seen, named=more, count=counted.count))
            if fitting := [plan for plan in made if plan.fits]:
                found.append((name, min(fitting, key=_pace)))
                continue
            least = min(made, key=lambda plan: plan.predicted_peak_bytes)
            why = f"{', '.join(least.strategies)} needs {format_bytes(least.predicted_peak_bytes)} on as many ranks"
        except AmpError as error:
            why = f"{name} is not possible: {error}"
        whole = replace(whole, notes=(*whole.notes, Explanation(why)))
    name, best = min(found, key=lambda one: _pace(one[1]), default=("", whole))
    # a plan that splits samples or layers must be faster by more than the tie margin
    if not name or (whole.fits and _pace(best) * TIE > _pace(whole)):
        return whole
    if whole.fits:
        why = f"{', '.join(whole.strategies)} takes {_pace(whole) / _pace(best):.1f} times as long"
    else:
        why = f"every plan that leaves samples whole needs {format_bytes(whole.predicted_peak_bytes)} or more"
    slower = (f"{other} takes {_pace(plan) / _pace(best):.1f} times as long" for other, plan in found if other != name)
    why = "; ".join([why, *slower])
    rules = tuple(replace(rule, why=why) if rule.strategy == name else rule for rule in best.rules)
    notes = (*best.notes, Explanation(f"{name} was taken: {why}"))
    return replace(best, policy=whole.policy, rules=rules, notes=notes)


def _pace(plan: Plan) -> float:
    """Seconds of a step per batch and rank: a model group of M ranks reads one batch, so a rank counts 1 / M of it."""
    return (plan.predicted_step_seconds or inf) * plan.mesh.model
