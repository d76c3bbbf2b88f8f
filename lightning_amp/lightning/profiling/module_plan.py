"""The plan of a module's step, with the largest batch, the largest length and the fewest devices that fit."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache, partial
from html import escape
from typing import Any

from lightning.pytorch import LightningModule

from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.errors import ModelError, PlanError
from lightning_amp.footprint.copies.other_lengths import length_of_dim, with_length
from lightning_amp.footprint.module_profile import ModuleProfile
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.planning.modules.finish_plan import rules_of
from lightning_amp.planning.modules.min_memory_plan import fewest_ranks
from lightning_amp.planning.modules.plan_module import counted_draft
from lightning_amp.planning.modules.questions import Answers, CountAt, SeenAt, answers, largest_batches, largest_planned
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.reports.plan_report import plan_report
from lightning_amp.planning.reports.step_report import step_report
from lightning_amp.techniques.table import STRATEGIES
from lightning_amp.techniques.technique import function_at

COUNTED_ON = (1, 2, 4, 8, 16)
"""Numbers of devices on which a plan is made to find the fewest: each takes counts of the step."""


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
        split: Technique of the plan that replaces the training step, or ""; the questions are then not supported.
        on_devices: Function that plans the step on another number of devices.
        planned_at: Function that plans a module with a decoder for a batch size, or for another batch; else None.
        unlike: Whether the devices differ in memory or speed; the questions are then not supported.
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
    planned_at: Callable[..., Plan] | None = field(default=None, repr=False)
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
        if (planned := self.planned_at) is not None:
            return largest_planned(lambda n: planned(n).fits is True, start)
        with self.counting():
            most = largest_batches(*self._counts(self.at), start=start, budget=budget, **self._question)
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

        size, planned = self.profile.batch_size, self.planned_at
        try:
            if planned is not None:
                return largest_planned(lambda n: planned(size, with_length(self.batch, start, n)).fits is True, start)
            with self.counting():
                most = largest_batches(*self._counts(at), start=start, budget=budget, **self._question)
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

        Plans on 1, 2, 4, 8 and 16 devices are counted, also those that split samples; the others are predicted. A
        module with a decoder is planned on these numbers alone.

        Raises:
            PlanError: There is no budget, or the memory on more devices cannot be computed.
        """
        budget = self._budget("fewest_devices")
        if self.planned_at is not None:
            planned = self._on_fewest(COUNTED_ON)
            return None if planned is None else planned.mesh.ranks
        with self.counting():
            found = fewest_ranks(self.at(self.profile.batch_size)[1], budget)
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
        # with a decoder each batch size takes a plan, which takes seconds
        if budget is None or self.unlike or self.split or self.planned_at is not None:
            return None
        with self.counting():
            seen = self.at(self.profile.batch_size)[1]
            # each further number of devices takes seconds
            own = self.plan.mesh.ranks
            on_fewest = partial(self._on_fewest, (own, 2 * own))
            return answers(*self._counts(self.at), seen, budget=budget, on_fewest=on_fewest, **self._question)

    @property
    def _question(self) -> dict[str, Any]:
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
