"""Seconds of communication of Linear layers on a grid of tensor and data parallel ranks (Singh et al. 2024, AxoNN).

A layer multiplies I [m, k] with W [k, n] on a grid of G_x x G_y x G_z ranks for each of G_data shares of the batch;
I is cut along x and z, W along x and y, and W's storage along z too. A training step costs a layer

    all-gather of W over z, forward         each rank contributes   k n / (G_x G_y G_z)       Eq. 4
    reduce-scatter of dW over z             each rank puts in       k n / (G_x G_y)           Eq. 5
    all-reduce of the output over y         each rank puts in       m n / (G_z G_x)           Eq. 6
    all-reduce of dI over x                 each rank puts in       m k / (G_z G_y)           Eq. 7
    all-reduce of gradients over data       each rank puts in       k n / (G_x G_y G_z)       Eq. 8

and the sum is its time (Eq. 9). The equations are derived from the paper's Algorithm 1 and ring collectives. In every
second layer x and y swap, so that it can read the output of the one before. Groups nest x innermost, then y, z, data.

Known limits: nothing overlaps with computation; activations are not recomputed; memory is not looked at.
Legend: m rows of one data group's input, k inputs and n outputs of a layer, G ranks of an axis of the grid.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from lightning_amp.errors import PlanError
from lightning_amp.planning.time.link_seconds import Links, collective_seconds


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Grid:
    """Ranks along the axes, innermost first."""

    x: int
    y: int
    z: int
    data: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearLayer:
    """A Linear layer's numbers of inputs k and outputs n."""

    inputs: int
    outputs: int


def layer_seconds(
    layer: LinearLayer,
    grid: Grid,
    links: Links,
    *,
    rows: float,
    transposed: bool = False,
    element_bytes: int = 2,
) -> float:
    """Communication of one layer in a training step.

    Args:
        layer: The layer.
        grid: The ranks.
        links: How they are connected.
        rows: Rows of the whole batch, over all data groups.
        transposed: Whether x and y swap.
        element_bytes: Bytes per number.
    """
    x, y = (grid.y, grid.x) if transposed else (grid.x, grid.y)
    # ranks in the axes nested inside the axis, which swap with it
    x_inner, y_inner = (grid.x, 1) if transposed else (1, grid.x)
    plane, space = grid.x * grid.y, grid.x * grid.y * grid.z
    weight = element_bytes * layer.inputs * layer.outputs / plane
    share = element_bytes * rows / grid.data / grid.z
    return (
        collective_seconds("all_gather", weight / grid.z, grid.z, links, inner=plane)
        + collective_seconds("reduce_scatter", weight, grid.z, links, inner=plane)
        + collective_seconds("all_reduce", share * layer.outputs / x, y, links, inner=y_inner)
        + collective_seconds("all_reduce", share * layer.inputs / y, x, links, inner=x_inner)
        + collective_seconds("all_reduce", weight / grid.z, grid.data, links, inner=space)
    )


def stack_seconds(
    layers: Sequence[LinearLayer], grid: Grid, links: Links, *, rows: float, element_bytes: int = 2
) -> float:
    """Communication of layers that follow each other, every second one transposed.

    Args:
        layers: The layers, in the order in which they are computed.
        grid: The ranks.
        links: How they are connected.
        rows: Rows of the whole batch.
        element_bytes: Bytes per number.
    """
    return sum(
        layer_seconds(layer, grid, links, rows=rows, transposed=i % 2 == 1, element_bytes=element_bytes)
        for i, layer in enumerate(layers)
    )


def rank_grids(
    layers: Sequence[LinearLayer], ranks: int, links: Links, *, rows: float, element_bytes: int = 2
) -> tuple[tuple[Grid, float], ...]:
    """All grids of so many ranks with their seconds, the fastest first; ties to the smaller x, y, z.

    Args:
        layers: The layers, in the order in which they are computed.
        ranks: Ranks in all.
        links: How they are connected.
        rows: Rows of the whole batch.
        element_bytes: Bytes per number.

    Raises:
        PlanError: No layers, or no ranks.
    """
    if not layers or type(ranks) is not int or ranks < 1:
        raise PlanError(
            f"grids of {ranks!r} ranks for {len(layers)} layers were asked for; allowed are one rank or more, and one"
            " layer or more"
        )
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    sizes = (s for s in product(divisors, repeat=3) if ranks % prod(s) == 0)
    grids = [Grid(x=x, y=y, z=z, data=ranks // (x * y * z)) for x, y, z in sizes]
    timed = [
        (grid, stack_seconds(layers, grid, links, rows=rows, element_bytes=element_bytes)) for grid in grids
    ]
    return tuple(sorted(timed, key=lambda pair: (pair[1], pair[0])))
