"""Save and restore the global random streams of Python, NumPy and torch."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_streams(device: torch.device | None = None) -> tuple[Any, ...]:
    """Where the streams of this process are: of CUDA those of one device, or all once it is in use."""
    if device is not None:
        cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    else:
        # a device that was not used yet would be initialised by the question
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def set_random_streams(states: tuple[Any, ...], device: torch.device | None = None) -> None:
    """Go on from where `random_streams` was, perhaps in another process with another device."""
    python, numpy, cpu, cuda = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if device is not None and cuda:
        torch.cuda.set_rng_state(cuda[0], device)
    elif cuda:
        torch.cuda.set_rng_state_all(cuda)


@contextmanager
def isolated_random_streams() -> Iterator[None]:
    """Let the streams go on as if nothing had been drawn, also after an error; Lightning's own leaves that out."""
    states = random_streams()
    try:
        yield
    finally:
        set_random_streams(states)
