"""Launch ranks so that an interrupt ends with a line on how to resume, and a user's mistake is printed once.

Every rank raises the same PlanError or InstallError, so only rank 0 prints it. If the main process has started the
ranks by multiprocessing, it raises the error too; torch would raise their tracebacks as text.
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
"""Environment variable with the id of the process that has started this one as a rank."""


class InterruptibleLauncher(ScriptLauncher):
    """A ScriptLauncher whose processes know their parent, and which ends as shells expect after an interrupt."""

    last_words: str | None = None
    """Text that `kill` prints at the end of an interrupted run."""

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether a notebook is supported: only a single process, because a notebook cannot start others."""
        return self.num_processes * self.num_nodes == 1

    def _call_children_scripts(self) -> None:
        if self.num_processes * self.num_nodes == 1:
            # Lightning would set LOCAL_RANK, so that a later Trainer or script would act as one of several ranks
            return
        os.environ[STARTED_BY] = str(os.getpid())
        try:
            super()._call_children_scripts()
        finally:
            del os.environ[STARTED_BY]

    def kill(self, signum: signal.Signals | int) -> None:
        """Kill the other processes; after an interrupt, this is Lightning's last call before it exits with status 1."""
        super().kill(signum)
        words, self.last_words = self.last_words, None
        if words is None:
            return
        if words:
            say(words)
        sys.exit(STATUS_OF_INTERRUPT)


def how_to_resume(trainer: Trainer | None) -> str:
    """Return how to resume from the newest checkpoint of the run; "" if there was no training."""
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
RAISED = re.compile(
    r"\nlightning_amp\.errors\.(PlanError|DoesNotFitError|InstallError): ((?:(?!\nTraceback \().)*)\Z", re.DOTALL
)


def print_mistakes_once() -> None:
    """Let only rank 0 print an uncaught PlanError or InstallError, without traceback; repeated calls are allowed."""
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
    """A MultiProcessingLauncher that raises a mistake of its processes with its own class."""

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
    """Change a launcher of Lightning to the subclass of this file; other launchers do not change."""
    if type(launcher) is ScriptLauncher:
        launcher.__class__ = InterruptibleLauncher
    elif type(launcher) is MultiProcessingLauncher:
        launcher.__class__ = MistakesLauncher
