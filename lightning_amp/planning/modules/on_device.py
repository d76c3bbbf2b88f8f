"""Compare a plan with the memory of a GPU: replay its counted step in torch's allocator, beside CUDA's context.

A plan is made for a budget of tensors (costs/device_memory.py). If what its step reserves exceeds the device
nevertheless, the plan is made again for as many bytes less.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_amp.costs.device_memory import TENSORS_SHARE, DeviceMemory, named_memory
from lightning_amp.footprint.module_profile import ModuleProfile
from lightning_amp.footprint.trace.allocator_settings import AllocatorSettings, rounded
from lightning_amp.footprint.trace.caching_allocator import ROUND_LARGE, CachingAllocator, DeviceFullError
from lightning_amp.planning.plan.device_bytes import DeviceBytes
from lightning_amp.planning.plan.plan import Plan

TRIES = 4
"""Most times that a plan is made for less memory."""
CLOSED_FORMS = "the bytes of {} come from closed forms, without the order of their allocations"
OF_DECODER = CLOSED_FORMS.format("a decoder")
OF_VALIDATION = "it is that of the validation, of which only the peak is known"


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """The GPU of each rank, for which plans are made.

    Attributes:
        memory: Its memory, and what a process takes of it beside tensors.
        budgets: Bytes that a process may take, one number if all devices have the same.
        settings: Settings of the allocator, or why the step cannot be replayed with them.
    """

    memory: DeviceMemory
    budgets: tuple[int, ...]
    settings: AllocatorSettings | str = field(default_factory=AllocatorSettings)

    @classmethod
    def of(cls, memory: DeviceMemory | None, device_memory: Any, devices: int) -> "Device | None":
        """Return the device with the requested memory, by default all of it; None if tensors alone count."""
        return None if memory is None else cls(memory=memory, budgets=named_memory(memory, device_memory, devices))

    def tensor_bytes(self, ranks: int) -> tuple[int, ...]:
        """Return the bytes that tensors may take on each device."""
        return tuple(self.memory.tensor_bytes(n, ranks) for n in self.budgets)


def on_device(plan: Plan, device: Device | None, step: ModuleProfile | str) -> Plan:
    """Return the plan with what a process takes of its device.

    Args:
        plan: A plan for a budget of tensors.
        device: Its device; None if tensors alone count.
        step: The step, counted with the plan's rules; or why it was not, so that what is reserved is estimated.
    """
    if device is None or plan.budget_bytes is None:
        return plan
    ranks = plan.mesh.ranks
    # unlike devices: the plan has the budget of its fullest rank
    budget = min(device.budgets, key=lambda n: abs(device.memory.tensor_bytes(n, ranks) - (plan.budget_bytes or 0)))
    found = (
        step
        if isinstance(step, str)
        else _replayed(plan, device, step, budget - device.memory.bytes_outside_tensors(ranks))
    )
    estimated, replayed = (found, None) if isinstance(found, str) else ("", found)
    taken = DeviceBytes(
        reserved_bytes=_estimate(plan.training_bytes, device) if replayed is None else replayed.peak_reserved,
        context_bytes=device.memory.context_bytes,
        nccl_bytes=device.memory.nccl_of(ranks),
        measured=device.memory.measured,
        budget_bytes=budget,
        estimated=estimated,
        given_back=0 if replayed is None else replayed.given_back,
    )
    return with_validation_on(replace(plan, on_device=taken), device)


def with_validation_on(plan: Plan, device: Device | None) -> Plan:
    """Return the plan with what its validation reserves, if that is its largest phase; it is estimated."""
    if device is None or plan.on_device is None or plan.predicted_peak_bytes <= plan.training_bytes:
        return plan
    found, estimate = plan.on_device, _estimate(plan.predicted_peak_bytes, device)
    if estimate <= found.reserved_bytes:
        return plan
    return replace(plan, on_device=replace(found, reserved_bytes=estimate, estimated=found.estimated or OF_VALIDATION))


def _estimate(n_bytes: int, device: Device) -> int:
    return int(n_bytes / TENSORS_SHARE) + 1 + sum(device.memory.workspaces)


def _replayed(plan: Plan, device: Device, step: ModuleProfile, capacity: int) -> CachingAllocator | str:
    """Return the allocator after the plan's step, or why the step cannot be replayed."""
    if isinstance(device.settings, str):
        return device.settings
    if step.trace is None:
        return "the order of its allocations was not kept"
    # what ranks allocate in addition, and a first step that takes more, are not in the trace
    more = max(0, plan.training_bytes - step.peak_bytes)
    workspaces = (*device.memory.workspaces, *([rounded(more, ROUND_LARGE)] if more else []))
    found: CachingAllocator = step.trace.reserved_by(device.settings, workspaces=workspaces)
    if found.peak_reserved > capacity:
        try:
            within: CachingAllocator = step.trace.reserved_by(device.settings, workspaces=workspaces, capacity=capacity)
        except DeviceFullError:
            return found
        return within
    return found


def made_for(make: Callable[[int], Plan]) -> Plan:
    """Return a plan that fits the device, as far as one does.

    Args:
        make: Makes the plan for so many bytes of tensors less, as `on_device` returns it.
    """
    first = plan = make(0)
    less = 0
    for _ in range(TRIES):
        found, budget = plan.on_device, first.budget_bytes
        if found is None or found.fits or budget is None or plan.predicted_peak_bytes > budget - less:
            break
        less += found.needed_bytes - found.budget_bytes
        if less >= budget:
            break
        plan = replace(make(less), budget_bytes=budget)
    return plan
