"""Profile one training step of a module on rank 0, before anything is installed.

Every fit does this, because the plan reports what uses the memory also if everything fits; it takes a second or two.
Validate, test and predict do not. If a step cannot be profiled, it is trained as on a plain Trainer, and the plan
gives the reason.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn

from lightning_amp.costs.device_rates import CPU_CORE, Rates
from lightning_amp.costs.profiled_step import ProfiledStep
from lightning_amp.costs.rule import Rule, Spec, changes_of
from lightning_amp.data.batch import datamodule_of
from lightning_amp.errors import AmpError, ModelError
from lightning_amp.footprint.chain.chain import Chain
from lightning_amp.footprint.chain.chain_of import CountedStep, count_step
from lightning_amp.footprint.confirm_count import Shape, shapes_of
from lightning_amp.footprint.copies.copy_batch import length_of
from lightning_amp.footprint.copies.noted_values import Answers
from lightning_amp.footprint.module_profile import ModuleProfile
from lightning_amp.footprint.operator_rates import OperatorRates
from lightning_amp.footprint.profile_module import profile_module
from lightning_amp.footprint.run.run_settings import RunSettings
from lightning_amp.installing.install import install_rules, overlap
from lightning_amp.lightning.profiling.dry_steps import DrySteps
from lightning_amp.lightning.profiling.facts_of_step import facts_of_step, looked_at, refused_techniques
from lightning_amp.lightning.profiling.loaders import example_batch, loaders_of, own_rows, read_streams_ahead
from lightning_amp.on_demand import first_of
from lightning_amp.planning.base.plan_request import NOTHING_REQUESTED, StepRequest
from lightning_amp.planning.modules.on_device import CLOSED_FORMS, OF_DECODER
from lightning_amp.planning.modules.plan_module import counted_rules
from lightning_amp.planning.plan.plan import Explanation, Plan
from lightning_amp.progress import counting
from lightning_amp.quantities import format_bytes
from lightning_amp.sharding.own_parts import OwnParts
from lightning_amp.sharding.splits import DryAxis
from lightning_amp.techniques.contract.protocol import INSIDE, find_decoders
from lightning_amp.techniques.data.batch_norm import statistics_bytes
from lightning_amp.techniques.data.gradient_sync import gradient_sizes, zeros_for_parts
from lightning_amp.techniques.table import (
    PREDICTIONS,
    STAGED,
    STRATEGIES,
    conflicts,
    rules_in_order,
    stage_search,
    why_not_with,
    works_with,
)
from lightning_amp.techniques.technique import function_at

T = TypeVar("T")
BESIDE_NO_DECODER = {STAGED, *(name for name, row in STRATEGIES.items() if row.no_decoder)}
"""Techniques that no module with a decoder can have."""


class StepOfModule:
    """One training step of a module, counted with or without techniques.

    Args:
        take_batch: Function that returns one batch, or raises an AmpError.
        batch_size: Batch size to count instead of the batch's.
        trains: Whether this module is trained; a module that is only planned may have no values.
        steps: Steps of a technique that replace the module's while it is counted.
        on_top_of: Rules of its decoder, which every count installs in addition.
        axis: The model axis over which these split the decoder; None on one device.
    """

    def __init__(
        self,
        module: LightningModule,
        take_batch: Callable[[], Any],
        *,
        run_settings: RunSettings,
        batch_size: int | None = None,
        trains: bool = False,
        steps: DrySteps | None = None,
        on_top_of: Sequence[Rule] = (),
        axis: DryAxis | None = None,
    ) -> None:
        if steps is not None:
            own = OwnParts(size=steps.ranks, axis=lambda: steps.axis)
            run_settings = replace(run_settings, own_parts=own)
        self._answers: dict[int | None, Answers] = {}
        self.decoders = tuple(find_decoders(module))
        run_settings = replace(run_settings, answers=self._answers)
        self.module, self._take_batch, self._run_settings = module, take_batch, run_settings
        self._trains, self._steps, self._base, self.axis = trains, steps, tuple(on_top_of), axis
        self._batch_size = batch_size
        self._batch: Any = None
        self._profiles: dict[frozenset[tuple[str, str]], ModuleProfile] = {}
        self._counts: dict[tuple[tuple[str, Spec], ...], ModuleProfile] = {}
        self._blocks, self.no_stages = function_at(stage_search().names)(module)
        self._chunk_plans: dict[Any, Any] = {}
        self._counted_steps: dict[int | None, CountedStep] = {}
        self._steps_with: dict[tuple[str, Spec], CountedStep | str] = {}
        self._rates = CPU_CORE
        self.shared_statistics = False
        self.requested = NOTHING_REQUESTED.requested

    @classmethod
    def of(
        cls, trainer: pl.Trainer, *, limit_bytes: int | None = None, steps: DrySteps | None = None
    ) -> "StepOfModule | None":
        """Return the step of a fit, or None outside a fit. All ranks must call it; only rank 0 uses the step.

        A step on real values raises an error above `limit_bytes`; with a decoder none runs on real values, for it could
        need more memory than there is.
        """
        module = trainer.lightning_module
        if trainer.state.fn != TrainerFn.FITTING:
            return None
        run_settings = RunSettings.of(trainer, prepared=True, datamodule=datamodule_of(trainer))
        own = getattr(trainer.strategy, "own_parts", None)
        run_settings = replace(run_settings, values=not find_decoders(module), limit_bytes=limit_bytes, own_parts=own)
        loaders, why = loaders_of(trainer)
        read_streams_ahead(loaders)
        take = partial(example_batch, loaders, why, own=own_rows(trainer))
        return cls(module, take, run_settings=run_settings, trains=True, steps=steps)

    def profiled(self, rates: Rates, request: StepRequest = NOTHING_REQUESTED) -> ProfiledStep:
        """Read one batch and profile the step without techniques.

        Raises:
            AmpError: No batch can be read, or the step cannot run on a copy of the module.
            PlanError: The step requires real values, and exceeds its limit.
        """
        # the batch of a step with a decoder is that of the step without, and may have been counted already
        if not (self._counted_steps and self._base and rates == self._rates):
            self.take(rates)
        self.shared_statistics, self.requested = request.shared_statistics, request.requested
        steps, step = self._steps, None
        if steps is not None:
            step = steps.choose(self._batch, lambda: self.step_with(()), rates.links)
        # `choose` may have counted the step with its choice already
        step = step or self.step()
        self._profiles[self._places(())] = step.profile
        row = None if steps is None else STRATEGIES[steps.name]
        # a technique that shards parameters does not average full gradients
        averages = row is None or not row.data_axis
        names = STRATEGIES if steps is None else works_with(steps.name)
        looked, failed = looked_at(self, [one for one in names if not (self.decoders and one in BESIDE_NO_DECODER)])
        refused = refused_techniques(self.module, step, values=self._trains)
        found = ProfiledStep(
            profile=step.profile,
            chain=step.chain,
            own_checkpoints=step.own_checkpoints,
            rates=rates,
            gradient_sizes=gradient_sizes(self.module.parameters()) if averages else (),
            partial_sizes=() if self.axis is None else self._partial_sizes(),
            requested=request.requested,
            host_memory=request.host_memory,
            host_room=request.host_room,
            facts=first_of(looked, facts_of_step(self.module, step)),
            refused=first_of(self._conflicting(), refused, failed),
            notes=tuple(self._notes(step)),
        )
        if self.decoders:
            found = stage_search().without(found, "strata of a decoder are split by 'strata'")
        if steps is None or row is None:
            shared = statistics_bytes(self.module)
            return replace(found, statistics_bytes=shared, counted=self._counted_with)
        others = {name: why_not_with(steps.name, name) for name in PREDICTIONS if name not in works_with(steps.name)}
        found = replace(
            found,
            refused=first_of(others, found.refused),
            sent_seconds=steps.sent_seconds(rates.links),
            averages=averages,
            notes=(*found.notes, *steps.notes, *steps.sent_notes()),
        )
        return stage_search().without(found, why_not_with(steps.name, STAGED))

    def _conflicting(self) -> dict[str, str]:
        """Techniques that conflict with those of the decoder, with reasons."""
        own = {rule.strategy for rule in self._base}
        # one of strata and of blocks applies to blocks here
        others = [name for name in PREDICTIONS if STRATEGIES[name].choice is None]
        found = {name: next(conflicts({*own, name}), "") for name in others}
        return {name: why for name, why in found.items() if why}

    def step(self, rows: int | None = None) -> CountedStep:
        """Return the step for a batch of `rows`, by default of the run's size; cached for each size."""
        if rows not in self._counted_steps:
            self._counted_steps[rows] = self.step_with((), rows)
        return self._counted_steps[rows]

    def step_with(self, rules: Sequence[Rule], rows: int | None = None) -> CountedStep:
        """Count the step with rules installed, and undo them; raises an AmpError if they do not support it."""
        found = self.run_with(rules, partial(count_step, names=self._blocks, rates=self.operator_rates()), rows)
        return replace(found, chain=self._outside(found.chain)) if self.decoders else found

    def _outside(self, chain: Chain) -> Chain:
        """Mark blocks as fixed that belong to a decoder, or that save nothing except their inputs."""
        saving = {block.fqn for block in chain.blocks if block.saved_bytes > 0}
        fixed = dict.fromkeys((b.fqn for b in chain.blocks if b.fqn not in saving), "it keeps nothing but its inputs")
        fixed |= {block.fqn: block.fixed for block in chain.blocks if block.fixed}
        fixed |= {b.fqn: INSIDE for b in chain.blocks if any(overlap(b.fqn, name) for name in self.decoders)}
        blocks = tuple(replace(b, fixed=fixed.get(b.fqn, b.fixed)) for b in chain.blocks)
        return replace(chain, blocks=blocks)

    def run_with(self, rules: Sequence[Rule], count: Callable[..., T], rows: int | None = None) -> T:
        """Return `count(module, batch, batch_size=, run_settings=)` while rules are installed."""
        size = self._batch_size if rows is None else rows
        names = ", ".join(dict.fromkeys(rule.strategy for rule in rules))
        batch = "" if size is None else f", a batch of {size:,}"
        counting(f"{f'with {names}' if names else 'as it is'}{batch}")
        with ExitStack() as undo:
            if self._steps is not None:
                # rules are installed around the steps, as in a fit
                undo.callback(self._steps.put(self.module))
            # rules are installed on the module, not on its counted copy, so that later counts reuse chunk plans
            whole = rules_in_order((*self._base, *rules))
            installed = install_rules(self.module, whole, self.axis, chunks=self._chunk_plans)
            undo.callback(installed.undo)
            run_settings = replace(
                self._run_settings, reducer=partial(zeros_for_parts, installed.partial_names(self.module))
            )
            try:
                return count(self.module, self._batch, batch_size=size, run_settings=run_settings)
            except AmpError:
                raise
            except Exception as error:
                raise ModelError(
                    f"cannot profile {type(self.module).__name__!r}, an unexpected error occurred:"
                    f" {type(error).__name__}: {error}; please report it with its traceback"
                ) from error

    def operator_rates(self) -> OperatorRates:
        """Return the device rates that determine the times of operators."""
        return OperatorRates.of(self._rates)

    @property
    def launches(self) -> bool:
        """Whether the device has memory of its own, apart from the host's."""
        return self._rates.launches

    def _counted_with(self, rule: Rule) -> CountedStep | str:
        key = rule.fqn, rule.spec
        if key not in self._steps_with:
            try:
                step = self._steps_with[key] = self.step_with([rule])
                self._counts[key,] = step.profile
            except AmpError as error:
                self._steps_with[key] = str(error)
        return self._steps_with[key]

    def _notes(self, step: CountedStep) -> Iterator[str]:
        if step.profile.noted:
            yield Explanation(
                "the step was counted for the first batch; its shapes or branches depend on values, for which two steps"
                f" of a copy ran, and another batch, or other random draws, can take more: {step.profile.reason}"
            )
        elif step.profile.reason:
            yield Explanation(f"the step was measured with real values before it was planned: {step.profile.reason}")
        if step.profile.own_reads:
            yield Explanation(
                f"the step reads buffers that it changes, and was counted with their values in its first batches: a"
                f" later one can take more ({', '.join(step.profile.own_reads)})"
            )
        if step.profile.reads is not None:
            yield Explanation(
                f"the values of {', '.join(map(repr, step.profile.reads.names))} in the batch may decide what the step"
                " computes: this is the peak for the first batch, and another one can take more, such as one with"
                " padding; on a CPU a budget that was named is held there"
            )
        if step.decides and step.chain.blocks:
            yield (
                "the step draws random numbers in Python: if they decide which blocks run, as in stochastic depth, this"
                " is the peak of the largest of several draws, and another one can take more"
            )
        yield from map(Explanation, step.profile.foreseen)
        frozen = sum(p.nbytes for p in self.module.parameters() if not p.requires_grad)
        if frozen and self._run_settings.unfreezes:
            yield Explanation(
                f"{format_bytes(frozen)} of parameters are frozen, and counted as if they were trained, for a callback"
                " unfreezes some"
            )
        elif frozen:
            yield Explanation(
                f"{format_bytes(frozen)} of parameters are frozen, and counted so; on a CPU a budget that was named is"
                " held where they are unfrozen later"
            )

    def with_steps(self, steps: DrySteps) -> "StepOfModule":
        """Return the same step with the steps of a technique instead of the module's."""
        return self._like(self._take_batch, self._run_settings, steps=steps)

    def of_batch(self, batch: Any) -> "StepOfModule":
        """Return the step of a batch of a run that has begun, which is on its device."""
        return self._like(lambda: batch, replace(self._run_settings, moved=True), steps=self._steps)

    def _like(self, take_batch: Callable[[], Any], run_settings: RunSettings, **others: Any) -> "StepOfModule":
        others |= {"run_settings": run_settings, "batch_size": self._batch_size, "trains": self._trains}
        return StepOfModule(self.module, take_batch, **others)

    def with_decoder(self, rules: Sequence[Rule], axis: DryAxis | None) -> "StepOfModule":
        """Return the same step, of which a batch was taken, with rules of its decoder as one rank of a model axis."""
        assert self._steps is None, "steps that are replaced run no decoder"
        found = self._like(lambda: self._batch, self._run_settings, on_top_of=rules, axis=axis)
        found._batch, found._rates = self._batch, self._rates
        # the step of a plan is looked up here
        found._profiles = self._profiles
        return found

    def _partial_sizes(self) -> tuple[int, ...]:
        """Return the bytes of every gradient of which a rank of the model axis has a part."""
        installed = install_rules(self.module, rules_in_order(self._base), self.axis)
        installed.undo()
        return gradient_sizes(installed.partial)

    def take(self, rates: Rates) -> None:
        """Read one batch, as `profiled` does, before `count` and `step_with`."""
        self._rates = rates
        self._batch = self._take_batch()
        # cached counts belong to the previous batch
        self._counts, self._counted_steps, self._steps_with = {}, {}, {}
        self._answers.clear()

    def take_once(self, rates: Rates) -> None:
        """Read a batch unless one was read, and not freed since."""
        if self._batch is None:
            self.take(rates)

    def rows(self, rates: Rates) -> int | None:
        """Return the length of the first batch; None if it cannot be read, or its tensors have none in common."""
        with suppress(AmpError):
            self.take_once(rates)
            return length_of(self._batch)
        return None

    def shapes(self) -> list[Shape]:
        """Return the shapes of the batch; none on a rank that has read none."""
        return shapes_of(self._batch)

    def forget(self) -> None:
        """Free the batch; counting is not possible afterwards."""
        self._batch = None
        self._answers.clear()

    def count(self, rules: Sequence[Rule]) -> ModuleProfile:
        """Profile the step with rules installed, in any order, and undo them; cached by rules. Requires `take` before.

        Raises:
            AmpError: A technique does not support the module, or the step fails with it.
        """
        key = changes_of(rules_in_order(rules))
        if key not in self._counts:
            self._counts[key] = self.run_with(rules, profile_module)
        self._profiles[self._places(rules)] = self._counts[key]
        return self._counts[key]

    def as_planned(self, plan: Plan) -> ModuleProfile | str:
        """Return the step with a plan's rules as it was counted, or why it was not."""
        if self.decoders:
            own = tuple(rule for rule in plan.rules if rule.strategy != "S1")
            found = self.profile_with(own) if counted_rules(plan) == own else None
            return OF_DECODER if found is None or found.larger_peak_bytes > plan.training_bytes else found
        rules = [rule for rule in plan.rules if rule.strategy in PREDICTIONS]
        uncounted = {rule.strategy: None for rule in rules if not PREDICTIONS[rule.strategy].counted}
        if plan.stages or uncounted:
            return CLOSED_FORMS.format(", ".join(uncounted) or STAGED)
        if not rules:
            return self.profile_with(()) or self.step().profile
        try:
            return self.count(rules)
        except AmpError as error:
            return f"its step was not counted: {error}"

    def count_own(self, rules: Sequence[Rule], rates: Rates) -> ModuleProfile:
        """Profile the step with rules, as `count`, on a rank that may have read no batch yet."""
        self.take_once(rates)
        return self.count(rules)

    def profile_with(self, rules: Sequence[Rule]) -> ModuleProfile | None:
        """Return the last profile of `profiled` or `count` with rules for the same modules; None without one."""
        return self._profiles.get(self._places(rules))

    def _places(self, rules: Sequence[Rule]) -> frozenset[tuple[str, str]]:
        return frozenset((rule.fqn, rule.strategy) for rule in (*self._base, *rules))
