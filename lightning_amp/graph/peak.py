"""Compute the live bytes of a captured block, row by row, forward and backward; without torch.

Counted are what the block makes: its arguments and parameters are there before it and after it. Forward: a result lives
until its last reader has run, or until its backward if that reader keeps it. Backward, in reverse order: the gradient
of a row lives from its last reader's backward to its own; gradients of arguments and parameters stay.

    forward:  alive(i) = sum of results not yet past their last use or saved + hidden_bytes so far + forward_bytes(i)
    backward: alive(i) = saved by rows <= i + gradients that wait + grad_bytes(i) + backward_bytes(i)
              then, for a gradient that another one waits for: saved by rows < i + both + their sum + all others

A result that is written over another row's (in inference only) takes that row's memory, and makes none.

Known limits: a tensor that Python keeps in a variable longer than its last use is not seen here, a captured block has
none; gradients that two readers hand to one row are added when the second one comes, in new memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_amp.graph.table import OPERATOR, OperatorRow


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockBytes:
    """Bytes alive at every row, and what is left for the backward pass.

    Attributes:
        forward: While each row's operator runs.
        backward: While each row's backward runs, by the row's place in the table.
        saved_bytes: Alive between the two passes, results of the block included.
        waiting: Of `backward`, gradients that later rows have made and that still wait.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    saved_bytes: int
    waiting: tuple[int, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Most bytes in either pass."""
        return max((*self.forward, *self.backward), default=0)


@dataclass(slots=True)
class PieceRow:
    """Of a row what is counted, for tables that are made by the thousand: a `Row` takes ten times as long to make."""

    kind: str
    inputs: tuple[int, ...]
    n_bytes: int
    storage: int
    last_use: int
    needs_grad: bool
    saved: tuple[int, ...] = ()
    hidden_bytes: int = 0
    forward_bytes: int = 0
    grad_bytes: tuple[int, ...] = ()
    backward_bytes: int = 0
    over: int = -1


Rows = Sequence[OperatorRow | PieceRow]


def block_bytes(
    rows: Rows, outputs: Sequence[int], *, train: bool = True, gradients_of_arguments: bool = True
) -> BlockBytes:
    """Count a block, given by its table's rows and outputs; without `train` nothing is saved, and there is no backward.

    Without `gradients_of_arguments` those are taken away as soon as they are complete, to be added up elsewhere.
    """
    # for every memory that is kept for the backward pass, the first row that keeps it: the last to read it there
    saved_until: dict[int, int] = {}
    for i, row in enumerate(rows if train else ()):
        for storage in row.saved:
            saved_until.setdefault(storage, i)
    forward, held = _forward(rows, saved_until, train=train)
    # results, what is saved of rows, and what operators keep of no row
    saved = sum(held.values()) + (sum(row.hidden_bytes for row in rows) if train else 0)
    backward, waiting = _backward(rows, outputs, saved_until, held, gradients_of_arguments) if train else ((), ())
    return BlockBytes(forward=forward, backward=backward, saved_bytes=saved, waiting=waiting)


def _forward(rows: Rows, saved: dict[int, int], *, train: bool) -> tuple[tuple[int, ...], dict[int, int]]:
    alive, now, found = dict[int, int](), 0, list[int]()
    # last use of every memory, by any view of it
    last: dict[int, int] = {}
    for i, row in enumerate(rows):
        last[row.storage] = max(last.get(row.storage, i), row.last_use, i)
    ends: dict[int, list[int]] = {}
    for k, end in last.items():
        # what is saved lives on into the backward pass, whoever reads it last
        if k not in saved:
            ends.setdefault(end, []).append(k)
    for i, row in enumerate(rows):
        if row.kind == OPERATOR and row.n_bytes:
            # what is written over ends here: its memory goes on as this row's
            now += row.n_bytes - alive.pop(rows[row.over].storage if row.over >= 0 else -1, 0)
            alive[i] = row.n_bytes
        now += row.hidden_bytes if train else 0
        found.append(now + row.forward_bytes)
        for k in ends.get(i, ()):
            now -= alive.pop(k, 0)
    return tuple(found), alive


def _backward(
    rows: Rows, outputs: Sequence[int], saved: dict[int, int], held: dict[int, int], gradients_of_arguments: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    # arguments by their first reader, which is the last that adds to their gradient
    complete: dict[int, list[int]] = {}
    seen: set[int] = set()
    if not gradients_of_arguments:
        for i, row in enumerate(rows):
            complete[i] = [k for k in dict.fromkeys(row.inputs) if rows[k].kind != OPERATOR and k not in seen]
            seen.update(complete[i])
    # the caller holds the results' gradients and may drop the results
    results = {rows[k].storage for k in outputs}
    # rows run backward, so that of all that keep a memory the first in the forward pass is the last to let go of it
    let_go: dict[int, int] = {}
    for storage, first in saved.items():
        if storage not in results:
            let_go[first] = let_go.get(first, 0) + held.get(storage, 0)
    kept = sum(held.values()) + sum(row.hidden_bytes for row in rows)
    # gradients that wait for the backward of the row that they are of, and their bytes in all
    waiting, n_bytes = dict[int, int](), 0
    found, waits = [0] * len(rows), [0] * len(rows)
    for i in range(len(rows) - 1, -1, -1):
        row, waits[i] = rows[i], n_bytes
        # the most bytes of gradients at a moment when one is added to another; 0 where none is
        adding = 0
        if row.kind != OPERATOR:
            continue
        if row.needs_grad:
            made = [(k, n) for k, n in zip(row.inputs, row.grad_bytes, strict=True) if rows[k].needs_grad]
            new_bytes, arrived = sum(n for _, n in made), waiting.pop(i, 0)
            found[i] = kept + n_bytes + new_bytes + row.backward_bytes
            n_bytes -= arrived
            # The gradient of a view is a view of the gradient: the memory that arrived is handed on. Where the backward
            # makes new gradients, the one that arrived is no longer needed once it has run.
            handed_on = 0 if any(row.grad_bytes) else arrived
            # bytes of all gradients once the row's backward has run
            alive = n_bytes + new_bytes + handed_on
            for k, n in made:
                if k in waiting:
                    # the sum is new memory, also where what waited was a gradient that the caller holds
                    both = max(waiting[k], n)
                    adding = max(adding, alive + both)
                    alive += both - waiting[k] - n
                    n_bytes += both - waiting[k]
                    waiting[k] = both
                else:
                    # of several arguments whose gradients are views, the first has the memory
                    waiting[k], handed_on = (n, handed_on) if n else (handed_on, 0)
                    n_bytes += waiting[k]
        n_bytes -= sum(waiting.pop(k, 0) for k in complete.get(i, ()))
        kept -= row.hidden_bytes + let_go.get(i, 0)
        if adding:
            found[i] = max(found[i], kept + adding)
    return tuple(found), tuple(waits)
