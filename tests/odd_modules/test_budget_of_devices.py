"""Claim: a device by name has its memory as budget; on CUDA the allocator holds a fit's budget until teardown, and is
given no more than what is free on every rank; on a CPU the process is watched between steps.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

import lightning_amp
from lightning_amp._torch import ALLOCATOR_VARIABLES
from lightning_amp.cli.main import main
from lightning_amp.costs.device_memory import CONTEXT_BYTES, NCCL_BYTES, TENSORS_SHARE, WORKSPACES, DeviceMemory
from lightning_amp.costs.device_rates import DEVICES, budget_on, rates_for
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.errors import DoesNotFitError, PlanError
from lightning_amp.footprint import profile_module
from lightning_amp.footprint.trace.allocator_settings import AllocatorSettings
from lightning_amp.lightning.steps import process_memory
from lightning_amp.lightning.strategy import context, hardware, install_plan
from lightning_amp.lightning.strategy.context import PlanningContext
from lightning_amp.lightning.strategy.request import Request
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.planning.modules.on_device import Device
from lightning_amp.planning.plan.plan import Plan
from tests.any_module import QUIET
from tests.lightning.steps.test_end_of_memory import ROWS, Small, fitted

GIB = 2**30
CUDA = torch.device("cuda", 0)


def test_a_device_by_name_has_its_memory_less_the_context_and_a_margin() -> None:
    h100 = rates_for("H100").memory
    assert h100 == DeviceMemory.of_sheet(80)
    taken = CONTEXT_BYTES + sum(WORKSPACES)
    assert budget_on(rates_for("H100"), None)[0] == int(TENSORS_SHARE * (int(0.985 * 80 * GIB) - taken))
    # several ranks have NCCL's buffers
    tensors = [int(TENSORS_SHARE * (n * GIB - taken - NCCL_BYTES)) for n in (24, 80)]
    assert budget_on(rates_for("H100"), ["24GiB", "80GiB"], 2) == (tensors, ())
    assert rates_for("cpu").memory is None
    assert budget_on(rates_for("cpu"), "24GiB") == ("24GiB", ())
    with pytest.raises(PlanError, match="64.0 MiB; give more than 813 MiB, or rates of a CPU for a plan of tensors"):
        budget_on(rates_for("H100"), "813MiB")
    # devices of one name and several sizes
    assert rates_for("NVIDIA A100-SXM4-40GB") is DEVICES["A100"]
    larger = rates_for("A100-80GB", products="tf32")
    assert larger.memory == h100
    assert (larger.device, larger.matmul_flops) == ("an A100 of 80 GB", 156e12)


@pytest.mark.parametrize(
    ("name", "near"),
    [("H10O", "'H100'"), ("rtx3090", "'RTX 3090'"), ("A1000", "'A100'"), ("GB200", "'B200'"), ("gpu", "'cpu'")],
)
def test_a_device_that_is_not_known_is_refused_with_the_nearest_names(name: str, near: str, capsys: Any) -> None:
    assert main(["plan", "--shape", "anchors=60,dim=8,strata=2,batch=1", "--device", name]) == 2
    said = capsys.readouterr().err
    assert f"rates of {name!r} are not known" in said
    assert f"Did you mean {near}" in said
    with pytest.raises(PlanError, match=f"Did you mean {near}"):
        lightning_amp.plan(Small(), ROWS[0], rates=name)


def test_a_plan_for_a_device_by_name_is_compared_with_its_memory(tmp_path: Path, capsys: Any) -> None:
    synthesize(tmp_path / "data", cells=24, bins=30, strata=3, genes=20, seed=1)

    def planned(*words: str) -> Plan:
        assert main(["plan", str(tmp_path / "data"), *words, "--format", "json"]) == 0
        return Plan.from_json(capsys.readouterr().out)

    made = planned("--device", "H100")
    assert (made.budget_bytes, made.fits) == (budget_on(rates_for("H100"), None)[0], True)
    assert "the budget is the memory of an H100, 78.8 GiB; --device-memory" in made.notes[-1]
    found = planned("--device", "H100", "--device-memory", "1GiB")
    assert found.on_device is not None
    assert found.on_device.budget_bytes == GIB
    assert found.budget_bytes == int(TENSORS_SHARE * (GIB - CONTEXT_BYTES - sum(WORKSPACES)))
    # the counted step is replayed
    assert found.on_device.estimated == ""
    assert found.on_device.reserved_bytes > found.predicted_peak_bytes
    assert planned("--device", "cpu").budget_bytes is None
    # a decoder that no H100 holds
    words = ["plan", "--shape", "anchors=113505,dim=4096,strata=6,batch=64", "--strategies", "S1", "--device", "H100"]
    assert main(words) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "+ 749 MiB context = " in said
    assert " of 78.8 GiB (does NOT fit)" in said
    assert "what is reserved was found by a replay of the step" in said
    profile = lightning_amp.profile(tmp_path / "data")
    assert lightning_amp.plan(profile, rates="H100").budget_bytes == made.budget_bytes
    assert lightning_amp.plan(profile).budget_bytes is None
    of_module = lightning_amp.plan(Small(), ROWS[0], rates="H100")
    assert of_module.plan.budget_bytes == made.budget_bytes
    assert "the memory of an H100" in str(of_module)
    assert of_module.plan.on_device is not None
    assert not of_module.plan.on_device.estimated
    assert Plan.from_json(of_module.plan.to_json()) == of_module.plan


class Cuda:
    """What the allocator of a GPU with 80 GiB was told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, before: float = 1.0) -> None:
        self.fractions = [before]
        replaced = {
            "get_per_process_memory_fraction": lambda device: self.fractions[-1],
            "set_per_process_memory_fraction": lambda fraction, device: self.fractions.append(fraction),
            "get_device_properties": lambda device: SimpleNamespace(total_memory=80 * GIB, uuid="GPU-0"),
            "mem_get_info": lambda device: (60 * GIB, 80 * GIB),
            "memory_reserved": lambda device: 2 * GIB,
        }
        for name, call in replaced.items():
            monkeypatch.setattr(torch.cuda, name, call)
        monkeypatch.setattr(hardware, "take_workspaces", lambda device: (GIB // 16, GIB // 16))


def test_the_allocator_holds_a_budget_until_it_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    undo = hardware.hold_budget(CUDA, 24 * GIB)
    # fragments and workspaces are no tensors
    assert cuda.fractions[-1] * 80 == pytest.approx(24 / TENSORS_SHARE + 1 / 8)
    undo()
    assert cuda.fractions[-1] == 1.0
    # the budget of a device is what is free there: not beside another job
    undo = hardware.hold_budget(CUDA, hardware.device_budget(CUDA, node_ranks=1))
    assert cuda.fractions[-1] * 80 == pytest.approx(60 + 2)
    # a user's own limit stays
    for budget in (79, 200):
        cuda = Cuda(monkeypatch, before=0.5)
        undo = hardware.hold_budget(CUDA, budget * GIB)
        assert cuda.fractions == [0.5, 0.5]
    hardware.hold_budget(torch.device("cpu"), 1)()
    assert len(cuda.fractions) == 2


def test_the_least_of_the_ranks_devices_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda(monkeypatch)
    own = hardware.reservable_bytes(CUDA)
    assert own == 62 * GIB
    assert hardware.least_budget(CUDA, node_ranks=2, n_ranks=1) == own

    def least(*others: tuple[int, str]) -> int:
        def gather(everyones: list[Any], mine: Any) -> None:
            everyones[:] = [mine, *others]

        monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
        return hardware.least_budget(CUDA, node_ranks=2, n_ranks=1 + len(others))

    assert least((own // 2, "GPU-1")) == own // 2
    # ranks on one GPU share what it has
    assert least((own, "GPU-0"), (own, "GPU-1")) == own // 2
    assert least((own, "GPU-0"), (own // 4, "GPU-1")) == own // 4


@pytest.mark.parametrize("named", [None, "24GiB"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_on_a_gpu_has_what_is_left_to_tensors(monkeypatch: pytest.MonkeyPatch, named: Any, ranks: int) -> None:
    Cuda(monkeypatch)

    def gather(everyones: list[Any], mine: tuple[int, str]) -> None:
        everyones[1:] = [(mine[0], "GPU-1")]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    facts: Any = object.__new__(PlanningContext)
    facts.request = SimpleNamespace(device_memory=named)
    facts.strategy = SimpleNamespace(root_device=CUDA, world_size=ranks, num_processes=ranks)
    # rates of a file that another device has measured
    facts.rates = (replace(rates_for("H100"), memory=None), [])
    beside, nccl = CONTEXT_BYTES, NCCL_BYTES * (ranks - 1)
    whole = 62 * GIB + beside if named is None else 24 * GIB
    assert facts.device.budgets == (whole,)
    assert facts.device.settings == AllocatorSettings()
    assert facts.memory == (int(TENSORS_SHARE * (whole - beside - nccl - GIB // 8)),)
    monkeypatch.setenv(ALLOCATOR_VARIABLES[0], "backend:cudaMallocAsync")
    assert "'backend:cudaMallocAsync' of CUDA's allocator is not modelled" in hardware.allocator_settings()
    monkeypatch.setenv(ALLOCATOR_VARIABLES[1], "expandable_segments:True")
    assert "different settings in PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF" in hardware.allocator_settings()
    monkeypatch.delenv(ALLOCATOR_VARIABLES[0])
    assert hardware.allocator_settings() == AllocatorSettings()


def test_a_plan_for_a_gpu_is_compared_anew_on_a_cpu() -> None:
    strategy = AMPStrategy(plan=lightning_amp.plan(Small(), ROWS[0], rates="H100").plan)
    assert strategy.request.given_plan is not None
    assert strategy.request.given_plan.on_device is not None
    fitted(Small(), DataLoader(ROWS, batch_size=None), strategy)
    assert strategy.plan is not None
    assert strategy.plan.on_device is None


@pytest.mark.parametrize("mib", [64, 2])
def test_a_run_is_refused_by_what_its_step_reserves(monkeypatch: pytest.MonkeyPatch, mib: int) -> None:
    # a GPU whose process has a megabyte beside its tensors; the run itself is on the CPU
    memory = DeviceMemory(total_bytes=GIB, context_bytes=2**20, workspaces=())
    device = Device(memory=memory, budgets=(mib * 2**20,))
    monkeypatch.setattr(PlanningContext, "device", device)
    monkeypatch.setattr(profile_module, "counts_for_accelerator", lambda: True)
    strategy, data = AMPStrategy(device_memory=f"{mib}MiB"), DataLoader(ROWS, batch_size=None)
    if mib == 2:
        # the tensors fit, and the allocator reserves 2 MiB for the first of them
        with pytest.raises(
            DoesNotFitError, match=r"of tensors per rank; on the device 2\.00 MiB reserved \+ 1\.00 MiB con"
        ):
            fitted(Small(), data, strategy)
        return
    fitted(Small(), data, strategy)
    assert strategy.plan is not None
    found = strategy.plan.on_device
    assert found is not None
    assert (found.estimated, found.reserved_bytes % (2 * 2**20), found.budget_bytes) == ("", 0, 64 * 2**20)


@pytest.mark.long
def test_the_step_of_a_decoder_is_replayed_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    synthesize(tmp_path / "data", cells=24, bins=30, strata=3, genes=20, seed=1)
    memory = DeviceMemory(total_bytes=GIB, context_bytes=2**20, workspaces=())
    monkeypatch.setattr(PlanningContext, "device", Device(memory=memory, budgets=(64 * 2**20,)))
    monkeypatch.setattr(profile_module, "counts_for_accelerator", lambda: True)
    strategy = AMPStrategy(device_memory="64MiB")
    trainer = Trainer(strategy=strategy, max_steps=1, num_sanity_val_steps=0, **QUIET)
    data = lightning_amp.SingleCellDataModule(tmp_path / "data", batch_size=8)
    trainer.fit(lightning_amp.GLUE(latent_dim=8, window=10, hidden_depth=1), data)
    assert strategy.plan is not None
    found = strategy.plan.on_device
    assert found is not None
    assert found.estimated == ""
    assert strategy.plan.predicted_peak_bytes < found.reserved_bytes


@pytest.mark.parametrize(
    ("options", "held"),
    [
        ({"device_memory": "1GiB"}, GIB),
        ({"device_memory": ["1GiB"]}, GIB),
        ({"device_memory": "1GiB", "on_predicted_oom": "warn"}, None),
        ({"device_memory": "1GiB", "on_predicted_oom": "warn", "rescue": True}, GIB),
        ({}, None),
    ],
    ids=str,
)
def test_a_fit_holds_a_budget_unless_it_may_train_anyway(monkeypatch: Any, options: Any, held: int | None) -> None:
    said = list[Any]()

    def hold(device: torch.device, budget: int) -> Any:
        said.append(budget)
        return lambda: said.append("undone")

    monkeypatch.setattr(install_plan, "hold_budget", hold)
    fitted(Small(), DataLoader(ROWS, batch_size=None), AMPStrategy(strategies="S1", **options))
    assert said == ([] if held is None else [held, "undone"])


def test_a_process_that_grows_beyond_the_budget_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([3 * GIB, 3 * GIB, 3 * GIB + 2**20, 5 * GIB, 6 * GIB, 7 * GIB])
    monkeypatch.setattr(process_memory, "resident_bytes", lambda: next(sizes))
    data = DataLoader([ROWS[0]] * 5, batch_size=None)
    with pytest.warns(UserWarning, match=r"after step 3 the process has 2\.00 GiB more than .* budget is 1\.00 GiB"):
        fitted(Small(), data, AMPStrategy(strategies="S1", device_memory="1GiB"))
    assert next(sizes) == 6 * GIB


@pytest.mark.parametrize(
    ("device", "named", "counted"), [("cuda", None, True), ("cpu", "1GiB", True), ("cpu", None, False)]
)
def test_a_validation_is_counted_on_a_gpu_or_for_a_budget(
    monkeypatch: pytest.MonkeyPatch, device: str, named: str | None, counted: bool
) -> None:
    """Also on a GPU whose memory nobody has named."""
    validation = object()
    monkeypatch.setattr(context.EvaluationOfModule, "of_fit", lambda trainer: validation)
    monkeypatch.setattr(context.StepOfModule, "of", lambda *_, **__: None)
    run: Any = SimpleNamespace(
        request=Request(device_memory=named), root_device=torch.device(device), world_size=1, num_processes=1
    )
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(fn=TrainerFn.FITTING), lightning_module=torch.nn.Linear(2, 2), precision="32-true"
    )
    facts = PlanningContext(run, trainer, cells=(8, ""))
    assert (facts.validation is validation) == counted
