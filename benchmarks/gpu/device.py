"""The device that is measured: when it is done, what it has given out, how fast it multiplies, in which precision."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.lightning.strategy.hardware import take_workspaces


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """How numbers are kept and multiplied.

    Attributes:
        name: In tables.
        dtype: Of parameters and latents.
        autocast: What products run in; None for `dtype`.
        tf32: Whether float32 products may run in TF32.
        scale: What the loss is multiplied by before its backward pass.
        allowed: Relative error of a loss or gradient against float64 on the CPU that is rounding.
    """

    name: str
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    tf32: bool = False
    scale: float = 1.0
    allowed: float

    @contextmanager
    def computing(self, device: torch.device) -> Iterator[None]:
        """Compute so."""
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = self.tf32
        try:
            half = self.autocast or torch.bfloat16
            with torch.autocast(device.type, dtype=half, enabled=self.autocast is not None):
                yield
        finally:
            torch.set_float32_matmul_precision(before[0])
            torch.backends.cudnn.allow_tf32 = before[1]


FLOAT64 = Precision(name="float64", dtype=torch.float64, allowed=1e-10)
FLOAT32 = Precision(name="float32", allowed=1e-4)
TF32 = Precision(name="TF32", tf32=True, allowed=2e-2)
BF16 = Precision(name="bf16", autocast=torch.bfloat16, allowed=1e-1)
FP16 = Precision(name="fp16", autocast=torch.float16, scale=2.0**8, allowed=2e-2)
PRECISIONS = (FLOAT64, FLOAT32, TF32, BF16, FP16)


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(step: Callable[[], object], device: torch.device) -> float:
    """What one call takes, with what it gives the device to do."""
    wait(device)
    begin = time.perf_counter()
    step()
    wait(device)
    return time.perf_counter() - begin


def median_seconds(step: Callable[[], object], device: torch.device, *, most: int, within: float) -> float:
    """Median of some calls after a first one that does not count.

    Args:
        most: Calls that count; two at least where there may be more.
        within: Seconds for all of them.
    """
    first = seconds_of(step, device)
    times = min(max(2, int(within / max(first, 1e-4)) - 1), most)
    return median(seconds_of(step, device) for _ in range(times))


class Allocated:
    """Bytes that a device gives out from when this is made: torch's allocator on CUDA, else the library's own count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        if device.type == "cuda":
            take_workspaces(device)
            torch.cuda.empty_cache()
            self._before = torch.cuda.memory_allocated(device)

    def begin(self, held: Any) -> None:
        """Count from now on; `held` are the tensors that are there."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        self._meter = LiveBytes()
        self._meter.__enter__()
        self._meter.watch(held)

    def end(self) -> int:
        """Most bytes at once since `begin`, with those that are held."""
        wait(self._device)
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        self._meter.__exit__(None, None, None)
        return self._meter.peak

    def peak_of(self, step: Callable[[], object], held: Any) -> int:
        """Most bytes at once during a call."""
        self.begin(held)
        step()
        return self.end()


def free_bytes(device: torch.device) -> int | None:
    """Bytes that a CUDA device has left, with those that torch keeps for itself; None elsewhere."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def matmul_rate(precision: Precision, device: torch.device, *, n: int) -> float:
    """FLOP/s of products of two square matrices [n, n] of random numbers."""
    a, b = torch.randn(2, n, n, device=device, dtype=precision.dtype)
    with precision.computing(device), torch.no_grad():
        return 2 * n**3 / median_seconds(lambda: a @ b, device, most=10, within=1.0)
