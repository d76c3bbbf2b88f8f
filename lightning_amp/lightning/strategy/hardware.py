"""Measure the device of a rank: usable memory, products per second; and set CUDA's allocator, also to a budget."""

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from lightning_amp._torch import ALLOCATOR_VARIABLES, set_allocator
from lightning_amp.costs.device_memory import TENSORS_SHARE, DeviceMemory
from lightning_amp.costs.device_rates import Rates
from lightning_amp.errors import PlanError
from lightning_amp.footprint.trace.allocator_settings import AllocatorSettings, rounded
from lightning_amp.lightning._compat import update_properties
from lightning_amp.techniques.host_memory.limit import free_bytes


def device_budget(device: torch.device, *, node_ranks: int) -> int:
    """Return the bytes of tensors that one rank may have; on CPU the ranks of a node share its memory."""
    if device.type == "cuda":
        return int(TENSORS_SHARE * (reservable_bytes(device) - sum(take_workspaces(device))))
    return int(psutil.virtual_memory().total) // max(1, node_ranks)


def reservable_bytes(device: torch.device) -> int:
    """Return the bytes that torch's allocator may reserve on a GPU, with those that it has reserved.

    They exclude CUDA's context and other processes, which take half a gigabyte and more.
    """
    take_workspaces(device)
    return int(torch.cuda.mem_get_info(device)[0]) + int(torch.cuda.memory_reserved(device))


def memory_beside(device: torch.device, rates: Rates) -> DeviceMemory | None:
    """Return what a process takes of a GPU beside tensors, as far as `rates` has measured it; None on a CPU."""
    if device.type != "cuda":
        return None
    total = int(torch.cuda.get_device_properties(device).total_memory)
    known = rates.memory or DeviceMemory(total_bytes=total)
    return replace(known, total_bytes=total, workspaces=take_workspaces(device))


def measured_memory(device: torch.device) -> DeviceMemory:
    """Measure what is taken of a GPU outside of torch's allocator, once kernels have run; also by other processes."""
    workspaces, (free, total) = take_workspaces(device), torch.cuda.mem_get_info(device)
    taken = int(total - free - torch.cuda.memory_reserved(device))
    return DeviceMemory(total_bytes=int(total), context_bytes=taken, workspaces=workspaces, measured=("context_bytes",))


def has_room(device: torch.device, module: nn.Module) -> bool:
    """Whether the memory of a device that is free holds the parameters of a module on the host."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return sum(parameter.nbytes for parameter in module.parameters() if parameter.device != device) <= free


def all_but_parameters_to(device: torch.device, module: nn.Module) -> None:
    """Move buffers, states of metrics and parameters without dims, which are not sharded, to a device."""
    kept = {id(parameter) for parameter in module.parameters() if parameter.dim()}
    whole: Any = module
    whole._apply(lambda tensor: tensor if id(tensor) in kept else tensor.to(device))
    update_properties(module, device=device)


def allocator_settings() -> AllocatorSettings | str:
    """Return the settings of CUDA's allocator in this process, or why it is not modelled with them."""
    texts = {text for name in ALLOCATOR_VARIABLES if (text := os.environ.get(name))}
    if len(texts) > 1:
        return f"the allocator has different settings in {' and '.join(ALLOCATOR_VARIABLES)}"
    try:
        # without settings segments grow (`let_segments_grow`)
        return AllocatorSettings.parse(texts.pop()) if texts else AllocatorSettings()
    except PlanError as error:
        return str(error)


