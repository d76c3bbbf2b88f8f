"""Plan the pipeline that a request or a given plan contains."""

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
from lightning_amp.techniques.chunk.row import ChunkBlock
from lightning_amp.techniques.pipeline.options import PipelineOptions
from lightning_amp.techniques.pipeline.row import PipelineStages
from lightning_amp.techniques.pipeline.stages import staged
from lightning_amp.techniques.recompute.row import RecomputeBlock
from lightning_amp.techniques.table import OF_BLOCKS, in_order


def pipeline_of(plan: Plan, seen: ProfiledStep) -> PipelineStages | None:
    """The stages that were requested.

    Raises:
        PlanError: The step has shown that there can be none.
    """
    spec = next((rule.spec for rule in plan.rules if isinstance(rule.spec, PipelineStages)), None)
    if spec is not None and "pipeline" in seen.refused:
        raise PlanError(f"pipeline cannot run this step: {seen.refused['pipeline']}; or leave 'pipeline' out")
    return spec


def with_stages(base: Plan, seen: ProfiledStep, asked: PipelineOptions, *, must: bool = False) -> Plan:
    """The plan of a pipeline that was requested; where nothing is known of its stages they are cut evenly and its peak
    is not known, or it must be known and is refused.
    """
    assert asked.model is not None, "a requested pipeline has ranks"
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
    return finished(without, seen, compared, rules_of(found, named=base.policy == "strategies"))


def _uncounted(plan: Plan, seen: ProfiledStep, why: str) -> Plan:
    """A pipeline of whose ranks it is known only that the fullest one has its share of what is kept between steps."""
    least = -(-seen.held_bytes // plan.mesh.model)
    return replace(
        plan,
        predicted_base_bytes=least,
        predicted_peak_bytes=least,
        uncounted=f"what the stages hold was not counted: {why}",
    )


def options_of_named(asked: PipelineOptions, named: tuple[str, ...], *, budget_named: bool) -> PipelineOptions:
    """What techniques that a person has named together with a pipeline ask of it.

    Raises:
        PlanError: One that was not tried with stages.
    """
    others = [name for name in named if name not in OF_BLOCKS]
    if others:
        raise PlanError(f"pipeline together with {', '.join(others)} is not supported: leave one of them out")
    return replace(
        asked,
        # of a budget that was named as few as are needed
        again=() if "recompute" not in named else None if budget_named else ("*",),
        chunks=None if "chunk" in named else {},
        all_chunks="chunk" in named and not budget_named,
    )


def predicted_again(given: Plan, seen: ProfiledStep, spec: PipelineStages, memory: tuple[int, ...] = ()) -> Plan:
    """A given plan with the prediction of its stages for this step, on ranks of so much memory."""
    # all that the plan has decided is requested again, or this step would be given stages and blocks of another plan
    ends = tuple(int(end) for end in spec.ends.split(","))
    asked = PipelineOptions(
        model=given.mesh.model,
        micro_batches=spec.micro_batches,
        schedule=spec.schedule,
        ends=ends,
        again=tuple(rule.fqn for rule in given.rules if isinstance(rule.spec, RecomputeBlock)),
        chunks={rule.fqn: rule.spec for rule in given.rules if isinstance(rule.spec, ChunkBlock)},
        memory=memory,
    )
    found = staged(seen, given.mesh.model, data=given.mesh.data, budget=given.budget_bytes, asked=asked)
    ranks = given.mesh.data * given.mesh.model
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
