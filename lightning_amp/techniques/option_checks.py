"""Check the values of options that users pass to techniques."""

from lightning_amp.errors import PlanError


def one_of(name: str, value: object, allowed: tuple[str | bool | None, ...]) -> None:
    """Raise a PlanError unless the value is one of `allowed`; 1 and 0 do not count as True and False."""
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise PlanError(f"{name}={value!r} is not supported; allowed are {', '.join(map(repr, allowed))}")


def whole_number(name: str, value: object, *, least: int) -> None:
    """Raise a PlanError unless the value is None or an int of at least `least`."""
    if value is not None and not (type(value) is int and value >= least):
        raise PlanError(f"{name}={value!r} is not supported; allowed is a whole number, {least} or more, or None")
