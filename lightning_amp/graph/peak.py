"""Bytes alive while a captured block runs, row by row, forward and backward; without torch.

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

from dataclasses import dataclass

from lightning_amp.graph.table import OPERATOR, Row, Table


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


def block_bytes(table: Table, *, train: bool = True, gradients_of_arguments: bool = True) -> BlockBytes:
    """Count a block; without `train` nothing is saved and there is no backward pass.

    Without `gradients_of_arguments` those are taken away as soon as they are complete, to be added up elsewhere.
    """
    saved_until = _saved_until(table) if train else {}
    forward, held = _forward(table, saved_until, train=train)
    saved = sum(held.values()) + (sum(row.hidden_bytes for row in table.rows) if train else 0)
    backward, waiting = _backward(table, saved_until, held, gradients_of_arguments) if train else ((), ())
    return BlockBytes(forward=forward, backward=backward, saved_bytes=saved, waiting=waiting)


def _saved_until(table: Table) -> dict[int, int]:
    """For every memory that is kept for the backward pass, the first row that keeps it: the last to read it there."""
    first: dict[int, int] = {}
    for i, row in enumerate(table.rows):
        for storage in row.saved:
            first.setdefault(storage, i)
    return first


def _forward(table: Table, saved: dict[int, int], *, train: bool) -> tuple[tuple[int, ...], dict[int, int]]:
    rows, alive, hidden, found = table.rows, dict[int, int](), 0, []
    last = _last_use(table)
    for i, row in enumerate(rows):
        if row.kind == OPERATOR and row.n_bytes:
            alive.pop(rows[row.over].storage if row.over >= 0 else -1, None)
            alive[i] = row.n_bytes
        hidden += row.hidden_bytes if train else 0
        found.append(sum(alive.values()) + hidden + row.forward_bytes)
        for k in [k for k in alive if last[k] <= i and k not in saved]:
            del alive[k]
    return tuple(found), alive


def _last_use(table: Table) -> dict[int, int]:
    """Last use of every memory, by any view of it."""
    last: dict[int, int] = {}
    for i, row in enumerate(table.rows):
        last[row.storage] = max(last.get(row.storage, i), row.last_use, i)
    return last


def _backward(
    table: Table, saved: dict[int, int], held: dict[int, int], gradients_of_arguments: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    rows, kept = table.rows, dict(held)
    complete = {} if gradients_of_arguments else _arguments_by_first_reader(rows)
    hidden = sum(row.hidden_bytes for row in rows)
    results = {rows[k].storage for k in table.outputs}
    # the caller holds the results' gradients and may drop the results
    waiting: dict[int, int] = {}
    found, waits = [0] * len(rows), [0] * len(rows)
    for i in range(len(rows) - 1, -1, -1):
        row, waits[i] = rows[i], sum(waiting.values())
        if row.kind != OPERATOR:
            continue
        during, adding = _hand_out(i, rows, waiting) if row.needs_grad else (0, 0)
        if row.needs_grad:
            found[i] = sum(kept.values()) + hidden + during + row.backward_bytes
        for k in complete.get(i, ()):
            waiting.pop(k, None)
        hidden -= row.hidden_bytes
        for storage in [k for k, first in saved.items() if first == i and k in kept and k not in results]:
            del kept[storage]
        if adding:
            found[i] = max(found[i], sum(kept.values()) + hidden + adding)
    return tuple(found), tuple(waits)


def _arguments_by_first_reader(rows: tuple[Row, ...]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    seen: set[int] = set()
    for i, row in enumerate(rows):
        new = {k for k in row.inputs if rows[k].kind != OPERATOR} - seen
        seen |= new
        found[i] = sorted(new)
    return found


def _hand_out(i: int, rows: tuple[Row, ...], waiting: dict[int, int]) -> tuple[int, int]:
    """Let the gradients that a row's backward makes wait.

    Returns:
        Bytes of gradients while it runs, and the most while some are then added to such as wait already.
    """
    row = rows[i]
    made = [(k, n) for k, n in zip(row.inputs, row.grad_bytes, strict=True) if rows[k].needs_grad]
    new, most = sum(n for _, n in made), 0
    during = sum(waiting.values()) + new
    own = waiting.pop(i, 0)
    # the gradient of a view is a view of the gradient: its memory is handed on
    own = own if not any(row.grad_bytes) else 0
    alive = sum(waiting.values()) + new + own
    for k, n in made:
        if k in waiting:
            # the sum is new memory, also where what waited was a gradient that the caller holds
            both = max(waiting[k], n)
            most = max(most, alive + both)
            alive += both - waiting[k] - n
            waiting[k] = both
        else:
            waiting[k], own = (n, own) if n else (own, 0)
    return during, most
