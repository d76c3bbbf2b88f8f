"""Write checkpoints atomically: a file, or a directory of shards to which every rank writes its own entries.

    save    write a new file next to the target, locked meanwhile; fsync; rename it over the target, which is one step
            for the file system. An error of any kind removes the new file, and the target does not change.
    load    an incomplete file raises an error that lists the complete checkpoints of its folder

Tensors are written one by one, without a second copy of the checkpoint in memory. A temporary file of a killed process
is no longer locked; the next save on the same machine in that folder removes it.

    NAME.ckpt/__0_0.distcp ...   tensors of the ranks, by torch.distributed.checkpoint
    NAME.ckpt/.metadata          torch's index of the tensors
    NAME.ckpt/meta.pt            the plain checkpoint with a meta tensor instead of each of these

No rank has a full copy of a sharded tensor. Replicated tensors are written by rank 0, as in a plain checkpoint. The
directory is written under a temporary name and then renamed, so that an interrupted run does not change the previous
checkpoint. If the run stops between the two renames, the previous checkpoint is `.NAME.ckpt.previous`.

Collectives: those of torch's planning, with names and shapes, and two broadcasts of an outcome.
Known limits: other stores than local paths (s3://, gs://, ...) are written by Lightning. On a file system without
locks, temporary files of killed processes remain. The ranks need one shared folder for a directory, such as one on a
network file system. Bit errors of the disk are not detected.
"""

import contextlib
import errno
import fcntl
import os
import platform
import secrets
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_amp.errors import DataError, PlanError
from lightning_amp.lightning.checkpoints.read_directory import (
    BULK,
    META,
    earlier_name,
    fill,
    is_directory,
    open_directory,
    replaced,
)
from lightning_amp.lightning.consistency.replicas import Broadcast, decide_on_one_rank
from lightning_amp.quantities import format_bytes

ASIDE = ".partial"
WITHOUT_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
"""Errors of file systems that do not support fsync."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Read and write checkpoint files atomically."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint; if that fails, raise a DataError, and the previous file does not change."""
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
            there = next((folder for folder in target.parents if folder.exists()), Path())
            before = "the one that was there is untouched" if target.is_file() else "no file of that name was left"
            raise DataError(
                f"checkpoint {str(target)!r} cannot be written: {error}; {before},"
                f" {format_bytes(shutil.disk_usage(there).free)} are free on that disk{_others(target)}. Make room"
                " or choose another folder, then resume from the last complete checkpoint"
            ) from error

    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, loc: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint; raise a DataError if the file is not complete."""
        try:
            loaded: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
        except Exception as error:
            place = Path(path)
            if _is_remote(path) or not place.is_file() or zipfile.is_zipfile(path):
                raise
            raise DataError(
                f"checkpoint {str(path)!r} is not complete, found {place.stat().st_size:,} bytes"
                f" ({type(error).__name__}){_others(place)}. Resume from a complete one"
            ) from error
        return loaded


def write_state(checkpoint: Any, file: Any) -> None:
    """Write a checkpoint to an open file by torch.save, and flush it to the disk.

    The file must be buffered: an unbuffered write writes 2 GiB at most, and torch.save does not write the rest. Raises
    the OSError of the file.
    """
    try:
        torch.save(checkpoint, file)
    except RuntimeError as error:
        # after a failed write, torch's writer raises a RuntimeError with the OSError as its context
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    try:
        os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in WITHOUT_FSYNC:
            raise


def put_in_place(aside: Path, path: Path) -> None:
    """Rename a complete checkpoint: a file in one step; a directory replaces the previous one, which is removed."""
    if not aside.is_dir() and not is_directory(path):
        aside.replace(path)
        return
    previous = earlier_name(path)
    if os.path.lexists(path):
        # a directory cannot be renamed to one that is not empty
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
    """Yield a locked temporary file, which is renamed to the target at the end, or removed."""
    while True:
        # random, because containers may have the same host name and process id
        aside = target.parent / f"{ASIDE}-{platform.node()}-{os.getpid()}-{secrets.token_hex(4)}"
        file = aside.open("xb")
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if aside.exists():
            break
        # another writer has removed it as a leftover in the moment before it was locked
        file.close()
    with file:
        try:
            yield file
            # renamed while locked: otherwise another writer could remove it as a leftover
            put_in_place(aside, target)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise


def _remove_left_over(folder: Path) -> None:
    for left in folder.glob(f"{ASIDE}-{platform.node()}-*"):
        # a file that another process still writes is locked
        with contextlib.suppress(OSError), left.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink(missing_ok=True)


def _is_remote(path: str | Path) -> bool:
    return "://" in str(path)


def _others(path: Path) -> str:
    """List the complete checkpoints in the folder of a path, newest first, for a message."""
    files = [file for file in path.parent.glob(f"*{path.suffix}") if file != path and zipfile.is_zipfile(file)]
    files.sort(key=lambda file: -file.stat().st_mtime)
    return f"; complete in the same folder: {[file.name for file in files[:5]]!r}" if files else ""


@dataclass(frozen=True, eq=False)
class Part:
    """This rank's shard of a tensor, in a checkpoint that is saved as a directory of shards.

    It is not a tensor on purpose: a hook that expects the full value fails instead of saving a shard.
    """

    shape: torch.Size  # of the full tensor
    dtype: torch.dtype
    boxes: Mapping[tuple[int, ...], Tensor]  # this rank's blocks of entries, by their offsets in the full tensor

    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        """Return the write items of this rank; called by torch."""
        return [
            WriteItem(
                index=MetadataIndex(key, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=values.shape),
                    properties=TensorProperties(dtype=self.dtype),
                    size=self.shape,
                ),
            )
            for offsets, values in self.boxes.items()
        ]

    def __reduce__(self) -> NoReturn:
        """Raise when pickled: a shard must not be saved as if it were the full tensor."""
        raise DataError(
            f"a hook has put a part of a tensor of shape {tuple(self.shape)!r} into the checkpoint, "
            "outside of 'state_dict' and 'optimizer_states'; no run could use a part: leave it "
            "out, or set save_distributed_checkpoint=False, with which hooks of rank 0 get whole tensors"
        )


Form = Literal["whole", "not here", "in parts"]
"""What a rank saves of sharded tensors: full tensors, these on "meta", without values, or its `Part`."""


def kept(whole: Tensor, form: Form) -> Tensor:
    """Return a full tensor in host memory, or on "meta" for a rank that does not write it."""
    return whole.to("meta" if form == "not here" else "cpu")


class _Planner(DefaultSavePlanner):
    """A DefaultSavePlanner that supports `Part`."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the values of a write item; called by torch."""
        value = self.state_dict[index.fqn]
        if isinstance(value, Part):
            assert index.offset is not None, "items of parts are planned with offsets"
            return value.boxes[index.offset]
        return super().lookup_object(index)


