"""Copy a batch, as it is or with another number of rows, and to fake tensors."""

from typing import Any

import torch
from torch import Tensor

from lightning_amp._torch import FakeTensorMode, has_no_values
from lightning_amp.data.batch import tensors_in
from lightning_amp.footprint.copies.fake_copy import fake_tensor, map_tensors
from lightning_amp.footprint.copies.known_values import give_values
from lightning_amp.footprint.live_bytes import has_storage


def length_of(batch: Any) -> int | None:
    """Return the length of the first dimension of more than half of a batch's tensors; None if there is none."""
    found = [tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()]
    return next((length for length in set(found) if 2 * found.count(length) > len(found)), None)


def resized(batch: Any, batch_size: int | None) -> Any:
    """Copy the batch; given a length, repeat or cut the rows of tensors that have the batch's length.

    A tensor that is there twice, as words that are their own labels, is there twice in the copy too.
    """
    length, made = length_of(batch), dict[Any, Tensor]()

    def copied(tensor: Tensor) -> Tensor:
        if batch_size is None or not tensor.dim() or tensor.shape[0] != length or tensor.is_meta:
            return tensor.clone()
        return tensor[torch.arange(batch_size, device=tensor.device) % length]

    def once(_: str, tensor: Tensor) -> Tensor:
        if not has_storage(tensor):
            return copied(tensor)
        geometry = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        key = tensor.untyped_storage()._cdata, geometry
        if key not in made:
            made[key] = copied(tensor)
        return made[key]

    return map_tensors(batch, once)


def fake_batch(batch: Any, fake: FakeTensorMode, batch_size: int | None) -> Any:
    """Convert a batch to fake tensors, of another length if one is given."""

    def made(path: str, tensor: Tensor) -> Tensor:
        found = fake_tensor(tensor, fake)
        # masks, also of real numbers, and indices may decide what a step computes
        if not has_no_values(tensor):
            give_values(found, tensor, path)
        return found

    found = map_tensors(batch, made)
    with fake:
        return found if batch_size is None else resized(found, batch_size)
