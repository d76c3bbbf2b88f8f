"""Plan a counted step of a module: first without a profile, then with techniques of a step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.costs.profiled_step import ProfiledStep
from lightning_amp.errors import PlanError
from lightning_amp.planning.modules.plan_module import Count, model_axis_size, plan_module, split_by_planner
from lightning_amp.planning.plan.decoder_only import profile_of_module
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.build_rules import with_memory, with_requested
from lightning_amp.planning.policies.make_plan import plan as make_plan
from lightning_amp.quantities import memory_of_ranks


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
    if shape.decoder is not None:
        raise PlanError(
            f"cannot plan the step of this module: {shape.decoder.fqn!r} is a decoder of strata, which is"
            " planned by its data; plan their folder: lightning_amp.plan(lightning_amp.profile(DIR))"
        )
    asked, named = split_by_planner(strategies, policy=policy)
    size, stages = model_axis_size(model_parallel_size, asked, shape, seen)
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
