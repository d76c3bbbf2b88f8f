"""Claim: a calibration fits the rates to a measured step, the file that it writes changes predictions, and every fit
tells the measured beside the predicted time.
"""

import copy
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_amp.cli.main import main
from lightning_amp.costs.device_rates import CPU_CORE, DEVICES, Rates
from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.errors import PlanError
from lightning_amp.lightning.steps import step_time
from lightning_amp.lightning.steps.step_time import WARM_UP, StepTimer
from lightning_amp.lightning.strategy import hardware
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.models.glue import GLUE
from lightning_amp.simulation import calibrate as calibration
from lightning_amp.simulation.calibrate import calibrate, calibration_report
from lightning_amp.simulation.calibrate_links import MeasuredLinks
from lightning_amp.techniques.rates_of import rates_of
from tests.any_module import QUIET

SIZES = (60, 8, 2, 4)


@pytest.fixture
def slow_clock(monkeypatch):
    """The clock of a machine on which the first kind of step takes three seconds, the second one, at first more; two
    of seven rounds are disturbed, one takes longer at once.
    """
    ticks = count()

    def now() -> float:
        step, ends = divmod(next(ticks), 2)
        first = 40.0 if step < 4 or step in (8, 9) else 0.5 if step > 10 else 0.0
        return 100.0 * step + ends * (first + (3.0 if step % 2 == 0 else 1.0))

    monkeypatch.setattr(calibration.time, "perf_counter", now)
    monkeypatch.setattr(calibration, "SHARE", 0)


def test_the_fitted_step_is_predicted_as_measured_and_the_check_is_told(slow_clock) -> None:
    found = calibrate("cpu", sizes=SIZES)
    assert found.before is CPU_CORE
    assert found.fitted.measured == 3.0
    assert found.check.measured == 1.0
    assert (found.fitted.slowest, found.check.slowest) == (43.0, 41.0)
    assert found.fitted.after == pytest.approx(3.0, rel=1e-9)
    scale = 3.0 / found.fitted.before
    assert found.check.after == pytest.approx(scale * found.check.before, rel=1e-9)
    assert found.after.matmul_flops == pytest.approx(CPU_CORE.matmul_flops / scale)
    assert found.after.links == CPU_CORE.links
    assert found.after.device == "cpu, 1 thread, calibrated"
    text = calibration_report(found)
    assert max(map(len, text.splitlines())) <= 80
    assert "3.00 s" in text
    assert f"{CPU_CORE.matmul_flops / 1e9:.4g} GFLOP/s" in text
    assert "best of 7 rounds; the slowest took 14.33 times (fitted), 41.00 times (check)" in " ".join(text.split())
    assert json.loads(json.dumps(found.to_dict()))["fitted"]["measured"] == 3.0


@pytest.mark.parametrize(
    ("seconds", "worked", "found"),
    [
        ([1.0, 9.0, 9.0, 9.0, 8.0], 1.0, "took 9.0 times as long as the best one, which had 100% of a processor"),
        ([1.0, 1.0, 1.0, 1.0, 1.0], 0.1, "took 1.0 times as long as the best one, which had 10% of a processor"),
    ],
)
def test_a_busy_machine_is_not_calibrated(monkeypatch, seconds, worked, found) -> None:
    clock, work = [0.0], [0.0]
    left = iter([5.0, 5.0, *seconds])

    def step() -> None:
        taken = next(left)
        clock[0] += taken
        work[0] += taken * worked

    monkeypatch.setattr(calibration, "ROUNDS", 5)
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(calibration.time, "process_time", lambda: work[0])
    with pytest.raises(PlanError, match=found):
        calibration._measure([step], torch.device("cpu"))


@pytest.mark.parametrize(
    ("device", "index", "message"),
    [
        ("tpu", 0, "device='tpu' is not supported; allowed are 'cpu' and 'cuda'"),
        ("cuda", 99, "GPU 99 is not supported: torch finds"),
        ("cuda", -1, "GPU -1 is not supported"),
        # it had been calibrated as a processor where there are no GPUs
        (None, 99, "GPU 99 is not supported: torch finds"),
        ("cpu", 1, "index 1 was given with device 'cpu'"),
    ],
)
def test_devices_that_are_not_there(device, index, message) -> None:
    with pytest.raises(PlanError, match=message):
        calibrate(device, index=index)


