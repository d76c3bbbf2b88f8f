"""Read a checkpoint that is a directory of shards, on any number of ranks or on none.

    open_directory    -> the plain checkpoint with a `Stored` for every tensor that lies in a shard; reads no values
    Stored.read       -> that tensor, whole
    fill              -> a state with the tensors themselves, by one pass over the files

Everything is checked before a value is read: files that are missing or cut short, tensors that are not there or of
another shape, entries that nobody has written. No collective: every rank reads for itself. Neither of the two pickles
in a directory can run code, unless `weights_only=False` is said.
"""

import copy
import pickle
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from lightning_amp.errors import DataError

META = "meta.pt"
"""As Lightning's other strategies name it."""
TORCH_META = ".metadata"
"""torch's: where the tensors lie; a pickle, which may name any function to call."""
BULK = ("state_dict", "optimizer_states")
"""What a checkpoint keeps in shards."""
DAMAGE = (pickle.UnpicklingError, RuntimeError, EOFError, OSError)
"""What reading a damaged file raises."""
ANOTHER = "write the checkpoint anew, or take an earlier one"
_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_METADATA, f"{kind}StorageMetadata") for kind in ("Tensor", "Bytes", "Chunk")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *((module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
}
"""The only classes that are looked up in it; `weights_only=False` reads it as torch does."""


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Stored:
    """A tensor in a directory of shards; hooks that need its values call `read`."""

    directory: Path
    key: str
    shape: torch.Size
    dtype: torch.dtype
    metadata: Metadata = field(repr=False)

    def read(self) -> Tensor:
        """The whole tensor, in the host's memory; a DataError where the shards cannot be read."""
        return _read([self])[self.key]


class _UnknownGlobalError(pickle.UnpicklingError):
    """A pickle asks for something that no checkpoint needs."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise _UnknownGlobalError(f"{module}.{name}")


class _ShardReader(FileSystemReader):
    """Reads shards by metadata that have been read already."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Called by torch."""
        return self._metadata


def is_directory(path: Path) -> bool:
    """Whether it is a directory of shards, perhaps a damaged one."""
    return path.is_dir() and ((path / META).exists() or (path / TORCH_META).exists())


def earlier_name(path: Path) -> Path:
    """The name of a checkpoint while another one takes its place."""
    return path.with_name(f".{path.name}.previous")


def refuse_interrupted(path: Path) -> None:
    """Name, in a DataError, the earlier checkpoint, where a run ended while it gave a new one its name."""
    previous = earlier_name(path)
    if not path.exists() and is_directory(previous):
        raise DataError(
            f"the checkpoint {str(path)!r} was to be loaded, found nothing: a run has ended while it replaced it. The"
            f" one before is complete: rename {str(previous)!r} to {path.name!r}"
        )


ReadFile = Callable[..., dict[str, Any]]
"""Reads a plain checkpoint, as `load_checkpoint` of a CheckpointIO does: (path, *, weights_only)."""


def open_directory(
    path: Path, read_file: ReadFile | None = None, *, weights_only: bool | None = None
) -> dict[str, Any]:
    """A checkpoint whose tensors are still on the disk.

    Args:
        read_file: Reads the file of everything but tensors; by default torch.load.
        weights_only: False reads what may run code; None is True.

    Raises:
        DataError: It is no such directory, not complete, or contradicts itself.
    """
    for name in (META, TORCH_META):
        if not (path / name).is_file():
            raise _damaged(
                path, f"has no file {name!r}; a directory of shards has both {META!r} and {TORCH_META!r}"
            )
    read: Callable[[], Any] = partial(read_file or _load_file, path / META, weights_only=weights_only)
    skeleton: dict[str, Any] = _safely(path, META, read, DAMAGE)
    read = partial(_read_metadata, path, weights_only=weights_only is not False)
    # a damaged pickle may raise anything
    metadata: Metadata = _safely(path, TORCH_META, read, (Exception,))
    if BULK[0] not in skeleton:
        raise DataError(
            f"{str(path)!r} was to be loaded, its {META!r} has {sorted(map(str, skeleton))!r} and no {BULK[0]!r}:"
            " another strategy has written it; load it with that one, or convert it with Lightning's"
            " `python -m lightning.pytorch.utilities.consolidate_checkpoint`"
        )
    _check_files(path, metadata)
    kept = metadata.state_dict_metadata
    found: dict[str, Stored] = {}

    def point(key: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_meta:
            return value
        _check_tensor(path, key, value, kept.get(key))
        found[key] = Stored(directory=path, key=key, shape=value.shape, dtype=value.dtype, metadata=metadata)
        return found[key]

    checkpoint = {
        name: replaced(tree, point, (name,)) if name in BULK else tree for name, tree in skeleton.items()
    }
    if more := sorted(set(kept) - set(found)):
        raise _damaged(path, f"has tensors that {META!r} does not know, e.g. {more[:3]!r}")
    return checkpoint


def load_either(
    path: str | Path, load_file: ReadFile, read_part: ReadFile, *, weights_only: bool | None
) -> dict[str, Any]:
    """A checkpoint that is a file, read by `load_file`, or a directory of shards, whichever is there.

    Raises:
        DataError: As `refuse_interrupted` and `load_directory`.
    """
    place = Path(path)
    refuse_interrupted(place)
    if place.is_dir():
        return load_directory(place, read_part, weights_only=weights_only)
    # as it was given: it may be the address of a file elsewhere
    return load_file(path, weights_only=weights_only)


def load_directory(path: Path, read_file: ReadFile, *, weights_only: bool | None) -> dict[str, Any]:
    """A checkpoint with the module's tensors; optimiser states are read when the optimisers load them.

    Raises:
        DataError: As `open_directory`, or the shards cannot be read.
    """
    checkpoint = open_directory(path, read_file, weights_only=weights_only)
    return {**checkpoint, "state_dict": fill(checkpoint["state_dict"])}


def fill(tree: Any) -> Any:
    """A state with the tensors that it had in `open_directory` as `Stored`, read in one pass; all else as it is.

    Raises:
        DataError: The shards cannot be read.
    """
    found: list[Any] = []
    replaced(tree, lambda _, value: found.append(value))
    found = [value for value in found if isinstance(value, Stored)]
    if not found:
        return tree
    values = _read(found)
    return replaced(tree, lambda _, value: values[value.key] if isinstance(value, Stored) else value)


def replaced(tree: Any, change: Callable[[str, Any], Any], place: tuple[str, ...] = ()) -> Any:
    """A nesting of dicts and lists with every leaf changed; `change` gets the place of a leaf and the leaf."""
    if isinstance(tree, dict):
        # copied, not made anew: load_state_dict reads the versions that torch keeps beside the tensors
        copied = copy.copy(tree)
        copied.update({key: replaced(value, change, (*place, str(key))) for key, value in tree.items()})
        return copied
    if isinstance(tree, list):
        return [replaced(value, change, (*place, str(i))) for i, value in enumerate(tree)]
    return change("/".join(place), tree)


def _load_file(path: Path, *, weights_only: bool | None) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=weights_only is not False)
    return content


def _safely(path: Path, name: str, read: Callable[[], Any], damage: tuple[type[Exception], ...]) -> Any:
    """What one of the two pickles of a directory holds; a DataError where it could run code, or of `damage`."""
    try:
        return read()
    except _UnknownGlobalError as error:
        raise _unsafe(path, name, str(error)) from error
    except damage as error:
        asked = isinstance(error, pickle.UnpicklingError) and re.search(r"GLOBAL ([\w.]+)", str(error))
        if asked:
            raise _unsafe(path, name, asked[1]) from error
        raise _damaged(path, f"has a file {name!r} that cannot be read: {error!r}") from error


def _read_metadata(directory: Path, *, weights_only: bool) -> Metadata:
    """Where the tensors of a directory lie; an exception of any kind where the file is damaged."""
    with (directory / TORCH_META).open("rb") as file:
        found = _Unpickler(file).load() if weights_only else pickle.load(file)
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError(f"{type(found).__name__} in place of torch's Metadata")
    return found


def _check_files(path: Path, metadata: Metadata) -> None:
    """Every file of shards must be there, and as long as what was written to it."""
    needed: dict[str, int] = {}
    for info in metadata.storage_data.values():
        end = info.offset + info.length
        needed[info.relative_path] = max(end, needed.get(info.relative_path, 0))
    for name, n_bytes in sorted(needed.items()):
        file = path / name
        if not file.is_file():
            raise _damaged(path, f"lacks the shard {name!r} of {len(needed)!r}")
        if (size := file.stat().st_size) < n_bytes:
            raise _damaged(path, f"has a shard {name!r} of {size!r} bytes, of which {n_bytes!r} were written")


def _check_tensor(path: Path, key: str, wanted: Tensor, kept: Any) -> None:
    if not isinstance(kept, TensorStorageMetadata):
        raise _damaged(path, f"has no tensor {key!r} in its shards")
    if kept.size != wanted.shape or kept.properties.dtype != wanted.dtype:
        raise _damaged(
            path,
            f"has {key!r} as {tuple(kept.size)!r} of {kept.properties.dtype!r} in its shards, and as"
            f" {tuple(wanted.shape)!r} of {wanted.dtype!r} in {META!r}",
        )
    written = sum(prod(chunk.sizes) for chunk in kept.chunks)
    if written != wanted.numel():
        raise _damaged(path, f"has {written!r} of the {wanted.numel()!r} entries of {key!r}")


def _read(wanted: Iterable[Stored]) -> dict[str, Tensor]:
    """The values by their key; of one directory."""
    by_key = {stored.key: stored for stored in wanted}
    (directory,) = {stored.directory for stored in by_key.values()}
    reader = _ShardReader(directory, next(iter(by_key.values())).metadata)
    values = {key: torch.empty(stored.shape, dtype=stored.dtype) for key, stored in by_key.items()}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            # that every rank reads for itself is meant
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(values, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        reasons = [repr(reason) for reason, _ in error.failures.values()]
        raise _damaged(directory, f"has shards that cannot be read: {reasons!r}") from error
    return values


def _unsafe(path: Path, name: str, asked: str) -> DataError:
    return DataError(
        f"the sharded checkpoint {str(path)!r} was to be read; its file {name!r} asks for {asked!r}, which is neither"
        " torch's nor a plain value, and could run code. If you trust whoever wrote it, say so: Trainer.fit(...,"
        " weights_only=False), or `lightning-amp convert --trust`"
    )


def _damaged(path: Path, found: str) -> DataError:
    return DataError(
        f"the sharded checkpoint {str(path)!r} was to be read; it {found}. It is damaged: {ANOTHER}"
    )
