"""Find the checkpoint that `--ckpt_path last`, `best` or `hpc` of the command line means.

Lightning looks for `last` in the folder of the run that is about to start, which is a new one where a logger numbers
its runs. It finds nothing there, warns, and goes on with untrained weights. Here `last` is the newest checkpoint that
`fit` of the same configuration wrote, in whichever run.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_amp.errors import PlanError

SHOWN = 5
"""Checkpoints that a refusal lists."""


def find_checkpoint(asked: str, trainer: Trainer, same_configuration: Callable[[Path], bool]) -> str:
    """The path of the checkpoint that is requested; a word that Lightning can resolve, and a path, stay as they are.

    Args:
        same_configuration: Whether the run whose logs are in a folder had the model and the data of this one.

    Raises:
        PlanError: There is none.
    """
    known = {
        "last": False,
        # of a Trainer that has trained in this process
        "best": bool(getattr(trainer.checkpoint_callback, "best_model_path", None)),
        "hpc": trainer._checkpoint_connector._hpc_resume_path is not None,
    }
    # a path that may be remote or of a registry is left to Lightning
    if known.get(asked, ":" in asked or Path(asked).exists()):
        return asked
    found, others = set(_own(trainer)), set[str]()
    for path in _of_runs(trainer):
        (found if same_configuration(path.parent.parent) else others).add(str(path))
    if asked == "last" and found:
        return max(found, key=_written)
    raise PlanError(f"--ckpt_path {asked!r}: {_why(asked)}. {_listed(found, others)}")


def _own(trainer: Trainer) -> Iterator[str]:
    """Checkpoints in folders that the configuration names, and those that Lightning calls the last ones."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            yield from callback._find_last_checkpoints(trainer)
            folder = Path(callback.dirpath or Path(trainer.default_root_dir, "checkpoints"))
            if callback.dirpath is not None or not trainer.loggers:
                yield from map(str, folder.glob("*.ckpt"))
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, OnExceptionCheckpoint) and Path(callback.ckpt_path).exists():
            yield callback.ckpt_path


def _of_runs(trainer: Trainer) -> Iterator[Path]:
    """Checkpoints of the runs that the first logger has numbered."""
    for logger in trainer.loggers[:1]:
        runs = Path(logger.save_dir or trainer.default_root_dir, str(logger.name))
        yield from runs.glob("*/checkpoints/*.ckpt")


def _written(path: str) -> float:
    return float(get_filesystem(path).modified(path).timestamp())


def _why(asked: str) -> str:
    return {
        "last": "fit has written no checkpoint of this model and this data",
        "best": "which one is best is known to the run of fit alone",
        "hpc": "there is no checkpoint of a run that a cluster interrupted",
    }.get(asked, "there is no such file")


def _listed(found: set[str], others: set[str]) -> str:
    if not found | others:
        return "No checkpoint was found: run `lightning-amp fit` with this configuration and without --ckpt_path first"
    newest = sorted(found or others, key=_written, reverse=True)
    whose = "this configuration" if found else "other configurations"
    more = f" and {len(newest) - SHOWN} more" if len(newest) > SHOWN else ""
    return f"Found of {whose}: {', '.join(map(repr, newest[:SHOWN]))}{more}. Name one by its path"
