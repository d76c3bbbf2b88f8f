"""Check a planning request before data are read, and complete it from the data."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_amp.costs.device_rates import CPU_CORE, Rates
from lightning_amp.costs.model_shape import LARGEST, ModelShape
from lightning_amp.diagnosis import Diagnosis
from lightning_amp.errors import PlanError
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
            raise PlanError(f"{name}={value!r} is not supported; allowed is a whole number from 1 to {LARGEST:,}")
    if device_memory is not None:
        memory_of_ranks(device_memory)
    if strategies is not None:
        parse_strategies(strategies)
    if model_parallel_size != "auto" and (type(model_parallel_size) is not int or model_parallel_size < 1):
        raise PlanError(
            f'model_parallel_size={model_parallel_size!r} is not supported; allowed are "auto" or a whole number of 1'
            " or more that divides the devices"
        )
