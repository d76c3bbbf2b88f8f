"""Parse and print numbers, byte sizes and durations: "24GiB", 25769803776; "1.73 s"."""

import re
from collections.abc import Sequence
from typing import TypeGuard

from lightning_amp.errors import PlanError

_BYTES = {"": 1, "b": 1}
_BYTES |= {f"{p}b": 1000 ** (i + 1) for i, p in enumerate("kmgt")}
_BYTES |= {f"{p}ib": 1024 ** (i + 1) for i, p in enumerate("kmgt")}
_BYTES |= {p: 1024 ** (i + 1) for i, p in enumerate("kmgt")}
_SECONDS = (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3))
SMALLEST = 2**17
"""A smaller number in a text without a unit raises an error: no device has so few bytes, so the unit is missing."""
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*\Z")


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether `value` is an int or float; bool is excluded, nan and infinity are included."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def parse_bytes(text: str | int | float) -> int:
    """Read a size in bytes.

    Args:
        text: A number of bytes, or a number with a unit: KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB or
            a bare K, M, G, T (powers of 1024). Case does not matter. A text without a unit must be at least `SMALLEST`.

    Raises:
        PlanError: Not a size, or not greater than zero.
    """
    match = _SIZE.match(str(text))
    unit = match.group(2).lower() if match else "?"
    if match is None or unit not in _BYTES:
        raise PlanError(
            f"{text!r} is not a memory size; write a number of bytes, or a number with one of"
            ' KB, MB, GB, TB, KiB, MiB, GiB, TiB, for example "24GiB"'
        )
    n_bytes = float(match.group(1)) * _BYTES[unit]
    if not unit and isinstance(text, str) and 1 <= n_bytes < SMALLEST:
        raise PlanError(
            f"the memory size {text!r} has no unit and would be bytes; add the unit, for example"
            f" '{match.group(1)}GiB' or '{match.group(1)}MiB'"
        )
    if not 1 <= n_bytes < float("inf"):
        raise PlanError(f"a memory size must be larger than zero, found {text!r}; write for example '24GiB'")
    return int(n_bytes)


def memory_of_ranks(device_memory: str | int | Sequence[str | int], devices: int | None = None) -> tuple[int, ...]:
    """Return the bytes of every device: one number if all have the same, else one per rank.

    Args:
        device_memory: Size as for `parse_bytes`, or one per rank, as a list or as "24GiB,80GiB".
        devices: Number of ranks; None skips the check of the list's length.

    Raises:
        PlanError: Not a size, or the list has another length than `devices`.
    """
    listed = device_memory.split(",") if isinstance(device_memory, str) else device_memory
    if isinstance(listed, int | float):
        return (parse_bytes(listed),)
    if not isinstance(listed, Sequence) or not listed:
        raise PlanError(
            f"device_memory={device_memory!r} is not supported; allowed is a size, or a list of one for each device"
        )
    found = tuple(map(parse_bytes, listed))
    # "24GiB" is one size for all devices, ["24GiB"] is a list for one device
    single = isinstance(device_memory, str) and len(found) == 1
    if devices is not None and len(found) != devices and not single:
        raise PlanError(
            f"device_memory={device_memory!r} has {len(found)} sizes, and there are {devices} devices; give one for"
            " each, or one size for all"
        )
    return found if len({*found}) > 1 else found[:1]


def format_bytes(n_bytes: float) -> str:
    """Format a size with three digits and a binary unit, in at most ten characters."""
    size, unit = float(n_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1000:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:.{max(0, 3 - len(str(int(abs(size)))))}f} {unit}"


def format_seconds(seconds: float) -> str:
    """Format a duration with three digits, in at most eight characters; from two minutes on in minutes or hours."""
    unit, size = next(((u, n) for u, n in _SECONDS if seconds >= (2 * n if n > 1 else 0.9995 * n)), ("us", 1e-6))
    value = seconds / size
    return f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"
