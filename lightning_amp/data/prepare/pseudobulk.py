"""Sums the contacts of all cells in memory that the genome bounds, not the number of cells."""

from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

FLUSH_AT = 4_000_000


class Pseudobulk:
    """Running sum of contact maps over the same bins.

    Pixels wait in a buffer and are added to a sparse matrix when the buffer is full, so that the cost of an
    addition is shared by many cells.
    """

    def __init__(self, n_bins: int) -> None:
        self.n_bins = n_bins
        self._sum: Any = sp.csr_array((n_bins, n_bins), dtype=np.float64)
        self._waiting: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]] = []
        self._n_waiting = 0

    def add(self, row: NDArray[np.int64], column: NDArray[np.int64], count: NDArray[Any]) -> None:
        """Add the pixels of a cell.

        Args:
            row: Lower bin of each pixel, of shape [pixel].
            column: Upper bin of each pixel, of shape [pixel].
            count: Contacts, of shape [pixel].
        """
        self._waiting.append((row, column, count))
        self._n_waiting += len(row)
        if self._n_waiting >= FLUSH_AT:
            self._flush()

    def total(self) -> Any:
        """Return the sum so far as a SciPy COO array of shape [bin, bin], upper triangle."""
        self._flush()
        return self._sum.tocoo()

    def _flush(self) -> None:
        if self._waiting:
            row, column, count = (np.concatenate(parts) for parts in zip(*self._waiting, strict=True))
            shape = (self.n_bins, self.n_bins)
            self._sum = self._sum + sp.csr_array((count.astype(np.float64), (row, column)), shape=shape)
            self._waiting, self._n_waiting = [], 0
