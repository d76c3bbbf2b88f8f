"""Claim: a trace has the bytes of its profile at every operator; torch's memory viewer reads the snapshot; steps are
replayed in the order in which a run allocates.
"""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_amp.errors import PlanError
from lightning_amp.footprint.module_profile import ACTIVATIONS, GRADIENTS, PARAMETERS, STATE, Life
from lightning_amp.footprint.profile_module import profile_and_trace
from lightning_amp.footprint.trace.allocator_settings import AllocatorSettings
from lightning_amp.footprint.trace.caching_allocator import CachingAllocator, DeviceFullError
from lightning_amp.footprint.trace.memory_snapshot import memory_snapshot
from lightning_amp.footprint.trace.step_trace import STEPS, StepTrace
from lightning_amp.footprint.trace.trace_events import trace_events
from lightning_amp.footprint.trace.write_trace import form_of


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in "abc"))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


@pytest.fixture(scope="module")
def counted() -> Any:
    return profile_and_trace(Net(), torch.zeros(512, 64))


def test_the_counter_of_bytes_is_that_of_the_profile(counted: Any) -> None:
    profile, trace = counted
    events = json.loads(trace_events(trace))["traceEvents"]
    counters = [event["args"] for event in events if event["ph"] == "C"]
    assert max(now["bytes"] for now in counters if "bytes" in now) == profile.peak_bytes
    assert max(sum(now.values()) for now in counters) == profile.peak_bytes
    assert min(min(now.values()) for now in counters) >= 0


def test_every_operator_has_a_slice_in_those_of_its_modules(counted: Any) -> None:
    trace = counted[1]
    slices = [event for event in json.loads(trace_events(trace))["traceEvents"] if event["ph"] == "X"]
    phases = [event for event in slices if event["name"] in ("forward", "backward", "optimiser")]
    assert [event["name"] for event in phases][:2] == ["forward", "backward"]
    assert {event["name"] for event in phases} == {"forward", "backward", "optimiser"}
    assert sum(event["dur"] for event in phases) == len(trace.work)
    operators = [event for event in slices if "args" in event]
    assert [event["name"] for event in operators] == list(trace.operators)
    # slices of one row are nested: an operator of `layers.1.0` is in those of its three modules and of its phase
    for one in (event for event in operators if event["args"]["of"] == "layers.1.0"):
        around = [e["name"] for e in slices if e["ts"] <= one["ts"] < e["ts"] + e["dur"] and "args" not in e]
        assert around[1:] == ["layers", "layers.1", "layers.1.0"]
    ends = list[int]()
    for event in slices:
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        end = event["ts"] + event["dur"]
        assert not ends or end <= ends[-1]
        ends.append(end)


def test_every_step_after_the_first_takes_the_same_bytes(counted: Any) -> None:
    profile, trace = counted
    allocator, peaks = CachingAllocator(), [0] * STEPS
    for step, _, _ in trace.replayed(allocator):
        peaks[step] = max(peaks[step], allocator.allocated)
    assert peaks[0] < peaks[1] == peaks[2]
    # a storage has up to 511 bytes in excess
    assert profile.peak_bytes <= peaks[1] <= profile.peak_bytes + 512 * len(trace.lives)
    assert allocator.peak_reserved >= allocator.peak_allocated


class Noted(CachingAllocator):
    """An allocator that notes what it is asked for."""

    def __init__(self) -> None:
        super().__init__(AllocatorSettings(expandable=False))
        self.asked: list[int] = []

    def allocate(self, n_bytes: int) -> Any:
        self.asked.append(n_bytes)
        return super().allocate(n_bytes)


