"""The counts of a batch that are not zero, in the order of runs of columns, and tables read and added to at them.

Known limits: a dense matrix is searched for its entries, for which an accelerator's host waits. Without values (meta
and fake tensors) entries are spread evenly, and of a dense matrix one number in 20 is taken as one.

Legend: entry (M), cell (B), feature (F_k).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from lightning_amp._torch import FakeTensor
from lightning_amp.data.sparse_counts import SparseCounts

ASSUMED_SHARE = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Entries:
    """The entries, run by run.

    Attributes:
        row: Their cells.
        column: Their features.
        value: The numbers.
        runs: Runs of columns.
        ends: One past the last entry of every run.
    """

    row: Int[Tensor, " entry"]
    column: Int[Tensor, " entry"]
    value: Float[Tensor, " entry"]
    runs: Sequence[slice]
    ends: Sequence[int]

    def places(self, k: int) -> Int[Tensor, " own_entry"]:
        """Where the entries of the k-th run lie in a flat [cell, column of the run]."""
        own, run = slice(self.ends[k - 1] if k else 0, self.ends[k]), self.runs[k]
        found: Tensor = self.row[own] * (run.stop - run.start) + (self.column[own] - run.start)
        return found

    def at(self, table: Float[Tensor, "#cell feature"]) -> Float[Tensor, " entry"]:
        """The table's numbers at the entries."""
        found: Tensor = table.reshape(-1).index_select(0, self._numbers(table))
        return found

    def function_at(
        self, function: Callable[[Tensor], Tensor], table: Float[Tensor, "#cell feature"]
    ) -> Float[Tensor, " entry"]:
        """An elementwise function of the table's numbers at the entries."""
        if table.numel() < len(self.value):
            return self.at(function(table))
        return function(self.at(table))

    def add_to(self, table: Float[Tensor, "#cell feature"], numbers: Float[Tensor, " entry"]) -> None:
        """Add the entries' numbers to a contiguous table, in place."""
        table.view(-1).index_add_(0, self._numbers(table), numbers)

    def _numbers(self, table: Tensor) -> Tensor:
        return self.column if len(table) == 1 else self.row * table.shape[1] + self.column


def entries(
    x: Num[Tensor, "cell feature"] | SparseCounts, runs: Sequence[slice], *, dtype: torch.dtype
) -> Entries:
    """The entries of a matrix.

    Args:
        runs: Runs of columns, one after the other, that cover all of them.
    """
    numbers = x if isinstance(x, Tensor) else x.value
    if numbers.is_meta or isinstance(numbers, FakeTensor):
        n = math.ceil(ASSUMED_SHARE * x.numel()) if numbers is x else len(numbers)
        return _without_values(numbers, n, x.shape[1], runs, dtype=dtype)
    found = [_search(x[:, run]) for run in runs]
    column = torch.cat([part.column + run.start for part, run in zip(found, runs, strict=True)])
    row, value = (torch.cat([getattr(part, name) for part in found]) for name in ("row", "value"))
    ends = list(accumulate(len(part.value) for part in found))
    return Entries(row=row, column=column, value=value.to(dtype), runs=runs, ends=ends)


def _search(x: Tensor | SparseCounts) -> SparseCounts:
    """The entries of some columns."""
    if isinstance(x, SparseCounts):
        return x
    row, column = x.nonzero(as_tuple=True)
    return SparseCounts(row, column, x[row, column], x.shape)


def _without_values(
    like: Tensor, n: int, width: int, runs: Sequence[slice], *, dtype: torch.dtype
) -> Entries:
    """That many entries of as many columns as `width`, spread evenly."""
    row, column = like.new_empty((2, n), dtype=torch.int64)
    ends = [n * run.stop // max(width, 1) for run in runs]
    return Entries(row=row, column=column, value=like.new_empty(n, dtype=dtype), runs=runs, ends=ends)
