"""Profile a LightningModule and a batch: run two steps of Lightning's loop on a copy with fake tensors.

The second step is recorded, because optimizer state and gradients exist then. With gradient accumulation, its last
batch is recorded, which also holds the accumulated gradients (inner_run.py). If the step needs values, its forward
passes run on real tensors, without gradients, and the two steps get what values decide there (noted_values.py). If they
need other values too, such as those of gradients, two whole steps run on real tensors, on a copy with the module's
weights. These are measured if the steps cannot run on fake tensors even so. All run without side effects
(no_side_effects.py): hooks of the module and the data module are called on copies, and nothing of the user's changes.

Known limits: `prepare_data` is not called; `setup` and `configure_model` are called unless the run has done so.
Callbacks do not run, of which only copies of the module are counted (foreseen.py), and loss scaling is not included.
Modules wrapped by torch.compile run uncompiled. Temporaries differ between CPU and GPU kernels, and the reserve space
that cuDNN's RNNs keep for the backward pass is not counted.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from lightning.pytorch import LightningModule

from lightning_amp._torch import has_no_values
from lightning_amp.data.batch import tensors_in
from lightning_amp.errors import ModelError, NoRoomToCountError
from lightning_amp.footprint.bounded_step import StepOverBudget, of_transform, users_line, why_values
from lightning_amp.footprint.copies.copy_batch import fake_batch, length_of, resized
from lightning_amp.footprint.copies.fake_copy import copy_of, copy_of_data, tensors_of_all
from lightning_amp.footprint.copies.known_values import OwnReads
from lightning_amp.footprint.copies.no_side_effects import without_side_effects
from lightning_amp.footprint.copies.noted_values import GROWS, MOST_BEFORE, Answers, NoteTaker
from lightning_amp.footprint.copies.quick_fakes import QuickFakes
from lightning_amp.footprint.copies.take_notes import DRAWS, copy_with_values, is_elsewhere, notes_of, room_of_pass
from lightning_amp.footprint.module_profile import REAL, Life, ModuleProfile, summarize
from lightning_amp.footprint.run.inner_run import run_two_steps
from lightning_amp.footprint.run.run_settings import BY_ITSELF, RunSettings
from lightning_amp.footprint.step_recorder import StepRecorder
from lightning_amp.footprint.target_device import counts_for_accelerator, optimizers_of_device
from lightning_amp.footprint.trace.step_trace import Place, StepTrace

SAME = 3
"""Draws after which no further ones are counted, where all took the same."""
R = TypeVar("R", bound=StepRecorder)


def profile_module(
    module: LightningModule, batch: Any, *, batch_size: int | None = None, run_settings: RunSettings = BY_ITSELF
) -> ModuleProfile:
    """Profile a training step without using its memory or a GPU; the module does not change.

    Args:
        module: Any LightningModule; its parameters may be on the meta device.
        batch: An example batch of `training_step`.
        batch_size: Profile a batch of this length instead: tensors whose first dimension has the batch's length are
            resized.
        run_settings: Settings of the run that the step belongs to.

    Raises:
        ModelError: The step raises an error, which is the cause; or it needs values, and the module has none.
    """
    return _profiled(module, batch, batch_size, run_settings)[0]


def profile_and_trace(
    module: LightningModule, batch: Any, *, batch_size: int | None = None, run_settings: RunSettings = BY_ITSELF
) -> tuple[ModuleProfile, StepTrace]:
    """Return the profile of a step, as `profile_module`, and its storages with the operators that make them."""
    profile, found = _profiled(module, batch, batch_size, run_settings)
    return profile, StepTrace(found.lives, found.work, found.operators, _places(module))


def _profiled(
    module: LightningModule, batch: Any, batch_size: int | None, run_settings: RunSettings
) -> tuple[ModuleProfile, StepRecorder]:
    found, reason = counted_step(module, batch, batch_size, StepRecorder, run_settings)
    rows = length_of(batch) if batch_size is None else batch_size
    return profile_of(found, found.lives, reason, rows), found


def _places(module: LightningModule) -> dict[str, Place]:
    """Return where the `forward` of each module is defined."""
    places = {}
    for fqn, child in module.named_modules():
        # a ScriptModule's class has no function of this name
        forward: Any = getattr(type(child), "forward", None)
        code = getattr(inspect.unwrap(forward), "__code__", None)
        if code is not None:
            places[fqn] = Place(code.co_filename, code.co_firstlineno, type(child).__name__)
    return places


def lacks_values(module: LightningModule) -> bool:
    """Whether tensors of a module have no values, as on the device "meta"."""
    return any(has_no_values(tensor) for tensor in tensors_of_all(module))


def profile_of(found: StepRecorder, lives: Sequence[Life], reason: str, rows: int | None) -> ModuleProfile:
    """Return the profile of a step recorded by `counted_step`, with a batch of `rows` rows."""
    return summarize(
        lives,
        found.work,
        found.head,
        measured=found.measured,
        reason=reason,
        noted=found.noted,
        own_reads=found.own_reads,
        batch_size=rows,
        first_bytes=found.first_bytes,
        left_bytes=found.left_bytes,
        foreseen=found.foreseen,
        reads=found.batch_reads,
        makes=found.makes,
        trace=StepTrace(lives, found.work) if counts_for_accelerator() else None,
    )


def counted_step(
    module: LightningModule,
    batch: Any,
    batch_size: int | None,
    make: Callable[[LightningModule], R],
    run_settings: RunSettings = BY_ITSELF,
    *,
    plain: Callable[[LightningModule], R] | None = None,
) -> tuple[R, str]:
    """Run two steps on a copy of the module; return its recorder, and why the step needed values ("" if not).

    Args:
        module, batch, batch_size, run_settings: As in `profile_module`.
        make: Makes the recorder of the step.
        plain: Makes another recorder, for a step in which torch.func does not support the first.

    Raises:
        ModelError: As in `profile_module`.
        NoRoomToCountError: The step needs values, and exceeds `run_settings.limit_bytes`.
    """
    if not isinstance(module, LightningModule):
        raise ModelError(
            f"cannot profile a {type(module).__name__!r}; pass a LightningModule and a batch, or the path of a data"
            " directory"
        )
    if batch_size is not None and batch_size < 1:
        raise ModelError(f"batch_size={batch_size!r} is not supported; allowed are 1, 2, ...")
    if batch_size is not None and length_of(batch) is None:
        lengths = sorted({tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()})
        raise ModelError(
            f"batch_size={batch_size!r} cannot be applied: the tensors of the batch have {lengths!r} rows, and no"
            " length is that of most of them; leave batch_size out"
        )
    count = _Count(
        module, batch, batch_size, makers=[make, *([] if plain is None else [plain])], run_settings=run_settings
    )
    return count.counted()


class _Count:
    """One count of a step: on fake tensors, else with what values decide in forward passes, else in whole steps."""

    def __init__(
        self, module: LightningModule, batch: Any, size: int | None, *, makers: list[Any], run_settings: RunSettings
    ) -> None:
        self._module, self._batch, self._size, self._run_settings, self._makers = (
            module,
            batch,
            size,
            run_settings,
            makers,
        )
        self._name = type(module).__name__

    def counted(self) -> tuple[Any, str]:
        """Return what `counted_step` returns."""
        answers = None if self._run_settings.answers is None else self._run_settings.answers.get(self._size)
        found, failed = self._run(QuickFakes(valid=True), answers)
        if failed is None:
            if answers is None and found.own_reads:
                found = self._later(found)
            elif answers is None and found.drew:
                found = self._of_largest_draw(found)
            return found, "" if answers is None else answers.why
        reason = why_values(failed)
        if lacks_values(self._module):
            raise ModelError(
                f"cannot profile {self._name!r}: its step needs values ({reason}), and its parameters have none (device"
                " 'meta'): pass a module on the CPU, of which a real step is measured"
            ) from failed
        if not (answers and answers.why) and (answers := notes_of(self._module, reason, self._pass)) is not None:
            found, failed = self._run(QuickFakes(valid=True), answers)
            if failed is None:
                self._keep(answers)
                return found, reason
            reason = why_values(failed)
        if not self._run_settings.values:
            raise ModelError(
                f"the step of {self._name!r} cannot run without values ({reason}), and was not to be run with them"
            ) from failed
        return self._with_values(reason)

    def _with_values(self, reason: str) -> tuple[Any, str]:
        """Run two whole steps with values, for notes; what they take is measured if no count can be given the notes."""
        taker = NoteTaker((), gradients=True, whole=True)
        real, failed = self._run(None, None, taker)
        if isinstance(failed, StepOverBudget) and is_elsewhere(self._module):
            taker = NoteTaker((), gradients=True, whole=True)
            try:
                self._pass(taker, on_host=True)
                failed = None
            except Exception as error:
                failed = error
        if failed is None:
            found, uncounted = self._run(QuickFakes(valid=True), answers := Answers(taker, reason))
            if uncounted is None:
                self._keep(answers)
                return found, reason
            if real is not None:
                real.measured = REAL
                return real, why_values(uncounted)
            failed = uncounted
        if isinstance(failed, StepOverBudget):
            raise NoRoomToCountError(
                f"the step of {self._name!r} cannot be counted without values: {reason}. Two steps of a copy were run"
                f" with values, and the memory that is free has no room for them: {failed}. Free memory, take a smaller"
                " batch, or let the count take more with AMPStrategy(on_predicted_oom='warn'), in YAML"
                " `on_predicted_oom: warn`, which still plans the training within its memory"
            ) from failed
        at = users_line(failed)
        raise ModelError(
            f"cannot profile {self._name!r}: its training step fails with {failed!r}{f' ({at})' if at else ''}; pass a"
            " batch like those of the training loader"
        ) from failed

    def _later(self, found: Any) -> Any:
        """Count a step that reads buffers which it changes in later batches, as long as it takes more there."""
        n, batches = 1, self._run_settings.batches
        while n <= MOST_BEFORE:
            another, failed = self._run(QuickFakes(valid=True), answers := Answers.without_notes(n * batches))
            if failed is not None or another.most_bytes <= (1 + GROWS) * found.most_bytes:
                break
            found, n = another, 2 * n
            self._keep(answers)
        return found

    def _of_largest_draw(self, found: Any) -> Any:
        """Count a step that draws numbers in Python with several draws, and take the largest."""
        most, largest = found.most_bytes, Answers.without_notes(0)
        for draw in range(1, DRAWS):
            another, failed = self._run(QuickFakes(valid=True), answers := Answers.without_notes(0, draw))
            if failed is not None or (draw == SAME and another.most_bytes == found.most_bytes == most):
                break
            if another.most_bytes > found.most_bytes:
                found, largest = another, answers
        self._keep(largest)
        return found

    def _keep(self, answers: Answers) -> None:
        """Let counts with techniques have the same answers."""
        if self._run_settings.answers is not None:
            self._run_settings.answers[self._size] = answers

    def _run(
        self, fake: QuickFakes | None, answers: Answers | None, taker: NoteTaker | None = None
    ) -> tuple[Any, Exception | None]:
        """Return the recorder of two steps, and the error that ended them; another recorder for torch.func."""
        while True:
            try:
                found = self._two_steps(fake, answers, taker)
                found.batch_reads = fake.reads if fake is not None and fake.reads.names else None
                found.noted = answers is not None and bool(answers.why)
                return found, None
            except ModelError:
                raise
            except Exception as error:
                failed = error
            if len(self._makers) == 1 or not of_transform(failed):
                return None, failed
            self._makers.pop(0)
            fake = fake and QuickFakes(valid=True)

    def _two_steps(self, fake: QuickFakes | None, answers: Answers | None, taker: NoteTaker | None) -> Any:
        module, run_settings = self._module, self._run_settings
        given = resized(self._batch, self._size) if fake is None else fake_batch(self._batch, fake, self._size)
        with without_side_effects(module, run_settings.datamodule), optimizers_of_device():
            twin = copy_of(module, fake)
            run_settings = replace(run_settings, datamodule=copy_of_data(run_settings.datamodule, module, twin, fake))
            if fake is None and run_settings.limit_bytes is not None:
                run_settings = replace(run_settings, limit_bytes=room_of_pass(twin, run_settings.limit_bytes))
            own = OwnReads(twin, {} if fake is None else fake.unowned)
            found = run_two_steps(twin, given, fake, self._makers[0], run_settings, answers=answers, taker=taker)
            found.own_reads = tuple(own.names)
            return found

    def _pass(self, taker: NoteTaker, on_host: bool) -> None:
        module, run_settings = self._module, self._run_settings
        with without_side_effects(module, run_settings.datamodule):
            twin = copy_with_values(module, on_host=on_host)
            if taker.whole:
                for parameter in twin.parameters():
                    # some may be on the host already, and shared
                    parameter.data = parameter.data.clone()
            data, limit = (
                copy_of_data(run_settings.datamodule, module, twin, None),
                room_of_pass(twin, run_settings.limit_bytes),
            )
            run_settings = replace(run_settings, datamodule=data, limit_bytes=limit)
            run_two_steps(twin, resized(self._batch, self._size), None, StepRecorder, run_settings, taker=taker)
