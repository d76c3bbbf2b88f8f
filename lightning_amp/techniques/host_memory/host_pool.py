"""Keep buffers of host memory for tensors that left the device; the first step fills the pool, later steps reuse it.

A buffer is given to the tensor that fits it best, so that a step of the same sizes allocates nothing. If the device is
a GPU, buffers are page-locked, and their sizes powers of two, for torch takes as much for any size. Without values
(fake tensors), buffers have sizes only, and `n_bytes` is what a real run would allocate. Buffers are allocated outside
of all dispatch modes: a count of the device's bytes does not see them.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_amp._torch import unseen
from lightning_amp.errors import ModelError
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.host_memory.limit import page_locked


@dataclass(eq=False, slots=True)
class Buffer:
    """One buffer.

    Attributes:
        n_bytes: Its size, at least that of the tensor that it holds.
        memory: uint8 [n_bytes] on the host; None for fake tensors.
        last_read: Event after the last copy from it; None on a CPU.
    """

    n_bytes: int
    memory: Tensor | None
    last_read: Any = None


class HostPool:
    """Buffers of host memory.

    Attributes:
        n_bytes: Bytes of all buffers.
        limit: Most bytes that it may allocate; None for no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self.n_bytes, self.limit = 0, limit
        self._free = list[Buffer]()

    def take(self, n_bytes: int, *, real: bool, pinned: bool) -> Buffer:
        """Return a buffer of at least so many bytes; `pinned` ones are page-locked.

        Raises:
            ModelError: The pool would exceed its limit.
        """
        n_bytes = page_locked(n_bytes) if pinned else n_bytes
        place = bisect_left(self._free, n_bytes, key=_size)
        found = self._free.pop(place) if place < len(self._free) else None
        if found is not None and (found.memory is not None) == real:
            return found
        # a count may begin with fake tensors and go on with values: their buffers are counted already
        size, more = (n_bytes, n_bytes) if found is None else (found.n_bytes, 0)
        if real and self.limit is not None and self.n_bytes + more > self.limit:
            raise ModelError(
                f"offload: the tensors of this step need {format_bytes(self.n_bytes + more)} of host memory or more,"
                f" and may have {format_bytes(self.limit)}; raise host_memory=, take smaller batches, or leave offload"
                " out"
            )
        self.n_bytes += more
        return _made(size, real=real, pinned=pinned)

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back."""
        insort(self._free, buffer, key=_size)


def _made(n_bytes: int, *, real: bool, pinned: bool) -> Buffer:
    memory = None
    if real:
        with unseen(), torch.device("cpu"), torch.inference_mode(False):
            memory = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=pinned)
    return Buffer(n_bytes, memory)


def _size(buffer: Buffer) -> int:
    return buffer.n_bytes
