"""The row of `sequence` in the table of strategies, and the spec that its rule has in a plan."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceParallel:
    """Dims of the batch's tensors are split over the model axis.

    Attributes:
        dims: Tensors and their dims, such as "ids:1,labels:1"; a path through dictionaries, tuples and attributes has
            dots: "0.image:2". Two dims of a tensor, "image:2/3", are split over the two axes of `grid`.
        sizes: "even", "causal" (parts of equal work in causal attention), or the parts' sizes, such as "5,7".
        grid: Ranks along the first and the second dim, such as "2x2"; "" where one dim is split.
    """

    dims: str
    sizes: str = "even"
    grid: str = ""


ROW: dict[str, Any] = {
    "title": "sequence parallel",
    "shrinks": "samples to a rank's part of each",
    "specs": (SequenceParallel,),
    "model_axis": True,
}
