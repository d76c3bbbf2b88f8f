"""Define the table of a captured block, without torch: memory, saved tensors, costs and dims of each operator.

Legend: `n_bytes` is new memory, 0 for a view; rows are given by their index; sizes end in `_bytes`.
"""

from dataclasses import dataclass

INPUT, PARAMETER, OPERATOR = "input", "parameter", "operator"
Dims = tuple[tuple[tuple[int, int], ...], ...]
"""For every dim of a result, the pairs (argument, its dim) that it follows; () for a dim that follows none."""
Sums = tuple[tuple[tuple[int, int], ...], ...]
"""Groups of (argument, its dim): if all dims of a group are cut equally, results of pieces add up to the result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorRow:
    """One operator, or one argument of the block.

    Attributes:
        name: Name in the graph.
        kind: INPUT, PARAMETER (or a buffer) or OPERATOR.
        op: Name of the operator, such as "aten.linear.default"; "" for an argument.
        inputs: Rows of its tensor arguments, in order.
        shape: Shape of its result; for several results, of the first.
        dtype: Dtype of its result.
        n_bytes: New memory of its results.
        storage: Row whose memory the result uses: itself, or the base of a view.
        flops: Floating point operations of the forward pass.
        last_use: Last row that reads it or a view of it; the table's length for a result of the block.
        saved: Rows whose memory it keeps for the backward pass.
        hidden_bytes: Memory that it keeps for the backward pass and that belongs to no row, such as a dropout mask.
        forward_bytes: Peak memory while it runs, beyond its results and the memory it keeps.
        grad_bytes: New memory of the gradient of each of `inputs`; 0 if there is none or it is a view.
        backward_bytes: Peak memory while its backward runs, beyond these gradients and `hidden_bytes`; negative if
            hidden memory is freed before the gradients are allocated.
        needs_grad: Whether its result has a gradient.
        dims: Dims that its result's dims follow; None without a rule for its operator, which then cannot be cut.
        sums: Dims of its arguments that it sums over.
        writes: Rows whose memory it changes in place, running statistics included.
        random: Whether it draws random numbers.
        near: Pairs (dim of its result, entries) of dims that follow only with this many entries on either side of a
            piece.
        over: Row whose memory the result overwrites, because no later row reads that; -1 for new memory.
        memory: In inference, rows whose memory the result may use for any strides of its arguments: itself, and for a
            possible view also the memory of its arguments.
        free: In inference, the last row that may read its memory; the table's length if it is never overwritten.
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
        rows: Arguments, then operators in execution order.
        outputs: Rows that the block returns.
    """

    block: str
    rows: tuple[OperatorRow, ...]
    outputs: tuple[int, ...]

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of operators without a flow rule."""
        return tuple(sorted({r.op for r in self.rows if r.kind == OPERATOR and r.dims is None}))

    @property
    def flops(self) -> int:
        """Floating point operations of the forward pass."""
        return sum(row.flops for row in self.rows)
