"""The row of `tensor3d` in the table of strategies, and the spec that its rule has in a plan."""

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from lightning_amp.errors import PlanError
from lightning_amp.quantities import parse_bytes

OVERLAP = "all_reduce,reduce_scatter,all_gather"
"""Collectives that may be under way while a rank computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallel3D:
    """Parameters, gradients and optimiser state are split over a grid of ranks, features over two of its axes.

    Attributes:
        grid: Ranks of the axes x, y and z, such as "2x1x2"; z splits rows of the batch.
        layouts: How the dims of parameters are split, as JSON (layouts.py).
        overlap: Collectives that are under way while a rank computes: all-reduces of gradients of inputs, sums of
            gradients of weights, gathers of parameters.
        cache_bytes: Of gathered parameters that a rank keeps until the backward pass has ended.
    """

    grid: str
    layouts: str = field(default="", repr=False)
    overlap: str = OVERLAP
    cache_bytes: int = 0

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
    """The spec with the options of a request; its layouts follow from the first batch.

    Raises:
        PlanError: There is no grid.
    """
    grid = getattr(request, "tensor_grid", None)
    if grid is None:
        raise PlanError(
            "strategies='tensor3d' was given without a grid; give tensor_grid=(x, y, z), whose product divides the"
            " number of ranks: x and y split features, z splits rows of the batch"
        )
    overlap = ",".join(getattr(request, "tensor_overlap", OVERLAP.split(",")))
    cache = cache_bytes(getattr(request, "tensor_cache", 0))
    return replace(spec, grid="x".join(map(str, grid)), overlap=overlap, cache_bytes=cache), False


def cache_bytes(text: str | int) -> int:
    """Bytes of a `tensor_cache`, which may be zero.

    Raises:
        PlanError: Not a size.
    """
    return 0 if str(text).strip().upper() in ("0", "0B") else parse_bytes(text)


ROW: dict[str, Any] = {
    "title": "3D tensor parallel",
    "shrinks": "parameters, gradients, optimiser state and features to those of a rank",
    "specs": (TensorParallel3D,),
    "targets": lambda shape: [("", TensorParallel3D(grid="1x1x1"))],
    "model_axis": True,
    "data_axis": True,
    "steps": "lightning_amp.techniques.tensor3d.install",
    "together": ("S1",),
    "asked": asked,
    "without_step": "Give a plan of a fit (plan=), or make the step run on fake tensors",
}
