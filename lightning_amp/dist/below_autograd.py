"""Call operators so that a subclass of Tensor sees them before autograd and autocast take them apart."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning_amp.dist._torch import (
    AUTOGRAD_AND_AUTOCAST,
    disable_torch_function,
    enable_torch_function,
    excluded_keys,
    force_dispatch_keys,
    included_keys,
    n_dispatch_modes,
    pop_dispatch_mode,
    push_dispatch_mode,
)


class _State(threading.local):
    """The calls of one thread that are on their way: their dispatch keys, and the modes that were on."""

    def __init__(self) -> None:
        self.keys: list[tuple[Any, Any]] = []
        self.modes: list[list[Any]] = []
        self.composite = False


STATE = _State()


def below_autograd(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operator so that it arrives at `__torch_dispatch__` whole and with its schema.

    A dispatch mode, such as a fake mode or a meter, is to see what is computed on parts, so it is off until then.
    """
    include, exclude = included_keys(), excluded_keys()
    modes = [pop_dispatch_mode() for _ in range(n_dispatch_modes())]
    STATE.keys.append((include, exclude))
    STATE.modes.append(modes)
    try:
        with disable_torch_function(), force_dispatch_keys(include, exclude | AUTOGRAD_AND_AUTOCAST):
            return func(*args, **kwargs)
    finally:
        STATE.keys.pop()
        STATE.modes.pop()
        for mode in reversed(modes):
            push_dispatch_mode(mode)


@contextmanager
def above_autograd() -> Iterator[None]:
    """Inside `__torch_dispatch__`: keys and modes as they were when the operator was called."""
    include, exclude = STATE.keys[-1]
    with force_dispatch_keys(include, exclude), enable_torch_function(), _modes_on():
        yield


@contextmanager
def taken_apart() -> Iterator[None]:
    """Inside `above_autograd`: autograd off again, for the operators that a composite one consists of."""
    include, exclude = STATE.keys[-1]
    outermost, STATE.composite = not STATE.composite, True
    try:
        with disable_torch_function(), force_dispatch_keys(include, exclude | AUTOGRAD_AND_AUTOCAST):
            yield
    finally:
        STATE.composite = not outermost


_NOTHING: AbstractContextManager[None] = nullcontext()


def _modes_on() -> AbstractContextManager[None]:
    modes = STATE.modes[-1]
    return _pushed(modes) if modes else _NOTHING


@contextmanager
def _pushed(modes: list[Any]) -> Iterator[None]:
    STATE.modes.append([])
    for mode in reversed(modes):
        push_dispatch_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            pop_dispatch_mode()
        STATE.modes.pop()
