"""Checkpoints that are complete or not there: written aside, flushed to the disk, then renamed.

    save    a new file beside the target, locked while it is written, fsync, rename over the target (one step for the
            file system), fsync of the folder, where the file system has one; an error, of whichever kind, removes the
            file aside and leaves the target as it was
    load    an incomplete file is refused by name, with the complete ones beside it

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
from typing import Any, BinaryIO, cast

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from lightning_amp.errors import DataError
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


class _FirstError:
    """A file for torch.save, which hides the error of a failed write behind another one."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Keep the first error."""
        try:
            return int(self._file.write(data))
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        """Flush."""
        self._file.flush()


def write_state(checkpoint: Any, raw: BinaryIO) -> None:
    """Write what torch.save writes, down to the disk.

    Raises:
        OSError: As the file has raised it.
    """
    file = _FirstError(raw)
    try:
        torch.save(checkpoint, file)  # type: ignore[arg-type]
    except Exception:
        if file.error is not None:
            raise file.error from None
        raise
    try:
        os.fsync(raw.fileno())
    except OSError as error:
        if error.errno not in WITHOUT_FSYNC:
            raise


@contextlib.contextmanager
def _aside(target: Path) -> Iterator[BinaryIO]:
    """A file to write to, renamed to the target at the end, or removed."""
    aside, file = _create(target.parent)
    with file:
        try:
            yield file
            aside.replace(target)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
    # it is there; that its name has reached the disk is more than every file system promises
    with contextlib.suppress(OSError):
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _create(folder: Path) -> tuple[Path, BinaryIO]:
    """A new file, locked; containers may have the same machine's name and process, so neither makes it one's own."""
    while True:
        path = folder / f"{ASIDE}-{platform.node()}-{os.getpid()}-{secrets.token_hex(4)}"
        file = cast("BinaryIO", path.open("xb", buffering=0))
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        # another process may have taken it for one that was left, before it was locked
        if path.exists():
            return path, file
        file.close()


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
        f"checkpoint {str(target)!r} was asked for and cannot be written: {error}; {before},"
        f" {format_bytes(shutil.disk_usage(there).free)} are free on that disk{_others(target)}. Make room or choose"
        " another folder, then resume from the last complete checkpoint"
    )


def _incomplete(path: Path, error: Exception) -> str:
    return (
        f"checkpoint {str(path)!r} was asked for, found {path.stat().st_size:,} bytes that are not a complete one"
        f" ({type(error).__name__}){_others(path)}. Resume from a complete one"
    )


def _others(path: Path) -> str:
    """The complete checkpoints beside a path, the newest first."""
    files = [
        file for file in path.parent.glob(f"*{path.suffix}") if file != path and zipfile.is_zipfile(file)
    ]
    files.sort(key=lambda file: -file.stat().st_mtime)
    return f"; complete beside it: {[file.name for file in files[:5]]!r}" if files else ""
