"""Save and restore the global random streams of Python, NumPy and torch."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_streams() -> tuple[Any, ...]:
    """Where all streams of this process are; those of CUDA once it is in use."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def set_random_streams(states: tuple[Any, ...]) -> None:
    """Go on from where `random_streams` was."""
    python, numpy, cpu, cuda = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)


@contextmanager
def isolated_random_streams() -> Iterator[None]:
    """Let the streams go on as if nothing had been drawn, also after an error; Lightning's own leaves that out."""
    states = random_streams()
    try:
        yield
    finally:
        set_random_streams(states)
