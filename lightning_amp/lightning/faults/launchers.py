"""Start ranks so that an interrupt prints how to resume as its last line, and a user's mistake its message, once.

Every rank raises the same PlanError or InstallError, so rank 0 speaks for all. Ranks that the main process has started
by multiprocessing raise it there too, where torch would raise their tracebacks as text.
"""

import os
import re
import signal
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.multiprocessing.spawn import ProcessRaisedException

from lightning_amp import errors
from lightning_amp.errors import STATUS_OF_INTERRUPT
from lightning_amp.lightning._compat import MultiProcessingLauncher, ScriptLauncher, rank_zero_only
from lightning_amp.lightning.faults.detector import say

STATUS_OF_SIGTERM = 128 + signal.SIGTERM
STARTED_BY = "LIGHTNING_AMP_STARTED_BY"
"""Variable of the environment in which a process finds the id of the one that has started it as a rank."""


class InterruptibleLauncher(ScriptLauncher):
    """Lightning's; its processes know who has started them. Asked to end them after an interrupt, it ends this one as
    shells expect.
    """

    last_words: str | None = None
    """What to say in the end, once the run has been interrupted."""

    @property
    def is_interactive_compatible(self) -> bool:
        """One process starts no others, which is all that a notebook cannot have."""
        return self.num_processes * self.num_nodes == 1

    def _call_children_scripts(self) -> None:
        if self.num_processes * self.num_nodes == 1:
            # Lightning would set LOCAL_RANK, so that a later Trainer or script takes itself for one of several ranks
            return
        os.environ[STARTED_BY] = str(os.getpid())
        try:
            super()._call_children_scripts()
        finally:
            del os.environ[STARTED_BY]

    def kill(self, signum: signal.Signals | int) -> None:
        """End the other processes; the last that Lightning does after an interrupt, before status 1."""
        super().kill(signum)
        words, self.last_words = self.last_words, None
        if words is None:
            return
        if words:
            say(words)
        sys.exit(STATUS_OF_INTERRUPT)


def how_to_resume(trainer: Trainer | None) -> str:
    """The newest checkpoint of the run, and how to go on from it; nothing where there was no training."""
    if trainer is None or trainer.state.fn != TrainerFn.FITTING:
        return ""
    names = ("last_model_path", "best_model_path", "_last_checkpoint_saved", "ckpt_path")
    found = [getattr(callback, name, "") for callback in trainer.checkpoint_callbacks for name in names]
    there = [Path(path) for path in found if path and Path(path).exists()]
    path = max(there, key=lambda path: path.stat().st_mtime, default=None)
    if path is None:
        return (
            "interrupted; no checkpoint has been written, so the next run begins anew: ModelCheckpoint with"
            " every_n_train_steps writes some within an epoch"
        )
    return f"interrupted; to go on: trainer.fit(..., ckpt_path={str(path)!r}), or --ckpt_path {path}"


OF_ALL_RANKS = (errors.PlanError, errors.InstallError)
RAISED = re.compile(r"\nlightning_amp\.errors\.(PlanError|InstallError): ((?:(?!\nTraceback \().)*)\Z", re.DOTALL)


def print_mistakes_once() -> None:
    """Let rank 0 alone print an uncaught mistake, by its message; it may be called again."""
    before = sys.excepthook
    if getattr(before, "__module__", "") == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None, /) -> None:
        if not issubclass(kind, OF_ALL_RANKS):
            before(kind, error, trace)
            return
        text = "".join(traceback.format_exception_only(error))
        rank_zero_only(print)(text, end="", file=sys.stderr)

    sys.excepthook = hook


class MistakesLauncher(MultiProcessingLauncher):
    """Lightning's; a mistake that its processes raise is raised as such."""

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        """Start the processes and wait for them."""
        try:
            return super().launch(*args, **kwargs)
        except ProcessRaisedException as error:
            found = RAISED.search(str(error).rstrip())
            if found is None:
                raise
            raise getattr(errors, found[1])(found[2]) from None


def end_as_ours(launcher: object) -> None:
    """Let Lightning's launcher end a run as the class here that is made of it; others stay as they are."""
    if type(launcher) is ScriptLauncher:
        launcher.__class__ = InterruptibleLauncher
    elif type(launcher) is MultiProcessingLauncher:
        launcher.__class__ = MistakesLauncher
