"""Detects values that are not raw counts: normalised, scaled, balanced or damaged ones."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 2**24
"""Values that are checked at a time: the checks make temporary copies."""


def fault_of_counts(values: NDArray[Any], *, whole: bool = True) -> tuple[str, Any] | None:
    """Return the kind and an example of a value that is no raw count, None if all are raw counts.

    Args:
        values: Of any type, [value].
        whole: Whether fractions are a fault.
    """
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        faults = {"missing or infinite": ~np.isfinite(block), "negative": block < 0}
        if whole:
            faults["fractional"] = block != np.floor(block)
        for fault, wrong in faults.items():
            if wrong.any():
                return fault, block[wrong.argmax()].item()
    return None
