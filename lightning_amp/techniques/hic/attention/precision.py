"""Choose the types in which attention by hand computes sums, rotations and matrix products."""

from functools import lru_cache, reduce

import torch
from torch import Tensor


@lru_cache
def computed_in(*dtypes: torch.dtype) -> torch.dtype:
    """The type of sums and products: float32, or float64 where one is."""
    # kept, because torch counts the question as an operator
    return reduce(torch.promote_types, dtypes, torch.float32)


def met_in(q: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The type in which queries meet keys, and weights values; `dtype` is that of sums."""
    kind = q.device.type
    if dtype != torch.float32 or kind == "meta" or not torch.is_autocast_enabled(kind):
        return dtype
    # float16 has no number as large as the mask's, and its gradients would have to be scaled
    return torch.bfloat16 if torch.get_autocast_dtype(kind) == torch.bfloat16 else dtype
