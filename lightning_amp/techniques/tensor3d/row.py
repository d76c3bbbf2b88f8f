"""The row of `tensor3d` in the table of strategies, and the spec that its rule has in a plan."""

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from lightning_amp.errors import PlanError
from lightning_amp.techniques.sequence import row as sequence_row


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallel3D:
    """Parameters, gradients and optimiser state are split over a grid of ranks, features over two of its axes.

    Attributes:
        grid: Ranks of the axes x, y and z, such as "2x1x2"; z splits rows of the batch.
        layouts: How the dims of parameters are split, as JSON (layouts.py).
        dims: Dims of the batch's tensors, as of `sequence`, that z splits in place of rows; "" where it does not.
    """

    grid: str
    dims: str = ""
    layouts: str = field(default="", repr=False)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Ranks of the axes."""
        x, y, z = map(int, self.grid.split("x"))
        return x, y, z

    @property
    def ranks(self) -> int:
        """Ranks of a grid; a run has a multiple of them."""
        return prod(self.sizes)


def asked(spec: TensorParallel3D, request: Any) -> tuple[TensorParallel3D, bool]:
    """The spec with the `tensor_grid` of a request; its layouts follow from the first batch.

    Raises:
        PlanError: There is no grid.
    """
    grid = getattr(request, "tensor_grid", None)
    if grid is None:
        raise PlanError(
            "strategies='tensor3d' was given without a grid; give tensor_grid=(x, y, z), whose product divides the"
            " number of ranks: x and y split features, z splits rows of the batch"
        )
    given = getattr(request, "sequence_dim", "auto")
    dims = (
        "" if given == "auto" else sequence_row.asked(sequence_row.SequenceParallel(dims=""), request)[0].dims
    )
    return replace(spec, grid="x".join(map(str, grid)), dims=dims), False


ROW: dict[str, Any] = {
    "title": "3D tensor parallel",
    "shrinks": "parameters, gradients, optimiser state and features to those of a rank",
    "specs": (TensorParallel3D,),
    "targets": lambda shape: [("", TensorParallel3D(grid="1x1x1"))],
    "model_axis": True,
    "data_axis": True,
    "steps": "lightning_amp.techniques.tensor3d.install",
    "together": ("S1", "recompute"),
    "asked": asked,
    "without_step": "Give a plan of a fit (plan=), or make the step run on fake tensors",
}
