"""Plan the pipeline stages that a request or a given plan contains."""

from dataclasses import replace

from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.errors import PlanError
from lightning_amp.planning.modules.candidates import Compared
from lightning_amp.planning.modules.finish_plan import (
    diagnose_module,
    finished,
    kept_notes,
    missing_bytes,
    of_fullest,
    rules_of,
)
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.techniques.stage_search import StageOptions
from lightning_amp.techniques.table import STAGED, in_order, stage_search
from lightning_amp.techniques.technique import UNEXPECTED, result_or_reason


def stages_requested(plan: Plan, seen: ProfiledStep) -> StageOptions | None:
    """Return the options of the stages that a plan contains; None if it has none.

    Raises:
        PlanError: The step has shown that stages are not possible.
    """
    spec = next((rule.spec for rule in plan.rules if rule.strategy == STAGED), None)
    if spec is None:
        return None
    if STAGED in seen.refused:
        raise PlanError(f"{STAGED} cannot run this step: {seen.refused[STAGED]}; or leave {STAGED!r} out")
    search = stage_search()
    options = replace(search.fixed(spec, plan.rules), model=plan.mesh.model)
    why = result_or_reason(search.uncut, seen, options)
    if why and UNEXPECTED not in why:
        raise PlanError(f"{STAGED} cannot run this step: {why}; or leave {STAGED!r} out")
    return options


def with_stages(base: Plan, seen: ProfiledStep, options: StageOptions, *, must: bool = False) -> Plan:
    """Plan a requested pipeline.

    If the bytes of its stages are not known, blocks are distributed evenly and the peak is unknown; with `must`, or
    with techniques inside the stages, that is an error.
    """
    assert options.model is not None, "a requested pipeline has ranks"
    found = stage_search().staged(seen, options.model, data=base.mesh.data, budget=base.budget_bytes, options=options)
    if isinstance(found, str) and must:
        raise PlanError(
            f"model_parallel_size={options.model!r} requires a {STAGED} for a module without a decoder of strata,"
            f" which is not possible: {found}; leave model_parallel_size out"
        )
    if isinstance(found, str):
        if inside := stage_search().inside(options):
            raise PlanError(
                f"{STAGED} together with {inside} requires that the bytes of the stages are counted, and they were"
                f" not: {found}; leave {inside!r} out"
            )
        ranks = base.mesh.ranks
        diagnosis = diagnose_module(seen, ranks=ranks, budget=base.budget_bytes)
        return replace(_uncounted(base, seen, found), diagnosis=diagnosis)
    kept = tuple(rule for rule in base.rules if rule.strategy != STAGED)
    without = replace(base, rules=kept, strategies=in_order({rule.strategy for rule in kept}))
    compared = Compared(best=found, candidates=(), dropped={})
    return finished(without, seen, compared, rules_of(found, named=base.policy == "strategies"))


def _uncounted(plan: Plan, seen: ProfiledStep, why: str) -> Plan:
    """Return a pipeline plan whose peak is a lower bound: the fullest rank's share of the bytes kept between steps."""
    least = -(-seen.held_bytes // plan.mesh.model)
    return replace(
        plan,
        predicted_base_bytes=least,
        predicted_peak_bytes=least,
        uncounted=f"what the stages hold was not counted: {why}",
    )


def predicted_again(given: Plan, seen: ProfiledStep, decided: StageOptions) -> Plan:
    """Predict the stages of a given plan again; without all that was `decided`, this step would get other stages."""
    found = stage_search().staged(
        seen, given.mesh.model, data=given.mesh.data, budget=given.budget_bytes, options=decided
    )
    ranks = given.mesh.ranks
    if isinstance(found, Draft):
        given, found = of_fullest(given, found)
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
        notes=(*kept_notes(given, seen), *missing_bytes(seen, found, given.budget_bytes)),
    )
