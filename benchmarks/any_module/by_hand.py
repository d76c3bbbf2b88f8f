"""What a person would write without lightning_amp: the body of each function is counted as its lines of code."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any


def checkpoint_by_hand(module: Any) -> None:
    """Recompute every block in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    for block in blocks_of(module):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def shard_by_hand(module: Any) -> None:
    """FSDP2: every block, then the whole module."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    def configure_model() -> None:
        mesh = module.device_mesh["data_parallel"]
        for block in blocks_of(module):
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
        register_fsdp_forward_method(module, "training_step")

    module.configure_model = configure_model


def both_by_hand(module: Any) -> None:
    """FSDP2 with recomputed blocks."""
    checkpoint_by_hand(module)
    shard_by_hand(module)


def compile_by_hand(module: Any, budget: float) -> None:
    """Let torch's partitioner keep a share of every block's activations; its budget is none of bytes."""
    import torch._functorch.config

    torch._functorch.config.activation_memory_budget = budget
    for block in blocks_of(module):
        block.compile(backend="aot_eager_decomp_partition")


BY_HAND: dict[str, Callable[[Any], None]] = {
    "recompute": checkpoint_by_hand,
    "fsdp2": shard_by_hand,
    "both": both_by_hand,
}


def change_by_hand(module: Any, by_hand: str | float) -> None:
    """Do to a module what a name, or a share for torch's partitioner, stands for."""
    if isinstance(by_hand, float):
        compile_by_hand(module, by_hand)
    else:
        BY_HAND[by_hand](module)


def lines_of(by_hand: str | float | None) -> int:
    """Lines that a person writes, without the Trainer's `strategy=`."""
    if by_hand is None:
        return 0
    if by_hand == "both":
        return lines_of("recompute") + lines_of("fsdp2")
    written = compile_by_hand if isinstance(by_hand, float) else BY_HAND[by_hand]
    source = inspect.getsource(written).splitlines()[2:]
    return sum(bool(line.strip()) for line in source)


def blocks_of(module: Any) -> list[Any]:
    """What a person would wrap: the members of the module's lists."""
    from lightning_amp.footprint.find_blocks import find_blocks

    return [block for block in find_blocks(module).values() if any(True for _ in block.parameters())]