def test_the_command_writes_a_file_that_plan_reads(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(calibration.SIZES, "cpu", SIZES)
    monkeypatch.setattr(calibration, "SPREAD", 1e9)
    monkeypatch.setattr(calibration, "SHARE", 0)
    monkeypatch.chdir(tmp_path)
    words = ["calibrate", "--device", "cpu", "--out", "rates.json"]
    assert main(words) == 0
    assert "wrote rates.json: use it with --rates, or AMPStrategy(rates='rates.json')" in capsys.readouterr().out
    first = Rates.read("rates.json")
    assert first.device == "cpu, 1 thread, calibrated"
    assert main(words) == 2
    assert "exists; choose another name, or add --overwrite" in capsys.readouterr().err
    assert main([*words, "--overwrite", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["before"]["device"] == "one CPU core"
    for out, message in (("rates.txt", "the name of a JSON file"), ("no/r.json", "its folder does not exist")):
        assert main(["calibrate", "--out", out]) == 2
        assert message in capsys.readouterr().err


class Properties:
    def __init__(self, name: str, gib: int) -> None:
        self.name, self.total_memory = name, gib * 2**30


@pytest.fixture
def products() -> Iterator[Any]:
    setting: Any = torch.backends.cuda.matmul
    before = setting.fp32_precision
    yield setting
    setting.fp32_precision = before


@pytest.mark.parametrize(
    ("name", "precision", "flops", "noted"),
    [
        ("NVIDIA A100-SXM4-40GB", "ieee", DEVICES["A100"].matmul_flops, False),
        ("NVIDIA A100-SXM4-40GB", "tf32", 156e12, False),
        ("NVIDIA GeForce RTX 5090", "ieee", DEVICES["RTX 3090"].matmul_flops, True),
    ],
)
def test_rates_are_those_of_the_gpu_or_the_nearest(monkeypatch, products, name, precision, flops, noted) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties(name, 24 if noted else 40))
    products.fp32_precision = precision
    rates, note = rates_of(torch.device("cuda", 0))
    assert rates.matmul_flops == flops
    assert bool(note) is noted
    assert rates_of(torch.device("cpu")) == (CPU_CORE, "")


def test_a_gpu_has_what_is_free_and_what_torch_keeps_but_for_workspaces(monkeypatch) -> None:
    monkeypatch.setattr(hardware, "take_workspaces", lambda device: (2**25, 2**25))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * 2**30, 40 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * 2**30)
    place = torch.device("cuda", 0)
    assert hardware.device_budget(place, node_ranks=4) == int(0.97 * (32 * 2**30 - 2**26))
    # calibration takes what is neither free nor reserved as the context
    memory = hardware.measured_memory(place)
    assert (memory.total_bytes, memory.context_bytes) == (40 * 2**30, 8 * 2**30)
    assert (memory.workspaces, memory.measured) == ((2**25, 2**25), ("context_bytes",))
    links = MeasuredLinks(links=CPU_CORE.links, seconds={}, nccl_bytes=2**27).with_nccl(memory)
    assert (links.nccl_bytes, links.measured) == (2**27, ("context_bytes", "nccl_bytes"))
    assert MeasuredLinks(links=CPU_CORE.links, seconds={}).with_nccl(memory) == memory


def test_segments_grow_on_cuda_unless_the_environment_has_settings(monkeypatch) -> None:
    found: list[str] = []
    monkeypatch.setattr(hardware, "set_allocator", found.append)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    hardware.let_segments_grow(torch.device("cpu"))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    hardware.let_segments_grow(torch.device("cuda", 0))
    assert found == []
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    hardware.let_segments_grow(torch.device("cuda", 0))
    assert found == ["expandable_segments:True"]


class Module:
    device = torch.device("cpu")


class Steps:
    """A Trainer that takes a step whenever it is looked at; one that accumulates gradients takes none."""

    strategy = SimpleNamespace(plan=None)
    accumulate_grad_batches = 1

    def __init__(self) -> None:
        self.steps = count()

    @property
    def global_step(self) -> int:
        return next(self.steps)


def test_the_median_leaves_out_the_first_steps_and_those_after_many(monkeypatch) -> None:
    times = iter([0.0, 1.0, 9.0, 2.0, 8.0, 3.0, 3.5, 4.0, 4.7, 5.0, 5.6])
    monkeypatch.setattr(step_time.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(step_time, "MOST", 3)
    timer = StepTimer(None)  # type: ignore[arg-type]
    trainer: Any = Steps()
    accumulates: Any = SimpleNamespace(global_step=3, strategy=Steps.strategy, accumulate_grad_batches=2)
    assert timer.median_seconds is None
    timer.on_train_batch_start(accumulates, Module, None, 0)  # type: ignore[arg-type]
    timer.on_train_batch_end(accumulates, Module, None, None, 0)  # type: ignore[arg-type]
    for _ in range(7):
        timer.on_train_batch_start(trainer, Module, None, 0)  # type: ignore[arg-type]
        timer.on_train_batch_end(trainer, Module, None, None, 0)  # type: ignore[arg-type]
    assert WARM_UP == 2
    assert timer.median_seconds == pytest.approx(0.6)
    assert next(times, None) is None


class Device:
    """CUDA's events of a device that takes a second for every event, and is waited for where it is asked."""

    def __init__(self) -> None:
        self.done = self.waited = 0

    def event(self, *, enable_timing: bool) -> "Device.Event":
        assert enable_timing
        return Device.Event(self)

    class Event:
        def __init__(self, device: "Device") -> None:
            self.device, self.at, self.come = device, 0, False

        def record(self, stream: str) -> None:
            assert stream == "stream of cuda:0"
            self.device.done += 1
            self.at = self.device.done

        def synchronize(self) -> None:
            self.come = True
            self.device.waited += 1

        def elapsed_time(self, end: "Device.Event") -> float:
            assert end.come, "read before it has come"
            return 1e3 * (end.at - self.at)


@pytest.fixture
def cuda(monkeypatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    return device


class OnCuda:
    device = torch.device("cuda", 0)


def test_no_step_on_cuda_waits(cuda) -> None:
    timer = StepTimer(None)  # type: ignore[arg-type]
    trainer: Any = Steps()
    for _ in range(6):
        timer.on_train_batch_start(trainer, OnCuda, None, 0)  # type: ignore[arg-type]
        timer.on_train_batch_end(trainer, OnCuda, None, None, 0)  # type: ignore[arg-type]
    assert cuda.waited == 0
    assert copy.deepcopy(timer).median_seconds is None
    assert timer.median_seconds == 1.0
    assert cuda.waited == 4


def test_a_fit_tells_both_times_and_takes_the_rates_of_the_file(tmp_path, caplog) -> None:
    synthesize(tmp_path / "data", cells=40, bins=30, strata=3, genes=20, seed=1)
    slow = replace(CPU_CORE, overhead_seconds=1.0, device="a snail")
    (tmp_path / "rates.json").write_text(slow.to_json())
    strategy = AMPStrategy(rates=tmp_path / "rates.json")
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, **QUIET)
    callbacks = list(trainer.callbacks)
    with caplog.at_level(logging.INFO):
        trainer.fit(GLUE(latent_dim=8, window=8), datamodule=SingleCellDataModule(tmp_path / "data", batch_size=8))
    assert strategy.plan.rates_device == "a snail"
    assert strategy.plan.predicted_step_seconds > 10
    told = [r.getMessage() for r in caplog.records if "measured step" in r.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("predicted step  ")
    assert ", of which the decoder " in told[0], "a step beside a step"
    assert "(a snail)\nmeasured step   " in told[0]
    assert "(median of " in told[0]
    assert trainer.callbacks == callbacks
    given = replace(strategy.plan, rates_device="another", predicted_step_seconds=1e-6)
    other = AMPStrategy(plan=given, rates=tmp_path / "rates.json")
    again = Trainer(strategy=other, accelerator="cpu", devices=1, fast_dev_run=1, logger=False)
    again.fit(GLUE(latent_dim=8, window=8), datamodule=SingleCellDataModule(tmp_path / "data", batch_size=8))
    assert other.plan.rates_device == "a snail"
    assert other.plan.predicted_step_seconds == strategy.plan.predicted_step_seconds
    assert other.plan.candidates == ()
