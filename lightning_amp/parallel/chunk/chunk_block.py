"""The technique `chunk`: it leaves a module as it is, hooks around it included, and sets what its forward runs."""

from torch import nn

from lightning_amp.errors import InstallError
from lightning_amp.parallel.chunk.after_blocks_in_chunks import AfterBlocksInChunks
from lightning_amp.parallel.chunk.in_chunks import InChunks
from lightning_amp.parallel.contract.change import Change
from lightning_amp.planning.plan.specs import ChunkBlock


def chunk_block(module: nn.Module, spec: ChunkBlock, mesh: object) -> Change:
    """Let a block of any module run in chunks, or what a module computes after its blocks.

    Args:
        module: Any block, or a module that has blocks; its own parameters and buffers are used as they are when it is
            called.
        spec: How many bytes it may take.
        mesh: Not looked at: chunks split nothing over ranks.

    Raises:
        InstallError: The budget is no positive number.
    """
    if spec.budget_bytes < 1:
        raise InstallError(
            f"chunk was asked for on {type(module).__name__!r} with budget_bytes={spec.budget_bytes!r}; allowed is a"
            " number of bytes larger than zero"
        )
    forward = InChunks(spec.budget_bytes, train=True)
    if spec.after:
        forward = AfterBlocksInChunks(spec.budget_bytes, spec.after)
    return Change({}, forwards={"": forward})
