"""Batches of other lengths than an example's: of sequences, pictures, or any dimension but the first."""

from typing import Any

import torch
from torch import Tensor

from lightning_amp.errors import PlanError
from lightning_amp.footprint.copies.fake_copy import map_tensors


def length_of_dim(batch: Any, name: str, dim: int) -> int:
    """Return the length of a dimension of a tensor of the batch, by its name such as "ids" or "batch.ids".

    Raises:
        PlanError: There is no such tensor or dimension.
    """
    found = dict[str, Tensor]()
    map_tensors(batch, lambda path, tensor: found.setdefault(path, tensor))
    tensor = found.get(name, found.get(name.removeprefix("batch.")))
    if tensor is None:
        raise PlanError(f"{name!r} is no tensor of the batch; allowed are {', '.join(map(repr, found)) or 'none'}")
    if not 1 <= dim < tensor.dim():
        raise PlanError(
            f"dim={dim!r} is not supported for {name!r}, a tensor of {tensor.dim()} dimensions; allowed are whole"
            f" numbers from 1 to {tensor.dim() - 1}, and largest_batch answers for the first"
        )
    return tensor.shape[dim]


def with_length(batch: Any, length: int, new: int) -> Any:
    """Return the batch with `new` entries in each dimension of `length`, the first of each tensor excepted.

    Entries are repeated or cut, so that every value is one that the batch has.
    """

    def changed(_: str, tensor: Tensor) -> Tensor:
        for dim in range(1, tensor.dim()):
            if tensor.shape[dim] == length:
                tensor = tensor.index_select(dim, torch.arange(new, device=tensor.device) % length)
        return tensor

    return map_tensors(batch, changed)
