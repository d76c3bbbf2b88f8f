"""Simulate a plan: count the memory of a training step on every rank, with a module on fake tensors."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lightning_amp.costs.device_rates import CPU_CORE, Rates
from lightning_amp.costs.model_shape import LATENT_DIM
from lightning_amp.errors import PlanError
from lightning_amp.footprint.target_device import settings_of
from lightning_amp.lightning.profiling.step_of_ranks import alike_ranks
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.profiling.profile import Profile
from lightning_amp.progress import track
from lightning_amp.sharding.splits import DryAxis
from lightning_amp.simulation.count_rank import RankResult, count_rank, refuse_unsimulated
from lightning_amp.simulation.models_without_values import Subject, decoder_subject, reference_subject
from lightning_amp.simulation.parse_shape import ShapeRequest
from lightning_amp.simulation.plan_of_data import plan_of_data, plan_of_shape

SCHEMA = 1
MOST_MODEL_RANKS = 1024
"""Most ranks of the model axis; the module is built once per rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """Memory of a plan's training step on every rank, in order."""

    plan: Plan
    ranks: tuple[RankResult, ...]

    @property
    def worst(self) -> RankResult:
        """The first rank that runs out of memory, or else the first with the highest peak."""
        return max(self.ranks, key=lambda result: (result.failed_at is not None, result.peak_bytes))

    @property
    def status(self) -> str:
        """Return "ok", or where the memory of a device is exceeded."""
        failed_at = self.worst.failed_at
        return "ok" if failed_at is None else f"out of memory at {failed_at}"

    @property
    def bytes_of_strata(self) -> dict[int, int]:
        """Bytes alive after each stratum of the forward pass: of the worst rank, or of ranks that run the strata."""
        split = self.plan.axes.placement == "strata"
        own = self.ranks[: self.plan.mesh.model] if split else (self.worst,)
        return {k: held for one in own for k, held in one.bytes_of_strata.items()}

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Peak of every rank."""
        return tuple(result.peak_bytes for result in self.ranks)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON: those of the worst rank, and the peaks of all."""
        worst, plan = self.worst, self.plan
        return {
            "schema": SCHEMA,
            "status": self.status,
            "failed_at": worst.failed_at,
            "requested_bytes": worst.requested_bytes,
            "peak_bytes": list(self.peak_bytes),
            "rank": worst.rank,
            "breakdown": worst.breakdown,
            "strata": list(self.bytes_of_strata),
            "strata_bytes": list(self.bytes_of_strata.values()),
            "comm_bytes": worst.comm_bytes,
            "budget_bytes": plan.budget_bytes,
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            "predicted_strata_bytes": list(plan.strata_bytes),
            "strategies": list(plan.strategies),
            "mesh": {"data": plan.mesh.data, "model": plan.mesh.model},
            "batch_size": plan.batch_size,
        }


def simulate(make: Callable[[], Subject], plan: Plan, *, rank: int, device_type: str = "cpu") -> RankResult:
    """Simulate the second training step of one rank, row-major in (data, model).

    Args:
        make: Builds the module and the batch, without values.

    Raises:
        InstallError: The plan does not fit the module.
        PlanError: The plan has a technique that is not simulated.
        ModelError: The step raises an error.
    """
    with settings_of(device_type):
        return count_rank(make(), plan, rank, device_type=device_type)


def simulate_plan(make: Callable[[], Subject], plan: Plan, *, device_type: str = "cpu") -> Simulation:
    """Simulate the second training step of every rank; ranks with equal shard sizes are simulated once.

    Arguments and errors as in `simulate`; also a PlanError if the model axis is too long.
    """
    check_model_axis(plan)
    refuse_unsimulated(plan)
    with settings_of(device_type):
        subject = make()
        # ranks of the data axis have different cells, but equally many
        axes = [DryAxis(plan.mesh.model, rank) for rank in range(plan.mesh.model)]
        alike = alike_ranks(subject.module, [rule for rule in plan.rules if rule.strategy != "S1"], axes)
        done = dict[int, RankResult]()
        for ranks in track(alike, description="simulating", total=len(alike)):
            own = [axis.get_local_rank() for axis in ranks]
            done |= dict.fromkeys(own, count_rank(subject, plan, own[0], device_type=device_type))
    group = [done[rank] for rank in range(plan.mesh.model)]
    results = tuple(replace(result, rank=i) for i, result in enumerate(group * plan.mesh.data))
    return Simulation(plan=plan, ranks=results)


def check_model_axis(plan: Plan) -> None:
    """Raise a PlanError for a plan whose model axis is too long."""
    if plan.mesh.model > MOST_MODEL_RANKS:
        raise PlanError(
            f"a model axis of {plan.mesh.model:,} ranks is not supported; simulated are {MOST_MODEL_RANKS:,}"
            " or fewer: choose a smaller model_parallel_size, or fewer devices"
        )


def request_decoder(
    sizes: ShapeRequest, *, batch_size: int, rates: Rates = CPU_CORE, **request: Any
) -> tuple[Callable[[], Subject], Plan]:
    """Return a function that builds a decoder alone, and its plan.

    Args:
        batch_size: Cells per rank, if the sizes do not include them.
        **request: As in `plan_of_shape`.

    Raises:
        PlanError: No plan is possible for the request.
    """
    batch_size = batch_size if sizes.batch_size is None else sizes.batch_size
    made = plan_of_shape(sizes.decoder, request, batch_size=batch_size, rates=rates, check=check_model_axis)
    return partial(decoder_subject, sizes.decoder, batch_size=batch_size), made


def request_reference(
    profile: Profile,
    *,
    batch_size: int,
    latent_dim: int | None,
    window: int | None,
    rates: Rates = CPU_CORE,
    **request: Any,
) -> tuple[Callable[[], Subject], Plan]:
    """Return a function that builds the reference model for some data, and its plan; see `plan_of_data`."""
    of_model: dict[str, Any] = {"latent_dim": LATENT_DIM if latent_dim is None else latent_dim, "window": window}
    made = plan_of_data(profile, request, batch_size=batch_size, **of_model, rates=rates, check=check_model_axis)
    return partial(reference_subject, profile, batch_size=batch_size, **of_model), made
