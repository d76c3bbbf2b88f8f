"""Run two training steps of a copy in a Trainer without callbacks or loggers; the second one is counted.

Lightning's own loop runs both, so hooks, logging, schedulers, automatic and manual optimisation do what they do in
training. It handles neither signals nor errors: Ctrl-C, SIGTERM and whatever the step raises are for the caller.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from types import MethodType
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment  # type: ignore[attr-defined]
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from lightning_amp._torch import FakeTensor, FakeTensorMode
from lightning_amp.errors import ModelError
from lightning_amp.footprint.bounded_step import BoundedStep
from lightning_amp.footprint.copies.fake_copy import make_fake, without_values
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.footprint.recompute_state import types_of_the_step
from lightning_amp.footprint.step_recorder import StepRecorder
from lightning_amp.holding import replacing

R = TypeVar("R", bound=StepRecorder)
STEPS = 1000
"""Length of an epoch as a scheduler sees it; two steps of it are run."""


@dataclass(frozen=True, kw_only=True)
class Around:
    """What is known of the run that a step belongs to; by default nothing, and the Trainer is one by itself.

    Attributes:
        prepared: Whether the module's `setup` and `configure_model` have run, and are not to run again.
        precision, gradient_clip_val, gradient_clip_algorithm: As the Trainer's; parameters have the precision already.
        accumulate_grad_batches: As the Trainer's, or the most that a callback will set; bytes are those of 2 for all
            that are more.
        datamodule: Whose hooks may change a batch, and which the module may ask for.
        values: Whether a step that cannot run without values runs with them, which takes its memory and its time.
        limit_bytes: Most bytes that it may take then, together with the module that it is a copy of.
        own_parts: What hooks that hand over a part of a batch find as `trainer.strategy.own_parts`; None where nothing
            is known of ranks.
        unfreezes: Whether a callback will unfreeze parameters later: the step trains them already, and some optimiser
            has them.
    """

    prepared: bool = False
    precision: str = "32-true"
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None
    accumulate_grad_batches: int = 1
    datamodule: LightningDataModule | None = None
    values: bool = True
    limit_bytes: int | None = None
    unfreezes: bool = False
    own_parts: Any = None

    @classmethod
    def of(cls, trainer: Trainer, *, prepared: bool, datamodule: LightningDataModule | None) -> "Around":
        """What a Trainer's settings and callbacks say."""
        clip = trainer.gradient_clip_algorithm
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        schedules = [c.scheduling for c in callbacks if isinstance(c, GradientAccumulationScheduler)]
        return cls(
            prepared=prepared,
            precision=str(trainer.precision),
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=None if clip is None else str(getattr(clip, "value", clip)),
            accumulate_grad_batches=max(
                trainer.accumulate_grad_batches, *(n for found in schedules for n in found.values()), 1
            ),
            datamodule=datamodule,
            unfreezes=any(isinstance(callback, BaseFinetuning) for callback in callbacks),
        )

    @property
    def batches(self) -> int:
        """Of a step that is run."""
        # the first batch makes gradients and the second adds to them; any further one holds what the second does
        return min(self.accumulate_grad_batches, 2)


BY_ITSELF = Around()


def run_two_steps(
    module: LightningModule,
    batch: Any,
    fake: FakeTensorMode | None,
    make: Callable[[LightningModule], R],
    around: Around,
) -> R:
    """What `make` returns for the module, a copy that is changed, after its second step; the data module is one too.

    Raises:
        ModelError: The module leaves its step out.
    """
    recorder = make(module)
    counter = _Count(recorder, fake, around)
    # what the module would download is not part of a step, and neither are checkpoints that its callbacks would write
    for hook in ("prepare_data", "configure_callbacks", *(("setup", "configure_model") if around.prepared else ())):
        setattr(module, hook, MethodType(getattr(LightningModule, hook), module))
    for child in module.modules():
        if isinstance(child, LightningModule):
            child.log = partial(_log_without_bar, child.log)  # type: ignore[method-assign]
    frozen = [p for p in module.parameters() if not p.requires_grad and p.is_floating_point()]
    counter.unfrozen = frozen if around.unfreezes else []
    for parameter in counter.unfrozen:
        parameter.requires_grad_(True)
    device = next((p.device for p in module.parameters() if not p.is_meta), torch.device("cpu"))
    with closing(counter):
        trainer = _trainer(device, counter, fake, around)
        # what `fit` does before it takes over errors and interrupts
        trainer.strategy._lightning_module = module
        trainer.state.fn, trainer.state.status, trainer.training = (TrainerFn.FITTING, TrainerStatus.RUNNING, True)
        with suppress(EnoughSeen):
            trainer._fit_impl(module, _Repeated(batch))
            raise ModelError(
                f"cannot profile {type(module).__name__!r}, whose training_step was not called: the batch is"
                " None, or on_train_batch_start returned -1; give a batch with which it is called"
            )
    return recorder


