"""Write checkpoints atomically: a file, or a directory of shards to which every rank writes its own entries.

    save    a new file next to the target, locked while it is written, fsync, rename over the target (one step for the
            file system); an error, of whichever kind, removes the file aside and leaves the target as it was
    load    an incomplete file is refused by name, with the complete ones in its folder

Tensors go to the file one after the other: no second copy of the checkpoint in memory. A file aside that a killed
process has left, which nobody has locked any more, is removed by the next save of the same machine in that folder.

    NAME.ckpt/__0_0.distcp ...   tensors, of every rank that has any, by torch.distributed.checkpoint
    NAME.ckpt/.metadata          where each lies; torch's
    NAME.ckpt/meta.pt            the plain checkpoint with a tensor without values in place of each of these

No rank ever has a whole sharded tensor. Tensors that all ranks have are written by rank 0, as in a plain checkpoint.
The directory is written under another name and then takes its own: a run that ends before leaves what was there. If it
ends between the two renamings, the old one is found as `.NAME.ckpt.previous`.

Collectives: those of torch's planning, of the size of the names and shapes, and two broadcasts of an outcome.
Known limits: what is not a local path (s3://, gs://, ...) is written by Lightning, which knows these stores; on a file
system without locks what a killed process has left stays. The ranks of a directory need one folder, as of a network
file system; a bit that flips on the disk is not noticed.
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
from typing import Any, BinaryIO, NoReturn

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
from lightning_amp.lightning.consistency.replicas import Broadcast, decide_on_rank_zero
from lightning_amp.quantities import format_bytes

ASIDE = ".partial"
WITHOUT_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
"""What file systems answer that cannot flush."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Reads and writes checkpoint files."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
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
        """Read a checkpoint; a DataError where the file is not a complete one."""
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
    """Write what torch.save writes to an open file, down to the disk.

    The file has a buffer: without one a write takes 2 GiB at most, and torch.save does not write the rest. Raises
    OSError as the file has raised it.
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
        # a directory cannot take the name of one that is not empty
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
    while True:
        # containers may have the same machine's name and process, so neither makes it one's own
        aside = target.parent / f"{ASIDE}-{platform.node()}-{os.getpid()}-{secrets.token_hex(4)}"
        file = aside.open("xb")
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if aside.exists():
            break
        # another writer has taken it for one left over, in the instant before it was locked
        file.close()
    with file:
        try:
            yield file
            # while it is locked, or another writer would take it for one left over before it has its name
            put_in_place(aside, target)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise


def _remove_left_over(folder: Path) -> None:
    for left in folder.glob(f"{ASIDE}-{platform.node()}-*"):
        # that of a process that still writes is locked
        with contextlib.suppress(OSError), left.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink(missing_ok=True)


def _is_remote(path: str | Path) -> bool:
    return "://" in str(path)


def _others(path: Path) -> str:
    """The complete checkpoints in the folder of a path, the newest first."""
    files = [file for file in path.parent.glob(f"*{path.suffix}") if file != path and zipfile.is_zipfile(file)]
    files.sort(key=lambda file: -file.stat().st_mtime)
    return f"; complete in the same folder: {[file.name for file in files[:5]]!r}" if files else ""


@dataclass(frozen=True, eq=False)
class Part:
    """This rank's part of a sharded tensor, in its place in a checkpoint on the way to a directory of shards.

    It is no tensor on purpose: a hook that would take it for the whole value fails instead of saving a piece.
    """

    shape: torch.Size  # of the whole tensor
    dtype: torch.dtype
    boxes: Mapping[tuple[int, ...], Tensor]  # adjacent entries that this rank has, by their offsets in the whole tensor

    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        """What this rank writes; called by torch."""
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
        """Refuse to be written as if it were the whole."""
        raise DataError(
            f"a hook has put a part of a tensor of shape {tuple(self.shape)!r} into the checkpoint, "
            "outside of 'state_dict' and 'optimizer_states'; no run could use a part: leave it "
            "out, or set save_distributed_checkpoint=False, with which hooks get whole tensors"
        )


class _Planner(DefaultSavePlanner):
    """torch's, which finds the values of a `Part` too."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The values of a write item; called by torch."""
        value = self.state_dict[index.fqn]
        if isinstance(value, Part):
            assert index.offset is not None, "items of parts are planned with offsets"
            return value.boxes[index.offset]
        return super().lookup_object(index)


def write_directory(
    checkpoint: dict[str, Any], filepath: str | Path, storage_options: object = None, *, rank: int, broadcast: Broadcast
) -> None:
    """Write a checkpoint, with a `Part` for each sharded tensor, in the place of what is there; a collective.

    Args:
        filepath: The directory to write, rank 0's counts.
        storage_options: There are none for a directory.
        rank, broadcast: The rank, and rank 0's value on every rank.

    Raises:
        DataError: It could not be written; on every rank.
        PlanError: There are options, or the path is an address.
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

        decide_on_rank_zero(refused, rank=rank, broadcast=broadcast)

    try:
        on_rank_zero(make_way)
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True)
        # all ranks write, each its own entries; rank 0 makes way before and gives the name after
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
    """A checkpoint with tensors without values, and the values by the key of their place; all else stays."""
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
    """Write the plain file that `save_distributed_checkpoint=False` would have, without starting ranks.

    Lightning loads it under any strategy, and torch without this package. Takes the host's memory for all of it once.

    Args:
        directory: What a run with `save_distributed_checkpoint=True` has written.
        out: The file to write; replaced if it is there.
        weights_only: False reads what may run code.

    Raises:
        DataError: The directory cannot be read, or the file cannot be written.
    """
    stored = open_directory(directory, weights_only=weights_only)
    whole = {name: fill(tree) if name in BULK else tree for name, tree in stored.items()}
    AtomicCheckpointIO().save_checkpoint(whole, out)


def _is_plain(value: Any) -> bool:
    """Whether torch's checkpoints keep it as it is: a dense tensor of torch's class, with a dimension."""
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
