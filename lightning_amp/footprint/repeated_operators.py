"""Count repeated operators once, with a multiplier: on fake tensors not every chunk needs to run."""

from collections.abc import Iterator
from contextlib import contextmanager

_times = [1]


@contextmanager
def standing_for(times: int) -> Iterator[None]:
    """What runs until the block ends would run so many times; within another such block, so many times each time."""
    _times.append(times * _times[-1])
    try:
        yield
    finally:
        _times.pop()


def times_now() -> int:
    """How many operators the one that runs now stands for, itself included."""
    return _times[-1]
