"""What a rank is doing, read from the stack of its main thread: nothing has to be noted while it trains.

The hook is the innermost function on the stack that has the name of one of Lightning's hooks; a rank waits for others
while the innermost frames are torch.distributed's, or that of our own wait for a collective that is on its way.

Known limit: on CUDA a rank waits for the device, not in a collective, so it is not known to wait for other ranks.
"""

import sys
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import lightning
import lightning.pytorch as pl
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

from lightning_amp.parallel.ranks.collectives import wait_in_all_reduce

STEPS = ("training_step", "validation_step", "test_step", "predict_step", "optimizer_step", "backward")
OWNED = (pl.Callback, ModelHooks, DataHooks, CheckpointHooks)
HOOKS = {
    *STEPS,
    *("save_checkpoint", "load_checkpoint", "configure_optimizers"),
    *(name for kind in OWNED for name in vars(kind) if name.startswith(("on_", "configure_"))),
    *("setup", "teardown", "prepare_data", "train_dataloader", "val_dataloader", "test_dataloader"),
}
LOADER = "torch/utils/data/dataloader.py"
# by their folders, for a user's own folder may be called lightning
FOLDERS = (*torch.__path__, *lightning.__path__, str(Path(__file__).parents[2]))
LIBRARIES = (*(f"{Path(folder).as_posix()}/" for folder in FOLDERS), "<frozen", sysconfig.get_path("stdlib"))
WAITS = {wait_in_all_reduce.__code__: "all_reduce"}
"""Functions of ours that wait for other ranks, and in what."""
INNERMOST = 6
"""Frames among which torch.distributed's are looked for."""


@dataclass(frozen=True, kw_only=True)
class Doing:
    """One look at a rank; what there is none of is "".

    Attributes:
        hook: Hook that it is in.
        where: File, line and function of the innermost frame of the user's code inside the hook.
        waiting: The collective that it waits in.
        place: Stage, epoch and batch.
        batches: Batches begun so far; with the hook, what progress is told by.
        unwinding: Whether an error has been raised, and callbacks and loggers hear of it before the run ends.
    """

    hook: str = ""
    where: str = ""
    waiting: str = ""
    place: str = ""
    batches: int = 0
    unwinding: bool = False

    def __str__(self) -> str:
        text = f"in {self.hook or 'no hook'}"
        if self.place:
            text += f" ({self.place})"
        if self.waiting:
            text += f", waiting for other ranks in {self.waiting}"
        return text + (f", at {self.where}" if self.where else "")


def doing_of_thread(ident: int, trainer: pl.Trainer | None) -> Doing:
    """What a thread of this process is doing now; `trainer` is None where it has none yet."""
    frame = sys._current_frames().get(ident)
    return _doing(() if frame is None else traceback.walk_stack(frame), trainer)


def doing_of_exception(exception: BaseException, trainer: pl.Trainer | None) -> Doing:
    """What was being done when an exception was raised."""
    return _doing(reversed(list(traceback.walk_tb(exception.__traceback__))), trainer)


def _doing(frames: Iterable[tuple[FrameType, int]], trainer: pl.Trainer | None) -> Doing:
    """From frames, the innermost first."""
    hook = where = waiting = ""
    for depth, (frame, line) in enumerate(frames):
        file, name = frame.f_code.co_filename.replace("\\", "/"), frame.f_code.co_name
        if not waiting and depth < INNERMOST and not hook:
            waiting = name if "/torch/distributed/" in file else WAITS.get(frame.f_code, "")
        if not where and not hook and not file.startswith(LIBRARIES):
            where = f"{Path(file).name}:{line} in {name}"
        if not hook and file.endswith(LOADER):
            hook = "the data loader"
        if not hook and name in HOOKS:
            hook = name
    return Doing(
        hook=hook,
        where=where,
        waiting=waiting,
        place=_place(trainer),
        batches=_batches(trainer),
        unwinding=trainer is not None and trainer.interrupted,
    )


def _place(trainer: pl.Trainer | None) -> str:
    if trainer is None or trainer.state.stage is None:
        return ""
    stage = str(trainer.state.stage.value)
    if stage != "train":
        return stage
    return f"epoch {trainer.current_epoch}, batch {max(0, trainer.fit_loop.epoch_loop.batch_idx)}"


def _batches(trainer: pl.Trainer | None) -> int:
    """Of all loops, so that a batch of whichever is progress."""
    if trainer is None:
        return 0
    loops = (
        trainer.fit_loop.epoch_loop,
        trainer.fit_loop.epoch_loop.val_loop,
        trainer.validate_loop,
        trainer.test_loop,
        trainer.predict_loop,
    )
    return sum(int(loop.batch_progress.total.ready) for loop in loops)
