"""Define the row of `logits` in the table of strategies, and the spec of its rule in a plan."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkLogits:
    """Cross-entropy of a linear layer's outputs runs in chunks of rows, in the forward and in the backward pass."""


ROW: dict[str, Any] = {
    "title": "cross-entropy in chunks",
    "shrinks": "logits of a training step, and their gradients, to those of a few rows",
    "specs": (ChunkLogits,),
}
