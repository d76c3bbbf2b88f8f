"""Compute the live bytes of a captured block, row by row, forward and backward. Does not import torch.

Only memory that the block allocates is counted: arguments and parameters exist before and after. Forward: a result
lives until its last reader has run, or until a reader's backward if that reader saves it. Backward, in reverse order:
the gradient of a row lives from its last reader's backward to its own; gradients of arguments and parameters stay.

    forward:  alive(i) = sum of results not yet past their last use or saved + hidden_bytes so far + forward_bytes(i)
    backward: alive(i) = saved by rows <= i + pending gradients + grad_bytes(i) + backward_bytes(i)
              then, if a pending gradient is added to: saved by rows < i + both + their sum + all others

A result that overwrites another row's (in inference only) takes over that row's memory, and allocates none.

Known limits: tensors that Python variables keep beyond their last use are not counted; a captured block has none. If
two readers return gradients of one row, they are added in new memory when the second one is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_amp.graph.table import OPERATOR, OperatorRow


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockBytes:
    """Bytes alive at every row, and bytes kept for the backward pass.

    Attributes:
        forward: Bytes while each row's operator runs.
        backward: Bytes while each row's backward runs, by the row's index.
        saved_bytes: Bytes alive between the two passes, results of the block included.
        waiting: Pending gradients of later rows, at each row of `backward`.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    saved_bytes: int
    waiting: tuple[int, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Peak over both passes."""
        return max((*self.forward, *self.backward), default=0)


@dataclass(slots=True)
class PieceRow:
    """Counted fields of a row, for tables that are made by the thousand: an `OperatorRow` takes ten times longer."""

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
    """Count a block, given its table's rows and outputs; without `train` there is no backward pass.

    Without `gradients_of_arguments`, gradients of arguments are removed once complete, to be added up elsewhere.
    """
    # for each memory kept for the backward pass, the first row that saves it, which is the last to read it there
    saved_until: dict[int, int] = {}
    for i, row in enumerate(rows if train else ()):
        for storage in row.saved:
            saved_until.setdefault(storage, i)
    forward, held = _forward(rows, saved_until, train=train)
    # results, saved rows, and memory that operators save and that belongs to no row
    saved = sum(held.values()) + (sum(row.hidden_bytes for row in rows) if train else 0)
    backward, waiting = _backward(rows, outputs, saved_until, held, gradients_of_arguments) if train else ((), ())
    return BlockBytes(forward=forward, backward=backward, saved_bytes=saved, waiting=waiting)


def _forward(rows: Rows, saved: dict[int, int], *, train: bool) -> tuple[tuple[int, ...], dict[int, int]]:
    alive, now, found = dict[int, int](), 0, list[int]()
    # last use of each memory, through any view
    last: dict[int, int] = {}
    for i, row in enumerate(rows):
        last[row.storage] = max(last.get(row.storage, i), row.last_use, i)
    ends: dict[int, list[int]] = {}
    for k, end in last.items():
        # saved memory stays for the backward pass
        if k not in saved:
            ends.setdefault(end, []).append(k)
    for i, row in enumerate(rows):
        if row.kind == OPERATOR and row.n_bytes:
            # an overwritten result ends here: its memory is this row's now
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
    # arguments by their first reader, which is the last to add to their gradient
    complete: dict[int, list[int]] = {}
    seen: set[int] = set()
    if not gradients_of_arguments:
        for i, row in enumerate(rows):
            complete[i] = [k for k in dict.fromkeys(row.inputs) if rows[k].kind != OPERATOR and k not in seen]
            seen.update(complete[i])
    # the caller keeps the gradients of results, and may drop the results
    results = {rows[k].storage for k in outputs}
    # of all rows that save a memory, the first one runs last in the backward pass, and frees it
    let_go: dict[int, int] = {}
    for storage, first in saved.items():
        if storage not in results:
            let_go[first] = let_go.get(first, 0) + held.get(storage, 0)
    kept = sum(held.values()) + sum(row.hidden_bytes for row in rows)
    # pending gradients by row, and their total bytes
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
            # the gradient of a view is a view of the gradient, so its memory is passed on; otherwise it is freed after
            # this backward
            handed_on = 0 if any(row.grad_bytes) else arrived
            # bytes of all gradients once the row's backward has run
            alive = n_bytes + new_bytes + handed_on
            for k, n in made:
                if k in waiting:
                    # the sum is new memory, even if the pending gradient belongs to the caller
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
