"""Compute the paper's cost of a region: AutoChunk, Section 3.4, Equations 8 to 10; without a unit.

    macro (8)   nodes x share of the block's rows + flops x share of its floating point operations
    micro (9)   density / computation density + stride / stride of the cut dim
    cost (10)   macro + micro; that of a plan is the sum over its regions (11)

Density is operations per row, and its mean over the block is 1. The stride is that of the cut dim in the region's
outputs, as a share of their size: cutting the outermost dim costs least. Seconds do not enter, and neither does the
number of pieces. The paper tunes its four weights and does not print them; ours are tuned in the same way.
"""

from math import prod
from typing import NamedTuple

from lightning_amp.graph.table import OPERATOR, Table
from lightning_amp.techniques.chunk.regions.region import Region


class Weights(NamedTuple):
    """Of the paper's four terms: its alpha, beta, gamma and lambda."""

    nodes: float = 1.0
    flops: float = 1.0
    density: float = 1.0
    stride: float = 1.0


WEIGHTS = Weights(nodes=100.0)
"""What `python -m benchmarks.chunks.autochunk --tune` finds for small models of the paper's four kinds."""


def paper_cost(table: Table, region: Region, weights: Weights = WEIGHTS) -> float:
    """What the paper's selection makes as small as it can."""
    inside = region.inside(table)
    n_rows = sum(row.kind == OPERATOR for row in table.rows)
    flops = sum(table.rows[i].flops for i in inside)
    macro = weights.nodes * len(inside) / n_rows + weights.flops * flops / max(table.flops, 1)
    density = (flops / len(inside) + 1) / (table.flops / n_rows + 1)
    strides = [
        prod(table.rows[i].shape[region.dims[i] :]) / prod(table.rows[i].shape)
        for i in region.outputs(table)
        if i in region.dims
    ]
    return macro + weights.density / density + weights.stride * sum(1 / s for s in strides) / max(len(strides), 1)
