"""Two ways to read the memory in use: count live tensors, or ask the CUDA allocator."""

from typing import Any, Protocol

import torch

from lightning_amp.lightning.callbacks.live_bytes import LiveBytes


class Meter(Protocol):
    """Something that knows the bytes in use."""

    def start(self, held: Any) -> None:
        """Begin, with tensors that are alive already, in any nesting of the containers of a batch."""
        ...

    def read(self) -> tuple[int, int]:
        """Bytes in use now, and most bytes in use since `start`."""
        ...

    def stop(self) -> None:
        """Let go of what `start` took."""
        ...


class TensorMeter:
    """Bytes of live tensors, on any device."""

    def __init__(self) -> None:
        self._live = LiveBytes()

    def start(self, held: Any) -> None:
        """Count these and all that are made from now on."""
        self._live.watch(held)
        self._live.__enter__()  # type: ignore[no-untyped-call]

    def read(self) -> tuple[int, int]:
        """Bytes alive, and their peak."""
        return self._live.current, self._live.peak

    def stop(self) -> None:
        """Look no further."""
        self._live.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class CudaMeter:
    """Bytes that torch's allocator has given out on one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self, held: Any) -> None:
        """Let the peak begin here; what is held is in the allocator's books already."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> tuple[int, int]:
        """Bytes given out, and their peak."""
        return torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)

    def stop(self) -> None:
        """Nothing was taken."""
