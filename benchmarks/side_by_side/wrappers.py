"""What people wrap a model in today to train it on several ranks, each of which has its own share of the cells."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def _fully_sharded(model: Any) -> nn.Module:
    for stratum in model.decoder.strata:
        fully_shard(stratum)
    wrapped: nn.Module = fully_shard(model)
    return wrapped


def _checkpointed(model: Any) -> nn.Module:
    strata = model.decoder.strata
    for k, stratum in enumerate(strata):
        strata[k] = checkpoint_wrapper(stratum)
    return _fully_sharded(model)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp": _fully_sharded,
    "fsdp-checkpoint": _checkpointed,
}
"""Names of Method.wrapper; the strata are what FSDP2 gathers, and what is computed again."""
