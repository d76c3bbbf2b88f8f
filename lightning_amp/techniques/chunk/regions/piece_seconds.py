"""Predict the seconds of a block from its table, whole and with regions in pieces.

    row          overhead + flops / rate of products + bytes it reads and writes / rate of memory
    in n pieces  n overheads + the same flops + the bytes of what is cut + n times those of what is read whole
                 + for every output n overheads and its bytes once more: pieces are copied to their place
    training     forward once, backward twice that; a region computes its forward pass again

A view takes an overhead and moves nothing.

Known limits: smaller pieces stay in a cache, which makes them faster than this says; products of very few rows do not
reach the rate.
"""

from collections.abc import Sequence

from lightning_amp.costs.device_rates import Rates
from lightning_amp.graph.table import OPERATOR, Table
from lightning_amp.techniques.chunk.regions.chunk_bytes import result_bytes
from lightning_amp.techniques.chunk.regions.region import Region, pieces


class Seconds:
    """Predictions for one table on one device."""

    def __init__(self, table: Table, rates: Rates, *, train: bool) -> None:
        self._table, self._rates, self._train = table, rates, train
        self._result = [result_bytes(row) for row in table.rows]
        self.rows = [self._row(i) for i in range(len(table.rows))]
        """Of every row, computed whole."""
        self.whole = sum(self.rows) * (3 if train else 1)
        """Of the block without regions."""

    def extra(self, region: Region) -> float:
        """What a region takes more than its rows do whole; never negative."""
        n = len(pieces(region.units, region.n_chunks))
        inside = region.inside(self._table)
        again = sum(self._again(i, region) for i in inside)
        outputs = region.outputs(self._table)
        copies = sum(self._moved(2 * self._result[i]) + n * self._rates.overhead_seconds for i in outputs)
        beside = (n - 1) * 2 * region.reach / region.units * sum(self.rows[i] for i in inside)
        forward = (n - 1) * again + copies + beside
        if not self._train:
            return forward
        # again before the backward pass, and both passes in pieces
        return 4 * forward + sum(self.rows[i] for i in inside)

    def of(self, regions: Sequence[Region]) -> float:
        """Of the block with some regions."""
        return self.whole + sum(self.extra(region) for region in regions)

    def _row(self, i: int) -> float:
        row = self._table.rows[i]
        if row.kind != OPERATOR:
            return 0.0
        if row.storage != i:
            return self._rates.overhead_seconds
        moved = self._result[i] + sum(self._result[k] for k in row.inputs)
        return self._rates.overhead_seconds + row.flops / self._rates.matmul_flops + self._moved(moved)

    def _again(self, i: int, region: Region) -> float:
        """What every piece but the first costs: a call, and what it reads whole or adds to a sum."""
        row = self._table.rows[i]
        if row.storage != i:
            return self._rates.overhead_seconds
        whole = sum(self._result[k] for k in row.inputs if k not in region.dims)
        summed = 2 * self._result[i] if i in region.sums else 0
        return self._rates.overhead_seconds + self._moved(whole + summed)

    def _moved(self, n_bytes: int) -> float:
        return n_bytes / self._rates.memory_bytes
