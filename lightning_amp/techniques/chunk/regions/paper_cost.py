"""Compute the paper's cost of a region: AutoChunk, Section 3.4, Equations 8 to 10; without a unit.

    macro (8)   ALPHA x share of the block's rows + BETA x share of its floating point operations
    micro (9)   GAMMA / computation density + DELTA / stride of the cut dim
    cost (10)   macro + micro; that of a plan is the sum over its regions (11)

Density is operations per row, and its mean over the block is 1. The stride is that of the cut dim in the region's
outputs, as a share of their size: cutting the outermost dim costs least. The paper tunes its four weights and does not
print them; here all are 1. Seconds do not enter, and neither does the number of pieces.
"""

from math import prod

from lightning_amp.graph.table import OPERATOR, Table
from lightning_amp.techniques.chunk.regions.region import Region

ALPHA = BETA = GAMMA = DELTA = 1.0


def paper_cost(table: Table, region: Region) -> float:
    """What the paper's selection makes as small as it can."""
    inside = region.inside(table)
    n_rows = sum(row.kind == OPERATOR for row in table.rows)
    flops = sum(table.rows[i].flops for i in inside)
    macro = ALPHA * len(inside) / n_rows + BETA * flops / max(table.flops, 1)
    density = (flops / len(inside) + 1) / (table.flops / n_rows + 1)
    strides = [
        prod(table.rows[i].shape[region.dims[i] :]) / prod(table.rows[i].shape)
        for i in region.outputs(table)
        if i in region.dims
    ]
    return macro + GAMMA / density + DELTA * sum(1 / s for s in strides) / max(len(strides), 1)
