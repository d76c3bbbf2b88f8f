"""The plan of a case, by the package's own planner with the strategies named."""

from dataclasses import replace

from benchmarks.decoders import in_forms
from benchmarks.side_by_side.cases import Case
from benchmarks.side_by_side.subject import subject_of
from lightning_amp.costs.device_rates import CPU_CORE
from lightning_amp.costs.model_shape import profile_of_module
from lightning_amp.installing.describe_module import describe
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.make_plan import plan


def plan_of(case: Case, *, launched: bool = False) -> Plan:
    """All ranks on the model axis; no rules where the method is none of ours.

    Args:
        case: What is planned.
        launched: As for a device that has its operators launched.
    """
    shape = describe(
        subject_of(case.size.decoder(), batch_size=case.size.cells, graph=case.graph).module, batch_size=case.size.cells
    )
    assert shape.decoder is not None, "the subject is a decoder"
    shape = replace(shape, decoder=replace(shape.decoder, threads=case.threads))
    strategies = case.method.strategies
    # ranks of a wrapper are not the plan's
    ranks = case.ranks if strategies and not case.method.wrapper else 1
    made = plan(
        profile_of_module(shape),
        devices=ranks,
        strategies=["S1", *strategies],
        batch_size=case.size.cells,
        shape=shape,
        rates=replace(CPU_CORE, launches=launched),
    )
    return in_forms(made, ["retain"]) if case.method.retain else made
