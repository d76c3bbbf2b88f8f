"""Tables with one row per experimental batch and one column per feature."""

from jaxtyping import Float
from torch import Tensor

from lightning_amp.shapes import Experiment


def table_rows(
    table: Float[Tensor, "experiment feature"], batch: Experiment
) -> Float[Tensor, "#cell feature"]:
    """Each cell's row; a single row is broadcast, because a copy per cell would cost as much as the data."""
    return table if len(table) == 1 else table[batch]
