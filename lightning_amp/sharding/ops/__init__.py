"""Handlers of operators on sharded tensors, by kind of operator; importing this package registers them."""

from lightning_amp.sharding import normalise  # noqa: F401
from lightning_amp.sharding.dispatch import compute  # noqa: F401
from lightning_amp.sharding.ops import (  # noqa: F401
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
from lightning_amp.sharding.sharded_tensor import ShardedTensor as ShardedTensor
