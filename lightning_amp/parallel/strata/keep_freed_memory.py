"""Memory that a CPU's work frees and takes again: whether it stays with the process in between.

The C library of Linux gives freed memory back to the system from a size on, and a page that is taken anew costs about
as long as a product of matrices that fills it. It raises that size by itself when a larger block is freed, to 32 MiB at
most, and keeps twice as much at an end of its memory. Here it is told so before strata take and free their tensors one
after the other. Where another library is in charge nothing happens.
"""

import numpy as np
import torch

LARGEST = 2**25 - 2**16
"""Bytes of a block whose size the library still learns from."""


def keep_freed_memory(device: torch.device) -> None:
    """Let the process keep the memory of freed tensors, up to 64 MiB; of a CPU only."""
    if device.type == "cpu":
        # never written to, so no memory is taken; not torch's, because bytes of tensors are counted
        np.empty(LARGEST, dtype=np.uint8)
