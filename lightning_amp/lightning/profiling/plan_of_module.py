"""Plan any module from one batch, without a run: for `lightning_amp.plan` and for `lightning-amp plan --config`."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import psutil
from lightning.pytorch import LightningModule

from lightning_amp.adapters.adapt import adapt
from lightning_amp.costs.device_rates import Rates, budget_on
from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.costs.ordered_runs import speeds_of_ranks
from lightning_amp.costs.profiled_step import ProfiledStep
from lightning_amp.errors import ModelError
from lightning_amp.footprint.find_blocks import named_blocks
from lightning_amp.footprint.module_profile import PARAMETERS
from lightning_amp.footprint.run_settings import RunSettings
from lightning_amp.footprint.target_device import settings_of
from lightning_amp.lightning.profiling.dry_steps import DrySteps
from lightning_amp.lightning.profiling.make_step_plan import PlanInputs, StepPlan, make_step_plan
from lightning_amp.lightning.profiling.module_plan import ModulePlan
from lightning_amp.lightning.profiling.shape_of_module import read_shape
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.planning.modules.on_device import Device, made_for, on_device
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.build_rules import without_shared_statistics
from lightning_amp.profiling.profile import Profile
from lightning_amp.progress import shown_if_long
from lightning_amp.quantities import memory_of_ranks
from lightning_amp.techniques.host_memory.limit import host_memory_of
from lightning_amp.techniques.table import STRATEGIES, parse_strategies, requested_specs, technique_of_steps

PLANNING = "planning"
"""What is shown of planning that takes seconds."""


@shown_if_long(PLANNING)
def plan_of_module(
    module: LightningModule,
    batch: Any,
    *,
    run_settings: RunSettings,
    rates: Rates,
    request: Mapping[str, Any],
    options: Mapping[str, Any],
    batch_size: int | None = None,
) -> ModulePlan:
    """Plan the step of a module.

    Args:
        request: `devices`, `node_devices`, `device_memory`, `policy`, `strategies`, `model_parallel_size` and
            `device_speeds`, as for `lightning_amp.plan`.
        options: Options of AMPStrategy for its techniques; None means not given.

    Raises:
        AmpError: The step cannot be counted, or the request cannot be planned.
    """
    if not isinstance(module, LightningModule):
        raise ModelError(
            f"cannot plan a {type(module).__name__!r} and a batch; give a LightningModule with a batch, or"
            " what lightning_amp.profile returns without one"
        )
    strategies, asked, devices = (request[name] for name in ("strategies", "device_memory", "devices"))
    ids, size = parse_strategies(strategies or "S1"), request["model_parallel_size"]
    rates, node_devices = rates.on_nodes_of(request.get("node_devices")), request.get("node_devices")
    speeds = speeds_of_ranks(request.get("device_speeds"), devices)
    changes_decoders = strategies is None or any(STRATEGIES[name].choice for name in ids)

    def memory_on(n: int) -> tuple[int, ...]:
        """Return the bytes of tensors on each of `n` devices; none if they are not known."""
        budget = budget_on(rates, asked, n)[0]
        return () if budget is None else memory_of_ranks(budget, n)

    memory, budget_notes = memory_on(devices), budget_on(rates, asked, devices)[1]
    given = argparse.Namespace(**{name: value for name, value in options.items() if value is not None})
    given.model_parallel_size = size
    budget = min(memory, default=None)
    steps = DrySteps.asked(ids, given, devices if size == "auto" else size, run_ranks=devices, budget=budget)
    # a configuration may have options of strategies that are not requested
    requested = requested_specs(ids if strategies else (), given)
    share = options.get("share_batch_statistics") is not False

    def step_at(n: int | None, other: Any = None) -> StepOfModule:
        # the search for the largest batch must not fill this machine's memory with a step that requires real values
        limit = None if n == batch_size and other is None else psutil.virtual_memory().total // 2
        limited = replace(run_settings, limit_bytes=run_settings.limit_bytes or limit)
        given = batch if other is None else other
        return StepOfModule(module, lambda: given, run_settings=limited, batch_size=n, steps=steps)

    def look(step: StepOfModule, devices: int = devices) -> ProfiledStep:
        return step.profiled(
            rates, requested=requested, host_memory=host_memory_of(given), shared_statistics=share and devices > 1
        )

    def sizes_at(n: int | None) -> tuple[Profile, ModelShape, list[str]]:
        data, shape, notes = read_shape(
            module,
            run_settings.datamodule,
            data_dir=options.get("data_dir"),
            batch_size=n or 1,
            queries=options.get("chunk_queries"),
            rates=rates,
        )
        return data, replace(shape, profiled=not shape.decoder), notes

    inside, on_decoders = list[bool](), list[str]()

    @contextmanager
    def counting() -> Iterator[None]:
        if inside:
            yield
            return
        blocks, inside[:] = named_blocks(module, options.get("blocks")), [True]
        # as in a fit: decoders written elsewhere are planned, and counted, as ours
        adapted = adapt(module, needed=changes_decoders)
        on_decoders[:] = adapted.notes
        try:
            with blocks, settings_of(rates.device_type), shown_if_long(PLANNING):
                yield
        finally:
            adapted.undo()
            inside.clear()

    step = step_at(batch_size)
    with counting():
        seen = look(step)
        data, shape, notes = sizes_at(seen.profile.batch_size)
    profile = seen.profile
    own = {id(tensor): tensor.nbytes for tensor in (*module.parameters(), *module.buffers())}
    if not run_settings.prepared and profile.by_kind[PARAMETERS] > sum(own.values()):
        raise ModelError(
            f"cannot plan {type(module).__name__!r}, which makes layers in `setup` or `configure_model`, and"
            " these were not called; call them before: module.configure_model()"
        )
    if steps is not None and STRATEGIES[steps.name].data_axis:
        # the number of ranks of its grid, which may have been chosen
        size = steps.ranks

    def inputs(
        n: int, budgets: Sequence[int], sizes: tuple[Profile, ModelShape, list[str]] = (data, shape, notes)
    ) -> PlanInputs:
        return PlanInputs(
            data=sizes[0],
            shape=sizes[1],
            rates=rates,
            devices=n,
            node_devices=node_devices,
            memory=tuple(budgets),
            memory_named=asked is not None,
            policy=request["policy"],
            strategies=None if strategies is None else ids,
            model_parallel_size=size,
            micro_batches=options.get("micro_batches"),
            requested=requested,
            speeds=speeds if n == devices else (),
            host_memory=host_memory_of(given),
            shared_statistics=share and n > 1,
            steps=steps,
            notes=tuple(sizes[2]),
        )

    def made_on(n: int) -> StepPlan:
        device, budgets, found = Device.of(rates.memory, asked, n), memory_on(n), list[StepPlan]()

        def made(less: int) -> Plan:
            planned = make_step_plan(inputs(n, [max(1, budget - less) for budget in budgets]), step, counted)
            found.append(planned)
            assert planned.step is not None, "it is counted"
            return on_device(planned.plan, device, planned.step.as_planned(planned.plan))

        with counting():
            counted = None if shape.decoder else seen if n == devices else look(step, n)
            plan = made_for(made)
        return replace(found[-1], plan=replace(plan, notes=(*plan.notes, *on_decoders)))

    planned = made_on(devices)
    made, counted_step = planned.plan, planned.step
    assert counted_step is not None, "it is counted"
    if not share:
        made = without_shared_statistics(made)

    @cache
    def sized(n: int | None) -> tuple[StepOfModule, ProfiledStep]:
        other = step_at(n)
        return other, look(other)

    def at(n: int | None, other: Any = None) -> tuple[StepOfModule, ProfiledStep]:
        if other is None:
            return (counted_step, seen) if n == seen.profile.batch_size else sized(n)
        longer = step_at(n, other)
        return longer, look(longer)

    def planned_at(n: int | None, other: Any = None) -> Plan:
        with counting():
            return make_step_plan(inputs(devices, memory, sizes_at(n)), step_at(n, other), None).plan

    return ModulePlan(
        plan=replace(made, notes=(*made.notes, *budget_notes)),
        profile=profile,
        module=module,
        step=counted_step,
        batch=batch,
        at=at,
        counting=counting,
        named=strategies is not None,
        split=technique_of_steps(made.strategies),
        on_devices=lambda n: made_on(n).plan,
        planned_at=planned_at if shape.decoder else None,
        unlike=len(memory) > 1 or bool(speeds),
    )