def least_budget(device: torch.device, *, node_ranks: int, n_ranks: int) -> int:
    """Return the least memory of the ranks, because others may use the GPU of one of them; a collective on CUDA.

    It is that of tensors on a CPU, and what torch's allocator may reserve on a GPU. Ranks on one GPU share it equally.
    """
    own = reservable_bytes(device) if device.type == "cuda" else device_budget(device, node_ranks=node_ranks)
    if device.type != "cuda" or n_ranks == 1:
        return own
    mine = own, str(torch.cuda.get_device_properties(device).uuid)
    everyones = [mine] * n_ranks
    dist.all_gather_object(everyones, mine)
    ranks_on = Counter(gpu for _, gpu in everyones)
    return min(n_bytes // ranks_on[gpu] for n_bytes, gpu in everyones)


def host_room(device: torch.device, module: nn.Module, *, node_ranks: int, n_ranks: int) -> int:
    """Return what a rank may take of the host's free memory: the least of the ranks; a collective of several.

    Parameters that are on the host of a GPU count as free: they go to the GPU, or shards take their place.
    """
    own = free_bytes(node_ranks)
    if device.type != "cpu":
        own += sum(parameter.nbytes for parameter in module.parameters() if parameter.device.type == "cpu")
    everyones = [own] * n_ranks
    if n_ranks > 1:
        dist.all_gather_object(everyones, own)
    return min(everyones)


def hold_budget(device: torch.device, budget: int) -> Callable[[], None]:
    """Let CUDA's allocator refuse what exceeds a budget of tensors; return an undo. On a CPU it does nothing.

    The allocator counts what it has reserved. So it may have the workspaces too, and the share that fragments take:
    it may have what `device_budget` derives the same budget from.
    """
    if device.type != "cuda":
        return lambda: None
    before = torch.cuda.get_per_process_memory_fraction(device)
    total = int(torch.cuda.get_device_properties(device).total_memory)
    allowed = budget / TENSORS_SHARE + sum(take_workspaces(device))
    torch.cuda.set_per_process_memory_fraction(min(before, allowed / total), device)
    return partial(torch.cuda.set_per_process_memory_fraction, before, device)


@cache
def take_workspaces(device: torch.device) -> tuple[int, ...]:
    """Let cuBLAS allocate its workspaces, at the first product of each thread; return bytes (forward, backward)."""
    before = int(torch.cuda.memory_allocated(device))
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(8, 8, device=device, requires_grad=True)
        y = (x @ x).sum()
        # without the two tensors
        forward = int(torch.cuda.memory_allocated(device)) - before - sum(rounded(z.nbytes) for z in (x, y))
        y.backward()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    del x, y
    return max(0, forward), max(0, int(torch.cuda.memory_allocated(device)) - before - forward)


def let_segments_grow(device: torch.device) -> None:
    """Enable expandable segments of CUDA's allocator, unless the environment configures the allocator.

    Otherwise segments of one size stay reserved for tensors of that size. Under recomputation 12.3 GiB were reserved
    while 7.5 were used at once (docs/reports/gpu.md), and a step whose tensors fit ran out of memory.
    """
    if device.type == "cuda" and not any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
        set_allocator("expandable_segments:True")


SPEED_S, WINDOWS, SPEED_SIZE = 1.0, 4, 384
"""Seconds of a window, number of windows, and rows of the matrix."""


def measured_speeds(device: torch.device, n_ranks: int) -> tuple[float, ...]:
    """Measure the matrix products per second of every rank, relative to the fastest; a collective.

    All ranks compute at the same time, as in a step, so that ranks that share a device or cores slow each other down.
    The result is the median over several windows of the relative speeds in each window.
    """
    if n_ranks == 1:
        return (1.0,)
    matrix = torch.ones(SPEED_SIZE, SPEED_SIZE, device=device)
    matrix @ matrix

    def product() -> None:
        matrix @ matrix
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    everyones: list[list[int]] = [[]] * n_ranks
    dist.barrier()
    dist.all_gather_object(everyones, done_in_windows(product, SPEED_S, WINDOWS))
    by_window = [[done / max(window) for done in window] for window in zip(*everyones, strict=True)]
    speeds = [median(ratios) for ratios in zip(*by_window, strict=True)]
    return tuple(speed / max(speeds) for speed in speeds)


def done_in_windows(
    work: Callable[[], object], seconds: float, windows: int, clock: Callable[[], float] = time.perf_counter
) -> list[int]:
    """Count how often `work` runs in each window of `seconds`; at least 1. The first window is discarded.

    A container's CPU quota is granted in periods, mostly of a tenth of a second. Windows are contiguous and are
    multiples of the period, so that each has the same quota. The first one may also have quota left from before.
    """
    done, begin = [0] * windows, clock()
    while (window := int((clock() - begin) / seconds)) < windows:
        done[window] += 1
        work()
    return [max(1, count) for count in done[1:]]
