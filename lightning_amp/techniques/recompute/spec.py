"""Define the spec of a recomputed block in a plan."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeBlock:
    """Nothing of a block of any module is kept for the backward pass but its inputs; there it is computed again."""
