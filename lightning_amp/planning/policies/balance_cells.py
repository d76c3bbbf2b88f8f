"""Decide whether to balance cells over the ranks, by the spread of their contacts, and whether there are enough."""

from statistics import NormalDist

from lightning_amp.planning.plan.axes import MeshShape
from lightning_amp.planning.plan.plan import Explanation
from lightning_amp.profiling.profile import Profile

BALANCE_FROM = 0.02
"""Expected excess of the busiest rank's contacts over the mean, from which balancing the cells pays."""


def decide_balance(profile: Profile, mesh: MeshShape, batch_size: int) -> tuple[bool, list[str]]:
    """Say whether contacts per cell vary enough to leave ranks waiting for each other, and why.

    The sum over B cells has a relative spread of spread / sqrt(B); the largest of R such sums exceeds their mean by
    about that times the expected maximum of R standard normal numbers (Blom's approximation).
    """
    spreads = [
        m.contact_spread for m in profile.modalities if m.decomposition is not None and m.contact_spread
    ]
    if mesh.data == 1 or not spreads:
        return False, []
    largest = NormalDist().inv_cdf((mesh.data - 0.375) / (mesh.data + 0.25))
    excess = max(spreads) / batch_size**0.5 * largest
    return excess >= BALANCE_FROM, [
        Explanation(
            f"contacts per cell vary by {100 * max(spreads):.0f} %: in a random step of {batch_size} cells per rank the"
            f" busiest rank would have {100 * excess:.1f} % more than the mean"
        )
    ]


def too_few_cells(profile: Profile, mesh: MeshShape, batch_size: int) -> list[str]:
    """Say where a step takes more cells than a modality has."""
    step = mesh.data * batch_size
    few = [f"{m.name} has {m.cells:,}" for m in profile.modalities if 0 < m.cells < step]
    if not few:
        return []
    return [
        f"a step has {mesh.data:,} x {batch_size:,} = {step:,} cells, and {', '.join(few)}: some cells come"
        " more than once in a step; choose fewer cells per rank, or fewer ranks on the data axis"
    ]
