"""Define the entry of `sequence` in the table of techniques, and the spec of its rule in a plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_amp.errors import PlanError
from lightning_amp.techniques.technique import OwnSteps, Technique


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceParallel:
    """Shard dims of the batch's tensors over the model axis.

    Attributes:
        dims: Tensors and their dims, such as "ids:1,labels:1". A path through dictionaries, tuples and attributes has
            dots: "0.image:2". Two dims of a tensor, "image:2/3", are sharded over the two axes of `grid`.
        sizes: "even", "causal" (shards of equal work in causal attention), or the shards' sizes, such as "5,7".
        grid: Ranks along the first and the second dim, such as "2x2"; "" if one dim is sharded.
    """

    dims: str = ""
    sizes: str = "even"
    grid: str = ""


def requested_spec(spec: SequenceParallel, request: Any) -> tuple[SequenceParallel, bool]:
    """Return the spec with `sequence_dim`, `sequence_sizes` and `sequence_grid` of a request, and whether it has dims.

    Raises:
        PlanError: A value is not allowed.
    """
    dims, grid = getattr(request, "sequence_dim", "auto"), getattr(request, "sequence_grid", "")
    given = sizes = getattr(request, "sequence_sizes", "even")
    if isinstance(sizes, Sequence) and not isinstance(sizes, str):
        sizes = ",".join(map(str, sizes))
    if sizes not in ("even", "causal") and not all(part.strip().isdecimal() for part in sizes.split(",")):
        raise PlanError(
            f"sequence_sizes={given!r} was given; allowed are 'even', 'causal', and the sizes of the"
            " ranks' parts, such as [5, 7]"
        )
    # the dims are then chosen by counting the step, see `options` in install.py
    if dims == "auto" and not grid:
        return replace(spec, sizes=sizes), False
    if not (isinstance(dims, Mapping) and dims and all(map(_is_dims, dims.values()))):
        raise PlanError(
            f"sequence_dim={dims!r} was given; allowed are 'auto', without a sequence_grid, and a dictionary from"
            " tensors of the batch to the dims that are split, such as {'ids': 1, 'labels': 1}, {'0.image': [2, 3]} for"
            " two dims, or {'batch': 1} where the batch is a tensor"
        )
    written = written_dims({path: _each(own) for path, own in dims.items()})
    # `grid` has one axis for each dim of a tensor, so it is given exactly if a tensor has two
    two = any(len(_each(own)) == 2 for own in dims.values())
    if two != bool(grid):
        raise PlanError(
            f"sequence_grid={grid!r} was given with sequence_dim={dims!r}; a tensor with two dims requires a grid of"
            " the model axis, such as '2x2', and one dim requires none"
        )
    return replace(spec, dims=written, sizes=sizes, grid=grid), True


def written_dims(dims: Mapping[str, tuple[int, ...]]) -> str:
    """Return dims in the text form of a plan: "ids:1,image:2/3"; `read_dims` is the inverse."""
    return ",".join(f"{path}:{'/'.join(map(str, own))}" for path, own in dims.items())


def _each(dims: Any) -> tuple[int, ...]:
    return (dims,) if isinstance(dims, int) else tuple(dims)


def _is_dims(dims: Any) -> bool:
    if isinstance(dims, int):
        return True
    return isinstance(dims, list | tuple) and 1 <= len(dims) <= 2 and all(isinstance(d, int) for d in dims)


ROW = Technique(
    title="sequence parallel",
    shrinks="samples to a rank's part of each",
    specs=(SequenceParallel,),
    targets=lambda shape: [("", SequenceParallel(dims=""))],
    model_axis=True,
    steps=OwnSteps(
        module="lightning_amp.techniques.sequence.install",
        works_with=("fsdp",),
        not_with={
            "tensor3d": "z of a grid splits samples: leave 'sequence' out, and give strategies='tensor3d' with"
            " sequence_dim, such as {'ids': 1, 'labels': 1}"
        },
        uncounted="Name the dims, as in AMPStrategy(sequence_dim={'ids': 1})",
    ),
    option_names=("sequence_dim", "sequence_sizes", "sequence_grid"),
    options=requested_spec,
)
