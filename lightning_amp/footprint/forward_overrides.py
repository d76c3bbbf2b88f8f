"""Replace a module's `forward` on the instance by overrides of several techniques, which are called in a fixed order.

    INSTEAD      replaces the class's forward, called as `run(module, *args, **kwargs)`: chunk, compile, stream, a
                 registered technique
    STATISTICS   calls the inner forward, unless a BatchNorm uses batch statistics: shared batch statistics
    TWICE        calls the inner forward, and again in the backward pass: recompute
    STAGE        calls the inner forward, or skips it on this rank: pipeline
    WITHIN       calls the inner forward, or runs a schedule of the parent module: chunk of a module block by block

All but the first are called as `run(inside, module, *args, **kwargs)`, where `inside` has the signature of the first. A
module has at most one override in each position: a second technique in the same position raises an error. A deep copy
of a module runs the copy's parameters; a shallow copy needs a call of `set_overrides`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

from torch import nn

from lightning_amp.errors import InstallError


class Position(IntEnum):
    """Positions of overrides, from the innermost to the outermost."""

    INSTEAD = 0
    STATISTICS = 1
    TWICE = 2
    STAGE = 3
    WITHIN = 4


@dataclass(frozen=True, slots=True)
class Override:
    """Override of a module's forward by one technique.

    Attributes:
        strategy: Name of the technique, for messages.
        run: Function that is called.
        position: Place in the order of overrides.
    """

    strategy: str
    run: Callable[..., Any]
    position: Position = Position.INSTEAD


@dataclass(frozen=True, slots=True)
class Forward:
    """All overrides of a module, innermost first; called as `forward(module, *args, **kwargs)`."""

    overrides: tuple[Override, ...]

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the overrides, and return the module's result."""
        run: Callable[..., Any] = type(module).forward
        for override in self.overrides:
            run = override.run if override.position is Position.INSTEAD else partial(override.run, run)
        return run(module, *args, **kwargs)


def overrides_of(module: nn.Module) -> tuple[Override, ...] | None:
    """Return a module's overrides, innermost first; None if other code has set its `forward`."""
    own = vars(module).get("forward")
    forward = getattr(own, "func", None)
    if isinstance(forward, Forward):
        return forward.overrides
    return () if own is None else None


def set_overrides(module: nn.Module, overrides: Iterable[Override]) -> None:
    """Set a module's overrides, replacing all others."""
    found = tuple(sorted(overrides, key=lambda one: one.position))
    # not by setattr: the class may override __setattr__
    if found:
        # not a closure: after a deep copy, it would run the original module's parameters
        vars(module)["forward"] = partial(Forward(found), module)
    else:
        vars(module).pop("forward", None)


def add_override(fqn: str, module: nn.Module, new: Override) -> None:
    """Add an override to a module.

    Raises:
        InstallError: The position is taken, or other code has set the module's `forward`.
    """
    before = overrides_of(module)
    if before is None:
        raise InstallError(
            f"{new.strategy} cannot change how {fqn!r} runs, whose `forward` is set on the instance to"
            f" {vars(module)['forward']!r}; leave it as its class has it, or leave {new.strategy} out"
        )
    for other in before:
        if other.position is new.position:
            raise InstallError(
                f"{other.strategy} and {new.strategy} are both to compute {fqn!r} ({type(module).__name__}), and only"
                " one of them can; leave the other out for this module"
            )
    set_overrides(module, (*before, new))


def remove_override(module: nn.Module, old: Override) -> None:
    """Remove an override from a module."""
    set_overrides(module, [one for one in overrides_of(module) or () if one is not old])


OF_PROFILER = "PyTorchProfiler's hooks (PyTorchProfiler(record_module_names=False) has none)"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes of a module that hold its hooks."""


def hooked(parts: Iterable[nn.Module], kinds: Iterable[str] = HOOKS) -> list[str]:
    """Return the kinds of hooks on some modules; for Lightning's PyTorchProfiler, which hooks them all, its name."""
    found = {kind.strip("_"): hook for part in parts for kind in kinds for hook in getattr(part, kind).values()}
    kinds_of_owners = {type(getattr(getattr(hook, "func", None), "__self__", None)).__name__ for hook in found.values()}
    return [OF_PROFILER] if "RegisterRecordFunction" in kinds_of_owners else list(found)
