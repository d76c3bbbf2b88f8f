"""Types of a training batch, a plain dict, whose cells Lightning can count and which it can move to a device."""

from typing import TypeAlias, TypedDict

from jaxtyping import Float, Int64
from torch import Tensor

from lightning_amp.data.sparse_counts import SparseCounts


class CellRows(TypedDict):
    """Cells of one modality as they are in its file."""

    x: Float[Tensor, "cell feature"] | SparseCounts
    library: Float[Tensor, "cell 1"]
    batch: Int64[Tensor, " cell"]
    index: Int64[Tensor, " cell"]


class CellBatch(CellRows):
    """Cells of one modality in one step; `draw`, in [0, 2**31), is the seed of a cell's random numbers."""

    draw: Int64[Tensor, " cell"]


Batch: TypeAlias = dict[str, CellBatch]
