"""Claim: a plan for a GPU is compared with what its step reserves, beside the context; where that was not replayed, the
plan says what stands in its place.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

import lightning_amp
from lightning_amp.costs.device_memory import TENSORS_SHARE, DeviceMemory
from lightning_amp.costs.device_rates import rates_for
from lightning_amp.costs.model_shape import profile_of_module
from lightning_amp.errors import PlanError
from lightning_amp.footprint.module_profile import ACTIVATIONS, Life, ModuleProfile
from lightning_amp.footprint.trace.allocator_settings import AllocatorSettings
from lightning_amp.footprint.trace.step_trace import StepTrace
from lightning_amp.installing.describe_module import describe
from lightning_amp.planning.base.plan_request import PlanRequest
from lightning_amp.planning.modules.on_device import Device, made_for, on_device, with_validation_on
from lightning_amp.planning.plan.plan import Plan, Validation
from lightning_amp.planning.reports.plan_report import plan_report, plan_summary, shortfall

MIB = 2**20
MEMORY = DeviceMemory(total_bytes=400 * MIB, context_bytes=30 * MIB, workspaces=(20 * MIB,), nccl_bytes=40 * MIB)
RATES = replace(rates_for("A100"), memory=MEMORY)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in "abcd"
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


@cache
def planned(**options: Any) -> Plan:
    return lightning_amp.plan(Net(), "1500x512", rates=RATES, **options).plan


def test_the_step_is_replayed_as_planned() -> None:
    # as it is 200 MiB; with less memory blocks are recomputed
    for memory, strategies in (("400MiB", ()), ("260MiB", ("recompute",))):
        plan = planned(device_memory=memory)
        found = plan.on_device
        assert found is not None
        assert plan.strategies == strategies
        assert plan.fits
        assert (found.estimated, found.context_bytes, found.nccl_bytes) == ("", 30 * MIB, 0)
        assert plan.predicted_peak_bytes < found.reserved_bytes - 20 * MIB <= 1.3 * plan.predicted_peak_bytes
        assert found.reserved_bytes % (2 * MIB) == 0
        assert found.needed_bytes <= found.budget_bytes == int(memory.removesuffix("MiB")) * MIB
        said = " ".join(plan_report(plan).split())
        assert f"{found.in_words()} (fits)" in said
        assert "was found by a replay of the step in torch's allocator" in said
        assert "context by default" in said
        assert found.in_words() in " ".join(plan_summary(plan).split())
        assert Plan.from_json(plan.to_json()) == replace(plan, notes=tuple(map(str, plan.notes)))
    assert lightning_amp.plan(Net(), "1500x512", device_memory="400MiB").plan.on_device is None


def test_a_plan_that_does_not_fit_says_what_the_device_takes() -> None:
    plan = planned(device_memory="120MiB", strategies="S1")
    assert plan.on_device is not None
    assert plan.fits is False
    assert f"of tensors per rank; on the device {plan.on_device.in_words()}" in shortfall(plan)


def test_bytes_from_closed_forms_are_estimated_and_the_plan_says_so() -> None:
    plan = planned(devices=2, strategies="S1,fsdp")
    found = plan.on_device
    assert found is not None
    assert found.nccl_bytes == 40 * MIB
    assert found.reserved_bytes == int(plan.predicted_peak_bytes / TENSORS_SHARE) + 1 + 20 * MIB
    assert found.estimated.startswith("the bytes of fsdp come from closed forms")
    said = " ".join(plan_report(plan).split())
    assert "on the device about" in said
    assert "is estimated as the tensors, 3 % for fragments and cuBLAS's workspaces, not replayed: the bytes of" in said


def a_plan(peak: int, budget: int) -> Plan:
    return replace(planned(), predicted_peak_bytes=peak, budget_bytes=budget, notes=())


@cache
def profiled() -> ModuleProfile:
    return lightning_amp.profile(Net(), "4x512")


def counted(*sizes: int, fragments: bool = False) -> ModuleProfile:
    """A step whose activations have these sizes in MiB; with `fragments` every second is released before the next."""
    lives = [
        Life("x", kind=ACTIVATIONS, n_bytes=n * MIB, birth=1 + k, death=k + 1 if fragments and k % 2 else len(sizes))
        for k, n in enumerate(sizes)
    ]
    trace = StepTrace(lives, [("forward", "")] * (len(sizes) + 2))
    peak = sum(sizes) * MIB
    return replace(profiled(), peak_bytes=peak, first_bytes=0, trace=trace)


def test_what_ranks_take_in_addition_is_reserved_and_settings_count() -> None:
    device = Device(memory=MEMORY, budgets=(300 * MIB,))
    step = counted(30, 30)
    alone = on_device(a_plan(60 * MIB, 200 * MIB), device, step).on_device
    more = on_device(a_plan(61 * MIB, 200 * MIB), device, step).on_device
    assert alone is not None
    assert more is not None
    assert (alone.reserved_bytes, more.reserved_bytes) == (80 * MIB, 100 * MIB)
    fixed = replace(device, settings=AllocatorSettings(expandable=False))
    taken = on_device(a_plan(61 * MIB, 200 * MIB), fixed, step).on_device
    assert taken is not None
    assert taken.reserved_bytes == (20 + 30 + 30 + 20) * MIB
    unknown = on_device(a_plan(60 * MIB, 200 * MIB), replace(device, settings="another backend"), step).on_device
    untraced = on_device(a_plan(60 * MIB, 200 * MIB), device, replace(step, trace=None)).on_device
    assert unknown is not None
    assert untraced is not None
    assert unknown.estimated == "another backend"
    assert untraced.estimated == "the order of its allocations was not kept"


def test_free_segments_that_go_back_make_room() -> None:
    step = counted(60, 70, 80, 90, fragments=True)
    device = Device(memory=MEMORY, budgets=(330 * MIB,), settings=AllocatorSettings(expandable=False))
    plan = on_device(a_plan(300 * MIB, 300 * MIB), device, step)
    found = plan.on_device
    assert found is not None
    assert found.given_back
    assert found.reserved_bytes <= 300 * MIB
    assert plan.fits
    assert "free segments go back to the device when it is full" in " ".join(plan_report(plan).split())
    tight = on_device(a_plan(300 * MIB, 300 * MIB), replace(device, budgets=(250 * MIB,)), step)
    assert tight.on_device is not None
    assert (tight.fits, tight.on_device.given_back) == (False, 0)


def test_a_larger_validation_is_estimated() -> None:
    device = Device(memory=MEMORY, budgets=(400 * MIB,))
    plan = on_device(a_plan(60 * MIB, 300 * MIB), device, counted(30, 30))
    validation = Validation(peak_bytes=200 * MIB, training_bytes=60 * MIB, batch_size=4)
    later = with_validation_on(replace(plan, predicted_peak_bytes=200 * MIB, validation=validation), device)
    assert later.on_device is not None
    assert later.on_device.reserved_bytes == int(200 * MIB / TENSORS_SHARE) + 1 + 20 * MIB
    assert later.on_device.estimated.startswith("it is that of the validation")
    assert with_validation_on(plan, device) is plan


def test_a_plan_is_made_again_for_less_while_its_fragments_exceed_the_device() -> None:
    device = Device(memory=MEMORY, budgets=(150 * MIB,))
    asked = list[int]()

    def make(less: int, *, fits: bool = True) -> Plan:
        asked.append(less)
        peak = 95 * MIB - less if fits else 95 * MIB
        plan = a_plan(peak, 97 * MIB - less)
        whole = on_device(plan, device, counted(30, 30)).on_device
        assert whole is not None
        # 10 MiB of fragments
        return replace(plan, on_device=replace(whole, reserved_bytes=peak + 35 * MIB))

    made = made_for(make)
    assert asked == [0, 10 * MIB]
    assert made.fits
    assert made.budget_bytes == 97 * MIB
    # nothing leaner is there: it ends
    asked.clear()
    assert made_for(lambda less: make(less, fits=False)).fits is False
    assert asked == [0, 10 * MIB]


def test_a_request_for_less_leaves_a_byte() -> None:
    shape = describe(Net(), batch_size=4)
    request = PlanRequest(data=profile_of_module(shape), shape=shape, rates=RATES, memory=(3 * MIB, MIB))
    assert request.less(2 * MIB).memory == (MIB, 1)
    assert request.less(0) == request


@pytest.mark.parametrize("budget", ["40MiB", "50MiB"])
def test_a_budget_below_the_context_is_refused(budget: str) -> None:
    with pytest.raises(PlanError, match=r"leaves nothing to tensors on a GPU, .* 50\.0 MiB, or"):
        planned(device_memory=budget)
