"""Copy tensors between a device and host memory: at once on a CPU, on streams of their own on a GPU."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class HostCopies:
    """Copies in both directions; a direction's copies run one after the other."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, str], Any] = {}

    def start(
        self, pairs: Iterable[tuple[Tensor, Tensor]], device: torch.device, direction: str, after: Any = None
    ) -> Any:
        """Copy from the first to the second of each pair; return the event of the end, None if it has ended.

        Args:
            direction: "out" to the host, or "back".
            after: Event that the copies wait for; None for none.
        """
        if device.type != "cuda":
            for source, target in pairs:
                target.copy_(source)
            return None
        stream = self._streams.get((device, direction))
        if stream is None:
            stream = self._streams[device, direction] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # what is copied is made, or its memory is free, when the work so far has ended
        stream.wait_stream(torch.cuda.current_stream(device))
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            return stream.record_event()

    def wait(self, done: Any, device: torch.device) -> None:
        """Let the device's current stream wait for a copy; the process does not wait."""
        torch.cuda.current_stream(device).wait_event(done)
