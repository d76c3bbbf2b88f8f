"""Writes files and data directories under a temporary name and renames them at the end; a failed run leaves nothing."""

import errno
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_amp.data.files.directory import FOLDERS
from lightning_amp.errors import DataError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors of a full or read-only disk."""


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yield a temporary name; the file written there becomes `path` on success and is removed on any error.

    Raises:
        DataError: The disk is full or read-only.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with _refusing(path):
            yield aside
            aside.replace(path)
    finally:
        # it can be there though the disk is read-only by now
        with suppress(OSError):
            aside.unlink(missing_ok=True)


@contextmanager
def write_aside(out: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary directory that becomes `out` on success and is removed on any error.

    Args:
        out: The directory to make; its parent must exist.
        overwrite: Replace `out` if it is a data directory; nothing else is ever replaced.

    Raises:
        DataError: `out` exists and is not to be replaced, its parent cannot be written to, or the disk is full.
    """
    out = Path(out)
    _check_free(out, overwrite=overwrite)
    place = out.resolve()  # "." has neither a name nor a parent
    aside = place.parent / f".{place.name}.{secrets.token_hex(4)}.partial"
    try:
        aside.mkdir()
    except OSError as error:
        raise DataError(
            f"{out}: cannot write there ({error.strerror}); give a path in an existing directory that you "
            "may write to"
        ) from error
    try:
        with _refusing(out):
            yield aside
            _put_in_place(aside, place)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise DataError(
            f"{cannot_write(path, error)}. Nothing half-written is left, and what was there before is untouched"
        ) from error


def cannot_write(path: str | Path | None, error: OSError) -> str:
    """Say that a disk is full or read-only, and what to do."""
    what = "a file" if path is None else f"{str(path)!r}"
    return f"cannot write {what}: {error.strerror}; make room or choose another folder"


def _check_free(out: Path, *, overwrite: bool) -> None:
    if not out.exists():
        return
    found = sorted(p.name for p in out.iterdir()) if out.is_dir() else None
    if found is None:
        raise DataError(f"{out}: expected a directory to write, found a file; choose another path")
    if found and not overwrite:
        raise DataError(
            f"{out}: the output exists and holds {found[:5]!r}; choose another path, or pass overwrite to "
            "replace it"
        )
    # A mistyped path must not cost a home directory.
    foreign = [name for name in found if name not in FOLDERS]
    if foreign:
        raise DataError(
            f"{out}: does not overwrite a directory that is no data directory; found {foreign[:5]!r} together with "
            f"{sorted(FOLDERS)!r}; remove it yourself or choose another path"
        )


def _put_in_place(aside: Path, out: Path) -> None:
    if not out.exists():
        aside.rename(out)
        return
    old = aside.with_suffix(".old")
    out.rename(old)
    aside.rename(out)
    shutil.rmtree(old)
