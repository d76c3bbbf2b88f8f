"""Define the spec of a block in chunks in a plan."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkBlock:
    """Parts of a block of any module run in chunks, in both passes; or of what a module computes after its blocks.

    Attributes:
        budget_bytes: Most bytes that it may take beyond its arguments and parameters: in training those of its
            forward and backward pass with what is kept between them, else those of its forward pass.
        after: Calls of blocks in a forward pass of the module, where the rule is for what follows the last of them,
            such as head and loss; 0 for a block.
    """

    budget_bytes: int
    after: int = 0
