"""Read a checkpoint that is a directory of shards, with any number of ranks or without any.

    open_directory    -> the plain checkpoint with a `Stored` for every tensor in the shards; reads no values
    Stored.read       -> the full tensor
    fill              -> a state with all `Stored` read

There are no collectives: every rank reads for itself. Loading the two pickles of a directory cannot run code, unless
`weights_only=False` is given.
"""

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
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
"""The checkpoint without its tensors, named as by Lightning's other strategies."""
TORCH_META = ".metadata"
"""torch's index of the tensors; a pickle, which can name any function to call."""
BULK = ("state_dict", "optimizer_states")
"""Entries of a checkpoint whose tensors are in shards."""
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
"""The only classes allowed in it, with torch's dtypes; `weights_only=False` reads it as torch does."""
ReadFile = Callable[..., dict[str, Any]]
"""A function that reads a plain checkpoint, like `CheckpointIO.load_checkpoint`: (path, *, weights_only)."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        # same wording as torch.load, which `_safely` searches for
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


class _ShardReader(FileSystemReader):
    """A FileSystemReader with metadata that were already read by the restricted unpickler."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata; called by torch."""
        return self._metadata


@dataclass(frozen=True, eq=False, slots=True)
class Stored:
    """A tensor in a directory of shards; hooks that need its values call `read`."""

    directory: Path
    key: str
    shape: torch.Size
    dtype: torch.dtype
    metadata: Metadata = field(repr=False)

    def read(self) -> Tensor:
        """Read the full tensor to host memory; raise a DataError if the shards cannot be read."""
        listed = self.metadata.state_dict_metadata.get(self.key)
        # checked here: torch converts dtypes, and leaves entries without a chunk uninitialised
        if not (
            isinstance(listed, TensorStorageMetadata)
            and (listed.size, listed.properties.dtype) == (self.shape, self.dtype)
            and sum(chunk.sizes.numel() for chunk in listed.chunks) == self.shape.numel()
        ):
            raise _damaged(
                self.directory,
                f"has {self.key!r} as {tuple(self.shape)!r} of {self.dtype} in {META!r}, and in {TORCH_META!r} as"
                f" {listed!r}",
            )
        values = {self.key: torch.empty(self.shape, dtype=self.dtype)}
        reader = _ShardReader(self.directory, self.metadata)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            with warnings.catch_warnings():
                # reading without torch.distributed is intended
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load(values, storage_reader=reader, planner=planner, no_dist=True)
        except CheckpointException as error:
            reasons = [repr(reason) for reason, _ in error.failures.values()]
            raise _damaged(self.directory, f"has shards of {self.key!r} that cannot be read: {reasons}") from error
        return values[self.key]


def is_directory(path: Path) -> bool:
    """Whether the path is a directory of shards, perhaps a damaged one."""
    return path.is_dir() and ((path / META).exists() or (path / TORCH_META).exists())


def earlier_name(path: Path) -> Path:
    """Return the name of the previous checkpoint while a new one replaces it."""
    return path.with_name(f".{path.name}.previous")


