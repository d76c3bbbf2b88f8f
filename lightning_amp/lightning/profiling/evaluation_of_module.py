"""Predict the memory of validate, test or predict for a module without a decoder, and choose chunks for a budget.

The validation of a fit is predicted too: beside its step there is the optimizer state of training.

One batch is read as in the run, and the module's step runs on a copy with fake tensors and without gradients. Only the
outermost modules that the step calls can run in chunks. Modules that exceed the budget get a rule with the bytes that
remain within the budget at their call. The step is counted again with these rules for the prediction.

Known limits: the prediction is for the length of the first batch; the data module's batch hooks are not called; results
that the Trainer keeps, such as predictions on a CPU, are not counted; computations outside modules are not chunked.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from lightning_amp.costs.device_rates import Rates
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import AmpError, DataError, ModelError
from lightning_amp.footprint.bounded_step import BoundedStep, why_values
from lightning_amp.footprint.copies.fake_copy import copy_of, fake_batch, length_of, resized, without_values
from lightning_amp.footprint.copies.guest import as_guest
from lightning_amp.footprint.copies.noted_values import Answers, NoteTaker
from lightning_amp.footprint.copies.quick_fakes import QuickFakes
from lightning_amp.footprint.copies.take_notes import copy_with_values, notes_of, room_of_pass
from lightning_amp.footprint.live_bytes import LiveBytes, has_storage
from lightning_amp.footprint.profile_module import lacks_values
from lightning_amp.installing.install import install_rules, overlap
from lightning_amp.lightning.profiling.loaders import each, example_batch, loaders_of, read_streams_ahead
from lightning_amp.planning.plan.plan import Explanation, Plan, Validation
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.contract.protocol import find_decoders
from lightning_amp.techniques.table import EVALUATED, evaluated_within

STEPS = {
    TrainerFn.VALIDATING: ("validation_step", "validate_loop"),
    TrainerFn.TESTING: ("test_step", "test_loop"),
    TrainerFn.PREDICTING: ("predict_step", "predict_loop"),
}
"""Method of the module, and loop of the Trainer that calls it."""
COARSE = 16
"""Parts of a batch to which the largest batch in chunks is known."""


class EvaluationOfModule:
    """The step of an evaluation: a method of the module, and a function for each loader that returns a batch for it.

    Loaders are read one after the other, each by a step; several that are read together count as one.
    """

    def __init__(self, trainer: pl.Trainer, step: str, takes: Sequence[Callable[[], Any]]) -> None:
        self._trainer, self._step, self._takes = trainer, step, takes
        self._late: Any = None
        self._answers: dict[tuple[int, int | None], Answers] = {}

    @classmethod
    def of(cls, trainer: pl.Trainer) -> "EvaluationOfModule | None":
        """Return the evaluation of a Trainer; None in a fit or with a decoder. All ranks must call it (loaders_of)."""
        if trainer.state.fn not in STEPS or find_decoders(trainer.lightning_module):
            return None
        step, loop = STEPS[trainer.state.fn]
        return cls._of(trainer, step, getattr(trainer, loop))

    @classmethod
    def of_fit(cls, trainer: pl.Trainer) -> "EvaluationOfModule | None":
        """Return the validation of a fit; None without one, or with a decoder. All ranks must call it."""
        module = trainer.lightning_module
        validates = trainer.limit_val_batches and is_overridden("validation_step", module)
        if trainer.state.fn != TrainerFn.FITTING or not validates or find_decoders(module):
            return None
        loop = trainer.fit_loop.epoch_loop.val_loop
        return cls._of(trainer, "validation_step", loop) if loop._data_source.is_defined() else None

    @classmethod
    def _of(cls, trainer: pl.Trainer, step: str, loop: Any) -> "EvaluationOfModule":
        loaders, why = loaders_of(trainer, loop)
        together = isinstance(loaders, CombinedLoader) and loaders._mode != "sequential"
        in_turn = [loaders] if together else each(loaders) or [None]
        for loader in in_turn:
            read_streams_ahead(loader)
        return cls(trainer, step, [partial(example_batch, loader, why) for loader in in_turn])

    def within(self, budget: int, made: Plan, rates: Rates, notes: Sequence[str]) -> tuple[Plan, tuple[Rule, ...]]:
        """Return the plan with the bytes of this step and `notes`, and rules that run it in chunks within the budget.

        Chunks are chosen by the rates of the device. If the budget cannot be met, they use the least memory possible.

        Raises:
            AmpError: No batch can be read, the step fails on fake tensors, or a module cannot run in chunks.
        """
        batches = self._batches()
        held, whole, peak, rules = self._chunked(batches, budget, rates)
        without = f": {format_bytes(whole)} without chunks" if rules else ""
        how = f"and its shapes or branches depend on values: {self.noted}" if self.noted else "without values"
        note = Explanation(f"{self._step} was counted with the first batch, {how}{without}")
        plan = replace(
            made,
            evaluates=self._step,
            batch_size=length_of(batches[0].tensors) or made.batch_size,
            predicted_base_bytes=held,
            predicted_peak_bytes=peak,
            # notes on training steps do not apply
            notes=(*notes, note),
        )
        return plan, rules

    def beside_training(self, made: Plan, kept_bytes: int, rates: Rates) -> Plan:
        """Return a fit's plan with its validation: its peak, and rules that run it in chunks within the budget.

        Args:
            kept_bytes: What training keeps during validation: parameters, buffers, optimizer state.

        Raises:
            AmpError: As in `within`.
        """
        assert made.budget_bytes is not None, "the plan of a run has a budget"
        batches = self._batches()
        module: Any = self._trainer.lightning_module
        own = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _own_tensors(module)}
        more = max(0, kept_bytes - sum(own.values()))
        installed = tuple(rule for rule in made.rules if rule.strategy == EVALUATED)
        try:
            _, _, peak, rules = self._chunked(batches, made.budget_bytes - more, rates, installed)
            why = ""
        except AmpError as error:
            # chunks are not possible, or not within the budget; or the step cannot be counted at all
            peak, rules, why = self._count_all(batches, installed)[1], (), str(error)
        # of the loader that needs most
        worst = (
            max(batches, key=lambda batch: self._count(batch, (*installed, *rules))[1])
            if len(batches) > 1
            else batches[0]
        )
        largest = None
        if peak + more > made.budget_bytes and made.fits:
            largest = self._largest_batch(worst, made.budget_bytes - more, (*installed, *rules))
        found = Validation(
            peak_bytes=peak + more,
            training_bytes=made.predicted_peak_bytes,
            batch_size=length_of(worst.tensors),
            largest_batch=largest,
            loader=worst.loader if len(self._takes) > 1 else None,
            no_chunks=why,
            rules=rules,
        )
        return replace(made, validation=found, predicted_peak_bytes=max(made.predicted_peak_bytes, found.peak_bytes))

    @property
    def noted(self) -> str:
        """Why the step was counted with notes of what values decide; "" if it needs none."""
        return next((answers.why for answers in self._answers.values()), "")

    def take_late(self, batch: Any) -> None:
        """Use a batch of the first loader, which could not be read before; others are counted if they can be."""
        self._late = batch

    def _batches(self) -> list["_Batch"]:
        self._answers.clear()
        if self._late is None:
            taken = [(loader, take()) for loader, take in enumerate(self._takes)]
        else:
            taken = [(0, self._late)]
            for loader, take in enumerate(self._takes[1:], 1):
                with suppress(DataError):
                    taken.append((loader, take()))
        return [_Batch(loader, self._trainer.precision_plugin.convert_input(batch)) for loader, batch in taken]

    def _chunked(
        self, batches: Sequence["_Batch"], budget: int, rates: Rates, installed: Sequence[Rule] = ()
    ) -> tuple[int, int, int, tuple[Rule, ...]]:
        """Return the bytes before the step, its peak without chunks and with them, and their rules, if needed."""
        calls: dict[str, tuple[int, int]] = {}
        held, whole = self._count_all(batches, installed, calls)
        rules = tuple(
            Rule(
                fqn=fqn,
                spec=evaluated_within(max(1, budget - before), rates),
                strategy=EVALUATED,
                why=f"{format_bytes(most)} are alive within it in {self._step}, of {format_bytes(max(0, budget))}",
                saves_bytes=most - budget,
            )
            for fqn, (before, most) in calls.items()
            if most > budget and not any(overlap(fqn, rule.fqn) for rule in installed)
        )
        peak = whole
        if rules and whole > budget:
            with warnings.catch_warnings():
                # the plan reports chunks that exceed the budget
                warnings.simplefilter("ignore")
                _, peak = self._count_all(batches, (*installed, *rules))
        return held, whole, peak, rules

    def _largest_batch(self, batch: "_Batch", budget: int, rules: Sequence[Rule]) -> int | None:
        """Return the most rows of a batch whose step stays within the budget; 0 for none, None if it has no length.

        In chunks, each number of rows is planned anew, so that the result is only exact to a part of the batch.
        """
        rows = length_of(batch.tensors)
        if rows is None:
            return None
        # fits and does not fit
        least, most = 0, rows
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            while most - least > (max(1, rows // COARSE) if rules else 1):
                middle = (least + most) // 2
                _, peak = self._count(batch, rules, rows=middle)
                least, most = (middle, most) if peak <= budget else (least, middle)
        return least

    def _count_all(
        self, batches: Sequence["_Batch"], rules: Sequence[Rule], calls: dict[str, tuple[int, int]] | None = None
    ) -> tuple[int, int]:
        """Return the most bytes of the steps of all loaders, as `_count`."""
        counts = [self._count(batch, rules, calls) for batch in batches]
        return max(held for held, _ in counts), max(peak for _, peak in counts)

    def _count(
        self,
        batch: "_Batch",
        rules: Sequence[Rule],
        calls: dict[str, tuple[int, int]] | None = None,
        *,
        rows: int | None = None,
    ) -> tuple[int, int]:
        """Return the bytes before the step and its peak; `calls` receives bytes before, and peak of, each module.

        A step that needs values gets what they decide in a pass with values (noted_values.py).
        """
        module, key = self._trainer.lightning_module, (batch.loader, rows)
        answers = self._answers.get(key)
        try:
            return self._on_fakes(batch, rules, calls, rows, answers)
        except AmpError:
            raise
        except Exception as error:
            failed = error
        if answers is None and not lacks_values(module):
            answers = notes_of(module, why_values(failed), partial(self._with_values, batch, rows))
        if answers is not None and key not in self._answers:
            self._answers[key] = answers
            return self._count(batch, rules, calls, rows=rows)
        raise ModelError(
            f"the memory of {self._step} of {type(module).__name__!r} cannot be counted: on tensors "
            f"without values it fails with {type(failed).__name__}: {failed}"
        ) from failed

    def _on_fakes(
        self,
        batch: "_Batch",
        rules: Sequence[Rule],
        calls: dict[str, tuple[int, int]] | None,
        rows: int | None,
        answers: Answers | None,
    ) -> tuple[int, int]:
        fake = QuickFakes(valid=True)
        twin: Any = copy_of(self._trainer.lightning_module, fake).eval()
        install_rules(twin, rules)
        live, given = LiveBytes(), fake_batch(batch.tensors, fake, rows)
        peak = _Outermost(twin, live, calls) if calls is not None else None
        with ExitStack() as stack:
            for context in (as_guest(twin), fake, without_values()):
                stack.enter_context(context)
            if answers is not None:
                stack.enter_context(answers.given())
                answers.restart()
            given = _moved(twin, given, self._trainer.strategy.root_device)
            live.watch([*twin.parameters(), *twin.buffers(), given])
            held = live.current
            with live:
                self._run(twin, given, batch.loader)
        # `_Outermost` resets the peak at every call, so `live` has only the peak after the last one
        return held, live.peak if peak is None else max(peak.most, live.peak)

    def _with_values(self, batch: "_Batch", rows: int | None, taker: NoteTaker, on_host: bool) -> None:
        """Run the step of a copy with values, for notes."""
        module = self._trainer.lightning_module
        with as_guest(module):
            twin: Any = copy_with_values(module, on_host=on_host).eval()
            device = torch.device("cpu") if on_host else self._trainer.strategy.root_device
            given, limit = resized(batch.tensors, rows), room_of_pass(twin, None)
            bounded = None if limit is None else BoundedStep(twin, limit)
            if bounded is not None:
                bounded.start(given, ())
            try:
                with taker.taking():
                    self._run(twin, _moved(twin, given, device), batch.loader)
            finally:
                if bounded is not None:
                    bounded.stop()

    def _without_loggers(self) -> pl.Trainer:
        """Return a copy of the Trainer for the copied step to read, such as whether it runs in a sanity check."""
        trainer = copy.copy(self._trainer)
        trainer.loggers = [DummyLogger() for _ in self._trainer.loggers]
        trainer.state = copy.copy(self._trainer.state)
        if trainer.state.fn == TrainerFn.FITTING:
            trainer.state.stage = RunningStage.VALIDATING
        return trainer

    def _run(self, twin: Any, batch: Any, loader: int) -> None:
        for child in twin.modules():
            if isinstance(child, LightningModule):
                child.log = child.log_dict = lambda *_, **__: None  # type: ignore[method-assign, assignment]
        step = getattr(twin, self._step)
        twin.trainer = self._without_loggers()
        index = [0] if is_param_in_hook_signature(step, "batch_idx", min_args=2) else []
        with torch.no_grad(), self._trainer.precision_plugin.forward_context():
            step(batch, *index, *([loader] if len(self._takes) > 1 else []))


class _Batch(NamedTuple):
    """A batch with the index of its loader."""

    loader: int
    tensors: Any


def _moved(twin: Any, batch: Any, device: torch.device) -> Any:
    with torch.no_grad():
        return twin._apply_batch_transfer_handler(batch, device)


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [tensor for tensor in (*module.parameters(), *module.buffers()) if has_storage(tensor)]


class _Outermost:
    """Record the bytes at calls of outermost modules: those that only the root module calls.

    Attributes:
        most: Peak bytes of the step, up to the last call.
    """

    def __init__(self, module: nn.Module, live: LiveBytes, calls: dict[str, tuple[int, int]]) -> None:
        self._live, self._calls = live, calls
        self._depth = self._before = self.most = 0
        for fqn, child in module.named_modules():
            if fqn:
                child.register_forward_pre_hook(self._enter)
                child.register_forward_hook(partial(self._leave, fqn))

    def __deepcopy__(self, _: dict[int, Any]) -> "_Outermost":
        """Return itself: chunks are planned on copies of modules that have its hooks."""
        return self

    def _enter(self, *_: Any) -> None:
        if not self._depth:
            self.most, self._before = max(self.most, self._live.peak), self._live.current
            self._live.reset_peak()
        self._depth += 1

    def _leave(self, fqn: str, *_: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self.most = max(self.most, self._live.peak)
            before, most = self._calls.get(fqn, (0, 0))
            self._calls[fqn] = max(before, self._before), max(most, self._live.peak)
            self._live.reset_peak()
