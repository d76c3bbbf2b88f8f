"""Claims: a trace has the bytes of its profile at every operator; torch's memory viewer reads the snapshot; the
allocator reserves by the rules of torch's CUDACachingAllocator.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_amp.errors import PlanError
from lightning_amp.footprint.profile_module import profile_and_trace
from lightning_amp.footprint.trace.caching_allocator import CachingAllocator
from lightning_amp.footprint.trace.step_trace import STEPS
from lightning_amp.footprint.trace.write_trace import form_of, memory_snapshot, trace_events

MIB = 2**20


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
    assert max(sum(now.values()) for now in counters) == profile.peak_bytes
    assert min(min(now.values()) for now in counters) >= 0
    phases = [event for event in events if event["ph"] == "X" and event["tid"] == 1]
    assert {event["name"] for event in phases} == {"forward", "backward", "optimiser"}
    assert sum(event["dur"] for event in phases) == len(trace.work)
    assert any("layers.1.0" in event["name"] for event in events if event["ph"] == "X" and event["tid"] == 2)


def test_every_step_after_the_first_takes_the_same_bytes(counted: Any) -> None:
    profile, trace = counted
    allocator, peaks = CachingAllocator(), [0] * STEPS
    for step, _, _ in trace.replayed(allocator):
        peaks[step] = max(peaks[step], allocator.allocated)
    assert peaks[1] == peaks[2]
    # a storage has up to 511 bytes in excess
    assert profile.peak_bytes <= peaks[1] <= profile.peak_bytes + 512 * len(trace.lives)
    assert allocator.peak_reserved >= allocator.peak_allocated


def test_the_memory_viewer_of_torch_reads_the_snapshot(counted: Any) -> None:
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    snapshot = pickle.loads(memory_snapshot(counted[1]))
    assert "segments: 1" in viewer.segsum(snapshot)
    assert "free completed" in viewer.trace(snapshot)
    assert "MemoryViz" in viewer.trace_plot(snapshot)
    frames = [entry["frames"][0]["filename"] for entry in snapshot["device_traces"][0]]
    assert {"layers.0.0", "layers.2.1"} <= set(frames)
    for segment in snapshot["segments"]:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]


def test_a_name_decides_the_form() -> None:
    assert form_of(Path("a.pickle")) is memory_snapshot
    assert form_of(Path("a.json")) is trace_events
    with pytest.raises(PlanError, match=r"ends in '.txt'; give .pickle"):
        form_of(Path("a.txt"))


@pytest.mark.parametrize(
    ("n_bytes", "fixed", "growing"),
    [
        (1, 2 * MIB, 2 * MIB),
        (MIB, 2 * MIB, 2 * MIB),
        (MIB + 1, 20 * MIB, 20 * MIB),
        (9 * MIB, 20 * MIB, 20 * MIB),
        (10 * MIB - 1, 10 * MIB, 20 * MIB),
        (13 * MIB - 5, 14 * MIB, 20 * MIB),
        (41 * MIB, 42 * MIB, 60 * MIB),
    ],
)
def test_what_is_reserved_for_one_tensor(n_bytes: int, fixed: int, growing: int) -> None:
    for expandable, reserved in ((False, fixed), (True, growing)):
        allocator = CachingAllocator(expandable=expandable)
        block = allocator.allocate(n_bytes)
        assert allocator.allocated == block.size
        assert block.size >= n_bytes
        assert allocator.reserved == reserved
        allocator.release(block)
        assert (allocator.allocated, allocator.reserved) == (0, reserved)
        allocator.allocate(n_bytes)
        assert allocator.reserved == reserved


def test_neighbours_merge_and_the_smallest_free_block_is_taken() -> None:
    allocator = CachingAllocator(expandable=False)
    blocks = [allocator.allocate(4 * MIB) for _ in range(5)]
    assert allocator.reserved == 20 * MIB
    allocator.release(blocks[1])
    allocator.release(blocks[3])
    assert allocator.allocate(4 * MIB).address == blocks[1].address
    allocator.release(blocks[2])
    # 8 MiB in one piece: the third and the fourth block
    assert allocator.allocate(8 * MIB).address == blocks[2].address
    assert allocator.reserved == 20 * MIB
    allocator.allocate(2 * MIB)
    assert allocator.reserved == 40 * MIB


def test_a_segment_that_grows_uses_its_free_end() -> None:
    allocator = CachingAllocator()
    first = allocator.allocate(16 * MIB)
    # 4 MiB are free at the end: 20 more make 24
    second = allocator.allocate(24 * MIB)
    assert second.address == first.address + first.size
    assert allocator.reserved == 40 * MIB
    assert len(allocator.segments) == 1