def open_directory(
    path: Path, read_file: ReadFile | None = None, *, weights_only: bool | None = None
) -> dict[str, Any]:
    """Return a checkpoint whose tensors are still on disk.

    Args:
        read_file: Reads the file with everything except tensors; by default torch.load.
        weights_only: False allows pickles that may run code; None means True.

    Raises:
        DataError: It is not a directory of shards, or not complete.
    """
    safe = weights_only is not False

    def read_metadata() -> Metadata:
        with (path / TORCH_META).open("rb") as file:
            found = (_Unpickler if safe else pickle.Unpickler)(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"{type(found).__name__} in place of torch's Metadata")
        return found

    read_meta = partial(torch.load, path / META, map_location="cpu", weights_only=safe)
    if read_file is not None:
        read_meta = partial(read_file, path / META, weights_only=weights_only)
    skeleton, metadata = _safely(path, META, read_meta), _safely(path, TORCH_META, read_metadata)
    if BULK[0] not in skeleton:
        raise DataError(
            f"cannot load {str(path)!r}: its {META!r} has {sorted(map(str, skeleton))!r} and not {BULK[0]!r}, so"
            " another strategy has written it; load it with that strategy, or convert it with Lightning's `python -m"
            " lightning.pytorch.utilities.consolidate_checkpoint`"
        )
    # every shard file must exist and have at least the written length
    needed: dict[str, int] = {}
    for info in metadata.storage_data.values():
        needed[info.relative_path] = max(info.offset + info.length, needed.get(info.relative_path, 0))
    for name, n_bytes in sorted(needed.items()):
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found is None or found < n_bytes:
            size = "no file" if found is None else f"{found!r} bytes"
            raise _damaged(path, f"has {size} of the shard {name!r}, of which {n_bytes!r} bytes were written")

    def point(key: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_meta:
            return value
        return Stored(path, key, value.shape, value.dtype, metadata)

    return {name: replaced(tree, point, name) if name in BULK else tree for name, tree in skeleton.items()}


def load_either(path: str | Path, read_file: ReadFile, *, weights_only: bool | None) -> dict[str, Any]:
    """Load a checkpoint that is a file or a directory of shards.

    The module's tensors of a directory are read; optimiser states are read when the optimisers load them.

    Raises:
        DataError: As for `open_directory`; or shards cannot be read; or a run stopped while replacing the checkpoint.
    """
    place = Path(path)
    previous = earlier_name(place)
    if not place.exists() and is_directory(previous):
        raise DataError(
            f"the checkpoint {str(path)!r} does not exist: a run ended while it replaced it. The "
            f"one before is complete: rename {str(previous)!r} to {place.name!r}"
        )
    if not place.is_dir():
        # not as a Path: it may be a URL
        return read_file(path, weights_only=weights_only)
    checkpoint = open_directory(place, read_file, weights_only=weights_only)
    return {**checkpoint, "state_dict": fill(checkpoint["state_dict"])}


def fill(tree: Any) -> Any:
    """Replace every `Stored` of a state by its tensor; other values do not change.

    Raises:
        DataError: The shards cannot be read.
    """
    return replaced(tree, lambda _, value: value.read() if isinstance(value, Stored) else value)


def replaced(tree: Any, change: Callable[[str, Any], Any], place: str = "") -> Any:
    """Map the leaves of nested dicts, lists and tuples by `change(place, leaf)`."""
    if isinstance(tree, dict):
        # copied, because load_state_dict reads the version metadata that torch keeps in the dict
        copied = copy.copy(tree)
        copied.update({key: replaced(value, change, f"{place}/{key}") for key, value in tree.items()})
        return copied
    if type(tree) in (list, tuple):
        return type(tree)(replaced(value, change, f"{place}/{i}") for i, value in enumerate(tree))
    return change(place, tree)


def _safely(path: Path, name: str, read: Callable[[], Any]) -> Any:
    """Read one of the two pickles of a directory; raise a DataError if it is damaged or could run code."""
    try:
        return read()
    except Exception as error:  # a damaged pickle may raise anything
        unsafe = isinstance(error, pickle.UnpicklingError) and re.search(r"GLOBAL ([\w.]+)", str(error))
        if not unsafe:
            raise _damaged(path, f"has no file {name!r} that can be read: {error!r}") from error
        raise DataError(
            f"cannot read the sharded checkpoint {str(path)!r}: its file {name!r} contains {unsafe[1]!r}, which is"
            " neither torch's nor a plain value, and could run code. If you trust its author, use Trainer.fit(...,"
            " weights_only=False), or `lightning-amp convert --trust`"
        ) from error


def _damaged(path: Path, found: str) -> DataError:
    return DataError(
        f"cannot read the sharded checkpoint {str(path)!r}: it {found}. It is damaged, or not a "
        "directory of shards: write the checkpoint again, or load an earlier one"
    )