def _trainer(device: torch.device, counter: "_Count", fake: FakeTensorMode | None, around: Around) -> Trainer:
    plugins: list[Any] = [LightningEnvironment()]
    precision: Any = around.precision
    if "mixed" in around.precision:
        # half the bytes in either format; 16-mixed would look at gradients' values
        plugins, precision = [*plugins, MixedPrecision("bf16-mixed", device.type)], None
    trainer = Trainer(
        accelerator="cpu",
        strategy=_Here(device, counter, fake, around.own_parts),
        plugins=plugins,
        precision=precision,
        gradient_clip_val=around.gradient_clip_val,
        gradient_clip_algorithm=around.gradient_clip_algorithm,
        accumulate_grad_batches=around.batches,
        max_epochs=1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        logger=DummyLogger(),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # not those that packages add to every Trainer
    trainer.callbacks = [counter]  # type: ignore[attr-defined]
    # whoever handles signals goes on to
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    convert = trainer.precision_plugin.convert_module

    def convert_made(module: torch.nn.Module) -> torch.nn.Module:
        """Convert what `setup` has made; fake parameters cannot be, and have the run's precision already."""
        for child in module.modules():
            # with the child's tables and without its children, to which `convert` would go on although they may be fake
            own = torch.nn.Module()
            own._parameters, own._buffers = child._parameters, child._buffers
            if not any(isinstance(tensor, FakeTensor) for tensor in (*own.parameters(), *own.buffers())):
                convert(own)
        return module

    trainer.precision_plugin.convert_module = convert_made  # type: ignore[method-assign]
    return trainer


def _log_without_bar(log: Callable[..., None], name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    """`self.log` without a progress bar, which would ask for the value."""
    log(name, value, False, *args[1:], **{k: v for k, v in kwargs.items() if k != "prog_bar"})


class EnoughSeen(Exception):
    """Raised in a step when nothing more of it has to run; `run_two_steps` then returns as after two steps."""


class _Repeated:
    """A loader that gives one batch again and again."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Any]:
        return repeat(self._batch, STEPS)


class _Here(SingleDeviceStrategy):
    """One device, on which the module stays as it is: fake parameters cannot be moved."""

    def __init__(self, device: torch.device, counter: "_Count", fake: FakeTensorMode | None, own_parts: Any) -> None:
        super().__init__(device=device)
        self._counter, self._fake, self.own_parts = counter, fake, own_parts

    @property
    def mesh(self) -> dict[str, Any]:
        """For hooks that hand over a part of a batch; the axis sends nothing."""
        return {"model": self.own_parts.model_axis()}

    def setup_environment(self) -> None:
        """Nothing: the device is in use already."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Let `configure_model` make parameters without memory."""
        with nullcontext() if self._fake is None else torch.device("meta"):
            yield

    def model_to_device(self) -> None:
        """Only take the values away of what the module has made in `setup` and `configure_model`."""
        if self._fake is not None:
            assert self.lightning_module is not None, "the Trainer sets the module before its device"
            make_fake(self.lightning_module, self._fake)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """With the parameters that will be unfrozen, where the module has made them for others."""
        super().setup_optimizers(trainer)
        taken = {id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
        late = [p for p in self._counter.unfrozen if id(p) not in taken]
        if late and self.optimizers:
            self.optimizers[0].add_param_group({"params": late})

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """A forward pass begins."""
        recorder = self._counter.recorder
        recorder.begin_step(args[0] if args else None)
        returned = super().training_step(*args, **kwargs)
        recorder.end_step(returned)
        return returned

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's backward pass, or the module's by `manual_backward`."""
        recorder = self._counter.recorder
        with replacing(recorder, in_step=False), types_of_the_step(self.precision_plugin):
            return super().backward(*args, **kwargs)

    def gradient_norm(self) -> torch.Tensor:
        """As AMPStrategy has it, of the gradients that are here."""
        assert self.lightning_module is not None, "a hook of the module asks"
        return torch.nn.utils.get_total_norm([p.grad for p in self.lightning_module.parameters() if p.grad is not None])

    def teardown(self) -> None:
        """Leave the module where it is."""


class _Count(Callback):
    """Enters the fake mode for both steps, and counts the last batch of the second."""

    def __init__(self, recorder: StepRecorder, fake: FakeTensorMode | None, around: Around) -> None:
        self.recorder, self.unfrozen = recorder, list[torch.nn.Parameter]()
        self._fake, self._entered, self._counting = fake, ExitStack(), False
        self._datamodule, self._counted = around.datamodule, 2 * around.batches - 1
        self._first, self._counting_first = LiveBytes(), ExitStack()
        self._counted_first = around.batches - 1
        self._limit = around.limit_bytes if fake is None else None

    def close(self) -> None:
        """End whatever has begun."""
        self._counting_first.close()
        self._entered.close()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the data module be found; its own setup is not called again, and its loaders are not."""
        if self._datamodule is not None:
            trainer.datamodule = self._datamodule  # type: ignore[attr-defined]
            selector = trainer._data_connector._datahook_selector
            assert selector is not None, "fit has attached the module"
            selector.datamodule, self._datamodule.trainer = self._datamodule, trainer

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Enter the mode, and begin to count."""
        if batch_idx == 0 and self._fake is not None:
            self._entered.enter_context(self._fake)
            self._entered.enter_context(without_values())
        if batch_idx == 0 and self._limit is not None:
            held = sum(tensor.nbytes for tensor in (*pl_module.parameters(), *pl_module.buffers()))
            bounded = BoundedStep(pl_module, max(0, self._limit - held))
            bounded.start(batch, trainer.optimizers)
            self._entered.callback(bounded.stop)
        if batch_idx == self._counted_first:
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            self._first.watch([*pl_module.parameters(), *pl_module.buffers(), *gradients, batch])
            self._counting_first.enter_context(self._first)
        if batch_idx == self._counted:
            self._counting = True
            self.recorder.start(batch, trainer.optimizers)
            self._entered.callback(self.recorder.stop)
            # alive now and no part of the second step's beginning, so the first step has left it
            self.recorder.left_bytes = max(0, self._first.current - self.recorder.current)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Gradients are whole."""
        if self._counting:
            self.recorder.begin_optimiser()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Go on to the second step, or stop."""
        if batch_idx == self._counted_first:
            self._counting_first.close()
            self.recorder.first_bytes = self._first.peak
        if self._counting:
            self.recorder.hold_gradients()
            raise EnoughSeen
