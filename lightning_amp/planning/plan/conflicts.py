"""Strategies that contradict each other, and why."""

from collections.abc import Collection, Iterator

ONE_PLACEMENT = "both split the decoder over the model axis, which has room for one placement"

CONFLICTS: tuple[tuple[str, str, str], ...] = (
    ("S3", "fused", "both say how attention is computed; fused needs less memory and is faster"),
    (
        "S3",
        "recompute",
        "chunks keep what they are computed from, also in strata that are; use stream, or fused",
    ),
    ("S5", "fused", "under S5 the scores are sums over the ranks, which fused attention never holds; use S3"),
    ("S5", "strata", ONE_PLACEMENT),
    ("S5", "nodes", ONE_PLACEMENT),
    ("nodes", "strata", ONE_PLACEMENT),
    (
        "recompute",
        "stream",
        "both say what is kept of a stratum; stream keeps as little and computes it once",
    ),
)
"""Pairs, in the order of the library."""


def conflicts(strategies: Collection[str]) -> Iterator[str]:
    """One sentence for every pair of the strategies that cannot be together."""
    for one, other, why in CONFLICTS:
        if one in strategies and other in strategies:
            yield f"{one} and {other} cannot be together: {why}"
