"""Count bytes and time of a step without gradients, on a copy of the module with fake tensors and rules installed.

A step that needs values gets what they decide in a pass with values (noted_values.py), which is run for it once.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from lightning_amp.costs.device_rates import CPU_CORE, Rates
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import AmpError, ModelError
from lightning_amp.footprint.bounded_step import BoundedStep, why_values
from lightning_amp.footprint.copies.copy_batch import fake_batch, length_of, resized
from lightning_amp.footprint.copies.fake_copy import copy_of, without_values
from lightning_amp.footprint.copies.no_side_effects import without_side_effects
from lightning_amp.footprint.copies.noted_values import Answers, NoteTaker
from lightning_amp.footprint.copies.quick_fakes import QuickFakes
from lightning_amp.footprint.copies.take_notes import copy_with_values, notes_of, room_of_pass
from lightning_amp.footprint.live_bytes import LiveBytes, Read, moved_bytes
from lightning_amp.footprint.module_profile import ModuleProfile
from lightning_amp.footprint.operator_rates import OperatorRates, times_now
from lightning_amp.footprint.profile_module import lacks_values, profile_of
from lightning_amp.footprint.step_recorder import StepRecorder
from lightning_amp.installing.install import install_rules
from lightning_amp.techniques.table import is_of_decoder

T = TypeVar("T")


class Batch(NamedTuple):
    """A batch with the index of its loader."""

    loader: int
    tensors: Any


class Evaluated(NamedTuple):
    """What a step takes.

    Attributes:
        held: Bytes before the step.
        peak: Most bytes in it.
        seconds: Time of its operators.
    """

    held: int
    peak: int
    seconds: float


class EvaluationCount:
    """Counts of a step: a method of the module of a Trainer.

    `several`: whether the method is also called with the index of a loader.

    Attributes:
        rates: Rates of the device, for the time.
    """

    def __init__(self, trainer: pl.Trainer, step: str, *, several: bool) -> None:
        self._trainer, self._step, self._several = trainer, step, several
        self.rates: Rates = CPU_CORE
        self._answers: dict[tuple[int, int | None], Answers] = {}

    @property
    def noted(self) -> str:
        """Why the step was counted with notes of what values decide; "" if it needs none."""
        return next((answers.why for answers in self._answers.values()), "")

    def forget(self) -> None:
        """Forget the notes, which belong to the batches counted so far."""
        self._answers.clear()

    def count(
        self,
        batch: Batch,
        rules: Sequence[Rule],
        calls: dict[str, tuple[int, int]] | None = None,
        *,
        rows: int | None = None,
    ) -> Evaluated:
        """Return what the step takes; `calls` receives bytes before, and peak of, each module."""
        return self._noted(batch, rules, rows, partial(self._measured, batch, rules, calls, rows))

    def profile(self, batch: Batch, *, rows: int | None = None) -> ModuleProfile:
        """Return the profile of the step."""
        return self._noted(batch, (), rows, partial(self._recorded, batch, rows))

    def _noted(self, batch: Batch, rules: Sequence[Rule], rows: int | None, run: Callable[[Answers | None], T]) -> T:
        """Run the step on fake tensors; if it needs values, with what they decide."""
        module, key = self._trainer.lightning_module, (batch.loader, rows)
        answers = self._answers.get(key)
        try:
            return run(answers)
        except AmpError:
            raise
        except Exception as error:
            failed = error
        if answers is None and not lacks_values(module):
            answers = notes_of(module, why_values(failed), partial(self._with_values, batch, rules, rows))
        if answers is not None and key not in self._answers:
            self._answers[key] = answers
            return self._noted(batch, rules, rows, run)
        raise ModelError(
            f"the memory of {self._step} of {type(module).__name__!r} cannot be counted: on tensors "
            f"without values it fails with {type(failed).__name__}: {failed}"
        ) from failed

    def _measured(
        self,
        batch: Batch,
        rules: Sequence[Rule],
        calls: dict[str, tuple[int, int]] | None,
        rows: int | None,
        answers: Answers | None,
    ) -> Evaluated:
        with self._on_fakes(batch, rules, rows, answers) as (twin, given):
            live = _Timed(OperatorRates.of(self.rates))
            peak = _Outermost(twin, live, calls) if calls is not None else None
            live.watch([*twin.parameters(), *twin.buffers(), given])
            held = live.current
            with live:
                self._run(twin, given, batch.loader)
        # `_Outermost` resets the peak at every call, so `live` has only the peak after the last one
        return Evaluated(held, live.peak if peak is None else max(peak.most, live.peak), live.seconds)

    def _recorded(self, batch: Batch, rows: int | None, answers: Answers | None) -> ModuleProfile:
        with self._on_fakes(batch, (), rows, answers) as (twin, given):
            recorder = StepRecorder(twin)
            recorder.start(given, ())
            try:
                self._run(twin, given, batch.loader)
            finally:
                recorder.stop()
        return profile_of(recorder, recorder.lives, "", length_of(given))

    @contextmanager
    def _on_fakes(
        self, batch: Batch, rules: Sequence[Rule], rows: int | None, answers: Answers | None
    ) -> Iterator[tuple[Any, Any]]:
        """Give a copy of the module, and the batch, both of fake tensors and on the device of the run."""
        fake = QuickFakes(valid=True)
        twin: Any = copy_of(self._trainer.lightning_module, fake).eval()
        install_rules(twin, rules)
        given = fake_batch(batch.tensors, fake, rows)
        with ExitStack() as stack:
            for context in (without_side_effects(twin), fake, without_values()):
                stack.enter_context(context)
            if answers is not None:
                stack.enter_context(answers.given())
                answers.begin_batch()
            yield twin, _moved(twin, given, self._trainer.strategy.root_device)

    def _with_values(
        self, batch: Batch, rules: Sequence[Rule], rows: int | None, taker: NoteTaker, on_host: bool
    ) -> None:
        """Run the step of a copy with values, for notes; techniques of a decoder may read other values than it does."""
        module = self._trainer.lightning_module
        with without_side_effects(module):
            twin: Any = copy_with_values(module, on_host=on_host).eval()
            install_rules(twin, filter(is_of_decoder, rules))
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
            # steps often add to what these make
            for hook in ("start", "epoch_start"):
                getattr(twin, f"on_{self._step.removesuffix('_step')}_{hook}")()
            step(batch, *index, *([loader] if self._several else []))


class _Timed(LiveBytes):  # type: ignore[no-untyped-call]
    """Also sum the time of the operators, as `seconds`."""

    def __init__(self, rates: OperatorRates) -> None:
        super().__init__()
        self._rates, self.seconds = rates, 0.0

    def ends(self, func: Any, args: Any, kwargs: Any, read: Read, result: Any) -> None:
        """Add the time of an operator."""
        moved = moved_bytes(read, result)
        self.seconds += times_now() * self._rates.seconds(func, args, kwargs, result, moved)


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


def _moved(twin: Any, batch: Any, device: torch.device) -> Any:
    with torch.no_grad():
        return twin._apply_batch_transfer_handler(batch, device)
