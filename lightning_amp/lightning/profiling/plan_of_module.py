"""Plan any module from one batch, without a run: for `lightning_amp.plan` and for `lightning-amp plan --config`."""

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import psutil
from lightning.pytorch import LightningModule

from lightning_amp.adapters.adapt import adapt
from lightning_amp.costs.device_rates import Rates, budget_on
from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.costs.profiled_step import ProfiledStep
from lightning_amp.errors import ModelError
from lightning_amp.footprint.find_blocks import named_blocks
from lightning_amp.footprint.inner_run import Around
from lightning_amp.footprint.module_profile import PARAMETERS
from lightning_amp.footprint.target_device import settings_of
from lightning_amp.lightning.profiling.dry_steps import DrySteps, with_spec
from lightning_amp.lightning.profiling.module_plan import ModulePlan
from lightning_amp.lightning.profiling.shape_of_module import read_shape
from lightning_amp.lightning.profiling.split_samples import samples_may_be_split, with_split_samples
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.lightning.profiling.step_of_ranks import on_top_of
from lightning_amp.planning.modules.on_device import Device, made_for, on_device
from lightning_amp.planning.modules.plan_decoder import plan_decoder, split_by_decoder
from lightning_amp.planning.modules.plan_module import Counted, base_plan, plan_step
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.build_rules import with_memory, without_shared_statistics
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
    around: Around,
    rates: Rates,
    request: Mapping[str, Any],
    options: Mapping[str, Any],
    batch_size: int | None = None,
) -> ModulePlan:
    """Plan the step of a module.

    Args:
        request: `devices`, `device_memory`, `policy`, `strategies`, `model_parallel_size` and `device_speeds`, as for
            `plan_step`.
        options: Options of AMPStrategy for its techniques; None means not given.

    Raises:
        AmpError: The step cannot be counted, or the request cannot be planned.
    """
    if not isinstance(module, LightningModule):
        raise ModelError(
            f"cannot plan a {type(module).__name__!r} and a batch; give a LightningModule with a batch, or"
            " what lightning_amp.profile returns without one"
        )
    request = dict(request)
    strategies = request["strategies"]
    changes_decoders = strategies is None or any(STRATEGIES[name].choice for name in parse_strategies(strategies))
    size, asked, devices = (request[name] for name in ("model_parallel_size", "device_memory", "devices"))

    def memory_on(n: int) -> tuple[int, ...]:
        """Return the bytes of tensors on each of `n` devices; none if they are not known."""
        budget = budget_on(rates, asked, n)[0]
        return () if budget is None else memory_of_ranks(budget, n)

    memory, budget_notes = memory_on(devices), budget_on(rates, asked, devices)[1]
    given = argparse.Namespace(**{name: value for name, value in options.items() if value is not None})
    given.model_parallel_size = size
    ids, budget = parse_strategies(request["strategies"] or "S1"), min(memory, default=None)
    steps = DrySteps.asked(ids, given, devices if size == "auto" else size, run_ranks=devices, budget=budget)
    # a configuration may have options of strategies that are not requested
    requested = requested_specs(ids if request["strategies"] else (), given)
    share = options.get("share_batch_statistics") is not False

    def step_at(n: int | None, other: Any = None) -> StepOfModule:
        # the search for the largest batch must not fill this machine's memory with a step that requires real values
        limit = None if n == batch_size and other is None else psutil.virtual_memory().total // 2
        limited = replace(around, limit_bytes=around.limit_bytes or limit)
        given = batch if other is None else other
        return StepOfModule(module, lambda: given, around=limited, batch_size=n, steps=steps)

    def look(step: StepOfModule, devices: int = devices) -> ProfiledStep:
        return step.profiled(
            rates, requested=requested, host_memory=host_memory_of(given), shared_statistics=share and devices > 1
        )

    def sizes_at(n: int | None) -> tuple[Profile, ModelShape, list[str]]:
        data, shape, notes = read_shape(
            module,
            around.datamodule,
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
    if not around.prepared and profile.by_kind[PARAMETERS] > sum(own.values()):
        raise ModelError(
            f"cannot plan {type(module).__name__!r}, which makes layers in `setup` or `configure_model`, and"
            " these were not called; call them before: module.configure_model()"
        )
    if steps is not None and STRATEGIES[steps.name].data_axis:
        # the number of ranks of its grid, which may have been chosen
        request["model_parallel_size"] = steps.ranks
    free = request["strategies"] is None and request["policy"] == "auto" and size == "auto"

    def made_on(n: int) -> tuple[Plan, StepOfModule]:
        device, budgets, found = Device.of(rates.memory, asked, n), memory_on(n), list[StepOfModule]()

        def made(less: int) -> Plan:
            plan, planned_step = made_within(n, [max(1, budget - less) for budget in budgets])
            found.append(planned_step)
            return on_device(plan, device, planned_step.as_planned(plan))

        with counting():
            return made_for(made), found[-1]

    def made_within(n: int, budgets: list[int]) -> tuple[Plan, StepOfModule]:
        micro_batches = options.get("micro_batches")
        alike = None if not budgets else budgets[0] if len(budgets) == 1 else budgets
        given = request | {"devices": n, "device_memory": alike}
        if shape.decoder:
            # the step is counted with the decoder's techniques, whatever the number of devices
            made = _with_decoder(Counted(seen=seen, shape=shape), data, step, given, share=share)
            return replace(made, notes=(*made.notes, *notes, *on_decoders)), step
        counted = Counted(seen=seen if n == devices else look(step, n), shape=shape)
        made = with_spec(plan_step(counted, **given, micro_batches=micro_batches, count=step.count), steps, "")
        if not free or not samples_may_be_split(made, counted.seen):
            return made, step

        def base(name: str, dry: DrySteps) -> Plan:
            alone = base_plan(
                counted,
                devices=n,
                budget=made.budget_bytes,
                policy="auto",
                strategies=["S1", name],
                model_parallel_size=dry.ranks,
            )
            return with_spec(alone, dry, "")

        return with_split_samples(made, step, base=base, node_ranks=n, rates=rates)

    made, counted_step = made_on(devices)
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
            of_data, sizes, _ = sizes_at(n)
            given = request | {"device_memory": list(memory_on(devices)) or None}
            return _with_decoder(Counted(seen=seen, shape=sizes), of_data, step_at(n, other), given, share=share)

    return ModulePlan(
        plan=replace(made, notes=(*made.notes, *budget_notes)),
        profile=profile,
        module=module,
        step=counted_step,
        batch=batch,
        at=at,
        counting=counting,
        named=request["strategies"] is not None,
        split=technique_of_steps(made.strategies),
        on_devices=lambda n: made_on(n)[0],
        planned_at=planned_at if shape.decoder else None,
        unlike=len(memory) > 1 or request.get("device_speeds") is not None,
    )


def _with_decoder(
    counted: Counted, data: Profile, step: StepOfModule, request: Mapping[str, Any], *, share: bool
) -> Plan:
    """Plan a module with a decoder, as a fit does; `share`: whether ranks of a data axis share batch statistics."""
    seen, devices, asked = counted.seen, request["devices"], request["device_memory"]
    memory = () if asked is None else memory_of_ranks(asked, devices)
    ids = None if request["strategies"] is None else parse_strategies(request["strategies"])
    strategies, named = split_by_decoder(ids, policy=request["policy"])

    def make(budget: int | None) -> Plan:
        return base_plan(
            counted,
            data=data,
            devices=devices,
            budget=budget,
            policy=request["policy"],
            strategies=strategies,
            model_parallel_size=request["model_parallel_size"],
            device_speeds=request.get("device_speeds"),
        )

    counts = partial(
        on_top_of,
        step,
        rates=seen.rates,
        requested=seen.requested,
        host_memory=seen.host_memory,
        shared_statistics=share and devices > 1,
    )
    made = plan_decoder(
        make, counts, counted.shape, budget=min(memory, default=None), named=named, budget_named=asked is not None
    )
    return with_memory(made.plan, memory)
