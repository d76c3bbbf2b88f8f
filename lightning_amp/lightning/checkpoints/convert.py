"""Directory of shards -> the plain single-device checkpoint, without starting ranks.

The file is the one that `save_distributed_checkpoint=False` would have written: Lightning loads it under any strategy,
and torch without this package. Takes the host's memory for all of it once.
"""

from pathlib import Path

from lightning_amp.lightning.checkpoints.atomic_file import AtomicCheckpointIO
from lightning_amp.lightning.checkpoints.read_directory import fill, open_directory


def convert_checkpoint(directory: Path, out: Path, *, weights_only: bool = True) -> None:
    """Write a plain checkpoint.

    Args:
        directory: What a run with `save_distributed_checkpoint=True` has written.
        out: The file to write; replaced if it is there.
        weights_only: False reads what may run code.

    Raises:
        DataError: The directory cannot be read, or the file cannot be written.
    """
    stored = open_directory(directory, weights_only=weights_only)
    checkpoint = {name: fill(tree) for name, tree in stored.items()}
    AtomicCheckpointIO().save_checkpoint(checkpoint, out)
