"""Check the sizes of attention, and define its constants and dtypes."""

from functools import lru_cache, reduce

import torch
from torch import Tensor

from lightning_amp.errors import ModelError

SELF_SCORE = -5e4
"""Score of a row with itself, as in the `local-attention` package."""
ROTARY_BASE = 10000.0
LEAST_NORM = 1e-12
"""Lower bound of the norm by which keys are divided."""


def check_sizes(name: str, dim: object, window: object) -> None:
    """Raise an error for an invalid dimension or window."""
    if not _whole(dim, least=2) or dim % 2:  # type: ignore[operator]
        raise ModelError(f"{name}(dim={dim!r}): rotary needs an even dim, a whole number; choose 2, 4, ...")
    if not _whole(window, least=1):
        raise ModelError(
            f"{name}(window={window!r}): a bucket needs at least one anchor, a whole number; choose window >= 1"
        )


def check_rows(q: Tensor, k: Tensor, values: Tensor) -> None:
    """Raise an error if queries, keys and values differ in their number of anchors."""
    if not len(q) == len(k) == len(values):
        raise ModelError(
            f"attention was called with {len(q)!r} queries, {len(k)!r} keys and {len(values)!r} "
            "values; allowed is one of each for every anchor: pass equally many"
        )


def _whole(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@lru_cache
def type_of_sums(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and products: float32, or float64 if an input is."""
    # cached, because torch counts this call as an operator
    return reduce(torch.promote_types, dtypes, torch.float32)


def met_in(q: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of products of queries and keys, and of weights and values; `dtype` is that of sums."""
    kind = q.device.type
    if dtype != torch.float32 or kind == "meta" or not torch.is_autocast_enabled(kind):
        return dtype
    # float16 cannot represent the mask's value, and its gradients would have to be scaled
    return torch.bfloat16 if torch.get_autocast_dtype(kind) == torch.bfloat16 else dtype
