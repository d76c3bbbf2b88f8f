"""Make the plan of a module's training step: the one function for a fit and for a plan without a run."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from lightning.pytorch import LightningModule
from torch import nn

from lightning_amp.costs.profiled_step import ProfiledStep
from lightning_amp.errors import PlanError
from lightning_amp.footprint.chain.chain import Chain
from lightning_amp.footprint.module_profile import ModuleProfile
from lightning_amp.lightning.profiling.dry_steps import with_spec
from lightning_amp.lightning.profiling.split_samples import samples_may_be_split, with_split_samples
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.lightning.profiling.step_of_ranks import on_top_of
from lightning_amp.planning.base.base_plan import plan_without_decoder
from lightning_amp.planning.base.plan_request import PlanRequest
from lightning_amp.planning.base.rules import with_memory, with_requested, with_speeds
from lightning_amp.planning.modules.on_device import OF_DECODER, Device, made_for, on_device
from lightning_amp.planning.modules.plan_decoder import OnTopOf, plan_decoder, split_by_decoder
from lightning_amp.planning.modules.plan_module import model_axis_size, plan_module, split_by_planner
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.build_rules import with_requested_specs, with_strata_by_speed
from lightning_amp.planning.policies.make_plan import plan_of_decoder
from lightning_amp.techniques.compile.choose import NAME as COMPILE
from lightning_amp.techniques.compile.choose import UNKNOWN_BYTES, blocks_to_compile
from lightning_amp.techniques.compile.row import CompileBlock
from lightning_amp.techniques.data.row import ShareBatchStatistics
from lightning_amp.techniques.table import STRATEGIES, in_order, parse_strategies, rules_in_order


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The plan of a step.

    Attributes:
        step: The step with which it was counted.
        seen: That step's profile; None if it could not be counted.
    """

    plan: Plan
    step: StepOfModule | None = None
    seen: ProfiledStep | None = None

    @property
    def counted(self) -> ModuleProfile | str:
        """The step with the plan's rules as it was counted, or why it was not."""
        plan = self.plan
        if self.step is not None and plan.diagnosis is not None:
            return self.step.as_planned(plan)
        return plan.uncounted or (f"the bytes of {plan.evaluates} are estimated" if plan.evaluates else OF_DECODER)


def plan_on_device(
    given: PlanRequest, make: Callable[[PlanRequest], StepPlan], *, device: Device | None, module: LightningModule
) -> StepPlan:
    """Plan a step within what a process may take of its device, and choose the blocks to compile.

    Args:
        make: Makes the plan of a request for a budget of tensors, such as `make_step_plan`.
        device: None if tensors alone count.
    """
    found = list[StepPlan]()

    def made(less: int) -> Plan:
        found.append(make(given.less(less)))
        return on_device(found[-1].plan, device, found[-1].counted)

    plan, last = made_for(made), found[-1]
    return replace(last, plan=with_compiled(plan, given, module, None if last.seen is None else last.seen.chain))


def make_step_plan(given: PlanRequest, step: StepOfModule | None, seen: ProfiledStep | None) -> StepPlan:
    """Plan a step: the techniques of a decoder or a data-parallel plan, and then those of any module.

    Args:
        step: Counts the step again with the techniques of a plan; None keeps the predictions.
        seen: The profiled step; None for a module with a decoder, whose step is counted with its techniques.

    Raises:
        AmpError: A requested technique is not possible, or the step cannot be counted, which it requires.
    """
    if given.shape.decoder:
        assert step is not None, "it is counted with the decoder's techniques"
        own, named = split_by_decoder(given.strategies, policy=given.policy)
        found, seen = plan_decoder(
            lambda budget: base_plan(replace(given, strategies=own, memory=(budget,) if budget else given.memory)),
            counts_on_top_of(given, step),
            given.shape,
            budget=given.budget,
            named=named,
            budget_named=given.memory_named,
        )
    else:
        found, step, seen = _without_decoder(given, step, seen)
    return StepPlan(plan=with_memory(found, given.memory), step=step, seen=seen)


