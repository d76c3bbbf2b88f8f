"""Run two training steps of a copied module in a Trainer without callbacks or loggers, and record the second step.

Lightning's own loop runs both, so that hooks, logging, schedulers, automatic and manual optimization behave as in
training. Signals and errors are not handled here: Ctrl-C, SIGTERM and errors of the step reach the caller.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from functools import partial
from itertools import repeat
from types import MethodType
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment  # type: ignore[attr-defined]
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from lightning_amp._torch import FakeTensor, FakeTensorMode
from lightning_amp.default_dtype import types_of_the_step
from lightning_amp.errors import ModelError
from lightning_amp.footprint.bounded_step import BoundedStep
from lightning_amp.footprint.confirm_count import StepMakes
from lightning_amp.footprint.copies.fake_copy import make_fake, without_values
from lightning_amp.footprint.copies.noted_values import Answers, NoteTaker
from lightning_amp.footprint.equal_parts import leaving_out_equal
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.footprint.run.foreseen import foresee
from lightning_amp.footprint.run.last_gradients import LastGradients
from lightning_amp.footprint.run.run_settings import RunSettings
from lightning_amp.footprint.step_recorder import StepRecorder
from lightning_amp.holding import replacing
from lightning_amp.own_operators import own_operators
from lightning_amp.random_streams import drawn_between, host_streams

R = TypeVar("R", bound=StepRecorder)
STEPS = 1000
"""Number of batches in an epoch, for schedulers; two steps of it are run."""


def run_two_steps(
    module: LightningModule,
    batch: Any,
    fake: FakeTensorMode | None,
    make: Callable[[LightningModule], R],
    run_settings: RunSettings,
    *,
    answers: Answers | None = None,
    taker: NoteTaker | None = None,
) -> R:
    """Run two steps of a module and return its recorder from `make`; the module and the data module must be copies.

    Args:
        module, batch, fake, make, run_settings: What runs and where.
        answers: What values decide in a step on fake tensors.
        taker: Takes notes of the two steps; without backward passes and optimizer unless it takes whole steps.

    Raises:
        ModelError: `training_step` was not called.
    """
    recorder = make(module)
    counter = _Count(recorder, fake, run_settings, answers, taker)
    # downloads and checkpoints of the module's callbacks are not part of a step
    for hook in (
        "prepare_data",
        "configure_callbacks",
        *(("setup", "configure_model") if run_settings.prepared else ()),
    ):
        setattr(module, hook, MethodType(getattr(LightningModule, hook), module))
    if run_settings.moved:
        for hook in ("_on_before_batch_transfer", "_apply_batch_transfer_handler"):
            setattr(module, hook, lambda batch, *_, **__: batch)
    for child in module.modules():
        if isinstance(child, LightningModule):
            child.log = partial(_log_without_bar, child.log)  # type: ignore[method-assign]
    frozen = [p for p in module.parameters() if not p.requires_grad and p.is_floating_point()]
    counter.unfrozen = frozen if run_settings.unfreezes else []
    for parameter in counter.unfrozen:
        parameter.requires_grad_(True)
    device = next((p.device for p in module.parameters() if not p.is_meta), torch.device("cpu"))
    with closing(counter):
        trainer = _trainer(device, counter, fake, run_settings)
        # the part of `fit` that precedes its handling of errors and interrupts
        trainer.strategy._lightning_module = module
        trainer.state.fn, trainer.state.status, trainer.training = (TrainerFn.FITTING, TrainerStatus.RUNNING, True)
        streams = host_streams()
        with suppress(EnoughSeen):
            trainer._fit_impl(module, _Repeated(batch))
            raise ModelError(
                f"cannot profile {type(module).__name__!r}, whose training_step was not called: the batch is"
                " None, or on_train_batch_start returned -1; give a batch with which it is called"
            )
    if not counter.counting:
        # stopped before the second step, as where notes are taken; nothing is recorded
        return recorder
    recorder.makes = StepMakes.of(counter.batch, recorder.lives, recorder.work)
    recorder.drew = bool(drawn_between(streams, host_streams())) or (answers is not None and answers.draw > 0)
    recorder.foreseen = foresee(recorder, trainer.optimizers, fake, run_settings.averaged)
    return recorder


def _trainer(
    device: torch.device, counter: "_Count", fake: FakeTensorMode | None, run_settings: RunSettings
) -> Trainer:
    plugins: list[Any] = [LightningEnvironment()]
    precision: Any = run_settings.precision
    if "mixed" in run_settings.precision:
        # both formats have two bytes; 16-mixed would read the values of gradients
        plugins, precision = [*plugins, MixedPrecision("bf16-mixed", device.type)], None
    trainer = Trainer(
        accelerator="cpu",
        strategy=_Here(device, counter, fake, run_settings),
        plugins=plugins,
        precision=precision,
        gradient_clip_val=run_settings.gradient_clip_val,
        gradient_clip_algorithm=run_settings.gradient_clip_algorithm,
        accumulate_grad_batches=run_settings.batches,
        max_epochs=1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        logger=DummyLogger(),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # drop callbacks that packages add to every Trainer
    trainer.callbacks = [counter]  # type: ignore[attr-defined]
    # signal handlers of the process stay in place
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    convert = trainer.precision_plugin.convert_module

    def convert_made(module: torch.nn.Module) -> torch.nn.Module:
        """Convert modules that `setup` created; fake ones cannot be, and have the run's precision already."""
        for child in module.modules():
            # a module with the child's tables and no children: `convert` recurses, and children may have fake tensors
            own = torch.nn.Module()
            own._parameters, own._buffers = child._parameters, child._buffers
            if not any(isinstance(tensor, FakeTensor) for tensor in (*own.parameters(), *own.buffers())):
                convert(own)
        return module

    trainer.precision_plugin.convert_module = convert_made  # type: ignore[method-assign]
    return trainer


