"""Read only a rank's shard of a batch: `own_part` returns the indices to read, `as_sharded` wraps the shard.

Nothing is sent. A full tensor is returned unchanged, so that the same data module also runs in one process.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_amp.errors import ShardError
from lightning_amp.sharding.owners import Owners
from lightning_amp.sharding.sharded_tensor import ShardedTensor
from lightning_amp.sharding.splits import MeshAxis


@dataclass(frozen=True, kw_only=True)
class OwnParts:
    """A rank's position in the model axis, as `trainer.strategy.own_parts`.

    Attributes:
        rank, size: This rank, and number of ranks of the model axis; size 0 if a plan has yet to determine it.
        axis: Returns the axis; None if no technique of the run shards batches.
        dims: By path of a tensor in the batch, the dims that the user wants to be sharded evenly.
    """

    rank: int = 0
    size: int = 1
    axis: Callable[[], MeshAxis] | None = None
    dims: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def part(self, length: int) -> slice:
        """See `own_part`."""
        if not self.size:
            raise ShardError(
                "own_part was called before a plan is made, and model_parallel_size='auto' leaves the size of the model"
                " axis to the plan; give AMPStrategy(model_parallel_size=...) a number of ranks"
            )
        if length < self.size:
            raise ShardError(
                f"own_part({length!r}) for {self.size!r} ranks of the model axis; a dim requires at least one index per"
                " rank: read it whole, or use fewer ranks"
            )
        (own,) = Owners.even(length, self.size).spans[self.rank]
        return slice(own.start, own.stop)

    def sharded(self, local: Tensor, *, dim: int, length: int) -> Tensor:
        """See `as_sharded`."""
        if local.shape[dim] == length:
            return local
        own = self.part(length)
        if local.shape[dim] != own.stop - own.start:
            raise ShardError(
                f"as_sharded(dim={dim!r}, length={length!r}) got a tensor of shape {tuple(local.shape)!r}; rank"
                f" {self.rank!r} of {self.size!r} of the model axis owns {own.stop - own.start!r} indices: read"
                " those of own_part(length, trainer)"
            )
        sizes = Owners.even(length, self.size).counts
        return ShardedTensor.from_local(local, self.model_axis(), dim=dim, sizes=sizes)

    def model_axis(self) -> MeshAxis:
        """Return the axis over which batches are sharded, or raise a ShardError."""
        if self.axis is None:
            raise ShardError(
                "the batch has a tensor that is split over the model axis, and no technique of this run splits batches;"
                " name one, as in AMPStrategy(strategies='sequence', sequence_dim={'x': 1}), or read whole rows"
            )
        return self.axis()


def own_part(length: int, trainer: Any) -> slice:
    """Return this rank's slice of a dim that is sharded evenly over the model axis.

    Args:
        length: Global length of the dim.
        trainer: The Trainer; without one, or with a strategy other than "amp", the slice has all indices.

    Raises:
        ShardError: The model axis has more ranks than the length, or a number that a plan has yet to determine.
    """
    return _of(trainer).part(length)


def as_sharded(local: Tensor, trainer: Any, *, dim: int, length: int) -> Tensor:
    """Wrap the shard that this rank has read as a sharded tensor; call it in `on_after_batch_transfer`.

    Args:
        local: The shard, on the device; a full tensor is returned unchanged.
        trainer: The Trainer.
        dim: The sharded dim.
        length: Global length of the dim.

    Raises:
        ShardError: The shard is not that of `own_part`, or the run does not shard batches over the model axis.
    """
    return _of(trainer).sharded(local, dim=dim, length=length)


def _of(trainer: Any) -> OwnParts:
    return getattr(getattr(trainer, "strategy", None), "own_parts", None) or OwnParts()
