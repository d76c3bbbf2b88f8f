"""Call operators so that a Tensor subclass receives them before autograd and autocast decompose them."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning_amp._torch import disable_torch_function
from lightning_amp.sharding._torch import (
    AUTOGRAD_AND_AUTOCAST,
    enable_torch_function,
    excluded_keys,
    force_dispatch_keys,
    included_keys,
    n_dispatch_modes,
    pop_dispatch_mode,
    push_dispatch_mode,
)


@dataclass(slots=True)
class OnItsWay:
    """A call that is being dispatched to `__torch_dispatch__`.

    Attributes:
        include, exclude: Dispatch keys of the caller.
        modes: Dispatch modes of the caller while they are disabled.
        n_operators: Number of operators that have arrived.
        plan, tensors: Plan of the last operator, if it has one, and its tensors.
    """

    include: Any
    exclude: Any
    modes: list[Any] = field(default_factory=list)
    n_operators: int = 0
    plan: Any = None
    tensors: list[Any] = field(default_factory=list)


class _AutogradState(threading.local):
    """Calls of one thread, innermost last, and whether operators may arrive at `__torch_dispatch__`."""

    def __init__(self) -> None:
        self.calls: list[OnItsWay] = []
        self.open = False


STATE = _AutogradState()


def below_autograd(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, OnItsWay]:
    """Call an operator so that it arrives at `__torch_dispatch__` undecomposed and with its schema."""
    call = OnItsWay(included_keys(), excluded_keys())
    STATE.calls.append(call)
    try:
        with taken_apart():
            return func(*args, **kwargs), call
    finally:
        STATE.calls.pop()


@contextmanager
def taken_apart() -> Iterator[None]:
    """Disable autograd and dispatch modes until `above_autograd`, so that modes receive only operators on shards."""
    call = STATE.calls[-1]
    # calls nest, as for a decomposed operator: on exit, restore what the outer call allowed
    before, STATE.open = STATE.open, True
    # A fake or counting mode would receive the operator first, with wrappers whose global shapes take no memory. It
    # receives the operators on shards in `above_autograd`, which restores modes.
    call.modes = [pop_dispatch_mode() for _ in range(n_dispatch_modes())]
    try:
        with disable_torch_function(), force_dispatch_keys(call.include, call.exclude | AUTOGRAD_AND_AUTOCAST):
            yield
    finally:
        STATE.open = before
        for mode in reversed(call.modes):
            push_dispatch_mode(mode)
        call.modes = []


@contextmanager
def above_autograd() -> Iterator[OnItsWay]:
    """Restore keys and modes of the caller inside `__torch_dispatch__`."""
    call = STATE.calls[-1]
    # Closed while a handler runs: functions that it calls must enter through `__torch_function__` again. An operator
    # that reaches a wrapper in another way would have no gradient, so `__torch_dispatch__` raises an error.
    modes, call.modes, STATE.open = call.modes, [], False
    for mode in reversed(modes):
        push_dispatch_mode(mode)
    try:
        with force_dispatch_keys(call.include, call.exclude), enable_torch_function():
            yield call
    finally:
        call.modes, STATE.open = modes, True
        # the enclosing `taken_apart` expects that no mode is active, and restores modes on its exit
        for _ in modes:
            pop_dispatch_mode()
