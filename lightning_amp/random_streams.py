"""Save, compare and restore the global random streams of Python, NumPy and torch."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import eq
from typing import Any

import numpy as np
import torch


def host_streams() -> tuple[Any, Any]:
    """Return the random states of Python and NumPy, without those of torch."""
    return random.getstate(), np.random.get_state()


def set_host_streams(states: tuple[Any, Any]) -> None:
    """Restore the states of `host_streams`."""
    random.setstate(states[0])
    np.random.set_state(states[1])


def seed_streams(seed: int) -> None:
    """Seed the random streams of Python, NumPy and torch; 0 leaves them as they are."""
    if seed:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)


def random_streams(device: torch.device | None = None) -> tuple[Any, ...]:
    """Return the random states of this process; for CUDA those of one device, or of all if CUDA is in use."""
    if device is not None:
        cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    else:
        # reading the state would initialise a device that is not in use yet
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return *host_streams(), torch.get_rng_state(), cuda


def set_random_streams(states: tuple[Any, ...], device: torch.device | None = None) -> None:
    """Restore the states of `random_streams`, perhaps in another process with another device."""
    python, numpy, cpu, cuda = states
    set_host_streams((python, numpy))
    torch.set_rng_state(cpu)
    if device is not None and cuda:
        torch.cuda.set_rng_state(cuda[0], device)
    elif cuda:
        torch.cuda.set_rng_state_all(cuda)


EQUAL: dict[str, Callable[[Any, Any], bool]] = {
    "random": eq,
    "numpy.random": lambda one, other: all(map(np.array_equal, one, other)),
    "torch.random": torch.equal,
    "torch.cuda": lambda one, other: len(one) == len(other) and all(map(torch.equal, one, other)),
}
"""Functions that compare two states of each stream, in their order."""


def drawn_between(first: tuple[Any, ...], second: tuple[Any, ...]) -> list[str]:
    """Return the streams that differ between two results of `random_streams`, or of `host_streams`."""
    streams = zip(EQUAL.items(), first, second, strict=False)
    return [name for (name, equal), one, other in streams if not equal(one, other)]


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
