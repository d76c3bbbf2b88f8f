"""Cases run in new processes, one after the other in rounds, so that what disturbs the machine disturbs all of them."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.processes import RunFailed, run_fresh
from benchmarks.side_by_side.cases import Case, plan_of
from benchmarks.side_by_side.training import HighWater, Training

STEPS = 2
"""In one process; the first is not timed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What was measured of a case.

    Attributes:
        seconds: Median over rounds of the slowest rank's time of a step.
        peak_bytes: Median over rounds of the highest rank's memory above its start.
        loss: Mean over ranks of the first step's loss, which is the loss of all cells.
        norm: Of the gradient of the anchors' latents in the first step.
        along: The same gradient along a random direction, so that its error shows as large as it is.
        sent_bytes: Most bytes that a rank hands to collectives in a step.
    """

    seconds: float
    peak_bytes: float
    loss: float
    norm: float
    along: float
    sent_bytes: int


def measure_rank(rank: int, ranks: int, case: Case) -> dict[str, Any]:
    """Train a miniature, then the case, as one of the ranks."""
    torch.set_num_threads(case.threads)
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("data", "model")) if ranks > 1 else None
    plan = plan_of(case)
    small = Training(case.small(), plan, mesh)
    small.step_before()
    small.step()
    del small
    training = Training(case, plan, mesh)
    water = HighWater()
    training.step_before()
    _, loss = training.step()
    norm, along = training.gradient()
    seconds = [training.step()[0] for _ in range(STEPS - 1)]
    peak = water.above_start()
    sent = training.sent() if mesh is not None else 0
    return {"seconds": seconds, "peak_bytes": peak, "loss": loss, "norm": norm, "along": along, "sent_bytes": sent}


def median_of(rounds: Sequence[Sequence[Mapping[str, Any]]]) -> Measured:
    """Several rounds of a case's ranks as one."""
    first = rounds[0]
    return Measured(
        seconds=median(max(steps) for ranks in rounds for steps in zip(*(r["seconds"] for r in ranks), strict=True)),
        peak_bytes=median(max(rank["peak_bytes"] for rank in ranks) for ranks in rounds),
        loss=sum(rank["loss"] for rank in first) / len(first),
        norm=first[0]["norm"],
        along=first[0]["along"],
        sent_bytes=max(rank["sent_bytes"] for rank in first),
    )


def measure_all(wanted: Sequence[Case], *, rounds: int) -> dict[Case, Measured | str]:
    """Measure cases, one of each in every round; of one that fails, what it said."""
    found: dict[Case, list[list[dict[str, Any]]]] = {case: [] for case in wanted}
    failed: dict[Case, Measured | str] = {}
    for n in range(rounds):
        for case in (case for case in wanted if case not in failed):
            print(f"round {n + 1}  {case.size}, {case.ranks} x {case.threads}  {case.method.name}", file=sys.stderr)
            try:
                found[case].append(run_fresh(measure_rank, case.ranks, case))
            except RunFailed as error:
                failed[case] = str(error)
    return {case: failed.get(case) or median_of(rounds) for case, rounds in found.items()}
