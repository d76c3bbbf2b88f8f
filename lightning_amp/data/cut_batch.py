"""Split a batch into its runs of samples, which are the entries of the first dim of its tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any, get_args

import numpy as np
from lightning.fabric.utilities.apply_func import apply_to_collection  # type: ignore[attr-defined]
from torch import Tensor

from lightning_amp.data.batch import parts_in
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.errors import DataError

Samples = Tensor | SparseCounts | np.ndarray
"""Types with a first dimension of samples."""
SAME = (bool, int, float, complex, str, bytes, type(None))
"""Types that every micro-batch gets unchanged."""


def cut(batch: Any, parts: int) -> tuple[list[Any], list[int]]:
    """Split a batch; returns the micro-batches and their numbers of samples, at most one micro-batch per sample.

    Raises:
        DataError: Tensors differ in their first dimension, a type is not supported, or a list has one value per sample.
    """
    if parts == 1:
        return [batch], [1]
    found = list(parts_in(batch))
    shapes = [tuple(part.shape) for part in found if isinstance(part, get_args(Samples))]
    strange = sorted({type(part).__name__ for part in found if not isinstance(part, (*get_args(Samples), *SAME))})
    lengths = {shape[0] for shape in shapes if shape}
    if len(lengths) != 1 or not all(lengths) or strange:
        raise DataError(
            f"the batch cannot be cut into {parts!r} micro-batches: it has tensors of the shapes "
            f"{shapes!r} and {strange!r}; allowed are numbers, texts and tensors, and all tensors "
            "with a dimension must have the same first one, that of the samples: bring the batch "
            "into that form, or set micro_batches=1"
        )
    n = lengths.pop()
    _refuse_lists(batch, n)
    parts = min(parts, n)
    ends = [(j * n) // parts for j in range(parts + 1)]
    runs = [slice(first, end) for first, end in pairwise(ends)]
    return [rows_of(batch, run) for run in runs], [run.stop - run.start for run in runs]


def rows_of(batch: Any, run: slice | list[int]) -> Any:
    """Return a batch of some of its samples; tensors share memory with the batch's where `run` is a slice."""

    def own(values: Any) -> Any:
        if isinstance(values, SparseCounts) and isinstance(run, list):
            values = values.to_dense()
        return values[run] if values.shape else values

    return apply_to_collection(batch, get_args(Samples), own)


def _refuse_lists(batch: Any, n: int) -> None:
    """Raise for a list of strings or numbers, one per sample: every micro-batch would get the full list."""
    inside: Sequence[Any] = batch if isinstance(batch, list | tuple) else ()
    has_samples = any(isinstance(part, get_args(Samples)) and part.shape for part in parts_in(batch))
    if inside and not has_samples and len(inside) == n:
        raise DataError(
            f"the batch cannot be cut into micro-batches: it has a list of {n!r} values without a "
            f"dimension, such as {inside[0]!r}, perhaps one for each sample; make it a tensor, take it "
            "out of the batch, or set micro_batches=1"
        )
    if isinstance(batch, Mapping):
        inside = list(batch.values())
    elif is_dataclass(batch):
        inside = [getattr(batch, field.name) for field in fields(batch)]
    for value in inside:
        _refuse_lists(value, n)
