"""Handlers of operators on sharded tensors, by kind of operator; importing this package registers them."""

from lightning_amp.dist import normalise  # noqa: F401
from lightning_amp.dist.dispatch import compute  # noqa: F401
from lightning_amp.dist.ops import (  # noqa: F401
    attention,
    functions,
    indexing,
    lookups,
    products,
    random,
    reductions,
    resampling,
    views,
    windows,
)
from lightning_amp.dist.sharded_tensor import ShardedTensor as ShardedTensor
