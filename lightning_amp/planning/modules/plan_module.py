"""Plan a module from the profile of its step: diagnose it, choose techniques, and add them to a data-parallel plan.

The plan without a profile (base/base_plan.py) comes first: S1, batch statistics, and registered techniques. The
other techniques are chosen by the bytes of the step. A plan with rules that change modules is then counted again with
the rules installed, which is nearly exact. If the count exceeds the budget, the plans are compared once more, with the
excess added to the prediction for these techniques.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.costs.profiled_step import LEAST_SECONDS, Draft, ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import AmpError, NoRoomToCountError, PlanError
from lightning_amp.footprint.module_profile import ModuleProfile
from lightning_amp.on_demand import first_of
from lightning_amp.planning.base.choose_mesh import check_divides
from lightning_amp.planning.modules.candidates import TRIES, Compared, as_it_is, compare, draft
from lightning_amp.planning.modules.finish_plan import (
    diagnose_module,
    finished,
    held_bytes,
    kept_notes,
    missing_bytes,
    on_model_axis,
    rules_of,
)
from lightning_amp.planning.modules.min_memory_plan import leanest_counted
from lightning_amp.planning.modules.plan_stages import predicted_again, stages_requested, with_stages
from lightning_amp.planning.plan.plan import Candidate, Plan
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.stage_search import OPEN, StageOptions
from lightning_amp.techniques.table import PREDICTIONS, in_order, is_of_decoder, parse_strategies, stage_search

SLIGHTLY = 1.01
"""A count up to this factor above the predicted peak confirms the prediction."""
Count = Callable[[tuple[Rule, ...]], ModuleProfile]
"""Maps rules to the step's profile with the rules installed; raises an AmpError if a technique refuses the module."""


def split_by_planner(
    strategies: str | Sequence[str] | None, *, policy: str
) -> tuple[list[str] | None, tuple[str, ...] | None]:
    """Split the requested strategies into those of a plan without a profile, and those that `plan_module` adds.

    None means that a policy chooses; "paper", AMP's fixed mapping, adds no strategy of the second kind.

    Raises:
        PlanError: An id that is not in the library.
    """
    if strategies is None:
        return None, () if policy == "paper" else None
    ids = parse_strategies(strategies if isinstance(strategies, str) else list(strategies))
    return [name for name in ids if name not in PREDICTIONS], tuple(name for name in ids if name in PREDICTIONS)


def model_axis_size(
    size: int | str, strategies: str | Sequence[str] | None, seen: ProfiledStep | None, *, policy: str
) -> tuple[int | str, StageOptions]:
    """Return the requested model axis size of a plan without a profile, and the options of a pipeline."""
    # policy "paper" has no pipeline; an invalid size raises an error where all arguments are checked
    if seen is None or strategies is not None or policy == "paper" or type(size) is not int or size < 1:
        return size, OPEN
    return "auto", StageOptions(model=size)


