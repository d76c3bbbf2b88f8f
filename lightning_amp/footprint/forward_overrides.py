"""Manage overrides of a module's `forward`, set on the instance by techniques, and run in one order.

    INSTEAD      computes in place of the class's forward, as `run(module, *args, **kwargs)`: chunk, compile, stream, a
                 registered technique
    STATISTICS   runs what is inside, unless a BatchNorm normalises by its batch: shared batch statistics
    TWICE        runs what is inside, and again in the backward pass: recompute
    STAGE        runs what is inside, or not on this rank: pipeline
    WITHIN       runs what is inside, or a plan of the module that holds it: chunk of a module block by block

All but the first are called as `run(inside, module, *args, **kwargs)`, where `inside` is called as the first is. A
module has one override at most in each position: two techniques that would compute the same module are refused. A deep
copy of a module runs the copy's own parameters; a shallow copy is given its overrides by `set_overrides`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

from torch import nn

from lightning_amp.errors import InstallError


class Position(IntEnum):
    """From the inside to the outside."""

    INSTEAD = 0
    STATISTICS = 1
    TWICE = 2
    STAGE = 3
    WITHIN = 4


@dataclass(frozen=True, slots=True)
class Override:
    """What one technique makes of a module's forward.

    Attributes:
        strategy: The technique's name, for messages.
        run: What is called.
        position: Where.
    """

    strategy: str
    run: Callable[..., Any]
    position: Position = Position.INSTEAD


@dataclass(frozen=True, slots=True)
class Forward:
    """All overrides of a module, the innermost first; called as `forward(module, *args, **kwargs)`."""

    overrides: tuple[Override, ...]

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        run: Callable[..., Any] = type(module).forward
        for override in self.overrides:
            run = override.run if override.position is Position.INSTEAD else partial(override.run, run)
        return run(module, *args, **kwargs)


def overrides_of(module: nn.Module) -> tuple[Override, ...] | None:
    """The overrides of a module, the innermost first; None where something else has set its `forward`."""
    own = vars(module).get("forward")
    forward = getattr(own, "func", None)
    if isinstance(forward, Forward):
        return forward.overrides
    return () if own is None else None


def set_overrides(module: nn.Module, overrides: Iterable[Override]) -> None:
    """Let a module have these overrides and no others."""
    found = tuple(sorted(overrides, key=lambda one: one.position))
    # past __setattr__, which a class may have its own of
    if found:
        # not a closure: a deep copy of the module would run the original's parameters
        vars(module)["forward"] = partial(Forward(found), module)
    else:
        vars(module).pop("forward", None)


def add_override(fqn: str, module: nn.Module, new: Override) -> None:
    """Let a module have one more.

    Raises:
        InstallError: There is one in the same position, or something else has set the module's `forward`.
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
    """Let a module have its other overrides alone."""
    set_overrides(module, [one for one in overrides_of(module) or () if one is not old])


OF_PROFILER = "PyTorchProfiler's hooks (PyTorchProfiler(record_module_names=False) has none)"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Names of the tables that a module has of its hooks."""


def hooked(parts: Iterable[nn.Module], kinds: Iterable[str] = HOOKS) -> list[str]:
    """Kinds of hooks that some modules have; of Lightning's PyTorchProfiler, which hangs them on all, its name."""
    found = {kind.strip("_"): hook for part in parts for kind in kinds for hook in getattr(part, kind).values()}
    kinds_of_owners = {type(getattr(getattr(hook, "func", None), "__self__", None)).__name__ for hook in found.values()}
    return [OF_PROFILER] if "RegisterRecordFunction" in kinds_of_owners else list(found)
