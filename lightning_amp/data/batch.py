"""The training batch: a plain dict, so that Lightning counts its cells and moves it without help."""

from typing import TypeAlias, TypedDict

from jaxtyping import Float, Int64
from torch import Tensor

from lightning_amp.data.sparse_counts import SparseCounts


class CellRows(TypedDict):
    """Cells of one modality as they lie in its file."""

    x: Float[Tensor, "cell feature"] | SparseCounts
    library: Float[Tensor, "cell 1"]
    batch: Int64[Tensor, " cell"]
    index: Int64[Tensor, " cell"]


class CellBatch(CellRows):
    """Cells of one modality in one step; `draw`, in [0, 2**31), is the key of the cell's random draws."""

    draw: Int64[Tensor, " cell"]


Batch: TypeAlias = dict[str, CellBatch]
