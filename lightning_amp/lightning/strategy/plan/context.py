"""Read what the plans of one run depend on: its data, its step, rates, budget and speeds."""

import copy
from dataclasses import replace
from functools import cached_property

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from lightning_amp.costs.device_rates import Rates
from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.costs.profiled_step import ProfiledStep
from lightning_amp.errors import AmpError, PlanError, ShardError
from lightning_amp.footprint.module_profile import ModuleProfile
from lightning_amp.lightning.profiling.cells_per_step import Cells, cells_per_step
from lightning_amp.lightning.profiling.evaluation_of_module import EvaluationOfModule
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.lightning.profiling.within_budget import step_beside_decoder
from lightning_amp.lightning.strategy.hardware import ThisRank, memory_in, rates_in
from lightning_amp.lightning.strategy.plan.measured_speeds import measured_speeds
from lightning_amp.lightning.strategy.plan.pipeline_run import without_stages
from lightning_amp.lightning.strategy.plan.read_run import read_run
from lightning_amp.lightning.strategy.plan.same_plan import make_sure_of_same_plan
from lightning_amp.lightning.strategy.request import Request
from lightning_amp.lightning.strategy.stepped import dry_steps
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.time.step_seconds import on_device
from lightning_amp.profiling.profile import Profile
from lightning_amp.techniques.table import (
    PREDICTIONS,
    of_blocks_alone,
    parse_strategies,
)


class PlanningContext:
    """The planner inputs of one run: read when the first one is made, on rank 0, and kept for the others.

    Args:
        request, here, trainer: What is asked, by which rank, in which run.
        cells: What `cells_per_step` gave, where it was called already; else all ranks call it here.
        trained: The plan of the run before.
    """

    def __init__(
        self,
        request: Request,
        here: ThisRank,
        trainer: pl.Trainer,
        *,
        cells: Cells | None = None,
        trained: Plan | None = None,
    ) -> None:
        self.request, self.here, self.trainer = request, here, trainer
        self._cells, self._compared = cells_per_step(trainer) if cells is None else cells, cells is not None
        bounded = request.device_memory is not None and request.if_unfit == "refuse"
        limit = self.budget if bounded else None
        fits = trainer.state.fn == TrainerFn.FITTING
        self.steps = dry_steps(request, here, None if fits else trained)
        self.step = StepOfModule.of(trainer, limit_bytes=limit, steps=self.steps)
        ids = () if request.strategies is None else parse_strategies(request.strategies)
        self.blocks_outside = {
            name for name in ids if name == "chunk" or (name == "recompute" and of_blocks_alone(ids))
        }
        """What was requested of blocks outside, if there is a decoder."""
        self.outside = (
            StepOfModule.of(trainer, decoder=True, limit_bytes=limit) if self.blocks_outside else None
        )
        # later in a run its blocks stay
        chooses = request.chooses and request.device_memory is not None and not self._compared
        self.beside = step_beside_decoder(trainer) if chooses else None
        """The step that must fit the budget, with blocks outside of the decoder."""
        before = () if trained is None or trainer.state.fn == TrainerFn.FITTING else trained.rules
        self.in_chunks = tuple(rule for rule in before if rule.strategy == "chunk")
        """Rules by which an evaluation runs as the fit before it."""
        budgeted = request.device_memory is not None and not self.in_chunks
        self.evaluation = EvaluationOfModule.of(trainer) if budgeted else None

    @cached_property
    def read(self) -> tuple[Profile, ModelShape, list[str]]:
        """Profile and shape of the run, and what a prediction leaves out."""
        profile, shape, notes = read_run(
            self.request, self.trainer, self._cells, self.seen[0], self.not_profiled
        )
        return profile, on_device(shape, self.rates[0]), notes

    @cached_property
    def seen(self) -> tuple[ProfiledStep | None, str]:
        """The step of a module without a decoder, None where it has one or cannot be profiled, and why it cannot."""
        if self.step is None:
            return None, ""
        try:
            shared = self.here.n_ranks > 1 and self.request.share_batch_statistics
            found = self.step.profiled(self.rates[0], requested=self.request.specs, shared_statistics=shared)
            return without_stages(found, self.here.device, self.request, self.trainer), ""
        except PlanError:
            # it was to run with values, and there was not enough memory for that
            raise
        except AmpError as error:
            if isinstance(error.__cause__, ShardError):
                # an operator of the step has no parts, and would fail in the run too
                raise error.__cause__ from None
            return None, str(error)

    @property
    def not_profiled(self) -> str:
        """Why the peak is not known; "" where the step was profiled, or is that of a decoder."""
        return self.seen[1] and f"the step was not profiled, and its peak is not known: {self.seen[1]}"

    @cached_property
    def rates(self) -> tuple[Rates, list[str]]:
        """What a device reaches, and a note where it is not known."""
        return rates_in(self.request, self.here, str(self.trainer.precision))

    @cached_property
    def memory(self) -> tuple[int, ...]:
        """Bytes of every device; one number where all have as many."""
        return memory_in(self.request, self.here)

    @property
    def budget(self) -> int:
        """Bytes of the smallest device."""
        return min(self.memory)

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """Of all ranks, by that of the fastest; none where they are taken as equal. All ranks ask for it first."""
        if self.request.device_speeds is None:
            return ()
        return measured_speeds(self.here.device, self.here.n_ranks)

    def within(self, n_bytes: int) -> "PlanningContext":
        """The same, with fewer bytes."""
        fewer = copy.copy(self)
        fewer.request = replace(self.request, device_memory=f"{n_bytes}B")
        vars(fewer).pop("memory", None)
        return fewer

    def predicted_step(self, plan: Plan) -> ModuleProfile | None:
        """The profile of a plan's step; None where it was not counted, as of techniques whose bytes are added up."""
        rules = tuple(rule for rule in plan.rules if rule.strategy in PREDICTIONS)
        if self.step is None or not all(PREDICTIONS[rule.strategy].counted for rule in rules):
            return None
        return self.step.profile_with(rules)

    def forget_step(self) -> None:
        """Let go of the batch that a step was profiled with; what was seen of it stays."""
        if self.step is not None:
            self.step.forget()
        self.step = None

    def compare(self) -> None:
        """Make sure, once in a run, that all ranks would make the same plans; a collective, may raise PlanError."""
        if not self._compared:
            make_sure_of_same_plan(self.request, self.here, getattr(self.trainer, "datamodule", None))
        self._compared = True
