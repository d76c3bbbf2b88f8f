"""Plan a module from the profile of its step: diagnosis, techniques, candidates, on top of the data axis.

The plan without a profile (policies/make_plan.py) comes first: S1, batch statistics, and what was registered from
outside. What the techniques of the table add to it is chosen by the bytes of the step; a plan with rules that change
modules is then counted again with them installed, which is nearly exact. Where it exceeds the budget after all, the
plans are compared once more, with as many bytes added to the prediction for its techniques.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_amp.costs.model_shape import ModelShape, profile_of_module
from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import AmpError, PlanError
from lightning_amp.footprint.module_profile import ModuleProfile
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
from lightning_amp.planning.modules.plan_stages import predicted_again, stages_requested, with_stages
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.build_rules import with_memory, with_requested
from lightning_amp.planning.policies.make_plan import check_divides
from lightning_amp.planning.policies.make_plan import plan as make_plan
from lightning_amp.quantities import memory_of_ranks
from lightning_amp.techniques.stage_search import OPEN, StageOptions
from lightning_amp.techniques.table import PREDICTIONS, parse_strategies, stage_search

SLIGHTLY = 1.01
"""Times a predicted peak: a count that exceeds it by no more confirms it."""
Count = Callable[[tuple[Rule, ...]], ModuleProfile]
"""Rules -> the step's profile with them installed; raises an AmpError where a technique refuses the module."""


def split_by_planner(
    asked: str | Sequence[str] | None, *, policy: str
) -> tuple[list[str] | None, tuple[str, ...] | None]:
    """Strategies that were requested: those that a plan without a profile has, and those that `plan_module` adds.

    None says that a policy chooses; AMP's fixed mapping, "paper", has none of the latter.

    Raises:
        PlanError: An id that is not in the library.
    """
    if asked is None:
        return None, () if policy == "paper" else None
    ids = parse_strategies(asked if isinstance(asked, str) else list(asked))
    return [name for name in ids if name not in PREDICTIONS], tuple(name for name in ids if name in PREDICTIONS)


def model_axis_size(
    size: int | str, strategies: str | Sequence[str] | None, seen: ProfiledStep | None, *, policy: str
) -> tuple[int | str, StageOptions]:
    """Ranks of the model axis that were requested: those of a plan without a profile, and those of a pipeline that
    `plan_module` adds where a policy chooses.
    """
    # policy "paper" has no pipeline, and a size that is not allowed is refused where all are checked
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
    asked: StageOptions = OPEN,
) -> Plan:
    """The plan of a module whose step was profiled.

    Args:
        base: The plan without the techniques of any module, with the budget of a device.
        seen: The step.
        named: Those techniques that a person has requested; None leaves the choice to the policy.
        budget_named: Whether a person has named the budget; else as much of what was requested is done as can be.
        count: Counts the step again with rules installed; None leaves it at the prediction.
        asked: Of a pipeline; with several ranks of the model axis one is required, with one rank there is none.

    Raises:
        PlanError: A technique that was named cannot be had.
    """
    search = stage_search()
    if (requested := stages_requested(base, seen)) is not None:
        asked = replace(asked, model=base.mesh.model, schedule=requested.schedule)
        made = with_stages(base, seen, search.named(asked, named or (), budget_named=budget_named))
        if not named or {rule.strategy for rule in made.rules} & {*named}:
            return made
        # none is needed, and yet it was requested
        return with_stages(base, seen, search.named(asked, named, budget_named=False))
    if asked.model not in (None, 1) and named is None:
        check_divides(asked.model, base.mesh.data)
        return with_stages(on_model_axis(base, asked.model), seen, asked, must=True)
    # Each turn drafts by the prediction, counts the step with what was chosen, and goes on with what the count has
    # shown. It ends: a refusal leaves fewer sets, and what is found beyond a prediction grows by a byte or more, until
    # another set is chosen, the count fits, or nothing can.
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
                asked=asked,
            )
        else:
            ordered = tuple(name for name in PREDICTIONS if name in named)
            drafted = draft(seen, ordered, ranks=base.gradient_ranks, budget=limit)
            if isinstance(drafted, str):
                asked_for = ",".join(named)
                raise PlanError(f"strategies={asked_for!r}: {drafted}; leave that one out, or let policy 'auto' choose")
            compared = Compared(best=drafted, candidates=(), dropped={})
        best = compared.best
        rules = rules_of(best, named=named is not None)
        if best.stages:
            break
        try:
            peak = best.peak_bytes
            if count is not None:
                peak = _drafted(seen, rules, ranks=best.ranks, count=count).peak_bytes
        except AmpError as error:
            if named is not None:
                raise
            # bytes of the others were added up, and cannot have failed in the count
            counted = tuple(name for name in best.strategies if PREDICTIONS[name].counted)
            refused[counted] = _why(error)
            seen = _without_refused(seen, counted, refused[counted], ranks=best.ranks, count=count)
            continue
        # counted, instead of predicted
        rows = (replace(row, peak_bytes=peak) if row.verdict == "chosen" else row for row in compared.candidates)
        compared = replace(compared, best=replace(best, peak_bytes=peak), candidates=tuple(rows))
        tried.append((peak, compared, rules))
        if limit is None or peak <= limit:
            break
        chosen = frozenset(best.strategies)
        over, last = best.peak_bytes > limit, len(seen.beyond.get(chosen, ())) >= TRIES - 1
        # of techniques that a person has named there is more to be had, until as much as can be; else, where nothing
        # is predicted to fit, another choice may be the leanest if a count has shown this one to take more
        if not rules or (over and (last or (named is None and peak <= SLIGHTLY * best.peak_bytes))):
            _, compared, rules = min(tried, key=lambda one: one[0])
            break
        # a prediction that fits was too low by the difference; one that does not fit either, of techniques that a
        # person has named, has less room by what the count is above the limit
        seen = seen.exceeding(chosen, peak - limit if over and named is not None else max(peak - best.peak_bytes, 1))
    # of techniques that a person has named it says by how much they exceed the limit, not the prediction
    return finished(base, seen if named is None else replace(seen, beyond={}), compared, rules)


