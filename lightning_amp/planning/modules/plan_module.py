"""Profile of a module's step -> Plan: diagnosis, techniques, candidates, on top of what the data axis asks for.

The plan without a profile (policies/make_plan.py) comes first: S1, batch statistics, and what was registered from
outside. What the techniques of the table add to it is chosen by the bytes of the step; a plan with rules that change
modules is then counted again with them installed, which is nearly exact. Where it exceeds the budget after all, the
plans are compared once more, with as many bytes added to the prediction for its techniques.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import AmpError, PlanError
from lightning_amp.footprint.module_profile import ModuleProfile
from lightning_amp.planning.modules.candidates import (
    TRIES,
    Beyond,
    Compared,
    as_it_is,
    asked_for,
    compare,
    draft,
    replaced_peak,
)
from lightning_amp.planning.modules.diagnosis import diagnose_module, evidence, signals
from lightning_amp.planning.modules.min_memory_plan import LEAST, missing
from lightning_amp.planning.plan.axes import Axes, MeshShape
from lightning_amp.planning.plan.plan import Explanation, Plan
from lightning_amp.planning.plan.sharding import sharding_of
from lightning_amp.planning.policies.build_rules import BY_USER
from lightning_amp.techniques.chunk.predict import forms_of
from lightning_amp.techniques.chunk.spec import ChunkBlock
from lightning_amp.techniques.data.row import DataParallel
from lightning_amp.techniques.fsdp.predict import split_by
from lightning_amp.techniques.pipeline.options import OPEN, PipelineOptions
from lightning_amp.techniques.pipeline.spec import PipelineStages
from lightning_amp.techniques.pipeline.stages import staged
from lightning_amp.techniques.recompute.spec import RecomputeBlock
from lightning_amp.techniques.table import PREDICTIONS, STRATEGIES, in_order, parse_strategies

INSIDE_STAGES = ("recompute", "chunk")

Count = Callable[[tuple[Rule, ...]], ModuleProfile]
"""Rules -> the step's profile with them installed; raises an AmpError where a technique refuses the module."""


def split_by_planner(
    asked: str | Sequence[str] | None, *, policy: str
) -> tuple[list[str] | None, tuple[str, ...] | None]:
    """Strategies that were asked for: those that a plan without a profile has, and those that `plan_module` adds.

    None says that a policy chooses; AMP's fixed mapping, "paper", has none of the latter.

    Raises:
        PlanError: An id that is not in the library.
    """
    if asked is None:
        return None, () if policy == "paper" else None
    ids = parse_strategies(asked if isinstance(asked, str) else list(asked))
    return [name for name in ids if name not in PREDICTIONS], tuple(
        name for name in ids if name in PREDICTIONS
    )


def model_axis_size(
    size: int | str, strategies: str | Sequence[str] | None, shape: ModelShape, seen: ProfiledStep | None
) -> tuple[int | str, PipelineOptions]:
    """Ranks of the model axis that were asked for: those of a plan without a profile, and those of a pipeline that
    `plan_module` adds where a policy chooses.
    """
    if shape.decoder is not None or seen is None or strategies is not None or not isinstance(size, int):
        return size, OPEN
    return "auto", PipelineOptions(model=size if size > 1 else None)


