"""Count live bytes, row by row, of a captured block with some regions in pieces; forward and backward.

Two tables say it, both counted by `graph/peak.py`:

    one piece      the region's rows with sizes of the longest piece; its inputs are there
    the block      every region as one row that makes nothing: it reads the region's inputs and its outputs, which rows
                   before it have made in their whole size; while it runs, one piece's bytes are alive

    forward(i in a region)   = whole tensors alive + outputs of the region + forward of one piece at i
    backward(i in a region)  = saved + gradients that wait + gradients of the region's inputs, whole
                               + the larger of forward (again, with what it saves) and backward of one piece at i

In training a region saves its inputs only. Sums over pieces of 16-bit numbers are kept in 32 bits meanwhile.

What an operator needs while it runs follows the cut dim as its result does; where it reads an activation whole, a copy
of that one may not shrink, and is counted. A piece that does not lie in one run of memory is copied where a product
reads it. Both are upper bounds; what else is counted is exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from lightning_amp.graph.peak import BlockBytes, PieceRow, block_bytes
from lightning_amp.graph.table import INPUT, OPERATOR, PARAMETER, OperatorRow, Table
from lightning_amp.techniques.chunk.regions.region import Region, piece_length, within, written_over

COPYING = ("aten.linear.", "aten.matmul.", "aten.einsum.")
"""Products that copy an argument which does not lie in one run."""
WIDTHS = {"bool": 1, "uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2, "int16": 2}
WIDTHS |= {"float64": 8, "int64": 8, "complex64": 8, "complex128": 16}
NARROW = ("float16", "bfloat16")


def chunk_bytes(table: Table, regions: Sequence[Region], *, train: bool = False) -> BlockBytes:
    """Count a block whose regions are computed piece by piece; no two of them share a row.

    Returns:
        Bytes by the block's rows, as `graph.peak.block_bytes` counts those of the block without regions.
    """
    outer, at = _Outer(table, train=train), 0
    for region in sorted(regions, key=lambda region: region.first):
        assert region.first >= at, f"two regions have row {region.first!r}"
        outer.whole(range(at, region.first))
        outer.region(region)
        at = region.last + 1
    outer.whole(range(at, len(table.rows)))
    return outer.count()


def result_bytes(row: OperatorRow) -> int:
    """Of a row's result in separate memory."""
    return prod(row.shape) * WIDTHS.get(row.dtype, 4)


@dataclass(slots=True)
class _Sizes:
    """A row that pieces compute, and its bytes for the whole of what is cut.

    Attributes:
        summed: Whether every piece has all of its result.
        uncut: Of activations that it reads whole, of which a copy may not shrink.
        copied: Of arguments that it copies, because a piece of them does not lie in one run.
        passing: Of its result where it is made in two steps then; 0 where it is not.
        handed: Of a copy that its backward makes of its result's gradient; 0 where it makes none.
        last_use: In inference.
        outlives: Whether something reads its result after the region.
    """

    row: OperatorRow
    summed: bool
    uncut: int
    copied: tuple[int, ...]
    passing: int
    handed: int
    inputs: tuple[int, ...]
    storage: int
    saved: tuple[int, ...]
    over: int
    cut: tuple[bool, ...]
    last_use: int
    outlives: bool