def _without_refused(
    seen: ProfiledStep, names: tuple[str, ...], why: str, *, ranks: int, count: Count | None
) -> ProfiledStep:
    """The step, of which it is known what of some techniques it refuses by itself."""
    # of several that were refused together any may be the reason: asked one by one, only those that are refused alone
    # are out, and the others stay for sets without them
    found = {names[0]: why} if len(names) == 1 else {}
    for name in names if len(names) > 1 else ():
        alone = draft(seen, (name,), ranks=ranks, budget=None)
        if isinstance(alone, str):
            continue
        try:
            _drafted(seen, rules_of(alone, named=False), ranks=ranks, count=count)
        except AmpError as error:
            found[name] = _why(error)
    return replace(seen, refused={**seen.refused, **found})


def _why(error: AmpError) -> str:
    """What a technique has refused, rather than that the step has failed by it."""
    return str(error.__cause__ if isinstance(error.__cause__, AmpError) else error)


def plan_again(given: Plan, seen: ProfiledStep, *, count: Count | None = None, memory: tuple[int, ...] = ()) -> Plan:
    """A plan that was given, with the prediction for this step, on ranks of so much memory."""
    if (decided := stages_requested(given, seen)) is not None:
        return predicted_again(given, seen, replace(decided, memory=memory))
    rules = tuple(rule for rule in given.rules if rule.strategy in PREDICTIONS)
    ranks = given.gradient_ranks
    made = _drafted(seen, rules, ranks=ranks, count=count)
    return replace(
        given,
        predicted_base_bytes=held_bytes(seen, made),
        predicted_stratum_bytes=0,
        predicted_peak_bytes=made.peak_bytes,
        diagnosis=diagnose_module(seen, ranks=ranks, budget=given.budget_bytes),
        notes=(*kept_notes(given, seen), *missing_bytes(seen, replace(made, targets=rules), given.budget_bytes)),
    )


def _drafted(seen: ProfiledStep, rules: tuple[Rule, ...], *, ranks: int, count: Count | None) -> Draft:
    """The step with rules: counted with those installed that change modules, the others added to that."""
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
                raise PlanError(f"the given plan has {name}, which is not possible for this module: {more}")
            made = more
    return made


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """Inputs of a plan of a module.

    Attributes:
        seen: Its step.
        shape: Its structure, with the length of the batch.
    """

    seen: ProfiledStep
    shape: ModelShape


def plan_step(
    counted: Counted,
    *,
    devices: int = 1,
    device_memory: str | int | Sequence[str | int] | None = None,
    policy: str = "auto",
    strategies: str | Sequence[str] | None = None,
    model_parallel_size: int | str = "auto",
    micro_batches: int | None = None,
    count: Count | None = None,
) -> Plan:
    """Decide what to install.

    Args:
        counted: The module's step.
        devices, device_memory, policy, strategies, model_parallel_size: As of `lightning_amp.plan`.
        micro_batches: Of a pipeline; None leaves their number open.
        count: Counts the step again with rules installed.

    Raises:
        PlanError: A request outside what is allowed, or a technique that was named cannot be had.
    """
    seen, shape = counted.seen, counted.shape
    if shape.decoder:
        raise PlanError(
            f"cannot plan the step of this module: {shape.decoder.fqn!r} is a decoder of strata, which is"
            " planned by its data; plan their folder: lightning_amp.plan(lightning_amp.profile(DIR))"
        )
    asked, named = split_by_planner(strategies, policy=policy)
    size, stages = model_axis_size(model_parallel_size, asked, seen, policy=policy)
    memory = () if device_memory is None else memory_of_ranks(device_memory, devices)
    base = make_plan(
        profile_of_module(shape),
        devices=devices,
        device_memory=min(memory, default=None),
        policy=policy,
        strategies=asked,
        batch_size=shape.batch_size,
        model_parallel_size=size,
        shape=shape,
        rates=seen.rates,
    )
    base = with_requested(base, seen.requested, shape, launches=seen.rates.launches)
    made = plan_module(
        base,
        seen,
        named=named,
        budget_named=device_memory is not None,
        count=count,
        asked=replace(stages, micro_batches=micro_batches, memory=memory),
    )
    return with_memory(made, memory)