def plan_module(
    base: Plan,
    seen: ProfiledStep,
    *,
    named: tuple[str, ...] | None = None,
    budget_named: bool = True,
    count: Count | None = None,
    asked: PipelineOptions = OPEN,
) -> Plan:
    """The plan of a module whose step was profiled.

    Args:
        base: The plan without the techniques of any module, with the budget of a device.
        seen: The step.
        named: Those techniques that a person has asked for; None leaves the choice to the policy.
        budget_named: Whether a person has named the budget; else as much of what was asked for is done as can be.
        count: Counts the step again with rules installed; None leaves it at the prediction.
        asked: Of a pipeline; with ranks of the model axis, there is to be one.

    Raises:
        PlanError: A technique that was named cannot be had.
    """
    if (spec := _pipeline_of(base, seen)) is not None:
        asked = replace(asked, model=base.mesh.model, schedule=spec.schedule)
        made = _with_stages(base, seen, _beside_stages(asked, named or (), budget_named=budget_named))
        if not named or {rule.strategy for rule in made.rules} & {*named}:
            return made
        # none is needed, and yet it was asked for
        return _with_stages(base, seen, _beside_stages(asked, named, budget_named=False))
    if asked.model is not None and named is None:
        return _with_stages(_on_axis(base, asked.model), seen, asked, must=True)
    budget, refused = base.budget_bytes, dict[tuple[str, ...], str]()
    limit = None if named is not None and not budget_named else budget
    beyond = defaultdict[frozenset[str], list[int]](list)
    while True:
        compared = _compared(
            seen, base, named=named, limit=limit, refused=refused, beyond=beyond, asked=asked
        )
        best = compared.best
        rules = _rules(best, named=named is not None)
        if best.stages:
            break
        try:
            peak = best.peak_bytes
            if count is not None:
                peak = _drafted(seen, rules, ranks=best.ranks, count=count).peak_bytes
        except AmpError as error:
            if named is not None:
                raise
            counted = tuple(name for name in best.strategies if PREDICTIONS[name].counted)
            refused[counted] = _why(error)
            seen = _without_refused(seen, counted, refused[counted], ranks=best.ranks, count=count)
            continue
        compared = replaced_peak(compared, peak)
        found = beyond[frozenset(best.strategies)]
        # of techniques that a person has named there is more to be had, until as much as can be
        hopeless = (
            limit is not None and best.peak_bytes > limit and (named is None or len(found) >= TRIES - 1)
        )
        if not rules or limit is None or peak <= limit or hopeless:
            break
        found.append(max(peak - best.peak_bytes, 1) if best.peak_bytes <= limit else peak - limit)
    return _made(base, seen, compared, rules)


def _without_refused(
    seen: ProfiledStep, names: tuple[str, ...], why: str, *, ranks: int, count: Count | None
) -> ProfiledStep:
    """The step, of which it is known what of some techniques it refuses by itself."""
    found = {names[0]: why} if len(names) == 1 else {}
    for name in names if len(names) > 1 else ():
        alone = draft(seen, (name,), ranks=ranks, budget=None)
        if isinstance(alone, str):
            continue
        try:
            _drafted(seen, _rules(alone, named=False), ranks=ranks, count=count)
        except AmpError as error:
            found[name] = _why(error)
    return replace(seen, refused={**seen.refused, **found})


def _why(error: AmpError) -> str:
    """What a technique has refused, rather than that the step has failed by it."""
    return str(error.__cause__ if isinstance(error.__cause__, AmpError) else error)


def plan_again(given: Plan, seen: ProfiledStep, *, count: Count | None = None) -> Plan:
    """A plan that was given, with the prediction for this step."""
    if (spec := _pipeline_of(given, seen)) is not None:
        return _staged_again(given, seen, spec)
    rules = tuple(rule for rule in given.rules if rule.strategy in PREDICTIONS)
    ranks = given.gradient_ranks
    made = _drafted(seen, rules, ranks=ranks, count=count)
    return replace(
        given,
        predicted_base_bytes=_held(seen, made),
        predicted_stratum_bytes=0,
        predicted_peak_bytes=made.peak_bytes,
        diagnosis=diagnose_module(seen, ranks=ranks, budget=given.budget_bytes),
        notes=(
            *_kept(given, seen),
            *_missing(seen, replace(as_it_is(seen, ranks), peak_bytes=made.peak_bytes), given.budget_bytes),
        ),
    )


def _pipeline_of(plan: Plan, seen: ProfiledStep) -> PipelineStages | None:
    """The stages that were asked for.

    Raises:
        PlanError: The step has shown that there can be none.
    """
    spec = next((rule.spec for rule in plan.rules if isinstance(rule.spec, PipelineStages)), None)
    if spec is not None and "pipeline" in seen.refused:
        raise PlanError(f"pipeline cannot run this step: {seen.refused['pipeline']}; or leave 'pipeline' out")
    return spec