class Pieces:
    """What a piece of a region holds: the region's inputs, its rows with the sizes of a piece, and its outputs.

    In training the outputs live until the piece's backward pass; else they are copied at once, and let go of.

    Args:
        table: A captured block.
        region: In any number of pieces.
    """

    def __init__(self, table: Table, region: Region) -> None:
        self._old, self._region = table.rows, region
        self.inputs, self.inside, self.outputs = (region.inputs(table), region.inside(table), region.outputs(table))
        self._place = {i: n for n, i in enumerate((*self.inputs, *self.inside))}
        self._homes = {i: self._place[i] for i in self.inputs}
        self._scattered = {i for i in self.inputs if self._is_scattered(i)}
        """Pieces of inputs, and views of them, with parts of other pieces between their own."""
        self._handed = {i for i in self.outputs if self._is_scattered(i)}
        """Rows whose gradient is a piece of that of an output in that way, or a view of one."""
        for i in reversed(self.inside):
            if i in self._handed and not any(self._old[i].grad_bytes):
                self._handed.update(self._old[i].inputs)
        given = (table.rows[i] for i in self.inputs)
        self._given = [
            PieceRow(PARAMETER if row.kind == PARAMETER else INPUT, (), 0, n, 0, row.needs_grad)
            for n, row in enumerate(given)
        ]
        last = {k: self._place[i] for i in self.inside for k in self._old[i].inputs}
        self._sizes = [self._sizes_of(i, last.get(i, self._place[i])) for i in self.inside]
        sums = (table.rows[i] for i in region.sums)
        self.wide_bytes = sum(2 * result_bytes(row) for row in sums if row.dtype in NARROW)
        """Of sums over pieces, which are kept in 32 bits meanwhile."""
        self.learns = any(table.rows[i].needs_grad for i in self.outputs)
        """Whether a piece has a backward pass."""

    def once(self, n_chunks: int) -> BlockBytes:
        """Bytes of the longest of so many pieces in inference."""
        return block_bytes(*self._table(n_chunks, train=False), train=False)

    def again(self, n_chunks: int) -> BlockBytes:
        """Bytes of the longest of so many pieces when it is computed again, and in its backward pass."""
        return block_bytes(*self._table(n_chunks, train=True), gradients_of_arguments=False)

    def _table(self, n_chunks: int, *, train: bool) -> tuple[list[PieceRow], Sequence[int]]:
        units = self._region.units
        # the longest piece has neighbours on both sides
        length = min(piece_length(units, n_chunks) + 2 * self._region.reach, units)

        def part(whole: int) -> int:
            return -(-whole * length // units)

        def work(n_bytes: int, uncut: int) -> int:
            return min(n_bytes, part(n_bytes) + uncut) if n_bytes > 0 else part(n_bytes)

        rows, end = list(self._given), len(self._place)
        for x in self._sizes:
            row, copied = x.row, sum(map(part, x.copied))
            passing = max(copied, part(x.passing))
            # a copy that is made of an argument is saved in its place
            # an operator that saves nothing, as of an argument that does not learn, lets go of its copy at once
            kept = copied if train and (row.saved or row.hidden_bytes) else 0
            found = PieceRow(
                OPERATOR,
                x.inputs,
                row.n_bytes if x.summed else part(row.n_bytes),
                x.storage,
                end if train and x.outlives else x.last_use,
                row.needs_grad,
                over=x.over,
                forward_bytes=work(row.forward_bytes, x.uncut) + passing - min(kept, passing),
            )
            if train:
                found.saved = x.saved
                found.hidden_bytes = work(row.hidden_bytes, x.uncut) + kept
                grads = zip(row.grad_bytes, x.cut, strict=True)
                found.grad_bytes = tuple(part(n) if cut else n for n, cut in grads)
                found.backward_bytes = work(row.backward_bytes, x.uncut) + copied - kept + part(x.handed)
            rows.append(found)
        return rows, [self._place[i] for i in self.outputs] if train else ()

    def _sizes_of(self, i: int, last_use: int) -> _Sizes:
        row, dims = self._old[i], self._region.dims
        if row.storage != i and self._scattered.intersection(row.inputs):
            self._scattered.add(i)
        self._homes[i] = self._home(i, row.storage)
        read = [(k, self._old[k]) for k in dict.fromkeys(row.inputs)]
        product, result = row.op.startswith(COPYING), result_bytes(row)
        # a product copies a piece that has more than two dims; a linear layer adds its bias in its own step then
        copied = [result_bytes(x) for k, x in read if product and k in self._scattered and len(x.shape) > 2]
        apart = copied and row.op.startswith("aten.linear.") and len(row.inputs) > 2
        handed = product and i in self._handed and len(row.shape) > 2
        return _Sizes(
            row=row,
            summed=i in self._region.sums,
            uncut=sum(result_bytes(x) for k, x in read if k not in dims and x.kind != PARAMETER),
            copied=tuple(copied),
            passing=result if apart else 0,
            handed=result if handed else 0,
            inputs=tuple(self._place[k] for k in row.inputs),
            storage=self._homes[i],
            saved=tuple({self._home(i, s) for s in row.saved}),
            over=self._place[row.over] if within(self._old, row, self.inside) else -1,
            cut=tuple(k in dims for k, _ in zip(row.inputs, row.grad_bytes, strict=False)),
            last_use=last_use,
            outlives=i in self.outputs,
        )

    def _is_scattered(self, i: int) -> bool:
        dim = self._region.dims.get(i)
        return dim is not None and prod(self._old[i].shape[:dim]) > 1

    def _home(self, i: int, storage: int) -> int:
        """Where the memory lies that a row makes, or shares with one of its arguments."""
        if storage == i:
            return self._place[i]
        return next(self._homes[k] for k in self._old[i].inputs if self._old[k].storage == storage)


class _Outer:
    """A block in which every region is one row."""

    def __init__(self, table: Table, *, train: bool) -> None:
        self._table, self._train, self._old = table, train, table.rows
        self._rows: list[OperatorRow] = []
        self._place: dict[int, int] = {}
        """Of rows of the block, in `_rows`."""
        self._inner: dict[int, tuple[int, int, int]] = {}
        """Of rows that pieces compute: the row that stands for the region, and how far below its bytes they are."""

    def count(self) -> BlockBytes:
        """Bytes by the rows of the block as it was captured."""
        outputs = tuple(self._place[k] for k in self._table.outputs)
        # `last_use` of the rows themselves is that of the block without regions, where an input of a region may end
        # inside
        # rows have other places than in the block, and regions read their inputs and outputs until they end
        last = {k: n for n, row in enumerate(self._rows) for k in row.inputs}
        last |= dict.fromkeys(outputs, len(self._rows))
        rows = [replace(row, last_use=last.get(n, n)) for n, row in enumerate(self._rows)]
        found = block_bytes(rows, outputs, train=self._train)
        forward, backward = [0] * len(self._old), [0] * len(self._old)
        for i, n in self._place.items():
            forward[i], backward[i] = found.forward[n], found.backward[n] if self._train else 0
        for i, (n, below, below_again) in self._inner.items():
            forward[i] = found.forward[n] - below
            backward[i] = found.backward[n] - below_again if self._train else 0
        return BlockBytes(
            forward=tuple(forward), backward=tuple(backward) if self._train else (), saved_bytes=found.saved_bytes
        )

    def whole(self, rows: Sequence[int]) -> None:
        """Take over some rows as they are."""
        for i in rows:
            self._put(i, self._old[i])

    def _put(self, i: int, row: OperatorRow) -> None:
        """Take over row i of the block."""
        self._place[i] = n = len(self._rows)
        inputs = tuple(self._place[k] for k in row.inputs)
        homes = {s: self._homes(row, s) for s in (*row.saved, row.storage) if s != i}
        # views of one memory that a region hands on lie in several, of which any may be what is saved
        saved = {h for s in row.saved for h in homes.get(s, [n])}
        storage = n if row.storage == i else homes[row.storage][0]
        over = self._place[row.over] if row.over >= 0 else -1
        self._rows.append(
            replace(row, inputs=inputs, storage=storage, saved=tuple(sorted(saved)), writes=(), over=over)
        )

    def _homes(self, row: OperatorRow, storage: int) -> list[int]:
        """Where the memory lies that a row shares with some of its arguments."""
        shared = (k for k in row.inputs if self._old[k].storage == storage)
        return [self._rows[self._place[k]].storage for k in shared]

    def region(self, region: Region) -> None:
        """Rows that come before the pieces, outputs, and the row that stands for all pieces."""
        self.whole([i for i in range(region.first, region.last + 1) if self._old[i].kind != OPERATOR])
        for i in region.before:
            self._put(i, replace(self._old[i], over=-1))
        over = written_over(self._table, region)
        for i in region.outputs(self._table):
            row = self._old[i]
            self._put(
                i,
                OperatorRow(
                    name=row.name,
                    kind=OPERATOR,
                    storage=i,
                    n_bytes=result_bytes(row),
                    needs_grad=row.needs_grad,
                    over=over.get(i, -1),
                ),
            )
        pieces = Pieces(self._table, region)
        inputs, outputs, learns = pieces.inputs, pieces.outputs, self._train and pieces.learns
        once, again = pieces.once(region.n_chunks), pieces.again(region.n_chunks)
        grads = [result_bytes(self._old[i]) if self._old[i].needs_grad else 0 for i in inputs]
        read = (*(self._place[i] for i in inputs), *(self._place[i] for i in outputs))
        n = len(self._rows)
        self._rows.append(
            OperatorRow(
                name=f"pieces of {self._old[region.first].name}",
                kind=OPERATOR,
                inputs=read,
                storage=n,
                saved=tuple(sorted({self._rows[self._place[i]].storage for i in inputs})) if learns else (),
                forward_bytes=max(once.forward) + pieces.wide_bytes,
                grad_bytes=(*grads, *(0 for _ in outputs)),
                backward_bytes=again.peak_bytes if learns else 0,
                needs_grad=learns,
            )
        )
        # the one row has the most of all pieces; what each row of a piece is below that is subtracted in `count`
        for k, i in enumerate(pieces.inside, start=len(inputs)):
            beside = (max(once.forward) - once.forward[k], again.peak_bytes - max(again.forward[k], again.backward[k]))
            self._inner[i] = (n, *beside)
