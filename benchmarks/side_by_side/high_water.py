"""The most memory that this process has held since a moment, from the kernel's own high-water mark (Linux)."""

import ctypes
import gc
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_HIGH_WATER = "5"


class HighWater:
    """Counts from when it is made; freed memory is given back to the system first."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        CLEAR.write_text(RESET_HIGH_WATER)
        self._start = _bytes("VmRSS")

    def above_start(self) -> int:
        """Bytes."""
        return _bytes("VmHWM") - self._start


def _bytes(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
