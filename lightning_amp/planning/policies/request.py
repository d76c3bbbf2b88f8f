"""Check a planning request before data are read, complete it from the data, and decide whether to balance cells."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from lightning_amp.costs.device_rates import CPU_CORE, Rates
from lightning_amp.costs.model_shape import LARGEST, ModelShape
from lightning_amp.diagnosis.diagnosis import Diagnosis
from lightning_amp.errors import PlanError
from lightning_amp.planning.plan.axes import MeshShape
from lightning_amp.planning.plan.plan import Explanation
from lightning_amp.profiling.profile import Profile
from lightning_amp.quantities import memory_of_ranks
from lightning_amp.techniques.table import parse_strategies

POLICIES = ("auto", "paper")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What is decided on, as in `plan`; the budget in bytes, and the rates with the links between nodes."""

    diagnosis: Diagnosis
    shape: ModelShape
    devices: int
    budget: int | None
    rates: Rates = CPU_CORE
    model_parallel_size: int | str = "auto"
    node_devices: int | None = None


def check_request(
    *,
    devices: int,
    device_memory: str | int | Sequence[str | int] | None,
    policy: str,
    strategies: str | list[str] | tuple[str, ...] | None,
    batch_size: int,
    model_parallel_size: int | str,
) -> None:
    """Refuse what no data could make legal, before any data are read; the arguments are those of `plan`.

    Raises:
        PlanError: An argument outside what is allowed.
    """
    if policy not in POLICIES:
        raise PlanError(f"policy={policy!r} is not supported; allowed are {', '.join(map(repr, POLICIES))}")
    for name, value in (("devices", devices), ("batch_size", batch_size)):
        if type(value) is not int or not 1 <= value <= LARGEST:
            raise PlanError(
                f"{name}={value!r} is not supported; allowed is a whole number from 1 to {LARGEST:,}"
            )
    if device_memory is not None:
        memory_of_ranks(device_memory)
    if strategies is not None:
        parse_strategies(strategies)
    if model_parallel_size != "auto" and (type(model_parallel_size) is not int or model_parallel_size < 1):
        raise PlanError(
            f'model_parallel_size={model_parallel_size!r} is not supported; allowed are "auto" or a whole number of 1'
            " or more that divides the devices"
        )


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
