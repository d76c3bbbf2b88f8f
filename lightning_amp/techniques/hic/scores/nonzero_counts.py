"""Collect the nonzero counts of a batch by runs of columns, with their positions in tables.

Strata read columns of one tensor. The number of its nonzero counts must be known to allocate memory, and reading it on
a device is a synchronisation. So the host finds the nonzero counts before the batch is moved (`find_entries`). Of any
other tensor they are found when the first stratum needs them, once per batch. On a CPU, which needs no synchronisation,
each stratum searches its own columns, while these are in the cache. `SparseCounts`, which the data module returns,
store their entries.

Known limits: counts that are computed on the device are another tensor, and so are columns that are selected by an
index. Every stratum searches those, and tensors of inference mode or that are not contiguous. An in-place change is
detected. Without values (meta and fake tensors) entries are assumed to be spread evenly, for a dense matrix one in 20
elements; a counted step gets those of its batch. Legend: entry (M), cell (B), feature (F_k, or F of all strata).
"""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, cast

import torch
from jaxtyping import Float, Int, Num
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_amp._torch import has_no_values, tree_leaves, whole_of
from lightning_amp.data.batch import datamodule_of
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.footprint.copies.known_values import in_a_count
from lightning_amp.footprint.target_device import launches_operators
from lightning_amp.techniques.contract.protocol import is_decomposed

_KNOWN: dict[int, tuple["weakref.ref[Tensor]", int, SparseCounts]] = {}
"""id of a live tensor -> weak reference to it, its version counter, and its entries."""
HOOKS = ("transfer_batch_to_device", "on_after_batch_transfer")
"""Lightning's hooks between the loader's batch and the batch of the step."""


def find_entries(before: Any, after: Any, likelihoods: type[nn.Module], module: nn.Module) -> None:
    """Find the entries of counts that decoders of a module will need, if their likelihood is one of `likelihoods`.

    `before` is the batch from the loader, `after` the same batch on the device.
    """
    data = datamodule_of(getattr(module, "_trainer", None))
    owners = [one for one in (module, data) if isinstance(one, LightningModule | LightningDataModule)]
    # a hook may return other counts or tensors, to which the host's entries would not apply
    if any(is_overridden(hook, one) for one in owners for hook in HOOKS):
        return
    pairs = [
        (host, moved)
        for host, moved in zip(tree_leaves(before), tree_leaves(after), strict=True)
        if isinstance(host, Tensor) and host.dim() == 2 and launches_operators(moved)
    ]
    # numbers of features of decoders with such a likelihood
    widths = {
        sum(len(cast(Any, stratum).feature_anchor) for stratum in part.strata)
        for part in (module.modules() if pairs else ())
        if any(isinstance(leaf, likelihoods) for leaf in part.modules()) and is_decomposed(part)
    }
    for host, moved in pairs:
        # an inference tensor has no version counter, so an in-place change would not be detected
        if host.shape[1] in widths and host.device.type == "cpu" and not moved.is_inference():
            _remember(moved, SparseCounts.from_dense(host).to(moved.device))


def known_entries(x: Num[Tensor, "cell feature"]) -> SparseCounts | None:
    """Return the entries of counts that are a slice of a contiguous tensor on an accelerator; None for others."""
    whole = whole_of(x)
    # the offset below is valid only if the rows are consecutive
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
    # the id may be reused after the tensor is freed
    _KNOWN[key] = weakref.ref(x, lambda _: _KNOWN.pop(key, None)), x._version, counts
    return _KNOWN[key]


ASSUMED = SimpleNamespace(share=0.05, in_counts=False)
"""Share of entries of dense counts without values, and whether a counted step assumes it too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entries:
    """Entries of a matrix by run of columns."""

    row: Int[Tensor, " entry"]
    column: Int[Tensor, " entry"]
    value: Float[Tensor, " entry"]
    log_factorial: Float[Tensor, " entry"]  # log(value!)
    runs: Sequence[slice]
    ends: Sequence[int]  # end of every run's entries
    flat: Int[Tensor, " entry"] | None = None  # positions in a flat [cell, feature], if they are known

    def own(self, k: int) -> slice:
        """Slice of the entries of the k-th run."""
        return slice(self.ends[k - 1] if k else 0, self.ends[k])

    def places(self, k: int) -> Int[Tensor, " own_entry"]:
        """Positions of the entries of the k-th run in a flat [cell, column of the run]."""
        run = self.runs[k]
        if len(self.runs) == 1:
            return self.index(run.stop)
        own = self.own(k)
        return torch.add(self.column[own] - run.start, self.row[own], alpha=run.stop - run.start)

    def index(self, n_features: int) -> Int[Tensor, " entry"]:
        """Positions of the entries in a flat [cell, feature]."""
        return torch.add(self.column, self.row, alpha=n_features) if self.flat is None else self.flat


def entries(x: Num[Tensor, "cell feature"] | SparseCounts, runs: Sequence[slice], *, dtype: torch.dtype) -> Entries:
    """Return the entries of a matrix by runs of columns, which cover all columns in order."""
    numbers = x if isinstance(x, Tensor) else x.value
    unknown = numbers is x and has_no_values(x) and ASSUMED.in_counts
    if has_no_values(numbers) and (not in_a_count(numbers) or (unknown and launches_operators(numbers))):
        n = math.ceil(ASSUMED.share * x.numel()) if numbers is x else len(numbers)
        # the assumed number of entries, spread evenly over the columns
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
    if unknown:
        sizes = [math.ceil(ASSUMED.share * x[:, run].numel()) for run in runs]
        found = [x.new_empty((n, 2), dtype=torch.int64).unbind(1) for n in sizes]
    else:
        found = [x[:, run].nonzero(as_tuple=True) for run in runs]
    ends = list(accumulate(len(row) for row, _ in found))
    row = torch.cat([row for row, _ in found])
    column = torch.cat([column + run.start for (_, column), run in zip(found, runs, strict=True)])
    value = x[row, column].to(dtype)
    log_factorial = (value + 1).lgamma_()
    return Entries(row=row, column=column, value=value, log_factorial=log_factorial, runs=runs, ends=ends)
