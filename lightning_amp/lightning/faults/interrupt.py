"""The end of a run that a person has interrupted: quickly, with the way back as its last line, and status 130."""

import signal
import sys
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_amp.errors import STATUS_OF_INTERRUPT
from lightning_amp.lightning._compat import ScriptLauncher
from lightning_amp.lightning.faults.detector import say


class InterruptibleLauncher(ScriptLauncher):
    """Lightning's; asked to end the other processes after an interrupt, it ends this one as shells expect."""

    last_words: str | None = None
    """What to say in the end, once the run has been interrupted."""

    @property
    def is_interactive_compatible(self) -> bool:
        """One process starts no others, which is all that a notebook cannot have."""
        return self.num_processes * self.num_nodes == 1

    def kill(self, signum: signal.Signals | int) -> None:
        """End the other processes; the last that Lightning does after an interrupt, before status 1."""
        super().kill(signum)
        words, self.last_words = self.last_words, None
        if words is None:
            return
        if words:
            say(words)
        sys.exit(STATUS_OF_INTERRUPT)


def make_interruptible(launcher: object) -> None:
    """Let Lightning's launcher end an interrupted run as `InterruptibleLauncher` does; others stay as they are."""
    if type(launcher) is ScriptLauncher:
        launcher.__class__ = InterruptibleLauncher


def how_to_resume(trainer: Trainer | None) -> str:
    """The newest checkpoint of the run, and how to go on from it; nothing where there was no training."""
    if trainer is None or trainer.state.fn != TrainerFn.FITTING:
        return ""
    path = _newest_checkpoint(trainer)
    if path is None:
        return (
            "interrupted; no checkpoint has been written, so the next run begins anew: ModelCheckpoint with"
            " every_n_train_steps writes some within an epoch"
        )
    return f"interrupted; to go on: trainer.fit(..., ckpt_path={str(path)!r}), or --ckpt_path {path}"


def _newest_checkpoint(trainer: Trainer) -> Path | None:
    names = ("last_model_path", "best_model_path", "_last_checkpoint_saved", "ckpt_path")
    found = [getattr(callback, name, "") for callback in trainer.checkpoint_callbacks for name in names]
    there = [Path(path) for path in found if path and Path(path).exists()]
    return max(there, key=lambda path: path.stat().st_mtime, default=None)
