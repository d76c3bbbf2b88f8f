"""Find every run of operators that can be computed piece by piece, from the last row upwards.

For a last row and a dim of it (or a sum that it is), rows are passed in reverse order. A row that a cut row reads
cut is cut itself, if its own dim follows its arguments' and if whoever else reads it inside the run can be cut along
with it; otherwise it is computed before the pieces. Whenever a row is cut, the run from it to the last row is a region.
So one walk per (last row, dim) finds the regions of all first rows, where the paper's Algorithm 1 searches every pair
of a first and a last row anew: O(rows^2) steps instead of O(rows^3). A walk passes only rows that can be cut, and ends
where no further one can be.

Of the legal regions with the same first and last row, those in which more rows are cut are found: a row that could be
cut and is computed before the pieces instead costs memory and saves nothing. Where two rows cannot both be cut, the
later one is.

`around` leaves out regions that contain none of these rows, such as those near the peak, as the paper does. Beyond it,
`held` leaves out regions of which a shorter one does the same, and `RegionSearch.around` thins out the others where
they are too many to compare.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import gcd, inf

from lightning_amp.errors import PlanError
from lightning_amp.graph.table import OPERATOR, OperatorRow, Table
from lightning_amp.techniques.chunk.regions.region import GETITEM, Region, reach_of, written_from

FEWER = 0.7
"""Of the stretches of a block in which regions may begin and end, those that are left where regions are too many."""


def same_region(table: Table, region: Region) -> Region:
    """The same rows, cut along the same dims, in a table of the same operators with other sizes.

    Raises:
        PlanError: That is not legal there.
    """
    block, last = _Rows(table), region.last
    for dim in [region.dims[last]] if last in region.dims else [~g for g in range(len(table.rows[last].sums))]:
        flow = _Flow(block, last)
        end = max(block.fixed_up_to[last], region.first - 1)
        found = flow.region(region.first) if flow.begin(dim) and region.first in flow.upwards(end) else None
        if found and (found.dims, found.sums, found.before) == (region.dims, region.sums, region.before):
            return replace(found, n_chunks=max(2, min(region.n_chunks, found.units)))
    raise PlanError(f"rows {region.first} to {last} of {table.block!r} cannot be cut in the same way with other sizes")


class RegionSearch:
    """Which walks there are, and which of their regions count; a region that is found again is the same object.

    Args:
        table: A captured block.
        held: Bytes alive just before every row. With it regions are left out that begin or end with a view, and those
            that begin earlier than another though no fewer bytes are alive there and they have no further row of those
            that are wanted.

    Attributes:
        thinned: Whether regions were left out because there were too many.
    """

    def __init__(self, table: Table, *, held: Sequence[int] | None = None) -> None:
        self._block, self._held = _Rows(table), held
        self._nearest: list[int] = []
        self._found: dict[tuple[int, int, int], Region | None] = {}
        self.thinned = False

    def around(self, wanted: Collection[int], *, most_rows: float = inf) -> list[Region]:
        """Every legal region that has one of these rows, by last row, dim and first row, each in the most pieces.

        That is as long as all of them together have no more than so many rows.

        Where they have more, the block is divided into equal stretches, as few as it takes: in each a region may end at
        one row only, and of those that end there and begin in one other stretch the best is left. The best row or
        region is that behind or before which the fewest bytes are alive.
        """
        n = len(self._block.rows)
        self._nearest, stretches = _nearest(wanted, n), n
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
                flow = _Flow(self._block, last)
                if flow.begin(dim):
                    yield from self._best(self._walk(flow, dim), stretches)

    def _lasts(self, stretches: int) -> list[int]:
        """Rows that a region may end at: one of each stretch, of those behind which the fewest bytes are alive."""
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
        """Of the regions of one walk that begin in one stretch, that before which the fewest bytes are alive."""
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

    def _walk(self, flow: "_Flow", dim: int) -> Iterator[Region]:
        """The regions of one last row and dim."""
        least, above = inf, flow.last + 1
        nearest = self._nearest[flow.last]
        for first in flow.upwards(self._block.fixed_up_to[flow.last]):
            if first > nearest or self._superfluous(first):
                continue
            if self._held and self._nearest[above - 1] < first and self._held[first] >= least:
                continue
            # known also where it was None: walks for other rows around the peak pass the same places again
            key = flow.last, dim, first
            if key not in self._found:
                self._found[key] = flow.region(first)
            region = self._found[key]
            if region is not None:
                least, above = self._held[first] if self._held else inf, first
                yield region

    def _superfluous(self, i: int) -> bool:
        """Whether a region does the same without a row at its begin or end: a view costs nothing whole either."""
        return self._held is not None and self._block.rows[i].storage != i


def _nearest(wanted: Collection[int], n_rows: int) -> list[int]:
    """For every row, the last wanted one up to it; -1 for none."""
    found, rows = list[int](), set(wanted)
    for i in range(n_rows):
        found.append(i if i in rows else found[-1] if found else -1)
    return found


class _Rows:
    """What the walks read of a table.

    Attributes:
        readers: Of every row.
        several: Rows of several results.
        fixed_up_to: For every row, the last one up to it that is part of no region, because memory is changed in place.
    """

    def __init__(self, table: Table) -> None:
        self.rows = table.rows
        self.readers: list[list[int]] = [[] for _ in table.rows]
        for i, row in enumerate(table.rows):
            for k in dict.fromkeys(row.inputs):
                self.readers[k].append(i)
        self.several = {row.inputs[0] for row in table.rows if row.op == GETITEM}
        written = written_from(table)
        fixed = [
            i
            for i, row in enumerate(table.rows)
            if row.writes or not written[i].isdisjoint(table.rows[k].storage for k in (i, *row.inputs))
        ]
        self.fixed_up_to = _nearest(fixed, len(table.rows))


class _Flow:
    """The rows that are cut so far, going up from a last row.

    Attributes:
        cut: Rows of the run that are cut, with their dim.
        summed: Rows of the run that are summed.
        wanted: Rows that these read cut and that are not cut themselves (so far), with the dim.
        whole: Rows that these read whole.
        asked: Of `wanted`, those whose other readers have not been looked at.
        passed: The uppermost row of the run so far.
    """

    def __init__(self, block: _Rows, last: int) -> None:
        self.block, self.last, self.passed = block, last, last + 1
        self.cut: dict[int, int] = {}
        self.summed: dict[int, int] = {}
        self.wanted: dict[int, int] = {}
        self.whole: dict[int, int] = {}
        self.asked: list[int] = []
        self._changes: list[tuple[dict[int, int], int, int | None]] = []
        """What was there before each change, for a row that turns out not to be cut."""
        self._next: list[int] = []
        """Rows that may be cut, as a heap of their negatives: those that are wanted, and readers of what is wanted."""

    def begin(self, dim: int) -> bool:
        """Cut the last row along a dim, or sum it over its group ~dim; False if that cannot be."""
        self.passed = self.last
        return self._add(self.last, dim)

    def upwards(self, end: int) -> Iterator[int]:
        """Pass all rows that can be cut or summed, down to one behind `end`; those that are."""
        if self.last > end:
            yield self.last
        while self._next:
            i = -heappop(self._next)
            if i <= end:
                return
            if i < self.passed and self._take(i):
                yield i

    def _take(self, i: int) -> bool:
        """Pass a row; whether it is cut or summed."""
        self.passed = i
        if self.block.rows[i].kind != OPERATOR:
            return False
        if i in self.cut or i in self.summed:
            return True
        taken = self._try(i, self.wanted[i]) if i in self.wanted else self._along(i)
        if taken:
            self._join()
        return taken

    def region(self, first: int) -> Region | None:
        """The run from a first row; None if sizes do not go together, or a row above it is cut already."""
        # a row of several results is cut as soon as one of them is, which may be above `first`
        if min(self.cut, default=first) < first:
            return None
        # what is wanted and not cut is an input of the run from here on, which pieces read cut
        dims, units = {**self.cut, **self.wanted}, 0
        for i, d in dims.items():
            units = gcd(units, self.block.rows[i].shape[d])
        if units < 2:
            return None
        inside = range(first, self.last + 1)
        before = tuple(
            i for i in inside if i not in self.cut and i not in self.summed and self.block.rows[i].kind == OPERATOR
        )
        region = Region(
            first=first,
            last=self.last,
            dims=dims,
            sums=tuple(sorted(self.summed)),
            before=before,
            units=units,
            n_chunks=units,
        )
        reach = reach_of(self.block.rows, region)
        # entries besides a piece would count twice in a sum
        return None if reach and self.summed else replace(region, reach=reach)

    def _try(self, i: int, dim: int) -> bool:
        """Cut or sum a row with all that follows from it, or leave everything as it is."""
        n_changes, n_asked = len(self._changes), len(self.asked)
        if self._add(i, dim):
            return True
        while len(self._changes) > n_changes:
            rows, k, before = self._changes.pop()
            if before is None:
                rows.pop(k, None)
            else:
                rows[k] = before
        del self.asked[n_asked:]
        return False

    def _set(self, rows: dict[int, int], i: int, dim: int | None) -> None:
        """Note a row's dim, or with None forget it, so that it can be taken back."""
        self._changes.append((rows, i, rows.get(i)))
        if dim is None:
            rows.pop(i, None)
        else:
            rows[i] = dim

    def _along(self, i: int) -> bool:
        """Cut a row that no cut row reads, because it reads what is cut for others; False if that cannot be."""
        return any(self._try(i, dim) for dim in self._dims_of(i))

    def _dims_of(self, i: int) -> list[int]:
        """Dims of a row, or groups of its sums, that follow what is cut of its arguments."""
        row, known = self.block.rows[i], set[tuple[int, int]]()
        for k, j in enumerate(row.inputs):
            d = self.cut.get(j, self.wanted.get(j))
            if d is not None:
                known.add((k, d))
        if not known:
            return []
        dims = [d for d, pairs in enumerate(row.dims or ()) if known.intersection(pairs)]
        return dims + [~g for g, pairs in enumerate(row.sums) if known.intersection(pairs)]

    def _add(self, i: int, dim: int) -> bool:
        """Cut or sum one row, then what reads it; False, with everything half done, if that cannot be."""
        row = self.block.rows[i]
        if row.random or row.dims is None or i in self.whole:
            return False
        pairs = row.sums[~dim] if dim < 0 else row.dims[dim]
        # `dict` keeps the last dim of every argument, so that a second, other dim of the same argument is seen as
        # unequal
        # one tensor as two arguments, or along two of its dims, has to be cut in one way
        asked = dict(pairs)
        if not pairs or any(asked[k] != d for k, d in pairs):
            return False
        if dim < 0:
            if i in self.wanted:
                return False
            self._set(self.summed, i, dim)
        else:
            if self.wanted.get(i, dim) != dim:
                return False
            self._set(self.wanted, i, None)
            self._set(self.cut, i, dim)
            self._note(i)
        return self._read(row, asked) and self._readers(i)

    def _read(self, row: OperatorRow, asked: dict[int, int]) -> bool:
        """Ask a row's arguments for what it reads of them."""
        # by place and not by row: `x @ x` reads one row twice, once along its rows and once whole, which no cut allows
        for k, j in enumerate(row.inputs):
            inside = j in self.cut
            if j in self.summed:
                return False
            if k in asked:
                if self.cut.get(j, self.wanted.get(j, asked[k])) != asked[k] or j in self.whole:
                    return False
                if not inside:
                    self._set(self.wanted, j, asked[k])
                    self.asked.append(j)
                    self._note(j)
                    # several results in one are cut with all that read them, or not at all
                    if j in self.block.several and not self._add(j, asked[k]):
                        return False
            elif inside or j in self.wanted:
                return False
            else:
                # from here on no row may want it cut: pieces would not have all of it
                self._set(self.whole, j, 0)
        return True

    def _note(self, i: int) -> None:
        """A row that is cut or wanted, and what reads it, may be passed."""
        for k in (i, *self.block.readers[i]):
            if k < self.passed:
                heappush(self._next, -k)

    def _readers(self, i: int) -> bool:
        """Cut or sum whatever reads a row inside the run; a sum is read by nothing there."""
        for reader in self.block.readers[i]:
            if reader > self.last:
                if i in self.block.several:
                    return False
                continue
            if i in self.summed:
                return False
            if reader in self.cut or reader in self.summed:
                continue
            dims = self._dims_of(reader)
            # a reader that could be cut in two ways is not cut: nothing here says in which
            if len(dims) != 1 or not self._add(reader, dims[0]):
                return False
        return True

    def _join(self) -> None:
        """Cut also those rows of the run that read what others read cut, where they can be."""
        while self.asked:
            j = self.asked.pop()
            for reader in self.block.readers[j] if j in self.wanted else ():
                passed = self.passed <= reader <= self.last
                if passed and reader not in self.cut and reader not in self.summed:
                    self._along(reader)
