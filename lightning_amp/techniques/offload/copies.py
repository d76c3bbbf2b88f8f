"""Copy storages between a device and buffers of the host, and compare what came back with what had left."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_amp._torch import unseen
from lightning_amp.techniques.host_memory.copies import HostCopies
from lightning_amp.techniques.host_memory.host_pool import Buffer


class Copies(HostCopies):
    """Copies of storages in both directions."""

    def out(self, x: Tensor, buffer: Buffer) -> Any:
        """Copy a tensor's storage to a buffer; return the event of its end, None if it has ended."""
        storage = x.untyped_storage()
        with unseen():
            source = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage, 0, (storage.nbytes(),), (1,))
            return self.start([(source, _part(buffer, storage.nbytes()))], x.device, "out", buffer.last_read)

    def back(self, buffer: Buffer, whole: Tensor) -> Any:
        """Copy a buffer to a tensor of bytes; return the event of its end, None if it has ended."""
        with unseen():
            done = self.start([(_part(buffer, whole.numel()), whole)], whole.device, "back")
            buffer.last_read = done
            return done

    def digest(self, x: Tensor) -> Tensor:
        """Return a sum over the bytes of a contiguous tensor, on the device's current stream."""
        with unseen(), torch.no_grad():
            n_bytes, begin = x.numel() * x.element_size(), x.storage_offset() * x.element_size()
            empty = torch.empty(0, dtype=torch.uint8, device=x.device)
            return empty.set_(x.untyped_storage(), begin, (n_bytes,), (1,)).sum()

    def same(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
        """Whether pairs of digests are equal; waits for the device."""
        with unseen():
            return all(bool(one == other) for one, other in pairs)

    def finish(self, device: torch.device) -> None:
        """Wait for all copies of a device."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _part(buffer: Buffer, n_bytes: int) -> Tensor:
    assert buffer.memory is not None, "a storage with values has a buffer with memory"
    return buffer.memory[:n_bytes]
