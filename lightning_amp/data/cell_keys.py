"""Hashes integers and text to the same number in every process, and makes seeds of random numbers of them."""

import zlib

import numpy as np
from numpy.typing import NDArray


def mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit integers one to one, neighbours included (SplitMix64, Steele et al. 2014)."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def hash_integers(*values: int) -> int:
    """Hash a few integers of any size to one in [0, 2**63), the same on every machine and rank."""
    state = np.zeros(1, dtype=np.uint64)  # an array of one: numpy warns when scalars wrap, arrays just wrap
    for value in values:
        state = mix(state ^ np.array([value % 2**64], dtype=np.uint64))
    return int(state[0] >> np.uint64(1))


def hash_text(text: str) -> int:
    """Hash a name to a 32-bit integer; unlike `hash` it is the same in every process."""
    return zlib.crc32(text.encode())


def draw_keys(draw_key: int, modality: str, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the seed of each cell's random numbers, in [0, 2**31), [cell]: a function of step, modality and row only.

    It does not depend on the position in the batch or the rank, so a batch split over any number of ranks draws
    the same numbers. A cell twice in one step draws the same numbers twice.

    Args:
        draw_key: names the step
        modality: cells of different modalities draw differently
        rows: [cell], of the file
    """
    step = np.uint64(hash_integers(draw_key, hash_text(modality)))
    return (mix(mix(rows.astype(np.uint64)) ^ step) >> np.uint64(33)).astype(np.int64)
