"""A matrix [cell, feature] of counts, most of them zero, by its entries: what a batch holds in place of a dense x.

    x[row[i], column[i]] = value[i], every other count is 0         entries by column, and by row within a column

What shrinks: 4 B F bytes to 20 for each entry. Columns [a, b) are a run of the entries, so that a stratum of x costs
nothing but its own column numbers.

No function of torch takes such counts but `torch.nn.functional.linear` (sparse_product.py), and so `nn.Linear`.

What a likelihood reads of a count alone, log x!, is computed for all columns at once and kept.

Where entries begin and end is looked up in copies of `row` and `column` in the host's memory, which stay behind when
counts are moved to a device: a device is never waited for, except for an index that lies there. Counts that are made
on a device are copied to the host once, when they are first cut.

Without values (the meta device) the entries are taken to be spread evenly over the matrix.

Legend: entry (M), cell (B), feature (F).
Known limits: no gradient of the counts. Cells, and an index of columns, are looked up in the host's memory anew for
every cut.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Num
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor

from lightning_amp.data.sparse_product import product
from lightning_amp.errors import DataError

Places = NDArray[np.int64]
Runs = tuple[tuple[int, int], ...]


class SparseCounts:
    """Counts by their entries; all arguments but the last are attributes too.

    Args:
        row: cell of each entry.
        column: feature of each entry.
        value: the counts.
        shape: cells and features.
        host: row and column in the host's memory, where they are known to be these and in order.

    Raises:
        DataError: The entries are not three equally long vectors; or, when they are first cut, they are out of order,
            twice in one place, outside of the matrix, or 0.
    """

    def __init__(
        self,
        row: Int[Tensor, " entry"],
        column: Int[Tensor, " entry"],
        value: Num[Tensor, " entry"],
        shape: Sequence[int],
        *,
        host: tuple[Places, Places] | None = None,
    ) -> None:
        shapes = [tuple(part.shape) for part in (row, column, value)]
        if len(set(shapes)) != 1 or len(shapes[0]) != 1 or len(shape) != 2:
            raise DataError(
                f"SparseCounts got row, column and value of the shapes {shapes!r} for a matrix of the shape"
                f" {tuple(shape)!r}; give three equally long vectors and the numbers of cells and features, or use"
                " SparseCounts.from_csr"
            )
        self.row, self.column, self.value = row, column, value
        self.shape = (int(shape[0]), int(shape[1]))
        if host is not None:
            self.__dict__["_host"] = host
        self._cut_from: tuple[SparseCounts, slice] | None = None
        self._log_factorial: dict[torch.dtype, Tensor] = {}
        self._places: Tensor | None = None
        self._runs: Runs = ()
        self._in_runs: tuple[Tensor, ...] = ()

    @classmethod
    def from_csr(cls, counts: "sparse.csr_matrix") -> "SparseCounts":
        """The entries of a scipy matrix; zeros that it stores are left out."""
        found = counts.tocsc()
        found.sum_duplicates()
        found.eliminate_zeros()
        column = np.repeat(np.arange(found.shape[1], dtype=np.int64), np.diff(found.indptr))
        row = found.indices.astype(np.int64)
        entries = [torch.from_numpy(part) for part in (row, column, found.data)]
        # in order, as they are made: to see that again takes longer than to make them
        return cls(entries[0], entries[1], entries[2], found.shape, host=(row, column))

    @classmethod
    def from_dense(cls, counts: Num[Tensor, "cell feature"]) -> "SparseCounts":
        """The entries of a matrix."""
        column, row = counts.T.nonzero(as_tuple=True)
        return cls(row, column, counts[row, column], counts.shape)

    def log_factorial(self, dtype: torch.dtype) -> Num[Tensor, " entry"]:
        """log x! of each entry; of columns a part of what all counts have, computed once and kept."""
        if self._cut_from is not None:
            whole, own = self._cut_from
            return whole.log_factorial(dtype)[own]
        if dtype not in self._log_factorial:
            self._log_factorial[dtype] = (self.value.to(dtype) + 1).lgamma_()
        return self._log_factorial[dtype]

    def expect(self, runs: Runs) -> None:
        """Compute for all entries at once what cuts `x[:, a:b]` of some runs of columns will need; a cut is free then.

        Args:
            runs: First column and one past the last of each, in their order.
        """
        if self._is_meta or runs == self._runs or list(runs) != sorted(runs):
            return
        starts, widths = _tables(runs, self.device)
        which = torch.bucketize(self.column, starts[1:], right=True)
        column = self.column - starts[which]
        self._runs, self._in_runs = runs, (column, torch.addcmul(column, self.row, widths[which]))

    def places(self) -> Int[Tensor, " entry"]:
        """Where the entries lie in a flat [cell, feature]."""
        known = self._places
        return torch.add(self.column, self.row, alpha=self.shape[1]) if known is None else known

    @property
    def device(self) -> torch.device:
        """Where the counts are."""
        return self.value.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the counts."""
        return self.value.dtype

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, as a loader's worker sends it: the host's places are the tensors once more."""
        return {name: value for name, value in vars(self).items() if name != "_host"}

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        where = f"dtype={self.dtype}, device={str(self.device)!r}"
        return f"SparseCounts(shape={self.shape}, entries={len(self.value)}, {where})"

    def numel(self) -> int:
        """Numbers in the matrix, zeros included."""
        return self.shape[0] * self.shape[1]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row, column and value."""
        return self.row, self.column, self.value

    def to(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool | None = None,
    ) -> "SparseCounts":
        """The counts on a device, or of a type; the host keeps its copy of the places.

        Args:
            non_blocking: As torch has it for tensors; None where the counts are in pinned memory, as a loader gives
                them, for Lightning asks it of tensors only.
        """
        if non_blocking is None:
            non_blocking = device is not None and _copies_by_itself(self.value, torch.device(device))
        value = self.value.to(device=device, dtype=dtype, non_blocking=non_blocking)
        row, column = (part.to(value.device, non_blocking=non_blocking) for part in (self.row, self.column))
        return SparseCounts(row, column, value, self.shape, host=None if self._is_meta else self._host)

    def pin_memory(self) -> "SparseCounts":
        """The counts in memory from which a device copies without the processor."""
        row, column, value = (part.pin_memory() for part in self.tensors())
        return SparseCounts(row, column, value, self.shape, host=self._host)

    def with_values(self, value: Num[Tensor, " entry"]) -> "SparseCounts":
        """Other numbers in the same places."""
        return SparseCounts(self.row, self.column, value, self.shape, host=self.__dict__.get("_host"))

    def to_dense(self, dtype: torch.dtype | None = None) -> Num[Tensor, "cell feature"]:
        """The matrix."""
        value = self.value if dtype is None else self.value.to(dtype)
        flat = torch.zeros(self.numel(), dtype=value.dtype, device=self.device)
        flat.scatter_(0, self.places(), value)
        return flat.view(self.shape)

    def ends(self, columns: Sequence[int]) -> list[int]:
        """How many entries there are before each of some columns, up to the number of features."""
        if self._is_meta:
            return [len(self.value) * column // max(self.shape[1], 1) for column in columns]
        if list(columns) == [self.shape[1]]:
            return [len(self.value)]
        return [int(place) for place in np.searchsorted(self._host[1], columns)]

    def __getitem__(self, key: Any) -> "SparseCounts":
        """Cells `x[a:b]`, or columns `x[:, a:b]`, `x[..., a:b]` and `x[..., index]`.

        Raises:
            DataError: Another key, or an index with a column that is not there, or there twice.
        """
        if isinstance(key, slice):
            return self._cells(*self._ends(key, 0))
        rows, columns = key if isinstance(key, tuple) and len(key) == 2 else (None, None)
        if rows is Ellipsis or rows == slice(None):
            if isinstance(columns, slice):
                return self._columns(*self._ends(columns, 1))
            if isinstance(columns, Tensor) and columns.dtype == torch.int64 and columns.dim() == 1:
                return self._chosen(columns)
        raise DataError(
            f"sparse counts do not support [{key!r}]; allowed are x[a:b] for cells, and x[:, a:b] or x[..., index], of"
            " int64, for features: for anything else take x.to_dense(), or sparse=False in the data module"
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.linear:
            return _linear(*args, **(kwargs or {}))
        raise DataError(
            f"sparse counts were given to torch's {getattr(func, '__name__', func)!r}, which needs a dense matrix; they"
            " go to nn.Linear and to a stratified decoder only: take x.to_dense(), or sparse=False in the data module"
        )

    @cached_property
    def _host(self) -> tuple[Places, Places]:
        row, column = self.row.cpu().long().numpy(), self.column.cpu().long().numpy()
        n_cells, n_features = self.shape
        inside = not len(row) or (
            min(row.min(), column.min()) >= 0 and row.max() < n_cells and column.max() < n_features
        )
        if not inside or (np.diff(column * n_cells + row) <= 0).any():
            raise DataError(
                f"{self!r} has entries out of order, twice, or outside of the matrix; they must be sorted by column and"
                " then by row: use SparseCounts.from_csr, which sorts them"
            )
        zeros = int((self.value == 0).sum())
        if zeros:
            raise DataError(
                f"{self!r} has {zeros!r} entries whose count is 0; an entry stands for a count that is not zero: use"
                " SparseCounts.from_csr, which leaves them out"
            )
        return row, column

    @property
    def _is_meta(self) -> bool:
        return self.row.is_meta

    def _ends(self, run: slice, dim: int) -> tuple[int, int]:
        start, stop, step = run.indices(self.shape[dim])
        if step != 1:
            raise DataError(f"sparse counts do not support {run!r}; allowed are steps of 1")
        return start, max(start, stop)

    def _columns(self, start: int, stop: int) -> "SparseCounts":
        shape = (self.shape[0], stop - start)
        if self._is_meta:
            return self._share(shape)
        row, column = self._host
        first, last = self.ends((start, stop))
        own, host = slice(first, last), (row[first:last], column[first:last] - start)
        known = [part[own] for part in self._in_runs] if (start, stop) in self._runs else []
        columns = known[0] if known else self.column[own] - start
        found = SparseCounts(self.row[own], columns, self.value[own], shape, host=host)
        found._cut_from, found._places = (self, own), known[1] if known else None
        return found

    def _cells(self, start: int, stop: int) -> "SparseCounts":
        shape = (stop - start, self.shape[1])
        if shape == self.shape:
            return self
        if self._is_meta:
            return self._share(shape)
        row, column = self._host
        own = np.flatnonzero((row >= start) & (row < stop))
        return self._taken(own, row[own] - start, column[own], shape)

    def _chosen(self, index: Tensor) -> "SparseCounts":
        shape = (self.shape[0], len(index))
        if self._is_meta:
            return self._share(shape)
        row, column = self._host
        place = self._place_of_columns(index.cpu().numpy())[column]
        own = np.flatnonzero(place >= 0)
        own = own[np.lexsort((row[own], place[own]))]
        return self._taken(own, row[own], place[own], shape)

    def _place_of_columns(self, index: Places) -> Places:
        """Where in the index each column is, -1 for a column that is not in it."""
        n = self.shape[1]
        place = np.full(n, -1, dtype=np.int64)
        known = index[(index >= 0) & (index < n)]
        place[known] = np.arange(len(known))
        if (place >= 0).sum() < len(index):
            raise DataError(
                f"sparse counts with {n!r} features were indexed with {len(index)!r} numbers, some of which are outside of"
                f" 0..{n - 1!r} or come twice; name each once"
            )
        return place

    def _taken(self, own: Places, row: Places, column: Places, shape: tuple[int, int]) -> "SparseCounts":
        """Some of the entries, at new places."""
        which, rows, columns = (_sent(part, self.device) for part in (own, row, column))
        return SparseCounts(rows, columns, self.value[which], shape, host=(row, column))

    def _share(self, shape: tuple[int, int]) -> "SparseCounts":
        """As many entries without values as a part of the matrix would have."""
        n = len(self.value) * shape[0] * shape[1] // max(self.numel(), 1)
        return SparseCounts(self.row[:n], self.column[:n], self.value[:n], shape)


@lru_cache(maxsize=8)
def _tables(runs: Runs, device: torch.device) -> tuple[Tensor, Tensor]:
    """First columns and widths of runs; kept, because a device waits for numbers of the host."""
    with torch.inference_mode(mode=False):
        starts, stops = torch.tensor(runs, device=device).T.contiguous()
        return starts, stops - starts


def _copies_by_itself(tensor: Tensor, device: torch.device) -> bool:
    """Whether a device can copy a tensor while the processor goes on."""
    return device.type == "cuda" and tensor.device.type == "cpu" and tensor.is_pinned()


def _sent(places: Places, device: torch.device) -> Tensor:
    """Places on a device, for which a GPU is not waited for."""
    found = torch.from_numpy(places)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)


def _linear(
    x: SparseCounts, weight: Float[Tensor, "hidden feature"], bias: Float[Tensor, " hidden"] | None = None
) -> Float[Tensor, "cell hidden"]:
    y = product(x, weight)
    return y if bias is None else y + bias.to(y.dtype)