def _log_without_bar(log: Callable[..., None], name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    """Call `self.log` without a progress bar, which would read the value."""
    log(name, value, False, *args[1:], **{k: v for k, v in kwargs.items() if k != "prog_bar"})


class EnoughSeen(Exception):
    """Raised to stop a step early; `run_two_steps` then returns as after two steps."""


class _Repeated:
    """A loader that returns the same batch repeatedly."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Any]:
        return repeat(self._batch, STEPS)


class _Here(SingleDeviceStrategy):
    """Single-device strategy that does not move the module: fake parameters cannot be moved."""

    def __init__(
        self, device: torch.device, counter: "_Count", fake: FakeTensorMode | None, run_settings: RunSettings
    ) -> None:
        super().__init__(device=device)
        self._counter, self._fake, self.own_parts = counter, fake, run_settings.own_parts
        self._frees, self._reducer = run_settings.frees_gradients, run_settings.reducer
        self._reduce: Callable[[], None] | None = None
        self._last_gradients: LastGradients | None = None

    @property
    def mesh(self) -> dict[str, Any]:
        """Mesh for hooks that give each rank a shard of the batch; its axis does no communication."""
        return {"model": self.own_parts.model_axis()}

    def setup_environment(self) -> None:
        """Do nothing: the device is set up already."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Create the parameters of `configure_model` on the meta device if the step runs on fake tensors."""
        with nullcontext() if self._fake is None else torch.device("meta"):
            yield

    def model_to_device(self) -> None:
        """Convert tensors that `setup` and `configure_model` created to fake tensors; move nothing."""
        if self._fake is not None:
            assert self.lightning_module is not None, "the Trainer sets the module before its device"
            make_fake(self.lightning_module, self._fake)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Set up the optimizers, and add parameters that will be unfrozen to the first one if none has them."""
        super().setup_optimizers(trainer)
        taken = {id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
        late = [p for p in self._counter.unfrozen if id(p) not in taken]
        if late and self.optimizers:
            self.optimizers[0].add_param_group({"params": late})
        assert self.lightning_module is not None, "the Trainer sets the module before its optimizers"
        self._last_gradients = LastGradients(self.lightning_module, self.optimizers, allowed=self._frees)
        self._reduce = None if self._reducer is None else self._reducer(self.lightning_module)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training step, and report its start and end to the recorder."""
        counter = self._counter
        recorder, answers, taker = counter.recorder, counter.answers, counter.taker
        noting = taker or answers
        if noting is not None:
            noting.begin_step()
        if noting is not None and counter.only_forward:
            with torch.set_grad_enabled(noting.gradients):
                returned = super().training_step(*args, **kwargs)
            if taker is not None and taker.has_enough(counter.n_batches):
                raise EnoughSeen
            return returned
        assert self._last_gradients is not None, "the Trainer sets up the optimizers before a step"
        with self._last_gradients.before_step():
            recorder.frees_gradients = self._last_gradients.freed
            recorder.begin_step(args[0] if args else None)
            returned = super().training_step(*args, **kwargs)
        recorder.end_step(returned)
        return returned

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the backward pass of the Trainer, or of the module's `manual_backward`."""
        recorder = self._counter.recorder
        if self._counter.only_forward:
            return None
        with replacing(recorder, in_step=False), types_of_the_step(self.precision_plugin):
            found = super().backward(*args, **kwargs)
        if self._reduce is not None:
            with replacing(recorder, reducing=True), own_operators():
                self._reduce()
        return found

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Step; without backward passes only run the closure."""
        if self._counter.only_forward:
            return closure()
        return super().optimizer_step(optimizer, closure, *args, **kwargs)

    def gradient_norm(self) -> torch.Tensor:
        """Return the norm of the local gradients; AMPStrategy has the same method."""
        assert self.lightning_module is not None, "a hook of the module asks"
        return torch.nn.utils.get_total_norm([p.grad for p in self.lightning_module.parameters() if p.grad is not None])

    def teardown(self) -> None:
        """Do nothing: the module stays on its device."""


class _Count(Callback):
    """Callback that enters the fake mode for both steps, and records the last batch of the second."""

    def __init__(
        self,
        recorder: StepRecorder,
        fake: FakeTensorMode | None,
        run_settings: RunSettings,
        answers: Answers | None,
        taker: NoteTaker | None,
    ) -> None:
        self.recorder, self.unfrozen = recorder, list[torch.nn.Parameter]()
        self.answers, self.taker = answers, taker
        self.only_forward, self.n_batches = False, 2 * run_settings.batches
        self._fake, self._entered, self.counting = fake, ExitStack(), False
        self._datamodule, self.batch = run_settings.datamodule, None
        n_before = 0 if answers is None else answers.n_before
        self._counted = n_before + self.n_batches - 1
        self._first, self._counting_first, self._before = LiveBytes(), ExitStack(), ExitStack()
        self._counted_first = n_before + run_settings.batches - 1
        # a memory of earlier batches counts
        self._watched_from = 0 if n_before else self._counted_first
        self._limit = run_settings.limit_bytes if fake is None else None

    def close(self) -> None:
        """Stop recording, and leave the fake mode."""
        self._counting_first.close()
        self._before.close()
        self._entered.close()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Attach the data module to the Trainer without calling its `setup` or creating its loaders."""
        if self._datamodule is not None:
            trainer.datamodule = self._datamodule  # type: ignore[attr-defined]
            selector = trainer._data_connector._datahook_selector
            assert selector is not None, "fit has attached the module"
            selector.datamodule, self._datamodule.trainer = self._datamodule, trainer

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Enter the fake mode on the first batch, and start to record on the counted batches."""
        if batch_idx == 0 and self._fake is not None:
            # operators before the counted batch are not timed
            self._before.enter_context(leaving_out_equal())
            self._entered.enter_context(self._fake)
            self._entered.enter_context(without_values())
            if self.answers is not None:
                self._entered.enter_context(self.answers.given())
        taker, answers = self.taker, self.answers
        if answers is not None:
            answers.begin_batch()
        self.only_forward = not taker.whole if taker is not None else answers is not None and answers.before_count
        if batch_idx == 0 and self._limit is not None:
            # what was copied; forward passes without backward passes share the parameters
            copied = [*pl_module.buffers(), *(() if self.only_forward else pl_module.parameters())]
            held = sum(tensor.nbytes for tensor in copied)
            bounded = BoundedStep(pl_module, max(0, self._limit - held))
            bounded.start(batch, trainer.optimizers)
            self._entered.callback(bounded.stop)
        if taker is not None:
            if batch_idx == 0:
                self._entered.enter_context(taker.taking())
            else:
                taker.begin_batch()
            if self.only_forward:
                return
        if batch_idx == self._watched_from:
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            self._first.watch([*pl_module.parameters(), *pl_module.buffers(), *gradients, batch])
            self._counting_first.enter_context(self._first)
        if batch_idx == self._counted:
            self._before.close()
            # as the hooks that move it return it, like that of a real step
            self.counting, self.batch = True, batch
            # made again in this step, so that what code caches from step to step is counted
            getattr(self._fake, "cache", {}).clear()
            self.recorder.start(batch, trainer.optimizers)
            self._entered.callback(self.recorder.stop)
            if self._watched_from < self._counted_first:
                self.recorder.inherit(self._first)
            # bytes alive now that the second step does not start with were left by the first step
            self.recorder.left_bytes = max(0, self._first.current - self.recorder.current)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Report the start of the optimizer step to the recorder; all gradients are complete here."""
        if self.counting:
            self.recorder.begin_optimiser()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop after the second step."""
        if batch_idx == self._counted_first:
            self._counting_first.close()
            self.recorder.first_bytes = self._first.peak
        if self.counting:
            self.recorder.hold_gradients()
            raise EnoughSeen