def _with_stages(base: Plan, seen: ProfiledStep, asked: PipelineOptions, *, must: bool = False) -> Plan:
    """The plan of a pipeline that was asked for; where nothing is known of its stages they are cut evenly and its peak
    is not known, or it must be known and is refused.
    """
    assert asked.model is not None, "a pipeline that is asked for has ranks"
    found = staged(seen, asked.model, data=base.mesh.data, budget=base.budget_bytes, asked=asked)
    if isinstance(found, str) and must:
        raise PlanError(
            f"model_parallel_size={asked.model!r} requires a pipeline for a module without a decoder of strata,"
            f" which is not possible: {found}; leave model_parallel_size out"
        )
    if isinstance(found, str):
        inside = "chunk" if asked.chunks is None else "recompute" if asked.again != () else ""
        if inside:
            raise PlanError(
                f"pipeline together with {inside} requires that the bytes of the stages are counted, and they were"
                f" not: {found}; leave {inside!r} out"
            )
        ranks = base.mesh.data * base.mesh.model
        diagnosis = diagnose_module(seen, ranks=ranks, budget=base.budget_bytes)
        return replace(_uncounted(base, seen, found), diagnosis=diagnosis)
    kept = tuple(rule for rule in base.rules if not isinstance(rule.spec, PipelineStages))
    without = replace(base, rules=kept, strategies=in_order({rule.strategy for rule in kept}))
    compared = Compared(best=found, candidates=(), dropped={})
    return _made(without, seen, compared, _rules(found, named=base.policy == "strategies"))


