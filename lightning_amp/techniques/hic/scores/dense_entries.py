"""Find the entries of dense counts once for all strata, on devices to which kernels are launched.

Strata read columns of one tensor. How many of its counts are not zero must be known to make room for them, and to look
is to wait for the device: so the host looks before the batch is moved (`find_entries`). A tensor that came another way
is looked through when the first stratum asks, once for the batch. A CPU, which waits for nobody, looks a stratum at a
time, while its columns are in the cache.

Known limits: what is made of the counts on the device, such as their type in another precision, is another tensor, and
so are columns chosen by an index; those are looked through by every stratum. A change in place is noticed.
Legend: cell (B), feature (F of all strata), entry.
"""

import weakref
from collections.abc import Iterable
from typing import Any, cast

from jaxtyping import Num
from torch import Tensor, nn

from lightning_amp._torch import tree_leaves, whole_of
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.techniques.contract.protocol import is_decomposed
from lightning_amp.techniques.device_settings import launches_operators

_KNOWN: dict[int, tuple["weakref.ref[Tensor]", int, SparseCounts]] = {}
"""By tensor: itself, how often it was changed in place, its entries; as long as it lives."""


def find_entries(before: Any, after: Any, likelihoods: type[nn.Module], module: nn.Module) -> None:
    """Find the entries of counts that the decoders of a module will ask for.

    Args:
        before: A batch where the loader has left it.
        after: The same batch on the device.
        likelihoods: What asks.
        module: Whose decoders they are in.
    """
    pairs = [
        (host, moved)
        for host, moved in zip(tree_leaves(before), tree_leaves(after), strict=True)
        if isinstance(host, Tensor) and host.dim() == 2 and launches_operators(moved)
    ]
    widths = set(_widths(likelihoods, module)) if pairs else set()
    for host, moved in pairs:
        if host.shape[1] in widths and host.device.type == "cpu":
            _remember(moved, SparseCounts.from_dense(host).to(moved.device))


def known_entries(x: Num[Tensor, "cell feature"]) -> SparseCounts | None:
    """The entries of counts, or of some cells and columns of counts; None where they are not known yet."""
    whole = whole_of(x)
    if not launches_operators(x) or whole is x or whole.dim() != 2 or whole.stride() != x.stride():
        return None
    found = _KNOWN.get(id(whole))
    if found is None or found[0]() is not whole or found[1] != whole._version:
        found = _remember(whole, SparseCounts.from_dense(whole))
    row, column = divmod(int(x.storage_offset() - whole.storage_offset()), int(whole.stride(0)))
    return found[2][row : row + x.shape[0]][:, column : column + x.shape[1]]


def _remember(x: Tensor, counts: SparseCounts) -> tuple["weakref.ref[Tensor]", int, SparseCounts]:
    key = id(x)
    _KNOWN[key] = weakref.ref(x, lambda _: _KNOWN.pop(key, None)), x._version, counts
    return _KNOWN[key]


def _widths(likelihoods: type[nn.Module], module: nn.Module) -> Iterable[int]:
    """Features of the decoders that ask."""
    for part in module.modules():
        asks = any(isinstance(leaf, likelihoods) for leaf in part.modules())
        if asks and is_decomposed(part):
            yield sum(len(cast(Any, stratum).feature_anchor) for stratum in part.strata)
