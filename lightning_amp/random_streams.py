"""Save and restore the global random streams of Python, NumPy and torch."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_streams(device: torch.device | None = None) -> tuple[Any, ...]:
    """Return the random states of this process; for CUDA those of one device, or of all if CUDA is in use."""
    if device is not None:
        cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    else:
        # reading the state would initialise a device that is not in use yet
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def set_random_streams(states: tuple[Any, ...], device: torch.device | None = None) -> None:
    """Restore the states of `random_streams`, perhaps in another process with another device."""
    python, numpy, cpu, cuda = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if device is not None and cuda:
        torch.cuda.set_rng_state(cuda[0], device)
    elif cuda:
        torch.cuda.set_rng_state_all(cuda)


def equal_random_streams(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    """Whether two results of `random_streams` are equal."""
    (python, numpy, cpu, cuda), (python2, numpy2, cpu2, cuda2) = first, second
    if python != python2 or not np.array_equal(numpy[1], numpy2[1]) or numpy[2:] != numpy2[2:]:
        return False
    return torch.equal(cpu, cpu2) and len(cuda) == len(cuda2) and all(map(torch.equal, cuda, cuda2))


@contextmanager
def isolated_random_streams() -> Iterator[None]:
    """Restore the random states after the block, also after an error, unlike Lightning's version."""
    states = random_streams()
    try:
        yield
    finally:
        set_random_streams(states)


@contextmanager
def drawn_from(generators: Iterable[torch.Generator]) -> Iterator[None]:
    """Set the generators to another state in this context, as if they had drawn: fake operators draw no numbers."""
    before = [(generator, generator.get_state()) for generator in generators]
    try:
        for generator, _ in before:
            generator.manual_seed(generator.initial_seed() ^ 1)
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)
