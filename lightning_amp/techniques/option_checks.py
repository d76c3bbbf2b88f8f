"""Check values of options that a user has given to a technique."""

from lightning_amp.errors import PlanError


def one_of(name: str, value: object, allowed: tuple[str | bool | None, ...]) -> None:
    """Refuse any other value with a PlanError; 1 and 0 do not pass for True and False."""
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise PlanError(f"{name}={value!r} is not supported; allowed are {', '.join(map(repr, allowed))}")


def whole_number(name: str, value: object, *, least: int) -> None:
    """Refuse, with a PlanError, what is neither None nor a whole number that is large enough."""
    if value is not None and not (type(value) is int and value >= least):
        raise PlanError(f"{name}={value!r} is not supported; allowed is a whole number, {least} or more, or None")
