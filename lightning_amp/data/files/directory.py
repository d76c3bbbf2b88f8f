"""Find the files of a data directory; write files and folders under a temporary name, so a failed run leaves nothing.

    hic/*.h5ad  rna/*.h5ad  atac/*.h5ad  methyl/*.h5ad  graphs/*.graphml.gz

As HiGLUE writes it. Its intermediate files (hic_base_*, rna_base_*) are ignored. If there are files of several settings
(hic_500kb_raw_0.98_2d_10.h5ad and hic_1mb_...), one must be named.
"""

import errno
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_amp.errors import DataError
from lightning_amp.quantities import format_bytes

MODALITIES = ("hic", "rna", "atac", "methyl")
FOLDERS = frozenset({*MODALITIES, "graphs"})
GRAPH_ENDINGS = (".graphml.gz", ".graphml")


@dataclass(frozen=True, slots=True)
class DataDirectory:
    """The files of one data set and one setting; an absent modality is None."""

    root: Path
    hic: Path | None = None
    rna: Path | None = None
    atac: Path | None = None
    methyl: Path | None = None
    graph: Path | None = None
    unread: tuple[Path, ...] = ()
    """h5ad files in folders of other names, which nothing here reads."""

    @property
    def modalities(self) -> dict[str, Path]:
        """The modalities that are present and their files."""
        files = {name: getattr(self, name) for name in MODALITIES}
        return {name: path for name, path in files.items() if path is not None}


def find(root: str | Path, *, setting: str | None = None, others: bool = False) -> DataDirectory:
    """Find the files under a directory, of one of several settings such as "500kb_raw_0.98_2d_10".

    `others`: a directory of other modalities alone is allowed.
    """
    root = Path(root)
    if not root.is_dir():
        found = "a file" if root.exists() else "nothing"
        raise DataError(f"{root}: expected a data directory, found {found}; `lightning-amp prepare` writes one")
    files = {name: _choose(root, name, setting) for name in MODALITIES}
    unread = tuple(path for path in sorted(root.glob("*/*.h5ad")) if path.parent.name not in FOLDERS)
    if not any(files.values()) and not (others and unread):
        raise DataError(
            f"{root}: no modality found, the directory holds {sorted(p.name for p in root.iterdir())[:8]!r}; "
            f"expected .h5ad files in one of {list(MODALITIES)!r}"
        )
    # the graph belongs to the setting of the first modality that is there
    chosen = setting or next((_setting(path, name) for name, path in files.items() if path), "")
    graph = _choose_graph(root, chosen, named=setting is not None)
    return DataDirectory(root, **files, graph=graph, unread=unread)


def _setting(path: Path, modality: str) -> str:
    return path.name.removesuffix(".h5ad").removeprefix(f"{modality}_")


def _choose(root: Path, modality: str, setting: str | None) -> Path | None:
    """Return the only h5ad of a modality, or the one of the setting."""
    folder = root / modality
    files = [p for p in sorted(folder.glob("*.h5ad")) if not p.name.startswith(f"{modality}_base_")]
    settings = [_setting(path, modality) for path in files]
    if setting is not None and files:
        if setting not in settings:
            raise DataError(f"{folder}: no file of setting {setting!r}, found {settings!r}; choose one of them")
        return files[settings.index(setting)]
    if len(files) > 1:
        raise DataError(f"{folder}: found {len(files)} settings {settings!r}; choose one with setting=...")
    return files[0] if files else None


def _choose_graph(root: Path, setting: str, *, named: bool) -> Path | None:
    """Return the only graph, or the one named after the setting; of several, HiGLUE's final one (dcq)."""
    files = [p for p in sorted((root / "graphs").glob("*")) if p.name.endswith(GRAPH_ENDINGS)]
    # A single graph may have any name, unless a setting is named: it could be another setting's.
    if len(files) <= 1 and not (files and named):
        return files[0] if files else None
    stems = [f"_{p.name.removesuffix('.gz').removesuffix('.graphml')}" for p in files]
    fitting = [p for p, stem in zip(files, stems, strict=True) if stem.endswith(f"_{setting}")]
    final = [p for p in fitting if p.name.startswith("dcq_prior_")] or fitting
    if len(final) == 1:
        return final[0]
    raise DataError(
        f"{root / 'graphs'}: found graphs {[p.name for p in files]!r}, of which {len(final)} fit setting "
        f"{setting!r}; keep one, named after the setting"
    )


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors of a full or read-only disk."""


@contextmanager
def written_aside(path: Path, needed: Callable[[], int] | None = None) -> Iterator[Path]:
    """Yield a temporary name; the file written there becomes `path` on success and is removed on any error.

    `needed` returns about how many bytes are written, for the message of a full disk.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with _refusing(path, needed):
            yield aside
            aside.replace(path)
    finally:
        # it can be there though the disk is read-only by now
        with suppress(OSError):
            aside.unlink(missing_ok=True)


@contextmanager
def write_aside(out: str | Path, *, overwrite: bool = False, needed: Callable[[], int] | None = None) -> Iterator[Path]:
    """Yield a temporary directory that becomes `out` on success and is removed on any error; parents are made.

    `overwrite` replaces a data directory; nothing else is ever replaced. `needed` as for `written_aside`.
    """
    out = Path(out)
    if out.exists():
        found = sorted(p.name for p in out.iterdir()) if out.is_dir() else None
        if found is None:
            raise DataError(f"{out}: expected a directory to write, found a file; choose another path")
        if found and not overwrite:
            raise DataError(
                f"{out}: the output exists and holds {found[:5]!r}; choose another path, or pass --overwrite, in"
                " Python overwrite=True, to replace it"
            )
        # A mistyped path must not cost a home directory.
        if foreign := [name for name in found if name not in FOLDERS]:
            raise DataError(
                f"{out}: does not overwrite a directory that is no data directory; found {foreign[:5]!r} together with "
                f"{sorted(FOLDERS)!r}; remove it yourself or choose another path"
            )
    place = out.resolve()  # "." has neither a name nor a parent
    aside = place.parent / f".{place.name}.{secrets.token_hex(4)}.partial"
    made = [folder for folder in aside.parents if not folder.exists()]
    try:
        aside.mkdir(parents=True)
    except OSError as error:
        _remove_empty(made)
        raise DataError(
            f"{out}: cannot write there ({error.strerror}); give a path in a directory that you may write to"
        ) from error
    try:
        with _refusing(out, needed):
            yield aside
            if place.exists():
                # a directory cannot be renamed to one that is not empty
                old = aside.with_suffix(".old")
                place.rename(old)
                aside.rename(place)
                shutil.rmtree(old)
            else:
                aside.rename(place)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        _remove_empty(made)


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders, innermost first, as far as they are empty."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


@contextmanager
def _refusing(path: Path, needed: Callable[[], int] | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise DataError(
            f"{cannot_write(path, error, needed)}. Nothing half-written is left, and what was there before is untouched"
        ) from error


def cannot_write(path: str | Path | None, error: OSError, needed: Callable[[], int] | None = None) -> str:
    """Say that a disk is full or read-only, how much is needed if that is known, and what to do."""
    what = "a file" if path is None else f"{str(path)!r}"
    room = "make room"
    if needed is not None and path is not None:
        folder = next(place for place in Path(path).resolve().parents if place.exists())
        free = shutil.disk_usage(folder).free
        room = f"up to {format_bytes(needed())} are needed, {format_bytes(free)} are free: make room"
    return f"cannot write {what}: {error.strerror}; {room} or choose another folder"
