"""On Linux the memory that a training step frees is kept for the next one, within a bound.

glibc gives memory at the end of its heap back to the system as soon as twice the largest block that was freed is idle
there, and every page of it costs a fault when the next stratum, or the next step, takes it again: some per cent of a
step on a CPU. Live tensors are the same; what the process holds beside them grows by no more than the bound.
"""

import ctypes
import sys

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_BLOCK = 2**25
"""Blocks from here on go back to the system at once, as ever: glibc's own upper limit for them."""
MOST, SHARE = 2**30, 16
"""Bytes that are kept at most, and which part of a rank's memory."""


def keep_freed_memory(device: torch.device, memory: int) -> bool:
    """Keep it from now on in this process; whether that can be done here.

    Args:
        device: Of the rank; others than a CPU have an allocator of torch's own.
        memory: Bytes that the rank may use.
    """
    if device.type != "cpu" or not sys.platform.startswith("linux"):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    kept = min(MOST, memory // SHARE)
    return set_option is not None and bool(
        set_option(M_TRIM_THRESHOLD, kept) and set_option(M_MMAP_THRESHOLD, LARGEST_BLOCK)
    )
