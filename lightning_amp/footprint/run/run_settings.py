"""Hold the settings of the training run that a profiled step belongs to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler

from lightning_amp.footprint.copies.noted_values import Answers
from lightning_amp.footprint.run.foreseen import averaged_by
from lightning_amp.footprint.run.last_gradients import nothing_reads_them


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of the training run that a profiled step belongs to; the defaults are those of a Trainer.

    Attributes:
        prepared: Whether the module's `setup` and `configure_model` have run already, and must not run again.
        precision, gradient_clip_val, gradient_clip_algorithm: As in the Trainer; parameters have the precision already.
        accumulate_grad_batches: As in the Trainer, or the largest value that a callback will set. Values above
            2 have the bytes of 2.
        datamodule: Data module, whose hooks may change a batch, and which the module may read.
        moved: Whether the batch has passed the hooks that move it to the device, which are then not called.
        values: Whether a step that cannot run on fake tensors runs on real ones, which takes its memory and time;
            forward passes without gradients always may.
        limit_bytes: Most bytes of such a real step, including the module that was copied; on a CPU, only whether there
            is a limit, which is then what the host has free.
        averaged: Callbacks that hold copies of the module, with their bytes.
        own_parts: Value of `trainer.strategy.own_parts` for hooks that shard the batch; None if ranks are not known.
        unfreezes: Whether a callback will unfreeze parameters later. They are trained in the profiled step already, and
            are added to the first optimizer if none has them.
        answers: What values decide in the forward pass (noted_values.py), by number of samples; filled when needed.
        frees_gradients: Whether the run frees the last step's gradients before `training_step`, where nothing reads
            them (last_gradients.py); a plain Trainer does not.
        reducer: Module with optimizers -> the reduction of its gradients over ranks, which is called after every
            backward pass and counted; None leaves it out.
    """

    prepared: bool = False
    precision: str = "32-true"
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None
    accumulate_grad_batches: int = 1
    datamodule: LightningDataModule | None = None
    moved: bool = False
    values: bool = True
    limit_bytes: int | None = None
    unfreezes: bool = False
    averaged: tuple[tuple[str, int], ...] = ()
    own_parts: Any = None
    answers: dict[int | None, Answers] | None = None
    frees_gradients: bool = False
    reducer: Callable[[LightningModule], Callable[[], None]] | None = None

    @classmethod
    def of(cls, trainer: Trainer, *, prepared: bool, datamodule: LightningDataModule | None) -> "RunSettings":
        """Read the settings from a Trainer and its callbacks."""
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
            averaged=averaged_by(trainer),
            frees_gradients=nothing_reads_them(trainer),
        )

    @property
    def batches(self) -> int:
        """Number of batches of a profiled step."""
        # the first batch creates gradients and the second adds to them; further batches have the bytes of the second
        return min(self.accumulate_grad_batches, 2)


BY_ITSELF = RunSettings()
UNDER_AMP = RunSettings(frees_gradients=True)
