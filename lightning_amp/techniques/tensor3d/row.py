"""Define the row of `tensor3d` in the table of techniques, the spec of its rule, and the check of its options."""

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from lightning_amp.errors import PlanError
from lightning_amp.quantities import parse_bytes
from lightning_amp.techniques.sequence import row as sequence_row
from lightning_amp.techniques.technique import OwnSteps, Technique

OVERLAP = "all_reduce,reduce_scatter,all_gather"
"""Collectives that may overlap with computation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallel3D:
    """Split parameters, gradients and optimiser state over a grid of ranks, and features over two of its axes.

    Attributes:
        grid: Ranks of the axes x, y and z, such as "2x1x2"; z splits rows of the batch. "" before it is chosen.
        layouts: How the dims of parameters are split, as JSON (layouts.py).
        dims: Dims of the batch's tensors, as in `sequence`, that z splits instead of rows; "" if z splits rows.
        overlap: Collectives that overlap with computation: all-reduces of input gradients, reduce-scatters of weight
            gradients, all-gathers of parameters.
        cache_bytes: Bytes of gathered parameters that a rank keeps until the backward pass has ended.
    """

    grid: str = ""
    dims: str = ""
    layouts: str = field(default="", repr=False)
    overlap: str = OVERLAP
    cache_bytes: int = 0

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Ranks of the axes x, y and z."""
        x, y, z = map(int, (self.grid or "1x1x1").split("x"))
        return x, y, z

    @property
    def model_ranks(self) -> int:
        """Number of ranks that read the same rows; includes z if z splits samples."""
        return prod(self.sizes if self.dims else self.sizes[:2])

    @property
    def ranks(self) -> int:
        """Number of ranks of a grid; the number of all ranks is a multiple of it."""
        return prod(self.sizes)


def requested_spec(spec: TensorParallel3D, request: Any) -> tuple[TensorParallel3D, bool]:
    """Return the spec with the options of a request; an open grid, and layouts, follow from the first batch.

    Raises:
        PlanError: The value of an option is not supported, or options contradict each other.
    """
    grid, size = getattr(request, "tensor_grid", None), getattr(request, "model_parallel_size", "auto")
    whole = isinstance(grid, tuple | list) and len(grid) == 3 and all(type(n) is int and n > 0 for n in grid)
    if grid is not None and not whole:
        raise PlanError(f"tensor_grid={grid!r} was given; allowed are three whole numbers of ranks, as (2, 1, 2)")
    if grid is None and size != "auto":
        raise PlanError(
            f"model_parallel_size={size!r} was given with strategies='tensor3d'; give tensor_grid=(x, y, z), of which"
            " it is x * y, or leave both out"
        )
    given = getattr(request, "sequence_dim", "auto")
    dims = (
        "" if given == "auto" else sequence_row.requested_spec(sequence_row.SequenceParallel(dims=""), request)[0].dims
    )
    if dims and grid is None:
        raise PlanError(
            f"sequence_dim={given!r} was given with strategies='tensor3d' and without a grid; give"
            " tensor_grid=(x, y, z), of which z splits samples"
        )
    names, allowed = getattr(request, "tensor_overlap", OVERLAP.split(",")), OVERLAP.split(",")
    if not isinstance(names, tuple | list) or any(name not in allowed for name in names):
        raise PlanError(
            f"tensor_overlap={names!r} was given; allowed are none or some of {', '.join(map(repr, allowed))}, as"
            " a tuple"
        )
    cache = getattr(request, "tensor_cache", 0)
    # parse_bytes does not accept 0
    cache_bytes = 0 if str(cache).strip().upper() in ("0", "0B") else parse_bytes(cache)
    found = replace(
        spec,
        grid=spec.grid if grid is None else "x".join(map(str, grid)),
        dims=dims,
        overlap=",".join(names),
        cache_bytes=cache_bytes,
    )
    if grid is not None and size not in ("auto", found.model_ranks):
        raise PlanError(
            f"model_parallel_size={size!r} was given with tensor_grid={tuple(grid)!r}, of which it is"
            f" {found.model_ranks}; leave model_parallel_size out"
        )
    return found, False


NOT_WITH = {
    "fsdp": "z of a grid shards parameters, gradients and optimiser state; give tensor_grid=(1, 1, z) for it alone",
    "pipeline": "a stage has whole blocks, and every rank of a grid has a part of each block; a larger tensor_grid"
    " makes a rank hold less",
    "chunk": "it captures a block as a graph of whole tensors, which has neither a rank's parts nor the gathers of"
    " its parameters; {less}",
    "logits": "it takes whole rows of logits, and a grid splits them over classes, where no rank has them whole",
    "replay": "it runs operators on whole tensors again, and a rank of a grid has parts; {less}",
}
ROW = Technique(
    title="3D tensor parallel",
    shrinks="parameters, gradients, optimiser state and features to those of a rank",
    specs=(TensorParallel3D,),
    targets=lambda shape: [("", TensorParallel3D())],
    model_axis=True,
    data_axis=True,
    steps=OwnSteps(
        module="lightning_amp.techniques.tensor3d.install",
        not_with=NOT_WITH,
        uncounted="Give a grid (tensor_grid=), or a plan of a fit (plan=)",
    ),
    split_parameters="lightning_amp.techniques.tensor3d.install:split_parameters",
    option_names=("tensor_grid", "tensor_overlap", "tensor_cache", "sequence_dim"),
    options=requested_spec,
)