def _without_decoder(
    given: PlanRequest, step: StepOfModule | None, seen: ProfiledStep | None
) -> tuple[Plan, StepOfModule | None, ProfiledStep]:
    assert seen is not None, "the step of a module without a decoder is profiled first"
    own, named = split_by_planner(given.strategies, policy=given.policy)
    size, stages = model_axis_size(given.model_parallel_size, own, seen, policy=given.policy)
    found = plan_module(
        base_plan(replace(given, strategies=own, model_parallel_size=size)),
        seen,
        named=named,
        budget_named=given.memory_named,
        count=None if step is None else step.count,
        options=replace(stages, micro_batches=given.micro_batches, speeds=given.speeds, memory=given.memory),
    )
    free = given.strategies is None and given.policy == "auto" and given.model_parallel_size == "auto"
    if free and step is not None and samples_may_be_split(found, seen):
        found, step = with_split_samples(
            found,
            step,
            base=lambda name, dry: base_plan(given.split(name, dry)),
            node_ranks=given.node_devices or given.devices,
            rates=given.rates,
        )
    return found, step, seen


def counts_on_top_of(given: PlanRequest, step: StepOfModule) -> OnTopOf:
    """Return the function that counts the step with rules of its decoder."""
    return partial(on_top_of, step, rates=given.rates, request=given)


def base_plan(given: PlanRequest, *, uncounted: str = "") -> Plan:
    """Make the plan that needs no count of a step.

    Args:
        given: With the techniques that need none; None for these leaves them to the policy.
        uncounted: Why no step could be counted to complete the spec of `given.steps`.

    Raises:
        PlanError: The request cannot be planned.
    """
    shape, launches = given.shape, given.rates.launches
    if given.strategies is not None:
        given = replace(given, strategies=parse_strategies(list(given.strategies)))
    if shape.decoder:
        made = with_requested_specs(plan_of_decoder(given), given.requested, shape, launches=launches)
        made = with_strata_by_speed(made, shape, given.speeds)
        if given.check is not None:
            given.check(made)
    else:
        made = with_requested(plan_without_decoder(given), given.requested, shape, launches=launches)
    made = with_speeds(with_spec(made, given.steps, uncounted), given.speeds)
    return replace(made, notes=(*made.notes, *given.notes))


def with_compiled(plan: Plan, given: PlanRequest, module: nn.Module, chain: Chain | None) -> Plan:
    """Return the plan with the blocks that `compile` asks for.

    Args:
        chain: The profiled step; None if it could not be counted.

    Raises:
        PlanError: The blocks of this plan cannot be compiled.
    """
    if given.memory_named and any(isinstance(rule.spec, CompileBlock) for rule in plan.rules):
        raise PlanError(f"the given plan compiles blocks, which is not supported: {UNKNOWN_BYTES}")
    if given.compile is False:
        return plan
    rules, note = blocks_to_compile(
        module,
        given.compile,
        [name for name in plan.strategies if not STRATEGIES[name].beside_compiled],
        shared=any(isinstance(rule.spec, ShareBatchStatistics) for rule in plan.rules),
        budgeted=given.memory_named,
        chain=chain if given.rates.launches else None,
        steps=given.steps_of_run,
    )
    names = in_order({*plan.strategies, *(rule.strategy for rule in rules)})
    notes = (*plan.notes, *[note] * bool(note))
    return replace(plan, strategies=names, rules=rules_in_order((*plan.rules, *rules)), notes=notes)


def without_compiled(plan: Plan) -> Plan:
    """Return the plan without compiled blocks, which are counted as they run eagerly and chosen again for each plan."""
    rules = tuple(rule for rule in plan.rules if not isinstance(rule.spec, CompileBlock))
    if len(rules) == len(plan.rules):
        return plan
    return replace(plan, rules=rules, strategies=tuple(name for name in plan.strategies if name != COMPILE))
