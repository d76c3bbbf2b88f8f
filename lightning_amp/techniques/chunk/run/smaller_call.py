"""Make calls of a block with fewer positions, and the forward that the same plan generates for them.

Dims of arguments that differ in size from all dims of parameters (samples, tokens, image rows) are cut to their first
positions. A call is usable if the block runs the same operators and every region of the plan is legal: then the
generated forward differs from the original only in sizes.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_amp._torch import tree_flatten, tree_unflatten, unseen
from lightning_amp.errors import PlanError
from lightning_amp.graph.capture import Capture, capture
from lightning_amp.graph.guards import state_of
from lightning_amp.techniques.chunk.regions.find_regions import same_region
from lightning_amp.techniques.chunk.run.lower import Lowered, dense_strides, lower, table_of
from lightning_amp.techniques.chunk.run.nested import lower_nested
from lightning_amp.techniques.chunk.run.two_steps import in_two_steps, norms_of

POSITIONS = (4, 16)
"""Smallest sizes of a cut dim; the second is for blocks that halve an image, or read windows of it."""
Call = tuple[tuple[Any, ...], dict[str, Any]]


def smaller_calls(
    block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], lowered: Lowered
) -> Iterator[tuple[Call, Lowered]]:
    """Yield calls with fewer positions, smallest first, each with the forward that is generated for it."""
    values, spec = tree_flatten((tuple(args), dict(kwargs)))
    fixed = {size for tensor in state_of(block).values() for size in tensor.shape}
    seen = {_shapes(values)}
    for least in POSITIONS:
        # dims that keep a size which a parameter has too, for images and for others: none, the last, the second, the
        # channels of either, all
        for dims in (((), ()), ((-1,), (-1,)), ((1,), (1,)), ((1,), (-1,)), (range(-8, 8), range(-8, 8))):
            fewer = _fewer(values, least, fixed, *dims)
            if _shapes(fewer) in seen:
                continue
            seen.add(_shapes(fewer))
            given = tree_unflatten(fewer, spec)
            with unseen():
                found = capture(block, *given, key=None)
                like = None if found.graph is None else lowered_like(lowered, found)
            if like is not None:
                yield given, like


def lowered_like(lowered: Lowered, found: Capture) -> Lowered | None:
    """Return the forward that the same plan generates for another capture; None if the plan is not legal for it."""
    try:
        return _lowered_like(lowered, found)
    except PlanError:
        return None


def _lowered_like(lowered: Lowered, found: Capture) -> Lowered:
    n_norms = len(norms_of(found))
    own = in_two_steps(found, [k for k in lowered.norms if k < n_norms])
    # rows are numbered: with another list of operators, the same number would be another row
    if _operators(own) != _operators(lowered.capture):
        raise PlanError("the block makes other operators of fewer positions")
    # rows of an image are cut through convolutions where the plan does so
    table = table_of(own, near=any(region.reach for region in lowered.cut))
    regions = [same_region(table, region) for region in lowered.cut]
    if lowered.inner is None:
        return lower(own, table, regions)
    inner = lowered.inner
    return lower_nested(own, table, regions[0], lambda piece: (_lowered_like(inner, piece), None))[0]


def _fewer(
    values: Sequence[Any], least: int, fixed: set[int], of_images: Sequence[int], of_others: Sequence[int]
) -> list[Any]:
    """Cut the dims of arguments; `of_images` (four dims or more) and `of_others` name dims that keep a fixed size."""
    made: dict[int, Tensor] = {}
    for value in values:
        if isinstance(value, Tensor):
            dims = of_images if value.dim() > 3 else of_others
            kept = {d % value.dim() for d in dims if -value.dim() <= d < value.dim()}
            # a divisor of the size, so that operators that halve a dim still work; otherwise an odd number
            fewer = [next((k for k in range(least, 2 * least) if n % k == 0), least + 1) for n in value.shape]
            shape = [n if d in kept and n in fixed else min(n, fewer[d]) for d, n in enumerate(value.shape)]
            made[id(value)] = _first(value, shape)
    return [made[id(value)] if isinstance(value, Tensor) else value for value in values]


def _first(value: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the first positions, with the dim order of the full tensor."""
    if list(value.shape) == list(shape):
        return value.detach().requires_grad_(value.requires_grad)
    part = value.detach()[tuple(slice(n) for n in shape)]
    made = torch.empty_strided(tuple(shape), dense_strides(part), dtype=part.dtype, device=part.device)
    return made.copy_(part).requires_grad_(value.requires_grad)


def _shapes(values: Sequence[Any]) -> tuple[torch.Size, ...]:
    return tuple(value.shape for value in values if isinstance(value, Tensor))


def _operators(found: Capture) -> list[tuple[str, str]]:
    return [(node.op, str(node.target)) for node in found.nodes]
