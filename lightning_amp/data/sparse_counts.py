"""Define SparseCounts, a sparse [cell, feature] matrix of counts that replaces the dense x of a batch.

    x[row[i], column[i]] = value[i], every other count is 0         entries by column, and by row within a column

Memory: 20 bytes for each entry instead of 4 B F bytes. Columns [a, b) are a slice of the entries, so that a stratum of
x costs only its column numbers. The term log x! of a likelihood is computed for all columns at once and kept.

Where a column's entries begin and end is looked up in copies of `row` and `column` in host memory, which stay there
when counts are moved to a device. So slicing does not synchronize with the device, except for an index
that is on it. Counts that are made on a device are copied to the host once, when they are first sliced.
On the meta device the entries are assumed to be spread evenly over the matrix.

`torch.nn.functional.linear`, and thus `nn.Linear`, is the only torch function that supports such counts:

    y = sum over blocks of x[:, block] W[:, block]^T            dW[:, block] = dy^T x[:, block]

One block of the dense [B, F] exists at a time, and only the entries are saved for the backward pass. With 2 % nonzero
counts, h = 128 and F = 172,800, this takes 8 % more time than the dense product; MKL's sparse products take 1.1 (B 256)
to 1.9 times (B 64) as long. Products use the weight's dtype, also under autocast; sums use float32 or wider.

Legend: entry (M), cell (B), feature (F), hidden (h).
Known limits: no gradient of the counts, no second derivative. Cells, and an index of columns, are looked up in host
memory for every slice.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int, Num
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_amp.errors import DataError

Places = NDArray[np.int64]
ColumnRuns = tuple[tuple[int, int], ...]


class SparseCounts:
    """Sparse counts in coordinate format; all arguments except `host` are also attributes.

    Args:
        row: cell of each entry.
        column: feature of each entry.
        value: the counts.
        shape: cells and features.
        host: row and column in host memory; give them only if they are sorted, which is then not checked.

    Raises:
        DataError: row, column and value differ in length; or, at the first slice, entries are unsorted, repeated,
            out of range or 0.
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
        self._runs: ColumnRuns = ()
        self._in_runs: tuple[Tensor, ...] = ()

    @classmethod
    def from_csr(cls, counts: "sparse.csr_matrix") -> "SparseCounts":
        """Convert a scipy matrix; explicit zeros are dropped."""
        found = counts.tocsc()
        found.sum_duplicates()
        found.eliminate_zeros()
        column = np.repeat(np.arange(found.shape[1], dtype=np.int64), np.diff(found.indptr))
        row = found.indices.astype(np.int64)
        entries = [torch.from_numpy(part) for part in (row, column, found.data)]
        # sorted by construction: a check takes longer than the construction
        return cls(entries[0], entries[1], entries[2], found.shape, host=(row, column))

    @classmethod
    def from_dense(cls, counts: Num[Tensor, "cell feature"]) -> "SparseCounts":
        """Convert a dense matrix."""
        column, row = counts.T.nonzero(as_tuple=True)
        return cls(row, column, counts[row, column], counts.shape)

    def log_factorial(self, dtype: torch.dtype) -> Num[Tensor, " entry"]:
        """Return log x! of each entry; computed once for all columns and kept."""
        if self._cut_from is not None:
            whole, own = self._cut_from
            return whole.log_factorial(dtype)[own]
        if dtype not in self._log_factorial:
            self._log_factorial[dtype] = (self.value.to(dtype) + 1).lgamma_()
        return self._log_factorial[dtype]

    def expect(self, runs: ColumnRuns) -> None:
        """Precompute positions of the slices `x[:, a:b]` in `runs`, so that these slices cost nothing.

        Args:
            runs: Pairs (a, b); nothing is precomputed unless they are in ascending order.
        """
        # bucketize requires sorted runs
        if self._is_meta or runs == self._runs or list(runs) != sorted(runs):
            return
        starts, widths = _tables(runs, self.device)
        # the last run that begins at the column or before it
        which = torch.bucketize(self.column, starts[1:], right=True)
        column = self.column - starts[which]
        self._runs, self._in_runs = runs, (column, torch.addcmul(column, self.row, widths[which]))

    def places(self) -> Int[Tensor, " entry"]:
        """Return the positions of the entries in a flat [cell, feature]."""
        known = self._places
        return torch.add(self.column, self.row, alpha=self.shape[1]) if known is None else known

    @property
    def device(self) -> torch.device:
        """Device of the counts."""
        return self.value.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the counts."""
        return self.value.dtype

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the host copies: a loader worker would otherwise send row and column twice."""
        return {name: value for name, value in vars(self).items() if name != "_host"}

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        where = f"dtype={self.dtype}, device={str(self.device)!r}"
        return f"SparseCounts(shape={self.shape}, entries={len(self.value)}, {where})"

    def numel(self) -> int:
        """Return the number of elements of the matrix, zeros included."""
        return self.shape[0] * self.shape[1]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return row, column and value."""
        return self.row, self.column, self.value

    def to(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool | None = None,
    ) -> "SparseCounts":
        """Return the counts on a device, or of a type; host copies of row and column are kept.

        `non_blocking`: as for tensors; None means True if pinned counts are moved to CUDA, because Lightning passes
        this argument for tensors only.
        """
        if non_blocking is None:
            on_cuda = device is not None and torch.device(device).type == "cuda"
            non_blocking = on_cuda and self.value.device.type == "cpu" and self.value.is_pinned()
        value = self.value.to(device=device, dtype=dtype, non_blocking=non_blocking)
        row, column = (part.to(value.device, non_blocking=non_blocking) for part in (self.row, self.column))
        return SparseCounts(row, column, value, self.shape, host=None if self._is_meta else self._host)

    def pin_memory(self) -> "SparseCounts":
        """Return the counts in pinned memory."""
        # `_host` stays pageable: it is read by numpy and never copied to a device
        row, column, value = (part.pin_memory() for part in self.tensors())
        return SparseCounts(row, column, value, self.shape, host=self._host)

    def with_values(self, value: Num[Tensor, " entry"]) -> "SparseCounts":
        """Return sparse counts with other values at the same entries."""
        return SparseCounts(self.row, self.column, value, self.shape, host=self.__dict__.get("_host"))

    def to_dense(self, dtype: torch.dtype | None = None) -> Num[Tensor, "cell feature"]:
        """Return the dense matrix."""
        value = self.value if dtype is None else self.value.to(dtype)
        flat = torch.zeros(self.numel(), dtype=value.dtype, device=self.device)
        flat.scatter_(0, self.places(), value)
        return flat.view(self.shape)

    def ends(self, columns: Sequence[int]) -> list[int]:
        """Return the number of entries before each column; a column may equal the number of features."""
        if self._is_meta:
            return [len(self.value) * column // max(self.shape[1], 1) for column in columns]
        # known without the copies in host memory, which may have to be made first
        if list(columns) == [self.shape[1]]:
            return [len(self.value)]
        return [int(place) for place in np.searchsorted(self._host[1], columns)]

    def __getitem__(self, key: Any) -> "SparseCounts":
        """Cells `x[a:b]`, or columns `x[:, a:b]`, `x[..., a:b]` and `x[..., index]`.

        Raises:
            DataError: The key is not supported, or an index has columns that are out of range or repeated.
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
            f"sparse counts were given to torch's {getattr(func, '__name__', func)!r}, which needs a dense matrix; only"
            " nn.Linear and a stratified decoder take them: use x.to_dense(), or sparse=False in the data module"
        )

    @cached_property
    def _host(self) -> tuple[Places, Places]:
        row, column = self.row.cpu().long().numpy(), self.column.cpu().long().numpy()
        n_cells, n_features = self.shape
        inside = not len(row) or (
            min(row.min(), column.min()) >= 0 and row.max() < n_cells and column.max() < n_features
        )
        # numbers in column-major order ascend only if entries are sorted and none is repeated
        if not inside or (np.diff(column * n_cells + row) <= 0).any():
            raise DataError(
                f"{self!r} has entries out of order, repeated, or outside of the matrix; they must be sorted by column"
                " and then by row: use SparseCounts.from_csr, which sorts them"
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
            raise DataError(
                f"sparse counts do not support {run!r}; allowed are steps of 1: for others take x.to_dense()"
            )
        return start, max(start, stop)

    def _columns(self, start: int, stop: int) -> "SparseCounts":
        shape = (self.shape[0], stop - start)
        if self._is_meta:
            return self._share(shape)
        row, column = self._host
        first, last = self.ends((start, stop))
        # sorted by column, so that columns next to each other are a run of entries: a view
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
        # cells are scattered over the entries, which are sorted by column: no slice has them, unlike those of columns
        own = np.flatnonzero((row >= start) & (row < stop))
        return self._taken(own, row[own] - start, column[own], shape)

    def _chosen(self, index: Tensor) -> "SparseCounts":
        shape = (self.shape[0], len(index))
        if self._is_meta:
            return self._share(shape)
        row, column = self._host
        n, wanted = self.shape[1], index.cpu().numpy()
        known = wanted[(wanted >= 0) & (wanted < n)]
        # position of each column in the index, -1 for a column that is not in it
        position = np.full(n, -1, dtype=np.int64)
        position[known] = np.arange(len(known))
        if (position >= 0).sum() < len(index):
            raise DataError(
                f"sparse counts with {n!r} features were indexed with {len(index)!r} numbers, some of which are"
                f" outside of 0..{n - 1!r} or repeated; name each column once"
            )
        place = position[column]
        own = np.flatnonzero(place >= 0)
        # columns may come in any order: entries are sorted again by the new column, then by row
        own = own[np.lexsort((row[own], place[own]))]
        return self._taken(own, row[own], place[own], shape)

    def _taken(self, own: Places, row: Places, column: Places, shape: tuple[int, int]) -> "SparseCounts":
        # pinned, so that the copy to a GPU waits for nothing
        found, pins = map(torch.from_numpy, (own, row, column)), self.device.type == "cuda"
        which, rows, columns = ((x.pin_memory() if pins else x).to(self.device, non_blocking=pins) for x in found)
        return SparseCounts(rows, columns, self.value[which], shape, host=(row, column))

    def _share(self, shape: tuple[int, int]) -> "SparseCounts":
        """Return counts on the meta device for a part of the matrix, with a proportional number of entries."""
        n = len(self.value) * shape[0] * shape[1] // max(self.numel(), 1)
        return SparseCounts(self.row[:n], self.column[:n], self.value[:n], shape)


@lru_cache(maxsize=8)
def _tables(runs: ColumnRuns, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return first columns and widths of runs; cached, because copies from the host synchronize a device."""
    with torch.inference_mode(mode=False):
        starts, stops = torch.tensor(runs, device=device).T.contiguous()
        return starts, stops - starts


BLOCK = 2**20
"""Elements of a dense block; 4 MiB in float32."""


def _linear(
    x: SparseCounts, weight: Float[Tensor, "hidden feature"], bias: Float[Tensor, " hidden"] | None = None
) -> Float[Tensor, "cell hidden"]:
    """x W^T; only the weight gets a gradient."""
    if weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise DataError(
            f"sparse counts of {x.shape[1]!r} features were given to a layer whose weight has the shape"
            f" {tuple(weight.shape)!r}; use the data that the layer was made for"
        )
    if torch.is_grad_enabled() and x.value.requires_grad:
        raise DataError(
            "the gradient of sparse counts is not computed; detach what they are scaled by, or take x.to_dense()"
        )
    y = cast(Tensor, _Product.apply(x, weight))  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias.to(y.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: SparseCounts, weight: Tensor) -> Tensor:
        ctx.x, ctx.dtype = x, weight.dtype
        # a sum over many blocks would lose digits in a type of 16 bits
        total = weight.new_zeros((len(x), len(weight)), dtype=torch.promote_types(weight.dtype, torch.float32))
        with _without_autocast(weight):
            for block, counts in _blocks(x, weight.dtype):
                # rounded to the weight's type by the product: only the sum over blocks is in float32
                total += counts @ weight[:, block].T
        return total.to(weight.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        of_weight = grad.new_empty((grad.shape[1], ctx.x.shape[1]), dtype=ctx.dtype)
        with _without_autocast(grad):
            for block, counts in _blocks(ctx.x, ctx.dtype):
                # a block has its own columns of the gradient, so nothing is added up
                torch.mm(grad.to(ctx.dtype).T, counts, out=of_weight[:, block])
        return None, of_weight


def _blocks(x: SparseCounts, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    n = x.shape[1]
    step = max(1, BLOCK // max(len(x), 1))
    for first in range(0, n, step):
        block = slice(first, min(first + step, n))
        yield block, x[:, block].to_dense(dtype)


def _without_autocast(like: Tensor) -> torch.autocast:
    # the meta device has no autocast
    device = like.device.type
    return torch.autocast(device if torch.amp.is_autocast_available(device) else "cpu", enabled=False)
