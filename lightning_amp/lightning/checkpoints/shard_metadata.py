"""torch's `.metadata`, which says where the tensors of a directory of shards lie, read without running anything.

It is a pickle, and a pickle may name any function to call. Only the classes that torch's checkpoints are made of are
looked up here, and plain values; `weights_only=False` reads it as torch does.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

TORCH_META = ".metadata"
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


class UnknownGlobalError(pickle.UnpicklingError):
    """A pickle asks for something that no checkpoint needs."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise UnknownGlobalError(f"{module}.{name}")


class ShardReader(FileSystemReader):
    """Reads shards by metadata that have been read already."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Called by torch."""
        return self._metadata


def read_metadata(directory: Path, *, weights_only: bool) -> Metadata:
    """Where the tensors of a directory lie.

    Raises:
        UnknownGlobalError: It asks for more than torch's classes and plain values, and `weights_only` is true.
        Exception: Of any kind, where the file is damaged.
    """
    with (directory / TORCH_META).open("rb") as file:
        found = _Unpickler(file).load() if weights_only else pickle.load(file)
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError(f"{type(found).__name__} in place of torch's Metadata")
    return found
