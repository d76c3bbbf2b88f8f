"""Plan any module from one batch, without a run: for `lightning_amp.plan` and for `lightning-amp plan --config`."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from html import escape
from typing import Any

import psutil
from lightning.pytorch import LightningModule

from lightning_amp.adapters.adapt import adapt
from lightning_amp.costs.device_rates import Rates, budget_on
from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import ModelError, PlanError
from lightning_amp.footprint.copies.other_lengths import length_of_dim, with_length
from lightning_amp.footprint.find_blocks import named_blocks
from lightning_amp.footprint.inner_run import Around
from lightning_amp.footprint.module_profile import PARAMETERS, ModuleProfile
from lightning_amp.footprint.target_device import settings_of
from lightning_amp.lightning.profiling.dry_steps import DrySteps, with_spec
from lightning_amp.lightning.profiling.shape_of_module import read_shape
from lightning_amp.lightning.profiling.split_samples import samples_may_be_split, with_split_samples
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.planning.modules.finish_plan import rules_of
from lightning_amp.planning.modules.min_memory_plan import fewest_ranks
from lightning_amp.planning.modules.on_device import Device, made_for, on_device
from lightning_amp.planning.modules.plan_decoder import plan_decoder, split_by_decoder
from lightning_amp.planning.modules.plan_module import Count, Counted, base_plan, counted_draft, plan_step
from lightning_amp.planning.modules.questions import Answers, CountAt, SeenAt, answers, largest_batches
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.build_rules import with_memory, without_shared_statistics
from lightning_amp.planning.reports.plan_report import plan_report
from lightning_amp.planning.reports.step_report import step_report
from lightning_amp.profiling.profile import Profile
from lightning_amp.progress import shown_if_long
from lightning_amp.quantities import memory_of_ranks
from lightning_amp.techniques.table import STRATEGIES, parse_strategies, requested_specs, technique_of_steps
from lightning_amp.techniques.technique import function_at

COUNTED_ON = (1, 2, 4, 8, 16)
"""Numbers of devices on which a plan is made to find the fewest: each takes counts of the step."""
PLANNING = "planning"
"""What is shown of planning that takes seconds."""


@dataclass(frozen=True, kw_only=True)
class ModulePlan:
    """The plan of a module's training step; `print` shows its report.

    Attributes:
        plan: The plan, for `AMPStrategy(plan=...)`.
        profile: Profile of the step without techniques, on one device.
        module: The module whose step was planned.
        step: The step, to count it again.
        batch: The batch.
        at: Function that counts the step with a batch size, or with another batch.
        counting: Context for counting, with the blocks of `blocks` and tensor sizes as on the device.
        named: Whether the user chose the techniques, not the policy.
        split: What the questions do not support: the technique that replaces the training step, or a decoder; or "".
        on_devices: Function that plans the step on another number of devices.
        unlike: Whether the devices differ in memory; the questions are then not supported.
    """

    plan: Plan
    profile: ModuleProfile
    module: LightningModule = field(repr=False)
    step: StepOfModule = field(repr=False)
    batch: Any = field(repr=False)
    at: Callable[..., tuple[StepOfModule, ProfiledStep]] = field(repr=False)
    counting: Callable[[], AbstractContextManager[None]] = field(repr=False)
    named: bool = field(repr=False)
    split: str = field(repr=False)
    on_devices: Callable[[int], Plan] = field(repr=False)
    unlike: bool = field(default=False, repr=False)

    def report(self) -> str:
        """Return the report as text of at most 80 columns: peak memory, techniques that help or do not, prediction."""
        classes = {fqn: type(child).__name__ for fqn, child in self.module.named_modules()}
        if self.plan.diagnosis is None:
            return plan_report(self.plan)
        return step_report(self.plan, self.profile, classes=classes)

    __str__ = report

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.report())}</pre>"

    def largest_batch(self) -> int:
        """Return the largest batch size that fits the budget, as `answers` computes it; 0 if no sample fits.

        It uses the techniques named by the user, or any that the policy may choose, as far as they are needed. On a GPU
        the budget is that of tensors (`Plan.budget_bytes`): fragments of other batch sizes are not replayed.

        Raises:
            PlanError: There is no budget, or the memory of other batch sizes cannot be computed.
        """
        budget, start = self._budget("largest_batch"), self.profile.batch_size
        if start is None:
            raise PlanError(
                "largest_batch requires a batch whose tensors have a common length, found none: give one that has"
            )
        with self.counting():
            most = largest_batches(*self._counts(self.at), start=start, budget=budget, **self._asked)
        return max(most.plain, most.lean)

    def largest(self, name: str, dim: int = 1) -> int:
        """Return the largest length of a dimension of the batch that fits the budget; 0 if a length of 1 does not.

        All dimensions of the batch that have the same length change with it, except the first of each tensor: those of
        labels and masks, or both sides of a square picture. Entries are repeated. The answer is about memory alone: a
        table of positions may end earlier.

        Args:
            name: Tensor of the batch, such as "ids", "0" in a tuple, or "batch" for a batch that is a tensor.
            dim: The dimension, from 1; `largest_batch` answers for 0.

        Raises:
            PlanError: There is no budget, no such tensor or dimension, or the step does not run with another length.
        """
        budget, start = self._budget("largest"), length_of_dim(self.batch, name, dim)

        @cache
        def at(length: int) -> tuple[StepOfModule, ProfiledStep]:
            size = self.profile.batch_size
            return self.at(size) if length == start else self.at(size, with_length(self.batch, start, length))

        with self.counting():
            try:
                most = largest_batches(*self._counts(at), start=start, budget=budget, **self._asked)
            except ModelError as error:
                raise PlanError(
                    f"largest({name!r}, dim={dim!r}) cannot be computed, the step does not run with other lengths than"
                    f" {start:,}: {error}"
                ) from error
        return max(most.plain, most.lean)

    @staticmethod
    def _counts(at: Callable[[int], tuple[StepOfModule, ProfiledStep]]) -> tuple[SeenAt, CountAt]:
        """Return the functions that count the step as it is, and with the techniques of a draft."""

        def with_draft(length: int, made: Draft) -> int:
            step, seen = at(length)
            if made.stages:
                return made.peak_bytes
            return counted_draft(seen, rules_of(made, named=False), ranks=made.ranks, count=step.count).peak_bytes

        return lambda length: at(length)[1], with_draft

    def fewest_devices(self) -> int | None:
        """Return the fewest devices on which the batch fits the budget, by any technique; None if there are none.

        Plans on 1, 2, 4, 8 and 16 devices are counted, also those that split samples; the others are predicted.

        Raises:
            PlanError: There is no budget, or the memory on more devices cannot be computed.
        """
        with self.counting():
            found = fewest_ranks(self.at(self.profile.batch_size)[1], self._budget("fewest_devices"))
        predicted = None if found is None else found.ranks * found.model
        counted = self._on_fewest(COUNTED_ON, below=predicted)
        return predicted if counted is None else counted.mesh.ranks

    def _on_fewest(self, devices: Sequence[int], *, below: int | None = None) -> Plan | None:
        """The plan of the policy on the fewest of these numbers of devices where it fits, with fewer than `below`."""
        own = self.plan.mesh.ranks
        for n in devices:
            # what does not fit on as many devices as were asked for fits on no fewer
            if self.named or (below is not None and n >= below) or (n < own and not self.plan.fits):
                continue
            plan = self.plan if n == own else self.on_devices(n)
            if plan.fits:
                return plan
        return None

    def answers(self) -> Answers | None:
        """Return both answers with and without techniques, also in words; None without one budget of all devices."""
        budget = self.plan.budget_bytes
        if budget is None or self.unlike or self.split:
            return None
        with self.counting():
            seen = self.at(self.profile.batch_size)[1]
            # each further number of devices takes seconds
            own = self.plan.mesh.ranks
            on_fewest = partial(self._on_fewest, (own, 2 * own))
            return answers(*self._counts(self.at), seen, budget=budget, on_fewest=on_fewest, **self._asked)

    @property
    def _asked(self) -> dict[str, Any]:
        mesh = self.plan.mesh
        return {"ranks": mesh.ranks, "named": self.plan if self.named else None, "planned": self.plan}

    def code(self) -> str:
        """Return the code of the blocks that the plan computes in chunks, as Python."""
        with self.counting():
            rows = (STRATEGIES[name] for name in self.plan.strategies)
            return "\n\n\n".join(function_at(row.code)(self.step, self.plan.rules) for row in rows if row.code)

    def _budget(self, question: str) -> int:
        if self.plan.budget_bytes is None or self.unlike:
            found = "unlike ones of its devices" if self.unlike else "none"
            raise PlanError(f"{question} requires a plan with one budget, found {found}; give device_memory='24GiB'")
        if self.split:
            raise PlanError(
                f"{question} does not support a plan with {self.split!r}; plan batches of several"
                " lengths, or on several numbers of devices"
            )
        return self.plan.budget_bytes


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
        request: `devices`, `device_memory`, `policy`, `strategies` and `model_parallel_size`, as for `plan_step`.
        options: Options of AMPStrategy for its techniques; None means not given.

    Raises:
        AmpError: The step cannot be counted, or the request cannot be planned.
    """
    if not isinstance(module, LightningModule):
        raise ModelError(
            f"cannot plan a {type(module).__name__!r} and a batch; give a LightningModule with a batch, or"
            " what lightning_amp.profile returns without one"
        )
    strategies = request["strategies"]
    changes = strategies is None or any(STRATEGIES[name].choice for name in parse_strategies(strategies))
    # as in a fit: decoders written elsewhere are planned, and counted, as ours
    adapted = adapt(module, needed=changes)
    try:
        made = _plan_of_step(
            module, batch, around=around, rates=rates, request=dict(request), options=options, batch_size=batch_size
        )
    finally:
        adapted.undo()
    return replace(made, plan=replace(made.plan, notes=(*made.plan.notes, *adapted.notes)))


