"""Checks of what a person asks of the strategy, made before any process is started."""

from pathlib import Path

from lightning_amp.errors import PlanError
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.plan.strategies import parse_strategies
from lightning_amp.quantities import parse_bytes


def one_of(name: str, value: object, allowed: tuple[str | bool | None, ...]) -> None:
    """Check a choice.

    Raises:
        PlanError: The value is not allowed; 1 and 0 do not pass for True and False.
    """
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise PlanError(f"{name}={value!r} was asked for; allowed are {', '.join(map(repr, allowed))}")


def check_numbers(*, model_parallel_size: int | str, bucket_mb: float) -> None:
    """Check the options that are numbers.

    Raises:
        PlanError: Not a number, or too small.
    """
    whole = isinstance(model_parallel_size, int) and not isinstance(model_parallel_size, bool)
    if model_parallel_size != "auto" and not (whole and int(model_parallel_size) >= 1):
        raise PlanError(
            f"model_parallel_size={model_parallel_size!r} was asked for; allowed are 'auto' and a"
            " whole number of ranks, 1 or more"
        )
    if (
        isinstance(bucket_mb, bool)
        or not isinstance(bucket_mb, int | float)
        or not 0 < bucket_mb < float("inf")
    ):
        raise PlanError(f"bucket_mb={bucket_mb!r} was asked for; allowed is a number of MiB above 0")


def check_seconds(**seconds: object) -> None:
    """Check the options that are times.

    Raises:
        PlanError: Not a number of seconds above 0.
    """
    for name, value in seconds.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise PlanError(
                f"{name}={value!r} was asked for; allowed is a number of seconds above 0, .inf for never"
            )


def check_paths(*, data_dir: object, device_memory: str | int | None, rates: object = None) -> None:
    """Check the kinds of the data directory and of the file of rates, and the budget.

    Raises:
        PlanError: Not a path, or not a size.
    """
    if rates is not None and (not isinstance(rates, str | Path) or not str(rates)):
        raise PlanError(
            f"rates={rates!r} was asked for; allowed is the path of a file that `lightning-amp calibrate` wrote, or"
            " None"
        )
    if data_dir is not None and (not isinstance(data_dir, str | Path) or not str(data_dir)):
        raise PlanError(
            f"data_dir={data_dir!r} was asked for; allowed is the path of a data directory, or None"
        )
    if device_memory is not None:
        # as text, for a person who writes 8 means no bytes
        parse_bytes(str(device_memory))


def check_plan(
    plan: str | Path | Plan | None,
    strategies: list[str] | str | None,
    *,
    policy: str,
    model_parallel_size: int | str,
) -> None:
    """Check a plan and a choice of strategies, and that they do not contradict each other.

    Raises:
        PlanError: Options beside a plan that it decides, unknown strategies, or a plan that is neither a path nor a
            Plan.
    """
    if strategies is not None:
        parse_strategies(strategies)
    decided = {"policy": policy if policy != "auto" else None}
    decided["model_parallel_size"] = None if model_parallel_size == "auto" else str(model_parallel_size)
    beside = {name: value for name, value in decided.items() if value is not None}
    if plan is not None and beside:
        raise PlanError(
            f"plan={plan!r} was asked for beside {beside!r}, which a plan decides; leave one of the two out"
        )
    if plan is not None and not isinstance(plan, str | Path | Plan):
        raise PlanError(
            f"plan={plan!r} was asked for; allowed are a Plan and the path of one written as JSON"
        )
    if plan is not None and strategies is not None:
        raise PlanError(
            f"plan={plan!r} and strategies={strategies!r} were asked for; a plan names its strategies."
            " Give one of the two"
        )
