"""Define `DeviceMemory`: what a process takes of a GPU beside the tensors of its step, and what is left to these.

    budget of a device = context + NCCL's buffers + reserved          NCCL's only with several ranks
    reserved           = cuBLAS's workspaces + tensors + fragments

What is reserved for a counted step is replayed (footprint/trace/). For other steps, and while techniques are compared,
tensors may take `TENSORS_SHARE` of what is left of the device.

Defaults, where `lightning-amp calibrate` has measured nothing: the context is that of an H100 and an H200 with torch's
kernels (docs/reports/gpu.md). cuBLAS has a workspace of 32 MiB for each of two threads, forward and backward, the
largest of torch's defaults (aten/src/ATen/cuda/CUDABlas.cpp). NCCL's buffers are an assumption: 4 MiB
(its documented NCCL_BUFFSIZE) for each of 32 channels and two directions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_amp.errors import PlanError
from lightning_amp.quantities import format_bytes, memory_of_ranks

CONTEXT_BYTES = 749 * 2**20
"""Bytes of CUDA's context with torch's kernels, as measured on an H100 and an H200 (docs/reports/gpu.md)."""
WORKSPACES = (32 * 2**20, 32 * 2**20)
"""Bytes of cuBLAS's workspaces, of the forward and of the backward pass."""
NCCL_BYTES = 2 * 32 * 4 * 2**20
"""Bytes of NCCL's buffers for a communicator: directions, channels, bytes of a buffer."""
REPORTED_SHARE = 0.985
"""Share of the GiB of a data sheet that CUDA reports."""
TENSORS_SHARE = 0.97
"""Usable share of CUDA's free memory: on an H100 steps of 95 % ran, and steps of 99 % ran out of memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Memory of a GPU, and what a process takes of it beside tensors.

    Attributes:
        total_bytes: What CUDA reports.
        context_bytes: CUDA's context with torch's kernels.
        workspaces: Bytes of cuBLAS's workspaces, which torch's allocator reserves.
        nccl_bytes: NCCL's buffers, in runs of several ranks.
        measured: Which of `context_bytes` and `nccl_bytes` were measured.
    """

    total_bytes: int
    context_bytes: int = CONTEXT_BYTES
    workspaces: tuple[int, ...] = WORKSPACES
    nccl_bytes: int = NCCL_BYTES
    measured: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Validate the numbers.

        Raises:
            PlanError: A number is out of range.
        """
        sizes = (self.total_bytes, self.context_bytes, self.nccl_bytes, *self.workspaces)
        if not all(type(n) is int and n >= 0 for n in sizes) or self.total_bytes == 0:
            raise PlanError(f"{self!r} is invalid; bytes are whole numbers of 0 or more, in all above 0: correct them")

    @classmethod
    def of_sheet(cls, gib: int) -> "DeviceMemory":
        """Return the memory of a GPU with `gib` GiB by its data sheet."""
        return cls(total_bytes=int(REPORTED_SHARE * gib * 2**30))

    @classmethod
    def of_json(cls, plain: Mapping[str, Any]) -> "DeviceMemory":
        """Return the memory from values of JSON, which has lists for tuples."""
        values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in plain.items()}
        return cls(**values)

    def bytes_outside_tensors(self, ranks: int) -> int:
        """Return what a process of a run with this many ranks takes, outside of torch's allocator."""
        return self.context_bytes + self.nccl_of(ranks)

    def nccl_of(self, ranks: int) -> int:
        """Return the bytes of NCCL's buffers in a run with this many ranks."""
        return self.nccl_bytes if ranks > 1 else 0

    def tensor_bytes(self, budget: int, ranks: int) -> int:
        """Return the bytes that tensors may take if a process may take `budget` bytes of the device.

        Raises:
            PlanError: Nothing is left to tensors.
        """
        taken = self.bytes_outside_tensors(ranks) + sum(self.workspaces)
        if budget <= taken:
            raise PlanError(
                f"a budget of {format_bytes(budget)} leaves nothing to tensors on a GPU, where CUDA's context takes"
                f" {format_bytes(self.context_bytes)}, NCCL {format_bytes(self.nccl_of(ranks))} and cuBLAS's workspaces"
                f" {format_bytes(sum(self.workspaces))}; give more than {format_bytes(taken)}, or rates of a CPU for a"
                " plan of tensors alone"
            )
        return int(TENSORS_SHARE * (budget - taken))


def named_memory(memory: DeviceMemory, device_memory: Any, devices: int) -> tuple[int, ...]:
    """Return what a process may take of each device: what was named, by default all of it; as `memory_of_ranks`."""
    return (memory.total_bytes,) if device_memory is None else memory_of_ranks(device_memory, devices)


def memory_of_tensors(
    memory: DeviceMemory | None, device_memory: Any, devices: int, *, device: str
) -> tuple[Any, tuple[str, ...]]:
    """Return the budget of tensors that follows from the requested memory of a device, and a note on it.

    Args:
        memory: Memory of the device; None for a device whose tensors alone count.
        device_memory: As in `lightning_amp.plan`.
        devices: Number of ranks.
        device: Its name.
    """
    if memory is None:
        return device_memory, ()
    found = [memory.tensor_bytes(n, devices) for n in named_memory(memory, device_memory, devices)]
    budget = found[0] if len(found) == 1 else found
    if device_memory is not None:
        return budget, ()
    return budget, (
        f"the budget is the memory of {device}, {format_bytes(memory.total_bytes)}; --device-memory, or device_memory=,"
        " sets another",
    )
