"""Manage the random numbers of a micro-batch: torch's, NumPy's and Python's state goes from stage to stage.

So a draw depends on the seed alone, and neither on the number of stages nor on the order in which a rank runs passes.

Known limit: generators that a module or a data set keeps for itself.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_draws(seed: int) -> None:
    """Begin anew."""
    # not torch.manual_seed: it writes down its stack for every kind of device that is not in use, 3 ms a micro-batch
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def draws_stay() -> Iterator[None]:
    """Go on afterwards as if nothing had been drawn."""
    before = packed_draws()
    try:
        yield
    finally:
        go_on_with(before)


def packed_draws() -> Tensor:
    """Where the random numbers are: bytes of one length."""
    version, words, gauss = random.getstate()
    _, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    numbers = np.array([version, place, has_gauss, gauss is not None], np.int64)
    others = [np.array(words, np.uint32), np.asarray(keys), numbers, np.array([gauss or 0.0, cached])]
    packed = bytearray(b"".join(part.tobytes() for part in others))
    return torch.cat([torch.get_rng_state(), torch.frombuffer(packed, dtype=torch.uint8)])


def go_on_with(packed: Tensor) -> None:
    """Let the random numbers be where they were when `packed_draws` was called, maybe on another rank."""
    n = len(torch.get_rng_state())
    torch.set_rng_state(packed[:n].clone())
    rest = packed[n:].numpy().tobytes()
    floats, numbers = np.frombuffer(rest[-16:], np.float64), np.frombuffer(rest[-48:-16], np.int64)
    words = np.frombuffer(rest[:-48], np.uint32)
    version, place, has_gauss, drawn = map(int, numbers)
    own = len(words) - 624
    state: Any = (version, tuple(map(int, words[:own])), float(floats[0]) if drawn else None)
    random.setstate(state)
    np.random.set_state(("MT19937", words[own:], place, has_gauss, float(floats[1])))