def test_state_comes_with_the_first_update_and_workspaces_before_all() -> None:
    mib = 2**20
    lives = [
        Life("w", kind=PARAMETERS, n_bytes=3 * mib),
        Life("w.grad", kind=GRADIENTS, n_bytes=3 * mib, death=0),
        Life("w.exp_avg", kind=STATE, n_bytes=3 * mib),
        Life("batch", kind=ACTIVATIONS, n_bytes=2 * mib),
        Life("mm", kind=ACTIVATIONS, n_bytes=12 * mib, birth=1, death=2),
        Life("w.grad", kind=GRADIENTS, n_bytes=3 * mib, birth=2),
    ]
    trace = StepTrace(lives, [("forward", ""), ("forward", ""), ("backward", ""), ("optimiser", "")])
    allocator = Noted()
    said = [(step, e.life.name, e.made) for step, e, _ in trace.replayed(allocator, workspaces=[30 * mib])]
    first = [("w", True), ("batch", True), ("mm", True), ("w.grad", True), ("mm", False), ("w.exp_avg", True)]
    assert [(name, made) for step, name, made in said if step == 0] == first
    later = [("w.grad", False), ("mm", True), ("w.grad", True), ("mm", False)]
    assert [(name, made) for step, name, made in said if step == 1] == later
    assert [n // mib for n in allocator.asked] == [30, 3, 2, 12, 3, 3, *(12, 3) * 2]
    # all of the first step fits in 20 MiB, as w, batch, mm, w.grad; w.exp_avg takes 3 of the 12 that mm leaves. Then mm
    # takes the other 9 with the 3 of w.grad, and the new w.grad has no place
    assert allocator.peak_reserved == (30 + 20 + 20) * mib
    assert trace.reserved_by(AllocatorSettings(expandable=False)).peak_reserved == 40 * mib
    with pytest.raises(DeviceFullError):
        trace.reserved_by(AllocatorSettings(expandable=False), capacity=39 * mib)


def test_the_memory_viewer_of_torch_reads_the_snapshot(counted: Any) -> None:
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    trace = counted[1]
    snapshot = pickle.loads(memory_snapshot(trace))
    assert "segments: 1" in viewer.segsum(snapshot)
    text = viewer.trace(snapshot)
    assert "free completed" in text
    assert f"{len(snapshot['device_traces'][0])} entries" in text
    for plot in (viewer.trace_plot, viewer.segment_plot):
        assert "MemoryViz" in plot(snapshot)
    assert "MemoryViz" in viewer.trace_plot(snapshot, plot_segments=True)
    for text in (viewer.memory(snapshot, format_flamegraph=str), viewer.segments(snapshot, format_flamegraph=str)):
        assert "layers.1.0" in text
    other = copy.deepcopy(snapshot["segments"])
    other[0]["address"] += 1
    assert "only_after" in viewer.compare(snapshot["segments"], other, format_flamegraph=str)
    for segment in snapshot["segments"]:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]


def test_events_of_the_snapshot_have_the_profiles_peak_and_the_modules_files(counted: Any) -> None:
    profile, trace = counted
    (events,) = pickle.loads(memory_snapshot(trace))["device_traces"]
    now = most = reserved = 0
    for event in events:
        now += {"alloc": event["size"], "free_completed": -event["size"]}.get(event["action"], 0)
        reserved += event["size"] if event["action"] == "segment_map" else 0
        most = max(most, now)
    assert most == profile.peak_bytes
    assert reserved == trace.reserved_by(AllocatorSettings()).peak_reserved
    assert [event["time_us"] for event in events] == sorted(event["time_us"] for event in events)
    made = next(e for e in events if e["action"] == "alloc" and "layers.1.0:" in e["frames"][1]["name"])
    of = [(Path(frame["filename"]).name, frame["name"]) for frame in made["frames"]]
    assert of[1:5] == [
        ("linear.py", "layers.1.0: Linear.forward"),
        ("container.py", "layers.1: Sequential.forward"),
        ("container.py", "layers: Sequential.forward"),
        ("module.py", "(the module itself): Net.forward"),
    ]
    assert made["frames"][1]["line"] == torch.nn.Linear.forward.__code__.co_firstlineno


def test_a_name_decides_the_form() -> None:
    assert form_of(Path("a.pickle")) is memory_snapshot
    assert form_of(Path("a.json")) is trace_events
    with pytest.raises(PlanError, match=r"ends in '.txt'; give .pickle"):
        form_of(Path("a.txt"))