def _uncounted(plan: Plan, seen: ProfiledStep, why: str) -> Plan:
    """A pipeline of whose ranks it is known only that the fullest one has its share of what is kept between steps."""
    least = -(-seen.held_bytes // plan.mesh.model)
    return replace(
        plan,
        predicted_base_bytes=least,
        predicted_peak_bytes=least,
        uncounted=f"what the stages hold was not counted: {why}",
    )


def _beside_stages(asked: PipelineOptions, named: tuple[str, ...], *, budget_named: bool) -> PipelineOptions:
    """What techniques that a person has named beside a pipeline ask of it.

    Raises:
        PlanError: One that was not tried with stages.
    """
    others = [name for name in named if name not in INSIDE_STAGES]
    if others:
        raise PlanError(f"pipeline together with {', '.join(others)} is not supported: leave one of them out")
    return replace(
        asked,
        # of a budget that was named as few as are needed
        again=() if "recompute" not in named else None if budget_named else ("*",),
        chunks=None if "chunk" in named else {},
        all_chunks="chunk" in named and not budget_named,
    )


def _staged_again(given: Plan, seen: ProfiledStep, spec: PipelineStages) -> Plan:
    ends = tuple(int(end) for end in spec.ends.split(","))
    asked = PipelineOptions(
        model=given.mesh.model,
        micro_batches=spec.micro_batches,
        schedule=spec.schedule,
        ends=ends,
        again=tuple(rule.fqn for rule in given.rules if isinstance(rule.spec, RecomputeBlock)),
        chunks={rule.fqn: rule.spec for rule in given.rules if isinstance(rule.spec, ChunkBlock)},
    )
    found = staged(seen, given.mesh.model, data=given.mesh.data, budget=given.budget_bytes, asked=asked)
    ranks = given.mesh.data * given.mesh.model
    stages = None if isinstance(found, str) else found
    diagnosis = diagnose_module(seen, ranks=ranks, budget=given.budget_bytes, stages=stages)
    given = replace(given, diagnosis=diagnosis, stages=())
    if isinstance(found, str):
        return _uncounted(given, seen, found)
    return replace(
        given,
        uncounted="",
        predicted_base_bytes=found.held_bytes or 0,
        predicted_stratum_bytes=0,
        predicted_peak_bytes=found.peak_bytes,
        predicted_step_seconds=found.seconds,
        rates_device=seen.rates.device,
        stages=found.stages,
        notes=(
            *_kept(given, seen),
            *_missing(seen, found, given.budget_bytes),
        ),
    )


def _on_axis(base: Plan, model: int) -> Plan:
    """The plan of all ranks on the data axis with so many on the model axis."""
    data = base.mesh.data // model
    noun = "rank" if data == 1 else "ranks"
    rules = tuple(
        replace(rule, why=f"{data} {noun} on the data axis") if isinstance(rule.spec, DataParallel) else rule
        for rule in base.rules
    )
    return replace(base, mesh=MeshShape(data=data, model=model), rules=rules)


def _shared(ranks: int, model: int) -> str:
    """What becomes of the samples of a step when ranks of the data axis become stages."""
    data = ranks // model
    return (
        f"{model} stages share a batch, so a step takes {data} batch{'es' * (data > 1)} of the loader, where {ranks}"
        f" ranks of a data axis take {ranks}; a batch {model} times as large keeps the samples of a step"
    )


def _missing(seen: ProfiledStep, best: Draft, budget: int | None) -> list[str]:
    fits = budget is None or best.peak_bytes <= budget
    # the refusal or the warning of a plan that does not fit has it too
    return [] if fits else [Explanation(missing(seen, best, budget=budget or 0))]


def _compared(
    seen: ProfiledStep,
    base: Plan,
    *,
    named: tuple[str, ...] | None,
    limit: int | None,
    refused: dict[tuple[str, ...], str],
    beyond: Beyond,
    asked: PipelineOptions,
) -> Compared:
    ranks = base.gradient_ranks
    if named is not None:
        best = asked_for(seen, named, ranks=ranks, budget=limit, beyond=beyond)
        return Compared(best=best, candidates=(), dropped={})
    return compare(
        seen,
        ranks=ranks,
        budget=base.budget_bytes,
        base=base.strategies,
        batch_size=base.batch_size,
        refused=refused,
        beyond=beyond,
        asked=asked,
    )


def _kept(given: Plan, seen: ProfiledStep) -> list[str]:
    """What was said of a plan that was given, with what is to be said of this step."""
    before = [note for note in given.notes if not note.startswith(LEAST)]
    return [*before, *(note for note in seen.notes if note not in before)]


def _held(seen: ProfiledStep, made: Draft) -> int:
    return seen.held_bytes if made.held_bytes is None else made.held_bytes


def _drafted(seen: ProfiledStep, rules: tuple[Rule, ...], *, ranks: int, count: Count | None) -> Draft:
    """The step with rules: counted with those installed that change modules, the others added to that."""
    strategies = tuple(dict.fromkeys(rule.strategy for rule in rules))
    local = tuple(rule for rule in rules if PREDICTIONS[rule.strategy].counted)
    seen = split_by(seen, sharding_of(rules))
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


def _rules(best: Draft, *, named: bool) -> tuple[Rule, ...]:
    return tuple(
        Rule(
            fqn=target.fqn,
            spec=target.spec,
            strategy=target.strategy,
            why=f"{BY_USER} ({target.why})" if named else target.why,
            saves_bytes=target.saves_bytes,
        )
        for target in best.targets
    )


def _made(base: Plan, seen: ProfiledStep, compared: Compared, rules: tuple[Rule, ...]) -> Plan:
    best, order = compared.best, list(STRATEGIES)
    notes = [*seen.notes]
    if best.model not in (1, base.mesh.model):
        notes.append(_shared(base.mesh.data, best.model))
        base = _on_axis(base, best.model)
    strategies = in_order({*base.strategies, *best.strategies})
    whole = tuple(sorted((*base.rules, *rules), key=lambda rule: order.index(rule.strategy)))
    forms = forms_of(seen)
    if "chunk" in best.strategies and forms is not None and forms.known and forms.thinned:
        thinned = forms.thinned[0]
        notes.append(Explanation(f"{thinned!r} has more regions that could run in chunks than are compared"))
    notes += _missing(seen, best, base.budget_bytes)
    notes += [] if compared.candidates else list(compared.dropped.values())
    return replace(
        base,
        strategies=strategies,
        axes=Axes.of(strategies, (rule.spec for rule in whole)),
        rules=whole,
        signals=(*base.signals, *signals(seen.profile)),
        evidence=(*base.evidence, *evidence(seen.profile)),
        predicted_base_bytes=_held(seen, best),
        predicted_stratum_bytes=0,
        predicted_peak_bytes=best.peak_bytes,
        predicted_step_seconds=best.seconds,
        rates_device=seen.rates.device,
        candidates=compared.candidates,
        diagnosis=diagnose_module(
            seen,
            ranks=best.ranks * best.model,
            budget=base.budget_bytes,
            stages=best if best.stages else None,
            compared=bool(compared.candidates),
        ),
        stages=best.stages,
        notes=(*base.notes, *notes),
    )