def write_directory(
    checkpoint: dict[str, Any], filepath: str | Path, storage_options: object = None, *, rank: int, broadcast: Broadcast
) -> None:
    """Write a checkpoint, with a `Part` for each sharded tensor, and replace the previous one; a collective.

    Args:
        filepath: The directory to write; that of rank 0 counts.
        storage_options: Must be None.
        rank, broadcast: This rank, and a function that returns rank 0's value on every rank.

    Raises:
        DataError: It could not be written; on every rank.
        PlanError: There are options, or the path is a URL.
    """
    if storage_options is not None or "://" in str(filepath):
        raise PlanError(
            f"save_distributed_checkpoint=True cannot be used with storage_options={storage_options!r},"
            f" found both for the checkpoint {str(filepath)!r}; shards are written to a folder of a file"
            " system, without options: give a path, or leave save_distributed_checkpoint out"
        )
    path = Path(broadcast(str(filepath)))
    aside = path.with_name(f".{path.name}.writing")
    skeleton, tensors = split(checkpoint)

    def make_way() -> None:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)

    def finish() -> None:
        AtomicCheckpointIO().save_checkpoint(skeleton, aside / META)
        put_in_place(aside, path)

    def on_rank_zero(action: Callable[[], None]) -> None:
        def refused() -> None:
            try:
                action()
            except OSError as error:
                raise _failed(path, f"failed with {error!r}") from error

        decide_on_one_rank(refused, rank=rank, broadcast=broadcast)

    try:
        on_rank_zero(make_way)
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True)
        # all ranks write their entries; rank 0 prepares the folder before, and renames it after
        save(tensors, storage_writer=FileSystemWriter(aside), planner=planner)
        on_rank_zero(finish)
    except BaseException as error:
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        if not isinstance(error, CheckpointException):
            raise
        reasons = {at: repr(reason) for at, (reason, _) in error.failures.items()}
        raise _failed(path, f"failed on ranks {reasons!r}") from error


def split(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor | Part]]:
    """Split a checkpoint into itself with meta tensors, and the tensors by their key; other values do not change."""
    tensors: dict[str, Tensor | Part] = {}

    def take(key: str, value: Any) -> Any:
        if not isinstance(value, Part) and not _is_plain(value):
            return value
        if prod(value.shape) == 0:
            return torch.empty(value.shape, dtype=value.dtype)
        assert key not in tensors, f"two tensors at {key!r}"
        tensors[key] = value
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    skeleton = {name: replaced(tree, take, name) if name in BULK else tree for name, tree in checkpoint.items()}
    return skeleton, tensors


def convert_checkpoint(directory: Path, out: Path, *, weights_only: bool = True) -> None:
    """Write the plain file of a run with `save_distributed_checkpoint=False`, without starting ranks.

    Lightning loads the file under any strategy, and torch loads it without this package. The complete checkpoint must
    fit in host memory.

    Args:
        directory: A checkpoint that a run with `save_distributed_checkpoint=True` has written.
        out: The file to write; replaced if it exists.
        weights_only: False allows pickles that may run code.

    Raises:
        DataError: The directory cannot be read, or the file cannot be written.
    """
    stored = open_directory(directory, weights_only=weights_only)
    whole = {name: fill(tree) if name in BULK else tree for name, tree in stored.items()}
    AtomicCheckpointIO().save_checkpoint(whole, out)


def _is_plain(value: Any) -> bool:
    """Whether the value is a dense Tensor or Parameter with at least one dim, which torch's checkpoints store as is."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.layout == torch.strided
        and not value.is_quantized
        and value.dim() > 0
    )


def _failed(path: Path, how: str) -> DataError:
    there = next(folder for folder in path.absolute().parents if folder.is_dir())
    return DataError(
        f"the checkpoint {str(path)!r} was not written: it {how}. What was there before is "
        f"unchanged; {format_bytes(shutil.disk_usage(there).free)} are free on that disk. Make "
        "room, or save to a folder that all ranks can write to"
    )
