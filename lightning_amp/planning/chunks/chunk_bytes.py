"""Bytes alive, row by row, while a captured block runs with some regions piece by piece; forward and backward.

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
from dataclasses import replace
from math import prod

from lightning_amp.graph.peak import BlockBytes, block_bytes
from lightning_amp.graph.table import INPUT, OPERATOR, PARAMETER, Row, Table
from lightning_amp.planning.chunks.over import within, written_over
from lightning_amp.planning.chunks.region import Region, piece_length

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
    outer = _Outer(table, train=train)
    outer.add_all(sorted(regions, key=lambda region: region.first))
    return outer.count()


def result_bytes(row: Row) -> int:
    """Of a row's result in memory of its own."""
    return prod(row.shape) * WIDTHS.get(row.dtype, 4)


def piece_table(table: Table, region: Region, *, train: bool = False) -> Table:
    """A region's inputs and rows with the sizes of its longest piece, and the outputs of that piece.

    In training the piece's outputs live until its backward pass; else they are copied at once, and let go of.
    """
    return _Piece(table, region).table(train=train)


class _Piece:
    """One piece of a region: its rows in other places, and what is less of each."""

    def __init__(self, table: Table, region: Region) -> None:
        self._old, self._region, self._block = table.rows, region, table
        length = piece_length(region.units, region.n_chunks) + 2 * region.reach
        self._length = min(length, region.units)
        self._inputs, self._inside = region.inputs(table), region.inside(table)
        self._place = {i: n for n, i in enumerate((*self._inputs, *self._inside))}
        self._homes: dict[int, int] = {}
        self._scattered: set[int] = set()
        """Pieces of inputs, and views of them, with parts of other pieces between their own."""
        self._handed: set[int] = set()
        """Rows whose gradient is a piece of that of an output in that way, or a view of one."""

    def table(self, *, train: bool) -> Table:
        """All rows of the piece."""
        last = {k: n for i in self._inside for n in (self._place[i],) for k in self._old[i].inputs}
        outputs = self._region.outputs(self._block) if train else ()
        last |= dict.fromkeys(outputs, len(self._place))
        self._handed = self._handed_by(outputs)
        rows = [self._input(i) for i in self._inputs] + [
            self._row(i, last.get(i, self._place[i]), train=train) for i in self._inside
        ]
        return Table(
            block=self._block.block, rows=tuple(rows), outputs=tuple(self._place[i] for i in outputs)
        )

    def _input(self, i: int) -> Row:
        """A row that the region reads; it costs nothing, but its gradient may."""
        row = self._old[i]
        if self._is_scattered(i):
            self._scattered.add(i)
        self._homes[i] = self._place[i]
        kind = PARAMETER if row.kind == PARAMETER else INPUT
        return Row(name=row.name, kind=kind, storage=self._place[i], needs_grad=row.needs_grad)

    def _is_scattered(self, i: int) -> bool:
        dim = self._region.dims.get(i)
        return dim is not None and prod(self._old[i].shape[:dim]) > 1

    def _handed_by(self, outputs: Sequence[int]) -> set[int]:
        found = {i for i in outputs if self._is_scattered(i)}
        for i in reversed(self._inside):
            if i in found and not any(self._old[i].grad_bytes):
                found.update(self._old[i].inputs)
        return found

    def _row(self, i: int, last_use: int, *, train: bool) -> Row:
        """A row that the region computes."""
        row, dims, part = self._old[i], self._region.dims, self._part
        if row.storage != i and self._scattered.intersection(row.inputs):
            self._scattered.add(i)
        self._homes[i] = self._home(i, row.storage)
        copied, passing = self._copied(row)
        # a copy that is made of an argument is saved in its place
        kept = copied if train and (row.saved or row.hidden_bytes) else 0
        again = self._work(row, row.backward_bytes) if train else 0
        grads = zip(row.inputs, row.grad_bytes, strict=False) if train else ()
        return Row(
            name=row.name,
            kind=OPERATOR,
            inputs=tuple(self._place[k] for k in row.inputs),
            n_bytes=row.n_bytes if i in self._region.sums else part(row.n_bytes),
            storage=self._homes[i],
            last_use=last_use,
            saved=tuple({self._home(i, s) for s in row.saved}),
            hidden_bytes=self._work(row, row.hidden_bytes) + kept,
            forward_bytes=self._work(row, row.forward_bytes) + passing - min(kept, passing),
            grad_bytes=tuple(part(n) if k in dims else n for k, n in grads),
            backward_bytes=again + copied - kept + self._gradient_copied(i),
            needs_grad=row.needs_grad,
            over=self._place[row.over] if within(self._old, row, self._inside) else -1,
        )

    def _home(self, i: int, storage: int) -> int:
        """Where the memory lies that a row makes, or shares with one of its arguments."""
        if storage == i:
            return self._place[i]
        return next(self._homes[k] for k in self._old[i].inputs if self._old[k].storage == storage)

    def _part(self, whole: int) -> int:
        return -(-whole * self._length // self._region.units)

    def _work(self, row: Row, n_bytes: int) -> int:
        """Of what a row needs while it runs, that of a piece."""
        if not n_bytes:
            return 0
        if n_bytes < 0:
            return self._part(n_bytes)
        whole = [k for k in dict.fromkeys(row.inputs) if k not in self._region.dims]
        uncut = sum(result_bytes(self._old[k]) for k in whole if self._old[k].kind != PARAMETER)
        return min(n_bytes, self._part(n_bytes) + uncut)

    def _gradient_copied(self, i: int) -> int:
        """Bytes of a copy that the backward of a product makes of its result's gradient."""
        if i not in self._handed:
            return 0
        row = self._old[i]
        copies = row.op.startswith(COPYING) and len(row.shape) > 2
        return self._part(result_bytes(row)) if copies else 0

    def _copied(self, row: Row) -> tuple[int, int]:
        """Bytes of copies, and of all that a product takes in passing, because a piece does not lie in one run.

        It copies the piece where that has more than two dims; a linear layer adds its bias in a step of its own then.
        """
        if not self._scattered or not row.op.startswith(COPYING):
            return 0, 0
        scattered = self._scattered.intersection(row.inputs)
        pieces = [k for k in scattered if len(self._old[k].shape) > 2]
        copied = sum(self._part(result_bytes(self._old[k])) for k in pieces)
        apart = pieces and row.op.startswith("aten.linear.") and len(row.inputs) > 2
        return copied, max(copied, self._part(result_bytes(row))) if apart else copied


class _Outer:
    """A block in which every region is one row."""

    def __init__(self, table: Table, *, train: bool) -> None:
        self._table, self._train, self._old = table, train, table.rows
        self._rows: list[Row] = []
        self._place: dict[int, int] = {}
        """Of rows of the block, in `_rows`."""
        self._inner: dict[int, tuple[int, int, int]] = {}
        """Of rows that pieces compute: the row that stands for the region, and how far below its bytes they are."""

    def add_all(self, regions: Sequence[Region]) -> None:
        """The whole block."""
        at = 0
        for region in regions:
            assert region.first >= at, f"two regions have row {region.first!r}"
            self._whole(range(at, region.first))
            self._region(region)
            at = region.last + 1
        self._whole(range(at, len(self._old)))

    def count(self) -> BlockBytes:
        """Bytes by the rows of the block as it was captured."""
        outputs = tuple(self._place[k] for k in self._table.outputs)
        last = {k: n for n, row in enumerate(self._rows) for k in row.inputs}
        last |= dict.fromkeys(outputs, len(self._rows))
        rows = tuple(replace(row, last_use=last.get(n, n)) for n, row in enumerate(self._rows))
        found = block_bytes(Table(block="", rows=rows, outputs=outputs), train=self._train)
        forward, backward = [0] * len(self._old), [0] * len(self._old)
        for i, n in self._place.items():
            forward[i], backward[i] = found.forward[n], found.backward[n] if self._train else 0
        for i, (n, below, below_again) in self._inner.items():
            forward[i] = found.forward[n] - below
            backward[i] = found.backward[n] - below_again if self._train else 0
        return BlockBytes(
            forward=tuple(forward),
            backward=tuple(backward) if self._train else (),
            saved_bytes=found.saved_bytes,
        )

    def _whole(self, rows: Sequence[int]) -> None:
        for i in rows:
            self._put(i, self._old[i])

    def _put(self, i: int, row: Row) -> None:
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

    def _homes(self, row: Row, storage: int) -> list[int]:
        """Where the memory lies that a row shares with some of its arguments."""
        shared = (k for k in row.inputs if self._old[k].storage == storage)
        return [self._rows[self._place[k]].storage for k in shared]

    def _region(self, region: Region) -> None:
        """Rows that come before the pieces, outputs, and the row that stands for all pieces."""
        self._whole([i for i in range(region.first, region.last + 1) if self._old[i].kind != OPERATOR])
        for i in region.before:
            self._put(i, replace(self._old[i], over=-1))
        over = written_over(self._table, region)
        for i in region.outputs(self._table):
            row = self._old[i]
            self._put(
                i,
                Row(
                    name=row.name,
                    kind=OPERATOR,
                    storage=i,
                    n_bytes=result_bytes(row),
                    needs_grad=row.needs_grad,
                    over=over.get(i, -1),
                ),
            )
        self._pieces(region)

    def _pieces(self, region: Region) -> None:
        inputs, outputs = region.inputs(self._table), region.outputs(self._table)
        learns = self._train and any(self._old[i].needs_grad for i in outputs)
        once = block_bytes(piece_table(self._table, region), train=False)
        again = block_bytes(
            piece_table(self._table, region, train=True), train=True, gradients_of_arguments=False
        )
        sums = [self._old[i] for i in region.sums if self._old[i].dtype in NARROW]
        wide = sum(2 * result_bytes(row) for row in sums)
        grads = [result_bytes(self._old[i]) if self._old[i].needs_grad else 0 for i in inputs]
        read = (*(self._place[i] for i in inputs), *(self._place[i] for i in outputs))
        n = len(self._rows)
        self._rows.append(
            Row(
                name=f"pieces of {self._old[region.first].name}",
                kind=OPERATOR,
                inputs=read,
                storage=n,
                saved=tuple(sorted({self._rows[self._place[i]].storage for i in inputs})) if learns else (),
                forward_bytes=max(once.forward) + wide,
                grad_bytes=(*grads, *(0 for _ in outputs)),
                backward_bytes=again.peak_bytes if learns else 0,
                needs_grad=learns,
            )
        )
        for k, i in enumerate(region.inside(self._table), start=len(inputs)):
            beside = (
                max(once.forward) - once.forward[k],
                again.peak_bytes - max(again.forward[k], again.backward[k]),
            )
            self._inner[i] = (n, *beside)
