"""Call operators so that a subclass of Tensor sees them before autograd and autocast take them apart."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning_amp._torch import disable_torch_function
from lightning_amp.dist._torch import (
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
    """A call on its way down to `__torch_dispatch__`.

    Attributes:
        include, exclude: Dispatch keys of the caller.
        modes: Dispatch modes of the caller while they are off.
        n_operators: How many operators have arrived.
        plan, tensors: The plan of the last operator, if it has one, and its tensors.
    """

    include: Any
    exclude: Any
    modes: list[Any] = field(default_factory=list)
    n_operators: int = 0
    plan: Any = None
    tensors: list[Any] = field(default_factory=list)


class _AutogradState(threading.local):
    """The calls of one thread, innermost last, and whether operators may arrive at `__torch_dispatch__`."""

    def __init__(self) -> None:
        self.calls: list[OnItsWay] = []
        self.open = False


STATE = _AutogradState()


def below_autograd(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, OnItsWay]:
    """Call an operator so that it arrives at `__torch_dispatch__` whole and with its schema."""
    call = OnItsWay(included_keys(), excluded_keys())
    STATE.calls.append(call)
    try:
        with taken_apart():
            return func(*args, **kwargs), call
    finally:
        STATE.calls.pop()


@contextmanager
def taken_apart() -> Iterator[None]:
    """Autograd and the dispatch modes are off: modes, such as a fake mode, see only what is computed on parts."""
    call = STATE.calls[-1]
    # inside another call, as of an operator that is decomposed, dispatch is allowed already and stays so
    before, STATE.open = STATE.open, True
    # A mode, as a fake or a counting one, would get the operator first, with wrappers whose global shapes are no
    # memory. It sees the operators on parts, in `above_autograd`, where modes are put back.
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
    """Inside `__torch_dispatch__`: keys and modes as they were when the operator was called."""
    call = STATE.calls[-1]
    # Closed while a handler runs: what it calls has to enter by `__torch_function__` again. An operator that reaches
    # a wrapper without it would have no gradient, and `__torch_dispatch__` refuses it.
    modes, call.modes, STATE.open = call.modes, [], False
    for mode in reversed(modes):
        push_dispatch_mode(mode)
    try:
        with force_dispatch_keys(call.include, call.exclude), enable_torch_function():
            yield call
    finally:
        call.modes, STATE.open = modes, True
        # the enclosing block expects no modes, and restores them when it ends
        for _ in modes:
            pop_dispatch_mode()
