"""Find every run of operators (region) that can be computed piece by piece along one dim.

A walk starts at a last row and one of its dims (or one of its sums), and passes the rows before it in reverse order.
If a cut row reads row r along a dim, r is cut too, provided that this dim of r follows r's arguments and that all other
readers of r inside the run can be cut with it. Otherwise r is computed before the pieces. Whenever a row is cut, the
run from it to the last row is a region. So one walk per (last row, dim) finds the regions of all first rows, in
O(rows^2) steps; Algorithm 1 of the paper searches every pair of first and last row separately, in O(rows^3). A walk
passes only rows that can be cut, and stops when there are no more.

Of all legal regions with the same first and last row, that with the most cut rows is found: a row that could be cut but
is computed before the pieces costs memory and saves nothing. If two rows cannot both be cut, the later one is.

`around` omits regions that contain none of the given rows, such as rows near the peak, as in the paper. With `held`,
it also omits regions if a shorter one saves as much, and thins out the others if there are too many to compare.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from math import inf

from lightning_amp.errors import PlanError
from lightning_amp.graph.table import OPERATOR, Table
from lightning_amp.techniques.chunk.regions.region import Region
from lightning_amp.techniques.chunk.regions.walk import Flow, RowsOfTable, Walk, nearest

FEWER = 0.7
"""Factor by which the number of stretches is reduced while there are too many regions; see `RegionSearch.around`."""


def same_region(table: Table, region: Region) -> Region:
    """Return the region with the same rows and cut dims in a table of the same operators with other sizes.

    Raises:
        PlanError: The region is not legal in that table.
    """
    block, last = RowsOfTable(table), region.last
    for dim in [region.dims[last]] if last in region.dims else [~g for g in range(len(table.rows[last].sums))]:
        flow = Flow(block, last)
        end = max(block.fixed_up_to[last], region.first - 1)
        found = flow.region(region.first) if flow.begin(dim) and region.first in flow.upwards(end) else None
        if found and (found.dims, found.sums, found.before) == (region.dims, region.sums, region.before):
            return replace(found, n_chunks=max(2, min(region.n_chunks, found.units)))
    raise PlanError(f"rows {region.first} to {last} of {table.block!r} cannot be cut in the same way with other sizes")


class RegionSearch:
    """Enumerate legal regions of a table; a region that is found twice is the same object.

    Args:
        table: A captured block.
        held: Bytes alive just before every row. If given, regions that begin or end with a view are omitted. A region
            that begins earlier than another is omitted unless fewer bytes are alive there or it has another wanted row.

    Attributes:
        thinned: Whether regions were omitted because there were too many.
    """

    def __init__(self, table: Table, *, held: Sequence[int] | None = None) -> None:
        self._block, self._held = RowsOfTable(table), held
        self._nearest: list[int] = []
        self._walks: dict[tuple[int, int], Walk] = {}
        self.thinned = False

    def around(self, wanted: Collection[int], *, most_rows: float = inf) -> list[Region]:
        """Return all legal regions that contain a wanted row, by last row, dim and first row, each in the most pieces.

        If these regions have more than `most_rows` rows in total, the block is divided into equal stretches, as many as
        the limit allows. In each stretch, regions end at one row only: the one after which the fewest bytes are alive.
        Of the regions that end there, have the same dim and begin in the same stretch, only the one before which the
        fewest bytes are alive is returned.
        """
        n = len(self._block.rows)
        self._nearest, stretches = nearest(wanted, n), n
        while True:
            found, rows = list[Region](), 0
            for region in self._regions(stretches):
                found.append(region)
                rows += region.last - region.first + 1
                if rows > most_rows:
                    break
            if rows <= most_rows or stretches == 1:
                return found
            self.thinned, stretches = True, max(1, int(FEWER * stretches))

    def _regions(self, stretches: int) -> Iterator[Region]:
        for last in self._lasts(stretches):
            row = self._block.rows[last]
            for dim in (*range(len(row.shape)), *(~g for g in range(len(row.sums)))):
                if (last, dim) not in self._walks:
                    self._walks[last, dim] = Walk(self._block, last, dim)
                yield from self._best(self._walk(self._walks[last, dim]), stretches)

    def _lasts(self, stretches: int) -> list[int]:
        """Return rows at which a region may end: in each stretch, the one after which the fewest bytes are alive."""
        rows = enumerate(self._block.rows)
        lasts = [i for i, row in rows if row.kind == OPERATOR and self._nearest[i] >= 0 and not self._superfluous(i)]
        if self._held is None or stretches == len(self._block.rows):
            return lasts
        behind = [*self._held[1:], 0]
        best: dict[int, int] = {}
        for i in lasts:
            stretch = self._stretch(i, stretches)
            if behind[i] <= behind[best.setdefault(stretch, i)]:
                best[stretch] = i
        return list(best.values())

    def _best(self, found: Iterator[Region], stretches: int) -> Iterator[Region]:
        """For each stretch, yield the region that begins in it with the fewest bytes alive before it."""
        if self._held is None or stretches == len(self._block.rows):
            yield from found
            return
        best: dict[int, Region] = {}
        for region in found:
            known = best.setdefault(self._stretch(region.first, stretches), region)
            if self._held[region.first] < self._held[known.first]:
                best[self._stretch(region.first, stretches)] = region
        yield from best.values()

    def _stretch(self, i: int, stretches: int) -> int:
        return i * stretches // len(self._block.rows)

    def _walk(self, walk: "Walk") -> Iterator[Region]:
        """Yield the regions of one last row and dim."""
        least, above = inf, walk.last + 1
        nearest = self._nearest[walk.last]
        for place, first in enumerate(walk.firsts()):
            if first > nearest or self._superfluous(first):
                continue
            if self._held and self._nearest[above - 1] < first and self._held[first] >= least:
                continue
            region = walk.region(place)
            if region is not None:
                least, above = self._held[first] if self._held else inf, first
                yield region

    def _superfluous(self, i: int) -> bool:
        """Whether no region needs to begin or end with row i, because it is a view, which takes no memory."""
        return self._held is not None and self._block.rows[i].storage != i
