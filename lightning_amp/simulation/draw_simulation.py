"""A simulation as a picture."""

from pathlib import Path

from lightning_amp.figures import simulated_memory
from lightning_amp.simulation.simulate import Simulation


def draw(path: Path, simulation: Simulation) -> None:
    """Write a PNG of memory after each stratum of the rank that needs most.

    Args:
        path: File to write.
        simulation: What to draw.
    """
    plan, worst = simulation.plan, simulation.worst
    names = ", ".join(plan.strategies)
    what = f"{names}, {plan.mesh.data} x {plan.mesh.model} ranks (data x model)" if names else "one device"
    simulated_memory(
        path,
        simulated_bytes=worst.strata_bytes,
        predicted_bytes=plan.strata_bytes,
        peak_bytes=worst.peak_bytes,
        failed_at=worst.failed_at,
        budget_bytes=plan.budget_bytes,
        title=f"Simulated step: {what}",
        rank_label=f"rank {worst.rank}",
    )
