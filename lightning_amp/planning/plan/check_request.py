"""What may be asked of a plan, checked before any data are read."""

from lightning_amp.errors import PlanError
from lightning_amp.planning.plan.model_shape import LARGEST
from lightning_amp.planning.plan.strategies import parse_strategies
from lightning_amp.quantities import parse_bytes

POLICIES = ("auto", "paper")


def check_request(
    *,
    devices: int,
    device_memory: str | int | None,
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
        raise PlanError(f"policy={policy!r} was asked for; allowed are {', '.join(map(repr, POLICIES))}")
    for name, value in (("devices", devices), ("batch_size", batch_size)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
            raise PlanError(
                f"{name}={value!r} was asked for; allowed is a whole number from 1 to {LARGEST:,}"
            )
    if device_memory is not None:
        parse_bytes(device_memory)
    if strategies is not None:
        parse_strategies(strategies)
    if model_parallel_size != "auto" and (
        isinstance(model_parallel_size, bool)
        or not isinstance(model_parallel_size, int)
        or model_parallel_size < 1
    ):
        raise PlanError(
            f'model_parallel_size={model_parallel_size!r} was asked for; allowed are "auto" or a whole number of 1 or'
            " more that divides the devices"
        )
