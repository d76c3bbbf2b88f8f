"""Write a checkpoint as a directory of shards: every rank its own entries, what is whole on all ranks once.

    NAME.ckpt/__0_0.distcp ...   tensors, of every rank that has any, by torch.distributed.checkpoint
    NAME.ckpt/.metadata          where each lies; torch's
    NAME.ckpt/meta.pt            the plain checkpoint with a tensor without values in place of each of these

No rank ever has a whole sharded tensor. Tensors that all ranks have are written by rank 0, as in a plain checkpoint.
The directory is written under another name, read over by rank 0, and then takes its own: a run that ends before leaves
the directory that was there. If it ends between the two renamings, the old one is found as `.NAME.ckpt.previous`; the
next save of that name renames it to `NAME.ckpt-recovered` and says so.

Collectives: those of torch's planning, of the size of the names and shapes, and two broadcasts of an outcome.
Known limits: the ranks need one folder, as of a network file system; a bit that flips on the disk is not noticed.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_amp.errors import DataError, PlanError
from lightning_amp.lightning._compat import rank_zero_warn
from lightning_amp.lightning.checkpoints.atomic_file import AtomicCheckpointIO
from lightning_amp.lightning.checkpoints.read_directory import (
    BULK,
    META,
    earlier_name,
    fill,
    is_directory,
    open_directory,
    replaced,
)
from lightning_amp.lightning.checkpoints.tensor_parts import Box, Part
from lightning_amp.lightning.consistency.replicas import Broadcast, decide_on_rank_zero
from lightning_amp.quantities import format_bytes


class PartPlanner(DefaultSavePlanner):
    """Plans a write item for every box of a part; whole tensors are planned by torch, for the lowest rank."""

    def __init__(self) -> None:
        super().__init__(
            flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
        )

    def create_local_plan(self) -> SavePlan:
        """What this rank could write; called by torch."""
        whole = {key: value for key, value in self.state_dict.items() if not isinstance(value, Part)}
        plan = create_default_local_save_plan(whole, self.is_coordinator)
        parts = [(key, value) for key, value in self.state_dict.items() if isinstance(value, Part)]
        items = [_item(key, part, box) for key, part in parts for box in part.boxes]
        self.plan = replace(plan, items=[*plan.items, *items])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The values of a write item; called by torch."""
        value = self.state_dict[index.fqn]
        if isinstance(value, Part):
            assert index.offset is not None, "items of parts are planned with offsets"
            return value.entries_at(tuple(index.offset))
        return super().lookup_object(index)


def write_directory(
    checkpoint: dict[str, Any],
    filepath: str | Path,
    storage_options: object = None,
    *,
    rank: int,
    broadcast: Broadcast,
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
            f"save_distributed_checkpoint=True was asked for, and a checkpoint {str(filepath)!r} with"
            f" storage_options={storage_options!r}; shards are written to a folder of a file system, without"
            " options: give a path, or leave save_distributed_checkpoint out"
        )
    path = Path(broadcast(str(filepath)))

    def on_rank_zero(action: Callable[[], None]) -> None:
        decide_on_rank_zero(lambda: _told(action, path), rank=rank, broadcast=broadcast)

    skeleton, tensors = split(checkpoint)
    aside = path.with_name(f".{path.name}.writing")
    on_rank_zero(lambda: _make_way(aside))
    try:
        save(tensors, storage_writer=FileSystemWriter(aside), planner=PartPlanner())
    except CheckpointException as error:
        on_rank_zero(lambda: shutil.rmtree(aside, ignore_errors=True))
        raise _failed(path, error) from error
    on_rank_zero(lambda: _finish(skeleton, aside, path))


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

    skeleton = {
        name: replaced(tree, take, (name,)) if name in BULK else tree for name, tree in checkpoint.items()
    }
    return skeleton, tensors


def replacing_directory(path: Path, write: Callable[[], None]) -> None:
    """Write a file under the name of a directory of shards, which is removed once the file is there."""
    if is_directory(path):
        _in_place_of(path, write)
    else:
        _recover(path)
        write()


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
    AtomicCheckpointIO().save_checkpoint({name: fill(tree) for name, tree in stored.items()}, out)


def _is_plain(value: Any) -> bool:
    """Whether torch's checkpoints keep it as it is: a dense tensor of torch's class, with a dimension."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.layout == torch.strided
        and not value.is_quantized
        and value.dim() > 0
    )


def _item(key: str, part: Part, box: Box) -> WriteItem:
    offsets = torch.Size(box.offsets)
    chunk = ChunkStorageMetadata(offsets=offsets, sizes=box.values.shape)
    properties = TensorProperties(dtype=part.dtype)
    return WriteItem(
        index=MetadataIndex(key, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=part.shape),
    )


def _make_way(aside: Path) -> None:
    aside.parent.mkdir(parents=True, exist_ok=True)
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir()


def _finish(skeleton: dict[str, Any], aside: Path, path: Path) -> None:
    """Complete the directory, read it over, and give it its name."""
    try:
        AtomicCheckpointIO().save_checkpoint(skeleton, aside / META)
        # what this process has just written
        open_directory(aside, weights_only=False)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    if path.exists() or path.is_symlink():
        _in_place_of(path, lambda: aside.rename(path))
    else:
        _recover(path)
        aside.rename(path)


def _recover(path: Path) -> None:
    """Show the checkpoint of a run that was killed while it replaced it, where nothing has its name."""
    previous = earlier_name(path)
    if path.exists() or path.is_symlink():
        _remove(previous)
    if not previous.exists():
        return
    names = (f"{path.name}-recovered{'' if n == 1 else f'-{n}'}" for n in count(1))
    kept = next(kept for name in names if not (kept := path.with_name(name)).exists())
    previous.rename(kept)
    rank_zero_warn(
        f"a run has ended while it replaced the checkpoint {str(path)!r}, and this one has not resumed from it; the one"
        f" before is kept as {str(kept)!r}: remove it, or resume from it"
    )


def _in_place_of(path: Path, write: Callable[[], object]) -> None:
    """Put something in the place of what is there, which is back if that fails."""
    previous = earlier_name(path)
    _remove(previous)
    path.rename(previous)
    try:
        write()
    except BaseException:
        previous.rename(path)
        raise
    # what writes in another thread, and may fail yet, has not: the next save of that name looks again
    if path.exists():
        _remove(previous)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _told(action: Callable[[], None], path: Path) -> None:
    try:
        action()
    except OSError as error:
        raise _failed(path, error) from error


def _failed(path: Path, error: BaseException) -> DataError:
    if isinstance(error, CheckpointException):
        reasons = {rank: repr(reason) for rank, (reason, _) in error.failures.items()}
        found = f"failed on ranks {reasons!r}"
    else:
        found = f"failed with {error!r}"
    there = next(folder for folder in path.absolute().parents if folder.is_dir())
    return DataError(
        f"the checkpoint {str(path)!r} was to be written and {found}; what was there before is as it was, and"
        f" {format_bytes(shutil.disk_usage(there).free)} are free on that disk. Make room, or save to a folder that all"
        " ranks can write to"
    )
