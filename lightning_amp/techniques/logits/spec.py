"""Define the spec of cross-entropy in chunks in a plan."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkLogits:
    """Cross-entropy of a linear layer's outputs runs in chunks of rows, in the forward and in the backward pass."""