def plan_module(
    base: Plan,
    seen: ProfiledStep,
    *,
    named: tuple[str, ...] | None = None,
    budget_named: bool = True,
    count: Count | None = None,
    options: StageOptions = OPEN,
) -> Plan:
    """Plan a module whose step was profiled.

    Args:
        base: The plan without techniques of this module, with the budget of a device.
        seen: The profiled step.
        named: Techniques that the user requested; None leaves the choice to the policy.
        budget_named: Whether the user set the budget; if not, requested techniques are applied as much as possible.
        count: Counts the step again with rules installed; None keeps the prediction.
        options: Options of a pipeline; several ranks of the model axis require one, one rank excludes it.

    Raises:
        PlanError: A requested technique is not possible.
    """
    search = stage_search()
    if (requested := stages_requested(base, seen)) is not None:
        options = replace(options, model=base.mesh.model, schedule=requested.schedule)
        made = with_stages(base, seen, search.named(options, named or (), budget_named=budget_named))
        if not named or {rule.strategy for rule in made.rules} & {*named}:
            return made
        # the budget needs none of the requested techniques: apply them as much as possible
        return with_stages(base, seen, search.named(options, named, budget_named=False))
    if options.model not in (None, 1) and named is None:
        check_divides(options.model, base.mesh.data)
        return with_stages(on_model_axis(base, options.model), seen, options, must=True)
    # Each iteration drafts by the prediction, counts the step with the chosen rules, and continues with what the count
    # has shown. The loop terminates: a refusal removes sets, and the excess over a prediction grows by at least a byte,
    # until another set is chosen, the count fits, or nothing can fit.
    budget, refused = base.budget_bytes, dict[tuple[str, ...], str]()
    limit = None if named is not None and not budget_named else budget
    tried = list[tuple[int, Compared, tuple[Rule, ...]]]()
    while True:
        if named is None:
            compared = compare(
                seen,
                ranks=base.gradient_ranks,
                budget=budget,
                base=base.strategies,
                batch_size=base.batch_size,
                refused=refused,
                options=options,
            )
        else:
            ordered = tuple(name for name in PREDICTIONS if name in named)
            drafted = draft(seen, ordered, ranks=base.gradient_ranks, budget=limit)
            if isinstance(drafted, str):
                joined = ",".join(named)
                raise PlanError(f"strategies={joined!r}: {drafted}; leave that one out, or let policy 'auto' choose")
            compared = Compared(best=drafted, candidates=(), dropped={})
        best = compared.best
        rules = rules_of(best, named=named is not None)
        if best.stages:
            break
        try:
            peak = best.peak_bytes
            if count is not None:
                peak = counted_draft(seen, rules, ranks=best.ranks, count=count).peak_bytes
        except AmpError as error:
            if named is not None:
                raise
            # bytes of the other techniques were added without a count, so they cannot be the cause
            counted = tuple(name for name in best.strategies if PREDICTIONS[name].counted)
            if isinstance(error, NoRoomToCountError):
                seen = replace(seen, no_room=seen.no_room | {counted})
            refused[counted] = _why(error)
            seen = _without_refused(seen, counted, refused[counted], ranks=best.ranks, count=count)
            continue
        # replace the prediction by the count
        rows = (replace(row, peak_bytes=peak) if row.verdict == "chosen" else row for row in compared.candidates)
        compared = replace(compared, best=replace(best, peak_bytes=peak), candidates=tuple(rows))
        tried.append((peak, compared, rules))
        if limit is None or peak <= limit:
            break
        chosen = frozenset(best.strategies)
        over, last = best.peak_bytes > limit, len(seen.beyond.get(chosen, ())) >= TRIES - 1
        # requested techniques can save more until they save all they can; otherwise, if nothing is predicted to fit,
        # another choice may need less than this one, once a count has shown this one to need more than predicted
        if not rules or (over and (last or (named is None and peak <= SLIGHTLY * best.peak_bytes))):
            _, compared, rules = min(tried, key=lambda one: one[0])
            break
        # a prediction that fits was too low by the difference; for requested techniques whose prediction does not fit
        # either, the room shrinks by what the count exceeds the limit
        seen = seen.exceeding(chosen, peak - limit if over and named is not None else max(peak - best.peak_bytes, 1))
    # for requested techniques the message says by how much they exceed the limit, not the prediction
    seen = seen if named is None else replace(seen, beyond={})
    if count is not None and budget is not None and not compared.best.stages and compared.best.peak_bytes > budget:
        seen, compared, rules = _at_least(
            seen, compared, rules, tried, budget=budget, count=count, chooses=named is None
        )
    return finished(base, seen, compared, rules)


def _at_least(
    seen: ProfiledStep,
    compared: Compared,
    rules: tuple[Rule, ...],
    tried: Sequence[tuple[int, Compared, tuple[Rule, ...]]],
    *,
    budget: int,
    count: Count,
    chooses: bool,
) -> tuple[ProfiledStep, Compared, tuple[Rule, ...]]:
    """Count which plan requires the least memory, and take it if the policy `chooses`, as nothing fits."""
    best, known = compared.best, dict[tuple[Rule, ...], int]()
    for peak, one, _ in tried:
        known[one.best.targets] = min(peak, known.get(one.best.targets, peak))
        names = frozenset(one.best.strategies)
        seen = replace(seen, counts={**seen.counts, names: min(peak, seen.counts.get(names, peak))})

    def counted(one: Draft) -> int:
        return counted_draft(seen, rules_of(one, named=False), ranks=one.ranks, count=count).peak_bytes

    least, found = leanest_counted(replace(seen, beyond={}), best.ranks, known, counted)
    least = min(least, best, key=lambda one: one.peak_bytes)
    seen = replace(seen, counts=found.counts, least=least)
    if not chooses or least is best:
        return seen, compared, rules
    return (
        seen,
        replace(compared, best=least, candidates=_with_least(compared, least, budget)),
        rules_of(least, named=False),
    )


