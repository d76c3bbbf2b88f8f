"""Report what a rank does: Lightning's current hook and batch, and the stack of its main thread; and define `Fault`.

The hook is the innermost function on the stack with the name of one of Lightning's hooks. A rank waits for others if
its innermost frames are those of torch.distributed, or of our function that waits for a pending collective.

The stack of another running thread is read by faulthandler, which creates no frame objects: walking frames while
torch's dispatch modes run eventually causes memory errors (CPython 3.11, torch 2.13), observed as crashes and as ranks
that hang. faulthandler also reads the state of threads that a C++ thread is creating, which has crashed a rank once. So
a stack is read only if a rank has made no progress for seconds.

Known limits: on CUDA a rank waits for the device, not in a collective, so waiting for other ranks is not detected. If a
stack is deeper than faulthandler's 100 functions, the hook is the one that Lightning has recorded, if any.
"""

import faulthandler
import os
import platform
import re
import sysconfig
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch.distributed import DistError

from lightning_amp.footprint.bounded_step import FOLDERS
from lightning_amp.techniques.ranks.collectives import wait_in_all_reduce

LONGEST = 600
"""Most characters of an error's text in a report."""

OF_COMMUNICATION = re.compile(
    r"gloo|nccl|c10d|connection (closed|reset|refused)|broken pipe|socket|process group", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The failure or end of one rank."""

    rank: int
    host: str  # machine and process
    what: str  # what happened, as the rest of a sentence
    interrupted: bool = False  # whether the user has interrupted the run, and waits

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}) {self.what}"


def this_host() -> str:
    """Return machine and process id."""
    return f"{platform.node()}, process {os.getpid()}"


def text_of(exception: BaseException) -> str:
    """Return class and text of an error, shortened to `LONGEST`."""
    text = f"{type(exception).__name__}: {exception}".strip().rstrip(":")
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def is_of_communication(exception: BaseException) -> bool:
    """Whether an error may be only the consequence of another rank's end."""
    if isinstance(exception, DistError):
        return True
    return isinstance(exception, RuntimeError | OSError) and bool(OF_COMMUNICATION.search(str(exception)))


def is_out_of_memory(exception: BaseException) -> bool:
    """Whether an error is an out-of-memory error, of any device."""
    if isinstance(exception, MemoryError | torch.OutOfMemoryError):
        return True
    # matches can't, cannot, could not allocate memory; but not torch's "to actually allocate memory" for meta tensors
    words = ("t allocate memory", "out of memory", "STATUS_ALLOC_FAILED")
    return isinstance(exception, RuntimeError) and any(word in str(exception) for word in words)


OWNED = (pl.Callback, ModelHooks, DataHooks, CheckpointHooks)
HOOKS = {
    *("training_step", "validation_step", "test_step", "predict_step", "optimizer_step", "backward"),
    *("save_checkpoint", "load_checkpoint", "configure_optimizers"),
    *(name for kind in OWNED for name in vars(kind) if name.startswith(("on_", "configure_"))),
    *("setup", "teardown", "prepare_data", "train_dataloader", "val_dataloader", "test_dataloader"),
}
LOADER = "torch/utils/data/dataloader.py"
LIBRARIES = tuple(
    folder.encode("ascii", "backslashreplace").decode()
    for folder in (*(f"{Path(folder).as_posix()}/" for folder in FOLDERS), "<frozen", sysconfig.get_path("stdlib"))
)
"""Folders of libraries, as faulthandler prints them."""
WAITS = {wait_in_all_reduce.__name__: "all_reduce"}
"""Our functions that wait for other ranks, and the collective."""
INNERMOST = 6
"""Number of innermost frames that are searched for torch.distributed."""


@dataclass(frozen=True, kw_only=True)
class Doing:
    """The activity of a rank; missing parts are ""."""

    hook: str = ""
    where: str = ""  # file, line and function of the innermost frame of the user's code inside the hook
    waiting: str = ""
    place: str = ""  # stage, epoch and batch
    batches: int = 0  # batches begun so far; hook and batches measure progress
    unwinding: bool = False  # whether an error was raised, and callbacks and loggers still run before the exit

    def __str__(self) -> str:
        text = f"in {self.hook or 'no hook'}"
        if self.place:
            text += f" ({self.place})"
        if self.waiting:
            text += f", waiting for other ranks in {self.waiting}"
        return text + (f", at {self.where}" if self.where else "")


THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+).*$", re.M)
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.M)


def doing_of_thread(ident: int, trainer: pl.Trainer | None) -> Doing:
    """Return the activity of a thread of this process; `trainer` is None if there is none yet."""
    text = ""
    # without the file only Lightning's records are used; a full pipe would block this thread, which holds the GIL
    with suppress(OSError), tempfile.TemporaryFile("w+", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    _, *parts = THREAD.split(text)
    of_thread = {int(number, 16): text for number, text in zip(parts[::2], parts[1::2], strict=True)}
    found = FRAME.findall(of_thread.get(ident, ""))
    return doing_in((FrameSummary(file, int(line), name, lookup_line=False) for file, line, name in found), trainer)


def doing_in(frames: Iterable[FrameSummary], trainer: pl.Trainer | None) -> Doing:
    """Return the activity from frames, innermost first, and from Lightning's records of the run."""
    hook = where = waiting = ""
    for depth, frame in enumerate(frames):
        file, name = frame.filename.replace("\\", "/"), frame.name
        if not waiting and depth < INNERMOST and not hook:
            waiting = name if "/torch/distributed/" in file else WAITS.get(name, "")
        if not where and not hook and not file.startswith(LIBRARIES):
            where = f"{Path(file).name}:{frame.lineno} in {name}"
        if not hook and file.endswith(LOADER):
            hook = "the data loader"
        if not hook and name in HOOKS:
            hook = name
    if trainer is None:
        return Doing(hook=hook, where=where, waiting=waiting)
    module, epoch_loop, place = trainer.lightning_module, trainer.fit_loop.epoch_loop, ""
    if trainer.state.stage is not None:
        place = str(trainer.state.stage.value)
        if place == "train":
            place = f"epoch {trainer.current_epoch}, batch {max(0, epoch_loop.batch_idx)}"
    # all loops, so that a batch of any of them is progress
    loops = (epoch_loop, epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    return Doing(
        # if the stack has no hook, the one that Lightning has recorded for `self.log`
        hook=hook or ("" if module is None else module._current_fx_name or ""),
        where=where,
        waiting=waiting,
        place=place,
        batches=sum(int(loop.batch_progress.total.ready) for loop in loops),
        unwinding=trainer.interrupted,
    )
