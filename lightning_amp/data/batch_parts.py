"""Iterates over the tensors and other parts of a nested batch."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

from lightning_amp.data.sparse_counts import SparseCounts


def parts_in(batch: object) -> Iterator[object]:
    """Yield the leaves of any nesting of mappings, lists, tuples and dataclasses."""
    inside: list[object]
    if isinstance(batch, Tensor | SparseCounts):
        yield batch
        return
    if isinstance(batch, Mapping):
        inside = list(batch.values())
    elif isinstance(batch, list | tuple):
        inside = list(batch)
    elif is_dataclass(batch) and not isinstance(batch, type):
        inside = [getattr(batch, field.name) for field in fields(batch)]
    else:
        yield batch
        return
    for part in inside:
        yield from parts_in(part)


def tensors_in(batch: object) -> Iterator[Tensor]:
    """Yield the tensors among the leaves, and the tensors of sparse counts."""
    for part in parts_in(batch):
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, SparseCounts):
            yield from part.tensors()


def dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the dense tensors that store a dense or sparse tensor; none for another layout."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()
