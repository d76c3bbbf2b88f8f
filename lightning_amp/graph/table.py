"""Define a captured block as a table of operators, without torch: memory, saved tensors, costs and dims of each.

Legend: `n_bytes` of new memory, 0 for a view; an operator is referred to by its index; sizes end in `_bytes`.
"""

from dataclasses import dataclass

INPUT, PARAMETER, OPERATOR = "input", "parameter", "operator"
Dims = tuple[tuple[tuple[int, int], ...], ...]
"""For every dim of a result, the (argument, dim of it) that it follows; () for a dim that follows none."""
Sums = tuple[tuple[tuple[int, int], ...], ...]
"""Groups of (argument, dim of it): pieces of all of a group, cut equally, have results that add up to the result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorRow:
    """One operator, or one argument of the block.

    Attributes:
        name: In the graph.
        kind: INPUT, PARAMETER (or a buffer) or OPERATOR.
        op: Of the operator, such as "aten.linear.default"; "" of an argument.
        inputs: Rows of its tensor arguments, in order.
        shape: Of its result; of several results, the first.
        dtype: Of its result.
        n_bytes: New memory of its results.
        storage: OperatorRow whose memory the result lies in: itself, or what it is a view of.
        flops: Of the forward pass.
        last_use: Last row that reads it or a view of it; the table's length for a result of the block.
        saved: Rows whose memory it keeps for the backward pass.
        hidden_bytes: Memory that it keeps for the backward pass and that is no row's, such as a dropout mask.
        forward_bytes: Most memory while it runs, beyond its results and what it keeps.
        grad_bytes: New memory of the gradient of each of `inputs`; 0 where there is none or it is a view.
        backward_bytes: Most memory while its backward runs, beyond these gradients and `hidden_bytes`; negative where
            the latter are let go of before the gradients are made.
        needs_grad: Whether its result has a gradient.
        dims: What its result's dims follow; None where its operator has no rule, which ends every flow.
        sums: Dims of its arguments that it sums over.
        writes: Rows whose memory it changes in place, running statistics included.
        random: Whether it draws random numbers.
        near: (dim of its result, entries) of dims that follow only with so many entries on either side of a piece.
        over: OperatorRow in whose memory the result is written, because nothing reads that later; -1 for new memory.
        memory: In inference, rows in whose memory the result may lie however its arguments are laid out: itself, and of
            a possible view also those of its arguments.
        free: In inference, the last row that may read its memory; the table's length where that is never written over.
    """

    name: str
    kind: str
    op: str = ""
    inputs: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    dtype: str = ""
    n_bytes: int = 0
    storage: int = 0
    flops: int = 0
    last_use: int = 0
    saved: tuple[int, ...] = ()
    hidden_bytes: int = 0
    forward_bytes: int = 0
    grad_bytes: tuple[int, ...] = ()
    backward_bytes: int = 0
    needs_grad: bool = False
    dims: Dims | None = None
    sums: Sums = ()
    writes: tuple[int, ...] = ()
    random: bool = False
    near: tuple[tuple[int, int], ...] = ()
    over: int = -1
    memory: tuple[int, ...] = ()
    free: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A captured block.

    Attributes:
        block: Class of the block.
        rows: Arguments, then operators in the order in which they run.
        outputs: Rows that the block returns.
    """

    block: str
    rows: tuple[OperatorRow, ...]
    outputs: tuple[int, ...]

    @property
    def unknown(self) -> tuple[str, ...]:
        """Operators without a rule for dims, by name."""
        return tuple(sorted({r.op for r in self.rows if r.kind == OPERATOR and r.dims is None}))

    @property
    def flops(self) -> int:
        """Of the forward pass."""
        return sum(row.flops for row in self.rows)
