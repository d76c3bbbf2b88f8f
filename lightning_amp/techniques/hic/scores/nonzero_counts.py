"""Collect the nonzero counts of a batch in the order of runs of columns, with their places in tables.

Strata read columns of one tensor. How many of its counts are not zero must be known to make room for them, and to look
is to wait for the device: so the host looks before the batch is moved (`find_entries`). A tensor that came another way
is looked through when the first stratum asks, once for the batch. A CPU, which waits for nobody, looks a stratum at a
time, while its columns are in the cache. `SparseCounts`, which the data module hands out, have their entries.

Known limits: what is computed from the counts on the device is another tensor, and so are columns chosen by an index;
every stratum looks through those, and through tensors of inference mode or that are not contiguous. A change in place
is noticed. Without values (meta and fake tensors) entries are spread evenly, and of a dense matrix one number in 20 is
taken as one. Legend: entry (M), cell (B), feature (F_k, or F of all strata).
"""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from jaxtyping import Float, Int, Num
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_amp._torch import has_no_values, tree_leaves, whole_of
from lightning_amp.data.batch import datamodule_of
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.footprint.target_device import launches_operators
from lightning_amp.techniques.contract.protocol import is_decomposed

_KNOWN: dict[int, tuple["weakref.ref[Tensor]", int, SparseCounts]] = {}
"""By tensor: itself, how often it was changed in place, its entries; as long as it lives."""
HOOKS = ("transfer_batch_to_device", "on_after_batch_transfer")
"""Lightning's hooks between a batch of the loader and that of the step."""


def find_entries(before: Any, after: Any, likelihoods: type[nn.Module], module: nn.Module) -> None:
    """Find the entries of counts that decoders in a module will ask for, if they have such likelihoods.

    `before` is the batch as the loader has left it, `after` the same on the device.
    """
    data = datamodule_of(getattr(module, "_trainer", None))
    owners = [one for one in (module, data) if isinstance(one, LightningModule | LightningDataModule)]
    # a hook may return other counts, or other tensors: what the host has seen says nothing of them
    if any(is_overridden(hook, one) for one in owners for hook in HOOKS):
        return
    pairs = [
        (host, moved)
        for host, moved in zip(tree_leaves(before), tree_leaves(after), strict=True)
        if isinstance(host, Tensor) and host.dim() == 2 and launches_operators(moved)
    ]
    # features of the decoders that ask
    widths = {
        sum(len(cast(Any, stratum).feature_anchor) for stratum in part.strata)
        for part in (module.modules() if pairs else ())
        if any(isinstance(leaf, likelihoods) for leaf in part.modules()) and is_decomposed(part)
    }
    for host, moved in pairs:
        # a tensor of inference mode counts no writes, so that what is known of it could be stale
        if host.shape[1] in widths and host.device.type == "cpu" and not moved.is_inference():
            _remember(moved, SparseCounts.from_dense(host).to(moved.device))


def known_entries(x: Num[Tensor, "cell feature"]) -> SparseCounts | None:
    """The entries of counts, or of some cells and columns of counts; None where they are not known yet."""
    whole = whole_of(x)
    # only of rows that follow each other the offset below says where the block begins
    known = whole is not x and whole.dim() == 2 and whole.is_contiguous() and whole.stride() == x.stride()
    if not launches_operators(x) or not known:
        return None
    found = _KNOWN.get(id(whole))
    if found is None or found[0]() is not whole or found[1] != whole._version:
        found = _remember(whole, SparseCounts.from_dense(whole))
    row, column = divmod(int(x.storage_offset() - whole.storage_offset()), max(int(whole.shape[1]), 1))
    return found[2][row : row + x.shape[0]][:, column : column + x.shape[1]]


def _remember(x: Tensor, counts: SparseCounts) -> tuple["weakref.ref[Tensor]", int, SparseCounts]:
    key = id(x)
    # the address of a tensor may be used again once it is gone
    _KNOWN[key] = weakref.ref(x, lambda _: _KNOWN.pop(key, None)), x._version, counts
    return _KNOWN[key]


ASSUMED_SHARE = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Entries:
    """The entries, run by run."""

    row: Int[Tensor, " entry"]
    column: Int[Tensor, " entry"]
    value: Float[Tensor, " entry"]
    log_factorial: Float[Tensor, " entry"]  # the logarithms of their factorials
    runs: Sequence[slice]
    ends: Sequence[int]  # one past the last entry of every run
    flat: Int[Tensor, " entry"] | None = None  # where they lie in a flat [cell, feature], if that is known

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


def entries(x: Num[Tensor, "cell feature"] | SparseCounts, runs: Sequence[slice], *, dtype: torch.dtype) -> Entries:
    """The entries of a matrix, in runs of columns that cover all of them in their order."""
    numbers = x if isinstance(x, Tensor) else x.value
    if has_no_values(numbers):
        n = math.ceil(ASSUMED_SHARE * x.numel()) if numbers is x else len(numbers)
        # that many entries, spread evenly
        row, column = numbers.new_empty((2, n), dtype=torch.int64)
        ends = [n * run.stop // max(x.shape[1], 1) for run in runs]
        value, log_factorial = numbers.new_empty((2, n), dtype=dtype)
        return Entries(row=row, column=column, value=value, log_factorial=log_factorial, runs=runs, ends=ends)
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
