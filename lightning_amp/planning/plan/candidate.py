"""One legal plan among those that policy "auto" compares, and what became of it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One legal plan.

    Attributes:
        strategies: Strategy ids.
        data: Ranks of the data axis.
        model: Ranks of the model axis.
        peak_bytes: Predicted peak per rank of a training step.
        step_seconds: Predicted time of the decoder's part of a step.
        cell_seconds: The same by cell, over all ranks: what candidates are compared by.
        verdict: The word chosen, or why it was not.
    """

    strategies: tuple[str, ...]
    data: int
    model: int
    peak_bytes: int
    step_seconds: float
    cell_seconds: float
    verdict: str = ""
