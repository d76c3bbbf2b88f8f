"""Collect the nonzero counts of a batch in the order of runs of columns, with their places in tables.

A dense matrix is searched for its entries: on an accelerator once for all strata (dense_entries.py), on a CPU in every
one. `SparseCounts`, which the data module hands out, have them.

Known limits: those of dense_entries.py. Without values (meta and fake tensors) entries are spread evenly, and of a
dense matrix one number in 20 is taken as one.

Legend: entry (M), cell (B), feature (F_k).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from lightning_amp._torch import has_no_values
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.techniques.hic.scores.dense_entries import known_entries

ASSUMED_SHARE = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Entries:
    """The entries, run by run.

    Attributes:
        log_factorial: The logarithms of their factorials.
        ends: One past the last entry of every run.
        flat: Where they lie in a flat [cell, feature], if that is known.
    """

    row: Int[Tensor, " entry"]
    column: Int[Tensor, " entry"]
    value: Float[Tensor, " entry"]
    log_factorial: Float[Tensor, " entry"]
    runs: Sequence[slice]
    ends: Sequence[int]
    flat: Int[Tensor, " entry"] | None = None

    def own(self, k: int) -> slice:
        """Which entries are those of the k-th run."""
        return slice(self.ends[k - 1] if k else 0, self.ends[k])

    def places(self, k: int) -> Int[Tensor, " own_entry"]:
        """Where the entries of the k-th run lie in a flat [cell, column of the run]."""
        run = self.runs[k]
        if len(self.runs) == 1:
            return self.index(run.stop)
        own = self.own(k)
        return torch.add(self.column[own] - run.start, self.row[own], alpha=run.stop - run.start)

    def index(self, n_features: int) -> Int[Tensor, " entry"]:
        """Where the entries lie in a flat [cell, feature]."""
        return torch.add(self.column, self.row, alpha=n_features) if self.flat is None else self.flat


def entries(
    x: Num[Tensor, "cell feature"] | SparseCounts, runs: Sequence[slice], *, dtype: torch.dtype
) -> Entries:
    """The entries of a matrix.

    Args:
        runs: Runs of columns, one after the other, that cover all of them.
    """
    numbers = x if isinstance(x, Tensor) else x.value
    if has_no_values(numbers):
        n = math.ceil(ASSUMED_SHARE * x.numel()) if numbers is x else len(numbers)
        return _without_values(numbers, n, x.shape[1], runs, dtype=dtype)
    if isinstance(x, SparseCounts):
        return Entries(
            row=x.row,
            column=x.column,
            value=x.value.to(dtype),
            log_factorial=x.log_factorial(dtype),
            runs=runs,
            ends=x.ends([run.stop for run in runs]),
            flat=x.places(),
        )
    counts = known_entries(x)
    if counts is not None:
        return entries(counts, runs, dtype=dtype)
    found = [x[:, run].nonzero(as_tuple=True) for run in runs]
    ends = list(accumulate(len(row) for row, _ in found))
    row = torch.cat([row for row, _ in found])
    column = torch.cat([column + run.start for (_, column), run in zip(found, runs, strict=True)])
    value = x[row, column].to(dtype)
    log_factorial = (value + 1).lgamma_()
    return Entries(row=row, column=column, value=value, log_factorial=log_factorial, runs=runs, ends=ends)


def _without_values(
    like: Tensor, n: int, width: int, runs: Sequence[slice], *, dtype: torch.dtype
) -> Entries:
    """That many entries of as many columns as `width`, spread evenly."""
    row, column = like.new_empty((2, n), dtype=torch.int64)
    ends = [n * run.stop // max(width, 1) for run in runs]
    value, log_factorial = like.new_empty((2, n), dtype=dtype)
    return Entries(row=row, column=column, value=value, log_factorial=log_factorial, runs=runs, ends=ends)
