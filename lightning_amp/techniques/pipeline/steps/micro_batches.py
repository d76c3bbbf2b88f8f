"""Split a rank's batch into micro-batches: runs of samples whose sizes differ by one at most."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, cast, get_args

import numpy as np
from lightning.fabric.utilities.apply_func import apply_to_collection  # type: ignore[attr-defined]
from torch import Tensor

from lightning_amp.data.batch import parts_in
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.errors import DataError

Samples = Tensor | SparseCounts | np.ndarray
"""What has a first axis of samples."""
SAME = (bool, int, float, complex, str, bytes, type(None))
"""What every micro-batch gets as it is."""


def cut(batch: Any, parts: int) -> tuple[list[Any], list[int]]:
    """The micro-batches, and their samples; as many as there are samples where these are fewer than `parts`.

    Raises:
        DataError: Not all tensors of the batch have one first axis, or something else in it has its length.
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

    return [_of(batch, run) for run in runs], [run.stop - run.start for run in runs]


def alike(batch: Any, size: int, total: int) -> tuple[Any, Any, int]:
    """Two batches whose first samples are the same and whose others are not.

    Args:
        batch: As for `cut`.
        size: Of a micro-batch: how many samples they have, or two.
        total: Samples of the batch, two or more.

    Returns:
        The two, and how many of their samples are the same.
    """
    n = max(2, size)
    same = n // 2
    others = [*range(same), *((n + i) % total for i in range(n - same))]
    return _of(batch, list(range(n))), _of(batch, others), same


def _of(batch: Any, run: slice | list[int]) -> Any:
    def own(values: Any) -> Any:
        if isinstance(values, SparseCounts) and isinstance(run, list):
            values = values.to_dense()
        return values[run] if values.shape else values

    return apply_to_collection(batch, get_args(Samples), own)


def _refuse_lists(batch: Any, n: int) -> None:
    """A list of texts, one for each sample, would be given whole to every micro-batch."""
    if isinstance(batch, Mapping):
        for value in batch.values():
            _refuse_lists(value, n)
    elif isinstance(batch, list | tuple):
        has_samples = any(isinstance(part, get_args(Samples)) for part in parts_in(batch))
        if not has_samples and len(batch) == n:
            raise DataError(
                f"the batch cannot be cut into micro-batches: it has a list of {n!r} values that are no "
                f"tensors, such as {batch[0]!r}, perhaps one for each sample; make it a tensor, take it "
                "out of the batch, or set micro_batches=1"
            )
        for value in cast(list[Any], batch):
            _refuse_lists(value, n)