def _with_least(compared: Compared, least: Draft, budget: int) -> tuple[Candidate, ...]:
    """Return the table of candidates in which the counted plan of the least memory is the chosen one."""
    first = compared.candidates[0]
    always = {*first.strategies} - {*compared.best.strategies}
    chosen = replace(
        first,
        strategies=in_order({*always, *least.strategies}),
        peak_bytes=least.peak_bytes,
        step_seconds=least.seconds,
        cell_seconds=first.cell_seconds * least.seconds / max(first.step_seconds, LEAST_SECONDS),
    )
    others = (replace(first, verdict=f"exceeds {format_bytes(budget)}"), *compared.candidates[1:])
    return chosen, *(row for row in others if row.strategies != chosen.strategies or row.model != chosen.model)


def _without_refused(
    seen: ProfiledStep, names: tuple[str, ...], why: str, *, ranks: int, count: Count | None
) -> ProfiledStep:
    """Record which of the techniques the step refuses."""
    # any of several techniques may be the reason: each is tried alone, and only those that fail alone are excluded
    found = {names[0]: why} if len(names) == 1 else {}
    for name in names if len(names) > 1 else ():
        alone = draft(seen, (name,), ranks=ranks, budget=None)
        if isinstance(alone, str):
            continue
        try:
            counted_draft(seen, rules_of(alone, named=False), ranks=ranks, count=count)
        except AmpError as error:
            found[name] = _why(error)
    return replace(seen, refused=first_of(found, seen.refused))


def _why(error: AmpError) -> str:
    """Return the reason of a technique's refusal, instead of the error of the step that it caused."""
    return str(error.__cause__ if isinstance(error.__cause__, AmpError) else error)


def plan_again(given: Plan, seen: ProfiledStep, *, count: Count | None = None, memory: tuple[int, ...] = ()) -> Plan:
    """Predict a given plan again for this step, on ranks with this much memory."""
    if (decided := stages_requested(given, seen)) is not None:
        return predicted_again(given, seen, replace(decided, memory=memory))
    rules = tuple(rule for rule in given.rules if rule.strategy in PREDICTIONS and not is_of_decoder(rule))
    ranks = given.gradient_ranks
    made = counted_draft(seen, rules, ranks=ranks, count=count)
    return replace(
        given,
        predicted_base_bytes=held_bytes(seen, made),
        predicted_stratum_bytes=0,
        predicted_peak_bytes=made.peak_bytes,
        diagnosis=diagnose_module(seen, ranks=ranks, budget=given.budget_bytes),
        notes=(*kept_notes(given, seen), *missing_bytes(seen, replace(made, targets=rules), given.budget_bytes)),
    )


def counted_draft(seen: ProfiledStep, rules: tuple[Rule, ...], *, ranks: int, count: Count | None) -> Draft:
    """Count the step with those rules installed that change modules, and add the effects of the others."""
    strategies = tuple(dict.fromkeys(rule.strategy for rule in rules))
    local = tuple(rule for rule in rules if PREDICTIONS[rule.strategy].counted)
    seen = seen.requesting({rule.strategy: rule.spec for rule in rules})
    counts = not local or count is not None
    if local and count is not None:
        seen = replace(seen, profile=count(local))
    made = as_it_is(seen, ranks)
    for name in strategies:
        if not (counts and PREDICTIONS[name].counted):
            more = PREDICTIONS[name].add(seen, made, None)
            if isinstance(more, str):
                raise PlanError(
                    f"the given plan has {name}, which is not possible for this module: {more}; make the plan again"
                )
            made = more
    return made


def counted_rules(plan: Plan) -> tuple[Rule, ...]:
    """Return the rules of a plan that a count of its step installs."""
    return tuple(
        rule
        for rule in plan.rules
        if is_of_decoder(rule) or (rule.strategy in PREDICTIONS and PREDICTIONS[rule.strategy].counted)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """Inputs of the plan of a module.

    Attributes:
        seen: The profiled step.
        shape: The module's structure, with the batch length.
    """

    seen: ProfiledStep
    shape: ModelShape
