"""Shard the tensors of a batch over the ranks, along given dims and in given sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt, prod
from typing import Any

from torch import Tensor

from lightning_amp.errors import PlanError, ShardError
from lightning_amp.footprint.copies.fake_copy import map_tensors
from lightning_amp.sharding.owners import Owners
from lightning_amp.sharding.sharded_tensor import ShardedTensor, redistribute
from lightning_amp.sharding.splits import MeshAxis, Split, Splits
from lightning_amp.techniques.sharded_step import tensors


@dataclass(frozen=True, kw_only=True)
class HowToSplit:
    """Parsed spec of a `sequence` rule.

    Attributes:
        dims: Path of a tensor in the batch -> its dims, one for each axis.
        sizes: "even", "causal" or the sizes of the shards.
        axes: Mesh axes over which the first and the second dim of a tensor are sharded.
    """

    dims: Mapping[str, tuple[int, ...]]
    sizes: str | tuple[int, ...]
    axes: tuple[MeshAxis, ...]

    def batch(self, batch: Any) -> Any:
        """Return the batch with the tensors in `dims` sharded; other tensors, and those already sharded, do not change.

        Raises:
            ShardError: The batch has none of the tensors, or one is sharded over other ranks.
        """
        found = list[str]()

        def split(path: str, x: Tensor) -> Tensor:
            if isinstance(x, ShardedTensor) and not all(own.axis in self.axes for own in x.splits):
                raise ShardError(
                    f"{path!r} of the batch is split over another axis than the step ({x.splits}); allowed is the model"
                    " axis, without a sequence_grid: make it with lightning_amp.as_sharded"
                )
            if path not in self.dims:
                return x
            # a tensor that is sharded already is not sharded again, but counts as present
            found.append(path)
            return x if isinstance(x, ShardedTensor) else self.tensor(path, x)

        changed = map_tensors(batch, split)
        if not found:
            raise ShardError(
                f"the batch has no tensor at {', '.join(map(repr, self.dims))}; it has"
                f" {', '.join(repr(path) for path, _ in tensors(batch)) or 'no tensors'}. Name one of these in"
                " AMPStrategy(sequence_dim={...})"
            )
        return changed

    def tensor(self, path: str, x: Tensor) -> Tensor:
        """Return a tensor sharded along its dims; it stays replicated along dims with fewer indices than ranks."""
        splits = list[Split]()
        for axis, dim in zip(self.axes, self.dims[path], strict=False):
            if not -x.dim() <= dim < x.dim():
                raise ShardError(
                    f"dim {dim} of {path!r} cannot be split: it has shape {tuple(x.shape)!r}; name another"
                    " dim in AMPStrategy(sequence_dim={...})"
                )
            dim %= x.dim()
            if x.shape[dim] >= axis.size:
                splits.append(Split(axis, dim, self._owners(path, x.shape[dim], axis)))
        return redistribute(x, Splits.of(splits))

    def _owners(self, path: str, n: int, axis: MeshAxis) -> Owners:
        if self.sizes == "even":
            return Owners.even(n, axis.size)
        sizes = causal_sizes(n, axis.size) if self.sizes == "causal" else self.sizes
        assert not isinstance(sizes, str), "sizes are 'even', 'causal' or numbers"
        if len(sizes) != axis.size or sum(sizes) != n or min(sizes) < 1:
            raise ShardError(
                f"sequence_sizes={sizes!r} was given for {axis.size} ranks and {path!r} with {n} indices; give one size"
                " per rank, each at least 1, that add up to it, or 'even'"
            )
        return Owners.contiguous(sizes)


def causal_sizes(n: int, size: int) -> tuple[int, ...]:
    """Return shard sizes of equal work if index i attends to i + 1 indices: borders are at n * sqrt(rank / ranks)."""
    ends = [isqrt(n * n * (rank + 1) // size) for rank in range(size)]
    # every rank has at least one index
    # Borders remain distinct: if two of them round to the same number, later borders are less than one index apart, so
    # that the upper bound, which rises by one, lies below the first of the two.
    ends = [min(max(end, rank + 1), n - size + rank + 1) for rank, end in enumerate(ends)]
    return tuple(b - a for a, b in zip([0, *ends], ends, strict=False))


def read_dims(text: str) -> dict[str, tuple[int, ...]]:
    """Parse dims from the text form of a plan: "ids:1,image:2/3"."""
    found = dict[str, tuple[int, ...]]()
    for part in filter(None, text.split(",")):
        path, _, dims = part.rpartition(":")
        found[path] = tuple(int(dim) for dim in dims.split("/"))
    return found


def read_grid(text: str, size: int) -> tuple[int, ...]:
    """Parse the ranks along each sharded dim; raises PlanError if their product is not the number of ranks."""
    grid = tuple(int(n) for n in text.split("x")) if text else (size,)
    if prod(grid) != size:
        raise PlanError(f"a grid of {text} ranks was given for {size} ranks of the model axis; change one of them")
    return grid
