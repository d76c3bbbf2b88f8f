"""Claim: the replay says which batches an H200 has run, and that memory ended with segments of fixed size
(docs/reports/gpu.md, "The largest batch").
"""

import pytest
import torch

from benchmarks.gpu.language_model import LanguageModel
from lightning_amp.footprint.profile_module import profile_and_trace
from lightning_amp.footprint.run.run_settings import UNDER_AMP
from lightning_amp.footprint.target_device import settings_of
from lightning_amp.footprint.trace.allocator_settings import AllocatorSettings
from lightning_amp.footprint.trace.caching_allocator import DeviceFullError

GIB = 2**30
WORKSPACES = (2**25, 2**25)
RESERVABLE = int(135 * GIB / 0.97) + sum(WORKSPACES)
"""The budget of tensors of that run was 135 GiB, which was 97 % of what the allocator could have for them."""


@pytest.mark.long
@pytest.mark.parametrize("rows", [113, 120])
def test_which_batches_fit(rows: int) -> None:
    with torch.device("meta"):
        module = LanguageModel(width=1024, heads=16, depth=12, words=32_000, positions=1024)
    with settings_of("cuda"):
        _, trace = profile_and_trace(module, torch.zeros(rows, 1025, dtype=torch.int64), run_settings=UNDER_AMP)
    grown = trace.reserved_by(AllocatorSettings(), workspaces=WORKSPACES, capacity=RESERVABLE)
    assert grown.given_back == 0
    assert grown.peak_reserved < 1.01 * grown.peak_allocated
    with pytest.raises(DeviceFullError):
        trace.reserved_by(AllocatorSettings(expandable=False), workspaces=WORKSPACES, capacity=RESERVABLE)
