"""Compute the cost of a region: the predicted time at measured rates, or the cost function of the paper.

    row          overhead + flops / matmul rate + bytes read and written / memory rate
    in n pieces  n overheads + the same flops + the bytes of cut tensors + n times the bytes of tensors read whole
                 + for every output n overheads and its bytes once more, because pieces are copied to their place
    training     forward once, backward twice that; a region recomputes its forward pass

A view takes one overhead and moves no bytes.

Known limits: smaller pieces stay in a cache, and are then faster than predicted; matrix products with very few rows do
not reach the rate.

The paper's cost is that of AutoChunk, Section 3.4, Equations 8 to 10. It has no unit.

    macro (8)   nodes x share of the block's rows + flops x share of its floating point operations
    micro (9)   density / computation density + stride / stride of the cut dim
    cost (10)   macro + micro; the cost of a plan is the sum over its regions (11)

Density is operations per row, relative to the block's mean. The stride is that of the cut dim in the region's outputs,
relative to their size: cutting the outermost dim costs least. Neither time nor the number of pieces enters. The paper
tunes its four weights but does not publish them; ours are tuned in the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

from lightning_amp.graph.table import OPERATOR, Table
from lightning_amp.techniques.chunk.regions.chunk_bytes import result_bytes
from lightning_amp.techniques.chunk.regions.region import Region, piece_count


class HasSpeed(Protocol):
    """Anything with the three rates of `Speed`."""

    @property
    def matmul_flops(self) -> float:
        """Operations of matrix products per second."""

    @property
    def memory_bytes(self) -> float:
        """Bytes read and written per second."""

    @property
    def overhead_seconds(self) -> float:
        """Seconds to start an operator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """The rates of a device on which the choice of regions depends; equal rates have equal plans."""

    matmul_flops: float
    memory_bytes: float
    overhead_seconds: float

    @classmethod
    def of(cls, rates: HasSpeed) -> "Speed":
        """Take the three rates out of all rates of a device."""
        return cls(
            matmul_flops=rates.matmul_flops, memory_bytes=rates.memory_bytes, overhead_seconds=rates.overhead_seconds
        )


class Seconds:
    """Predicted times for one table on one device."""

    def __init__(self, table: Table, rates: HasSpeed, *, train: bool) -> None:
        self._table, self._rates, self._train = table, rates, train
        self._result = [result_bytes(row) for row in table.rows]
        self.rows = [self._row(i) for i in range(len(table.rows))]
        """Time of every row, computed whole."""
        self.whole = sum(self.rows) * (3 if train else 1)
        """Time of the block without regions."""

    def extra(self, region: Region) -> float:
        """Return the additional time of a region compared with its rows computed whole; never negative."""
        n = piece_count(region.units, region.n_chunks)
        inside = region.inside(self._table)
        # additional cost of each further piece: calls, and the bytes it reads whole or adds to a sum
        again = 0.0
        for i in inside:
            row, moved = self._table.rows[i], 0
            if row.storage == i:
                moved = sum(self._result[k] for k in row.inputs if k not in region.dims)
                moved += 2 * self._result[i] if i in region.sums else 0
            again += self._rates.overhead_seconds + self._moved(moved)
        outputs = region.outputs(self._table)
        copies = sum(self._moved(2 * self._result[i]) + n * self._rates.overhead_seconds for i in outputs)
        # neighbours of a piece are computed on both sides, except at the ends
        overlap = (n - 1) * 2 * region.reach / region.units * sum(self.rows[i] for i in inside)
        forward = (n - 1) * again + copies + overlap
        if not self._train:
            return forward
        # the forward pass is recomputed, and both passes run in pieces
        return 4 * forward + sum(self.rows[i] for i in inside)

    def of(self, regions: Sequence[Region]) -> float:
        """Return the time of the block with some regions."""
        return self.whole + sum(self.extra(region) for region in regions)

    def _row(self, i: int) -> float:
        row = self._table.rows[i]
        if row.kind != OPERATOR:
            return 0.0
        if row.storage != i:
            return self._rates.overhead_seconds
        moved = self._result[i] + sum(self._result[k] for k in row.inputs)
        return self._rates.overhead_seconds + row.flops / self._rates.matmul_flops + self._moved(moved)

    def _moved(self, n_bytes: int) -> float:
        return n_bytes / self._rates.memory_bytes


class Weights(NamedTuple):
    """Weights of the paper's four terms: its alpha, beta, gamma and lambda."""

    nodes: float = 1.0
    flops: float = 1.0
    density: float = 1.0
    stride: float = 1.0


WEIGHTS = Weights(nodes=100.0)
"""Result of `python -m benchmarks.chunks.autochunk --tune` for small models of the paper's four kinds."""


def paper_cost(table: Table, region: Region, weights: Weights = WEIGHTS) -> float:
    """Return the cost that the paper's selection minimizes."""
    inside = region.inside(table)
    n_rows = sum(row.kind == OPERATOR for row in table.rows)
    flops = sum(table.rows[i].flops for i in inside)
    macro = weights.nodes * len(inside) / n_rows + weights.flops * flops / max(table.flops, 1)
    # `+ 1` keeps the density of a block without floating point operations finite
    density = (flops / len(inside) + 1) / (table.flops / n_rows + 1)
    strides = [
        prod(table.rows[i].shape[region.dims[i] :]) / prod(table.rows[i].shape)
        for i in region.outputs(table)
        if i in region.dims
    ]
    return macro + weights.density / density + weights.stride * sum(1 / s for s in strides) / max(len(strides), 1)
