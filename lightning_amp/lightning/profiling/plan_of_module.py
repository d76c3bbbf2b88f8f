"""Plan any module from one batch, without a run: for `lightning_amp.plan` and for `lightning-amp plan --config`."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, cached_property
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
from lightning_amp.footprint.run.run_settings import RunSettings
from lightning_amp.footprint.target_device import settings_of
from lightning_amp.lightning.profiling.dry_steps import DrySteps
from lightning_amp.lightning.profiling.make_step_plan import StepPlan, make_step_plan, plan_on_device
from lightning_amp.lightning.profiling.module_plan import ModulePlan
from lightning_amp.lightning.profiling.shape_of_module import read_shape
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.planning.base.plan_request import PlanRequest, StepRequest, compile_option
from lightning_amp.planning.base.rules import without_shared_statistics
from lightning_amp.planning.modules.on_device import Device
from lightning_amp.planning.plan.plan import Plan
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
    rates = rates.on_nodes_of(request.get("node_devices"))
    return Planner(module, batch, run_settings, rates, request, options, batch_size).module_plan()


Sizes = tuple[Profile, ModelShape, list[str]]
"""Profile of the data, structure of the module, and what a prediction from these leaves out."""


class Planner:
    """Plan the step of one module, on any number of devices and with batches of any length.

    Args:
        sizes: Data and structure, if they are known; None reads them from the module.
        check: Gets the plan of a decoder by closed forms, before a step is counted, and may raise.
    """

    def __init__(
        self,
        module: LightningModule,
        batch: Any,
        run_settings: RunSettings,
        rates: Rates,
        request: Mapping[str, Any],
        options: Mapping[str, Any],
        batch_size: int | None,
        *,
        sizes: Sizes | None = None,
        check: Callable[[Plan], None] | None = None,
    ) -> None:
        self._module, self._batch, self._run_settings, self._rates = module, batch, run_settings, rates
        self._given_sizes, self._check = sizes, check
        self._request, self._options, self._batch_size = request, options, batch_size
        self._devices, self._size = request["devices"], request["model_parallel_size"]
        self._speeds = speeds_of_ranks(request.get("device_speeds"), self._devices)
        strategies = request["strategies"]
        self._ids, self._named = parse_strategies(strategies or "S1"), strategies is not None
        self._changes_decoders = not self._named or any(STRATEGIES[name].choice for name in self._ids)
        given = argparse.Namespace(**{name: value for name, value in options.items() if value is not None})
        given.model_parallel_size = self._size
        self._host_memory = host_memory_of(given)
        # a configuration may have options of strategies that are not requested
        self._requested = requested_specs(self._ids if strategies else (), given)
        self._shares = options.get("share_batch_statistics") is not False
        self._counting, self._on_decoders = False, list[str]()
        self._steps = DrySteps.of_request(
            self._ids,
            given,
            self._devices if self._size == "auto" else self._size,
            run_ranks=self._devices,
            budget=min(self._memory_on(self._devices), default=None),
        )
        self._sized = cache(self._profiled_at)

    def module_plan(self) -> ModulePlan:
        """Return the plan on the requested devices, with what answers questions on others."""
        seen = self._seen
        self._refuse_unmade_layers()
        if self._steps is not None and STRATEGIES[self._steps.name].data_axis:
            # the number of ranks of its grid, which may have been chosen
            self._size = self._steps.ranks
        planned = self.made_on(self._devices)
        assert planned.step is not None, "it is counted"
        # of a plan that splits samples it is another one
        self._planned_step = planned.step
        made = planned.plan if self._shares else without_shared_statistics(planned.plan)
        named = self._request["device_memory"]
        notes = budget_on(self._rates, named, self._devices)[1]
        return ModulePlan(
            plan=replace(made, notes=(*made.notes, *notes)),
            profile=seen.profile,
            module=self._module,
            step=self._planned_step,
            batch=self._batch,
            at=self._at,
            counting=self.counting,
            named=self._named,
            split=technique_of_steps(made.strategies),
            on_devices=lambda n: self.made_on(n).plan,
            planned_at=self._planned_at if self._sizes[1].decoder else None,
            unlike=len(self._memory_on(self._devices)) > 1 or bool(self._speeds),
        )

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count steps with the named blocks, on the named device, and with decoders written elsewhere as ours."""
        if self._counting:
            yield
            return
        blocks, self._counting = named_blocks(self._module, self._options.get("blocks")), True
        # as in a fit: decoders written elsewhere are planned, and counted, as ours
        adapted = adapt(self._module, needed=self._changes_decoders)
        self._on_decoders = adapted.notes
        try:
            with blocks, settings_of(self._rates.device_type), shown_if_long(PLANNING):
                yield
        finally:
            adapted.undo()
            self._counting = False

    def _memory_on(self, n: int) -> tuple[int, ...]:
        """Return the bytes of tensors on each of `n` devices; none if they are not known."""
        budget = budget_on(self._rates, self._request["device_memory"], n)[0]
        return () if budget is None else memory_of_ranks(budget, n)

    def _step_at(self, n: int | None, other: Any = None) -> StepOfModule:
        """Return the step with batches of length `n`, or with another batch."""
        # the search for the largest batch must not fill this machine's memory with a step that requires real values
        limit = None if n == self._batch_size and other is None else psutil.virtual_memory().total // 2
        limited = replace(self._run_settings, limit_bytes=self._run_settings.limit_bytes or limit)
        batch = self._batch if other is None else other
        return StepOfModule(self._module, lambda: batch, run_settings=limited, batch_size=n, steps=self._steps)

    def _look(self, step: StepOfModule, devices: int) -> ProfiledStep:
        return step.profiled(self._rates, self._request_of_step(devices))

    def _request_of_step(self, devices: int) -> StepRequest:
        return StepRequest(
            requested=self._requested, host_memory=self._host_memory, shared_statistics=self._shares and devices > 1
        )

    @cached_property
    def _step(self) -> StepOfModule:
        return self._step_at(self._batch_size)

    @cached_property
    def _seen(self) -> ProfiledStep:
        with self.counting():
            return self._look(self._step, self._devices)

    @cached_property
    def _sizes(self) -> Sizes:
        return self._given_sizes or self._sizes_at(self._seen.profile.batch_size)

    def _sizes_at(self, n: int | None) -> Sizes:
        return read_shape(
            self._module,
            self._run_settings.datamodule,
            data_dir=self._options.get("data_dir"),
            batch_size=n or 1,
            queries=self._options.get("chunk_queries"),
            rates=self._rates,
        )

    def _refuse_unmade_layers(self) -> None:
        own = {id(tensor): tensor.nbytes for tensor in (*self._module.parameters(), *self._module.buffers())}
        if not self._run_settings.prepared and self._seen.profile.by_kind[PARAMETERS] > sum(own.values()):
            raise ModelError(
                f"cannot plan {type(self._module).__name__!r}, which makes layers in `setup` or `configure_model`, and"
                " these were not called; call them before: module.configure_model()"
            )

    def _inputs(self, n: int, sizes: Sizes | None = None) -> PlanRequest:
        (data, shape, notes), policy = sizes or self._sizes, self._request["policy"]
        return PlanRequest(
            data=data,
            shape=replace(shape, profiled=not shape.decoder),
            rates=self._rates,
            devices=n,
            node_devices=self._request.get("node_devices"),
            memory=self._memory_on(n),
            memory_named=self._request["device_memory"] is not None,
            policy=policy,
            strategies=self._ids if self._named else None,
            model_parallel_size=self._size,
            micro_batches=self._options.get("micro_batches"),
            speeds=self._speeds if n == self._devices else (),
            steps=self._steps,
            compile=compile_option(self._options.get("compile"), chooses=policy == "auto" and not self._named),
            notes=tuple(notes),
            check=self._check,
            **vars(self._request_of_step(n)),
        )

    def made_on(self, n: int) -> StepPlan:
        """Plan the step on `n` devices."""
        with self.counting():
            counted = None
            if not self._sizes[1].decoder:
                counted = self._seen if n == self._devices else self._look(self._step, n)
            made = plan_on_device(
                self._inputs(n),
                lambda given: make_step_plan(given, self._step, counted),
                device=Device.of(self._rates.memory, self._request["device_memory"], n),
                module=self._module,
            )
        return replace(made, plan=replace(made.plan, notes=(*made.plan.notes, *self._on_decoders)))

    def _profiled_at(self, n: int | None, other: Any = None) -> tuple[StepOfModule, ProfiledStep]:
        step = self._step_at(n, other)
        return step, self._look(step, self._devices)

    def _at(self, n: int | None, other: Any = None) -> tuple[StepOfModule, ProfiledStep]:
        """Return the step with batches of length `n`, or with another batch, and its profile."""
        if other is not None:
            return self._profiled_at(n, other)
        return (self._planned_step, self._seen) if n == self._seen.profile.batch_size else self._sized(n)

    def _planned_at(self, n: int | None, other: Any = None) -> Plan:
        with self.counting():
            inputs = self._inputs(self._devices, self._sizes_at(n))
            return make_step_plan(inputs, self._step_at(n, other), None).plan
