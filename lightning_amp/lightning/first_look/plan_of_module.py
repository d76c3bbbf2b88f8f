"""Plan any module by one batch, without a run: for `lightning_amp.plan` and for `lightning-amp plan --config`."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any

from lightning.pytorch import LightningModule

from lightning_amp.errors import ModelError, PlanError
from lightning_amp.footprint.inner_run import Around
from lightning_amp.footprint.module_profile import PARAMETERS, ModuleProfile
from lightning_amp.lightning.first_look.dry_steps import DrySteps, with_spec
from lightning_amp.lightning.first_look.step_of_module import StepOfModule
from lightning_amp.parallel.describe_module import describe
from lightning_amp.planning.modules.leanest import fewest_ranks, with_techniques_of
from lightning_amp.planning.modules.plan_module import told_apart
from lightning_amp.planning.modules.plan_step import Counted, plan_step
from lightning_amp.planning.modules.questions import answers, largest_batch
from lightning_amp.planning.modules.seen import Seen
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.plan.specs import FullyShard
from lightning_amp.planning.plan.strategies import STRATEGIES, parse_strategies
from lightning_amp.planning.policies.build_rules import without_shared_statistics
from lightning_amp.planning.reports.step_report import step_report
from lightning_amp.planning.time.device_rates import Rates
from lightning_amp.quantities import parse_bytes


@dataclass(frozen=True, kw_only=True)
class ModulePlan:
    """The plan of a module's training step; `print` shows its report.

    Attributes:
        plan: As `AMPStrategy(plan=...)` takes it.
        profile: The step as it is, on one device.
    """

    plan: Plan
    profile: ModuleProfile
    _asked: "StepRequest" = field(repr=False)
    _seen: dict[int | None, Seen] = field(repr=False)
    _step: StepOfModule = field(repr=False)

    def report(self) -> str:
        """What holds the peak, what helps, what does not, and what is predicted, as text of at most 80 columns."""
        module = self._asked.module
        classes = {fqn: type(child).__name__ for fqn, child in module.named_modules()}
        return step_report(self.plan, self.profile, name=classes[""], classes=classes)

    __str__ = report

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.report())}</pre>"

    def largest_batch(self) -> int:
        """The largest number of samples of one batch that fits the budget with the plan's techniques.

        Of each technique there is as much as the batch needs; 0 where not even one sample fits.

        Raises:
            PlanError: There is no budget, or it is not known how the step depends on the number of samples.
        """
        budget, start = self._budget("largest_batch"), self.profile.batch_size
        if start is None:
            raise PlanError(
                f"the largest batch of {type(self._asked.module).__name__!r} was asked for, and the tensors of its"
                " batch have no length in common; give a batch whose tensors have one sample in a row"
            )
        return largest_batch(
            lambda n: with_techniques_of(self.plan, self._seen_at(n)).peak_bytes, budget, start
        )

    def fewest_devices(self) -> int | None:
        """The fewest devices on which the batch fits the budget, by any technique; None where there are none.

        Raises:
            PlanError: There is no budget, or it is not known what more devices would hold.
        """
        found = fewest_ranks(self._seen_at(self.profile.batch_size), self._budget("fewest_devices"))
        return None if found is None else found.ranks * found.model

    def answers(self) -> list[str]:
        """Both, as sentences, with and without techniques; none where there is no budget."""
        budget, steps = self.plan.budget_bytes, self._asked.steps
        if budget is None or steps is not None:
            return []
        seen, mesh = self._seen_at(self.profile.batch_size), self.plan.mesh
        return answers(self._seen_at, seen, ranks=mesh.data * mesh.model, budget=budget)

    def code(self) -> str:
        """What the blocks run that the plan computes in chunks, as Python."""
        return self._step.code(self.plan.rules)

    def _seen_at(self, n: int | None) -> Seen:
        if n not in self._seen:
            self._seen[n] = self._asked.look(self._asked.step_at(n))
        return self._seen[n]

    def _budget(self, question: str) -> int:
        if self.plan.budget_bytes is None:
            raise PlanError(f"{question} was asked of a plan without a budget; give device_memory='24GiB'")
        if self._asked.steps is not None:
            raise PlanError(
                f"{question} was asked of a plan with {self._asked.steps.name!r}, of which it is not known; plan batches"
                " of several lengths, or on several numbers of devices"
            )
        return self.plan.budget_bytes


@dataclass(frozen=True, kw_only=True)
class StepRequest:
    """Whose step is planned, and how it is counted.

    Attributes:
        module, batch, around: As of `StepOfModule`.
        rates: Of the device.
        steps: Of a technique with steps of its own.
        fsdp: How it is to split.
        shared_statistics: Whether ranks exchange the statistics of batches.
    """

    module: LightningModule
    batch: Any
    around: Around
    rates: Rates
    steps: DrySteps | None
    fsdp: FullyShard | None
    shared_statistics: bool

    def step_at(self, n: int | None) -> StepOfModule:
        """The step of a batch of some length."""
        return StepOfModule(
            self.module, lambda: self.batch, around=self.around, batch_size=n, steps=self.steps
        )

    def look(self, step: StepOfModule) -> Seen:
        """Count it."""
        return step.seen(self.rates, fsdp=self.fsdp, shared_statistics=self.shared_statistics)


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
        module, batch, around, batch_size: As of `StepOfModule`.
        rates: Of the device.
        request: `devices`, `device_memory`, `policy`, `strategies` and `model_parallel_size`, as of `plan_step`.
        options: Of AMPStrategy, for its techniques; what is None was not given.

    Raises:
        AmpError: The step cannot be counted, or nothing can be planned as asked.
    """
    if not isinstance(module, LightningModule):
        raise ModelError(
            f"a plan was asked for of a {type(module).__name__!r} and a batch; give a LightningModule with a batch, or"
            " what lightning_amp.profile returns without one"
        )
    request = dict(request)
    _, named = told_apart(request["strategies"], policy=request["policy"])
    size, memory, devices = (request[name] for name in ("model_parallel_size", "device_memory", "devices"))
    given = argparse.Namespace(**{name: value for name, value in options.items() if value is not None})
    given.model_parallel_size = size
    of_run = {"run_ranks": devices, "budget": None if memory is None else parse_bytes(memory)}
    ids = parse_strategies(request["strategies"] or "S1")
    steps = DrySteps.asked(ids, given, devices if size == "auto" else size, **of_run)
    if steps is not None:
        steps.check_ranks()
    fsdp = None
    if "fsdp" in (named or ()):
        # the configuration's may be of other strategies
        fsdp = FullyShard(shard_ranks=options.get("fsdp_ranks"), offload=bool(options.get("fsdp_offload")))
    share = options.get("share_batch_statistics") is not False
    asked = StepRequest(
        module=module,
        batch=batch,
        around=around,
        rates=rates,
        steps=steps,
        fsdp=fsdp,
        shared_statistics=share and devices > 1,
    )
    step = asked.step_at(batch_size)
    seen = asked.look(step)
    if not around.prepared:
        _refuse_late_layers(module, seen.profile)
    if steps is not None and STRATEGIES[steps.name].data_axis:
        # of its grid, which may have been chosen
        request["model_parallel_size"] = steps.ranks
    made = plan_step(
        Counted(
            seen=seen,
            shape=replace(describe(module, batch_size=seen.profile.batch_size or 1), profiled=True),
        ),
        **request,
        micro_batches=options.get("micro_batches"),
        schedule=options.get("schedule"),
        count=step.count,
    )
    made = with_spec(made, steps, "")
    if not share:
        made = without_shared_statistics(made)
    known = {seen.profile.batch_size: seen}
    return ModulePlan(plan=made, profile=seen.profile, _asked=asked, _seen=known, _step=step)


def _refuse_late_layers(module: LightningModule, profile: ModuleProfile) -> None:
    """Refuse, with a ModelError, a module whose copy has made layers that it does not have itself."""
    own = {id(tensor): tensor.nbytes for tensor in (*module.parameters(), *module.buffers())}
    if profile.by_kind[PARAMETERS] > sum(own.values()):
        raise ModelError(
            f"a plan was asked for of {type(module).__name__!r}, which makes layers in `setup` or `configure_model`, and"
            " these were not called; call them before: module.configure_model()"
        )
