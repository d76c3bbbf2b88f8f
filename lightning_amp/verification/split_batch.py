"""Split a global batch over data ranks: contiguous parts whose sizes differ by one at most.

Every tensor's first axis is the cell. In a batch {modality: mapping} every modality has its own number of cells and is
split by itself; anywhere else all tensors must agree. What is no tensor, array or sparse counts is given whole.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, get_args

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection  # type: ignore[attr-defined]
from torch import Tensor

from lightning_amp.data.batch_parts import parts_in
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.errors import DataError
from lightning_amp.lightning.steps.cell_weight import count_cells

Cells = Tensor | SparseCounts | np.ndarray
"""What has a first axis of cells."""


def sizes_of(batch: object) -> list[int]:
    """The different numbers of cells in a batch, one for each length of a first axis."""
    shapes = [part.shape for part in parts_in(batch) if isinstance(part, Tensor | SparseCounts)]
    return sorted({int(shape[0]) for shape in shapes if shape})


def part_of(batch: Any, part: int, parts: int) -> Any:
    """The cells of one data rank.

    Raises:
        DataError: The number of cells is not known, or there are fewer cells than ranks.
    """
    if parts == 1:
        return batch
    sizes = sizes_of(batch)
    if count_cells(batch) is None:
        raise DataError(
            f"the batch cannot be split over {parts} ranks: its tensors have the first axes "
            f"{sizes!r}; allowed are tensors whose first axis is the sample, equally long in the "
            f"whole batch or in each modality of a batch {{modality: mapping}}: bring it into that "
            "form, or verify one data rank with model_parallel_size=devices"
        )
    if sizes[0] < parts:
        raise DataError(
            f"a batch of {sizes[0]!r} samples cannot be split over {parts} data ranks; every rank "
            f"needs a sample: give a batch of {parts} or more samples, or fewer devices"
        )
    return _each(batch, lambda x: x[slice(*_bounds(len(x), part, parts))])


def cast(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating point tensors in another precision."""
    return _each(
        batch,
        lambda x: x if isinstance(x, np.ndarray) or not x.dtype.is_floating_point else x.to(dtype=dtype),
    )


def first_of(loader: Iterable[Any], steps: int) -> list[Any]:
    """The first batches of a loader, again from the start where it is shorter.

    Raises:
        DataError: It has no batch.
    """
    found = list(islice(loader, steps))
    if not found:
        raise DataError("a loader without batches was given to verify; give one with at least one batch")
    return [found[step % len(found)] for step in range(steps)]


class Parts:
    """A training loader of one rank.

    Attributes:
        batch_size: Cells per rank, for the plan's prediction; None where the number of cells is not known.
    """

    def __init__(self, batches: list[Any], *, ranks: int, place: Callable[[], tuple[int, int]]) -> None:
        """Serve parts of global batches; `place` gives data rank and number of data ranks, once they are known."""
        self._batches, self._place = batches, place
        cells = count_cells(batches[0])
        self.batch_size = None if cells is None else max(1, cells // ranks)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return (part_of(batch, *self._place()) for batch in self._batches)

    def amp_example_batch(self) -> Any:
        """The first part, for a plan: the ranks of the data axis are those of the request by then."""
        return part_of(self._batches[0], *self._place())


def _bounds(n: int, part: int, parts: int) -> tuple[int, int]:
    size, longer = divmod(n, parts)
    start = part * size + min(part, longer)
    return start, start + size + (part < longer)


def _each(values: Any, change: Callable[[Any], Any]) -> Any:
    """The same nesting of containers with everything that has cells changed, as Lightning moves it to a device."""
    return apply_to_collection(values, get_args(Cells), lambda x: change(x) if x.shape else x)
