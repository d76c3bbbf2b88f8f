"""The cells of a stratum in blocks, forward and backward one block after the other; part of `stream`.

    nll(key, u, all cells) = sum over blocks of nll(key, u of the block, its cells)

Exact: every cell's log-likelihood is computed from the key, its own u and its own counts, so values and gradients are
sums over cells. What shrinks: scores and likelihood [B, F_k] exist for one block only. The gradient of the key [N, D]
is made for every block and added up; that of a block's rows of u is its own.

Collectives of the decode and of the softmax (S2, S5, nodes) come once for every block, on all ranks alike: the blocks
depend on the number of cells, which a model group shares.

What a stratum is called with has one row per cell, or is the same for all: one row, no dimension, a number, None.

Legend: cell (B), anchor (N), dim (D).
Known limit: gradients are handed out once (autograd/precomputed_gradients.py).
"""

from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_amp.errors import InstallError
from lightning_amp.parallel.autograd.precomputed_gradients import (
    Gradients,
    add,
    gradients,
    leaf,
    wants_gradients,
    with_gradients,
)
from lightning_amp.parallel.checks.same_function import mismatch
from lightning_amp.parallel.checks.sum_over_cells import check_sum
from lightning_amp.shapes import PerAnchor, PerCell, Scalar


def block_cells(cells: object, *, size: int) -> nn.Module:
    """The same for some cells at a time.

    Raises:
        InstallError: The module is not one that hands all cells on, or `size` is not positive.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InstallError(
            f"stream was asked for with cells={size!r}; a block has a whole number of cells, at least 1"
        )
    taken = "takes blocks of cells already" if isinstance(cells, CellBlocks) else ""
    problem = taken or mismatch(cells, {"": torch.tensor(63.0)}, _run)
    if problem:
        raise InstallError(
            f"stream was asked for on a stratum whose child `cells` {problem}; only a module without state that returns"
            " nll(key, u, **cells) can be replaced: move the rest to the stratum, or leave 'stream' out"
        )
    return CellBlocks(size, known=getattr(cells, "known", True))


class CellBlocks(nn.Module):
    """A stratum's cells in blocks; made by `block_cells`.

    Args:
        size: Cells of a block.
        known: Whether the loss is known to be a sum over cells; else it is looked at when there are several blocks.
    """

    def __init__(self, size: int, *, known: bool = True) -> None:
        super().__init__()
        self.size = size
        self.known = known

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"size={self.size}"

    def forward(
        self,
        nll: Callable[..., Scalar],
        key: PerAnchor,
        u: PerCell,
        *,
        parameters: Iterable[Tensor],
        **cells: Tensor,
    ) -> Scalar:
        """Sum over cells of `nll(key, u, **cells)`, one block alive at a time.

        Raises:
            InstallError: Something has neither one row per cell nor one for all, or the loss is no sum over cells.
        """
        odd = {name: n for name, value in cells.items() if (n := _n_rows(value)) not in (1, len(u))}
        if odd:
            raise InstallError(
                f"a stratum's {len(u)!r} cells were to be taken in blocks, and it is called with {odd!r} rows; allowed"
                " is one row per cell, or one for all: make the rest a parameter or a buffer of the stratum, or leave"
                " 'stream' out"
            )
        if not self.known and len(u) > max(1, self.size):
            check_sum(nll, key, u, lambda block: _rows(cells, block))
            self.known = True
        tables = list(parameters)
        inputs = [key, u, cells["library"], cells["log_weight"], *tables]
        if not wants_gradients(inputs):
            rows = [nll(key, u[block], **_rows(cells, block)) for block in self._blocks(len(u))]
            return torch.stack(rows).sum()

        def compute(needed: Sequence[bool]) -> tuple[Tensor, Gradients]:
            return self._compute(nll, inputs, cells, needed)

        return with_gradients(compute, inputs)

    def _blocks(self, n: int) -> list[slice]:
        return [slice(start, min(start + self.size, n)) for start in range(0, n, self.size)] or [slice(0, 0)]

    def _compute(
        self,
        nll: Callable[..., Tensor],
        inputs: Sequence[Tensor],
        cells: dict[str, Tensor],
        needed: Sequence[bool],
    ) -> tuple[Tensor, Gradients]:
        key = leaf(inputs[0], needed[0])
        # tables are read by `nll` itself, so these are the very tensors
        tables = list(inputs[4:])
        total: Tensor = inputs[1].new_zeros((), dtype=torch.promote_types(inputs[1].dtype, torch.float32))
        shared: Gradients = [None] * (1 + len(tables))
        rows: list[Gradients] = []
        for block in self._blocks(len(inputs[1])):
            own = [leaf(_row(t, block), n) for t, n in zip(inputs[1:4], needed[1:4], strict=True)]
            arguments = _rows(cells, block) | {"library": own[1], "log_weight": own[2]}
            value = nll(key, own[0], **arguments)
            found = gradients([value], [key, *own, *tables], [None])
            shared = [add(a, b) for a, b in zip(shared, [found[0], *found[4:]], strict=True)]
            rows.append(found[1:4])
            total = total + value.detach()
        return total, [shared[0], *_join(rows, inputs[1:4], needed[1:4]), *shared[1:]]


def _n_rows(value: object) -> int:
    """Rows; 1 of what has none, which is the same for all cells as one row is."""
    try:
        return len(cast(Sized, value))
    except TypeError:
        # a number, None, a tensor without dimensions
        return 1


def _row(tensor: Tensor, block: slice) -> Tensor:
    return tensor if _n_rows(tensor) == 1 else tensor[block]


def _rows(cells: dict[str, Tensor], block: slice) -> dict[str, Tensor]:
    return {name: _row(value, block) for name, value in cells.items()}


def _join(rows: list[Gradients], inputs: Sequence[Tensor], needed: Sequence[bool]) -> Gradients:
    """The gradients of the cells' rows: one block after the other, or added up where all cells share one row."""
    joined: Gradients = []
    for i, (tensor, wanted) in enumerate(zip(inputs, needed, strict=True)):
        parts = [row[i] for row in rows]
        found = [part for part in parts if part is not None]
        if not wanted or not found:
            joined.append(None)
        elif _n_rows(tensor) == 1:
            total: Tensor | None = None
            for part in found:
                total = add(total, part)
            joined.append(total)
        else:
            joined.append(torch.cat(found))
    return joined


def _run(cells: Any) -> dict[str, Tensor]:
    key, u = torch.arange(6.0).view(3, 2), torch.arange(4.0).view(2, 2)

    def nll(key: Tensor, u: Tensor, **rows: Tensor) -> Tensor:
        return (u @ key.T).sum() + rows["x"]

    return {"": cells(nll, key, u, parameters=(), x=key.sum())}
