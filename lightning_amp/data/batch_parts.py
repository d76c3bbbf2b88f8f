"""What a batch holds: one walk, for all that count, compare or measure a batch."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

from torch import Tensor

from lightning_amp.data.sparse_counts import SparseCounts


def parts_in(batch: object) -> Iterator[object]:
    """What lies in any nesting of mappings, lists, tuples and dataclasses, and is none of these."""
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
    """The tensors among these, and those that sparse counts are made of."""
    for part in parts_in(batch):
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, SparseCounts):
            yield from part.tensors()
