"""Write checkpoints atomically: to a temporary file, flushed to the disk, then renamed.

    save    a new file next to the target, locked while it is written, fsync, rename over the target (one step for the
            file system); an error, of whichever kind, removes the file aside and leaves the target as it was
    load    an incomplete file is refused by name, with the complete ones in its folder

Tensors go to the file one after the other: no second copy of the checkpoint in memory. A file aside that a killed
process has left, which nobody has locked any more, is removed by the next save of the same machine in that folder.

Known limits: what is not a local path (s3://, gs://, ...) is written by Lightning, which knows these stores; on a file
system without locks what a killed process has left stays.
"""

import contextlib
import errno
import fcntl
import os
import platform
import secrets
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from lightning_amp.errors import DataError
from lightning_amp.lightning.checkpoints.read_directory import earlier_name, is_directory
from lightning_amp.quantities import format_bytes

ASIDE = ".partial"
WITHOUT_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
"""What file systems answer that cannot flush."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Reads and writes checkpoint files."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint; a DataError where that cannot be done, and what was there before is still there."""
        if storage_options is not None or _is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _remove_left_over(target.parent)
            with _aside(target) as file:
                write_state(checkpoint, file)
        except OSError as error:
            raise DataError(_cannot_write(target, error)) from error

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, loc: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint; a DataError where the file is not a complete one."""
        try:
            loaded: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
        except Exception as error:
            if _is_remote(path) or not Path(path).is_file() or zipfile.is_zipfile(path):
                raise
            raise DataError(_incomplete(Path(path), error)) from error
        return loaded


def write_state(checkpoint: Any, file: Any) -> None:
    """Write what torch.save writes to an open file, down to the disk.

    Raises:
        OSError: As the file has raised it.
    """
    try:
        torch.save(checkpoint, file)
    except RuntimeError as error:
        # torch's writer raises another one after a write that failed
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    try:
        os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in WITHOUT_FSYNC:
            raise


def put_in_place(aside: Path, path: Path) -> None:
    """Give a complete checkpoint its name, for a file in one step; of a directory of shards there the old one goes."""
    if not aside.is_dir() and not is_directory(path):
        aside.replace(path)
        return
    previous = earlier_name(path)
    if os.path.lexists(path):
        _remove(previous)
        path.rename(previous)
    aside.rename(path)
    _remove(previous)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _aside(target: Path) -> Iterator[BinaryIO]:
    """A locked file to write to, renamed to the target at the end, or removed."""
    # containers may have the same machine's name and process, so neither makes it one's own
    aside = target.parent / f"{ASIDE}-{platform.node()}-{os.getpid()}-{secrets.token_hex(4)}"
    with aside.open("xb", buffering=0) as file:
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            yield file
            put_in_place(aside, target)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise


def _remove_left_over(folder: Path) -> None:
    for aside in folder.glob(f"{ASIDE}-{platform.node()}-*"):
        with contextlib.suppress(OSError), aside.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            aside.unlink(missing_ok=True)


def _is_remote(path: str | Path) -> bool:
    return "://" in str(path)


def _cannot_write(target: Path, error: OSError) -> str:
    there = next((folder for folder in target.parents if folder.exists()), Path())
    before = "the one that was there is untouched" if target.is_file() else "no file of that name was left"
    return (
        f"checkpoint {str(target)!r} cannot be written: {error}; {before},"
        f" {format_bytes(shutil.disk_usage(there).free)} are free on that disk{_others(target)}. Make room"
        " or choose another folder, then resume from the last complete checkpoint"
    )


def _incomplete(path: Path, error: Exception) -> str:
    return (
        f"checkpoint {str(path)!r} is not complete, found {path.stat().st_size:,} bytes"
        f" ({type(error).__name__}){_others(path)}. Resume from a complete one"
    )


def _others(path: Path) -> str:
    """The complete checkpoints in the folder of a path, the newest first."""
    files = [
        file for file in path.parent.glob(f"*{path.suffix}") if file != path and zipfile.is_zipfile(file)
    ]
    files.sort(key=lambda file: -file.stat().st_mtime)
    return f"; complete in the same folder: {[file.name for file in files[:5]]!r}" if files else ""