def _plan_of_step(
    module: LightningModule,
    batch: Any,
    *,
    around: Around,
    rates: Rates,
    request: dict[str, Any],
    options: Mapping[str, Any],
    batch_size: int | None,
) -> ModulePlan:
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
        return step.profiled(rates, requested=requested, shared_statistics=share and devices > 1)

    @contextmanager
    def counting() -> Iterator[None]:
        blocks = named_blocks(module, options.get("blocks"))
        with blocks, settings_of(rates.device_type), shown_if_long(PLANNING):
            yield

    step = step_at(batch_size)
    with counting():
        seen = look(step)
        data, shape, notes = read_shape(
            module,
            around.datamodule,
            data_dir=options.get("data_dir"),
            batch_size=seen.profile.batch_size or 1,
            queries=options.get("chunk_queries"),
            rates=rates,
        )
        shape = replace(shape, profiled=not shape.decoder)
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
        counted = Counted(seen=seen if n == devices else look(step, n), shape=shape)
        alike = None if not budgets else budgets[0] if len(budgets) == 1 else budgets
        given = request | {"devices": n, "device_memory": alike}
        if shape.decoder:
            made = _with_decoder(counted, data, step, given)
            return replace(made, notes=(*made.notes, *notes)), step
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

    return ModulePlan(
        plan=replace(made, notes=(*made.notes, *budget_notes)),
        profile=profile,
        module=module,
        step=counted_step,
        batch=batch,
        at=at,
        counting=counting,
        named=request["strategies"] is not None,
        split=technique_of_steps(made.strategies) or ("a decoder of strata" if shape.decoder else ""),
        on_devices=lambda n: made_on(n)[0],
        unlike=len(memory) > 1,
    )


def _with_decoder(counted: Counted, data: Profile, step: StepOfModule, request: Mapping[str, Any]) -> Plan:
    """Plan a module with a decoder, as a fit does."""
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
        )

    def on_top_of(rules: tuple[Rule, ...], frees_gradients: bool) -> tuple[ProfiledStep, Count]:
        with_rules = step.on_top_of(rules, frees_gradients=frees_gradients)
        found = with_rules.profiled(
            seen.rates, requested=seen.requested, shared_statistics=step.shared_statistics and devices > 1
        )
        return found, with_rules.count

    made = plan_decoder(
        make, on_top_of, counted.shape, budget=min(memory, default=None), named=named, budget_named=asked is not None
    )
    return with_memory(made.plan, memory)
