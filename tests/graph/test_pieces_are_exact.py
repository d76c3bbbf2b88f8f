"""Claim: captured blocks computed piece by piece, in any region that is found, return what they return whole; and
their bytes are those that `chunk_bytes` says."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.graph.build_table import build_table
from lightning_amp.graph.capture import Capture, Captures
from lightning_amp.graph.guards import state_of
from lightning_amp.graph.table import Table
from lightning_amp.techniques.chunk.regions.chunk_bytes import chunk_bytes
from lightning_amp.techniques.chunk.regions.find_regions import find_regions
from lightning_amp.techniques.chunk.regions.region import Region, pieces
from tests.any_module import NAMES
from tests.graph.calls import calls_of
from tests.graph.run_pieces import Runner

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def captured(block: nn.Module, *args: Any, **kwargs: Any) -> tuple[Capture, Table, list[Tensor]]:
    with torch.no_grad():
        capture = Captures().of(block, args, kwargs)
    assert capture.reason == ""
    given = [v for v in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
    with torch.no_grad():
        return capture, build_table(capture), [*state_of(block).values(), *given]


def compare(capture: Capture, table: Table, tensors: list[Tensor], regions: list[Region]) -> None:
    """Values in float64, and the peak of live bytes."""
    assert capture.graph is not None
    with torch.no_grad():
        right = capture.graph(*tensors)
        with LiveBytes() as live:
            found = Runner(capture.graph, table, regions)(*tensors)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    predicted = chunk_bytes(table, regions).peak_bytes
    assert live.peak <= predicted, regions
    assert predicted <= 1.02 * live.peak, regions


def double(values: Any) -> Any:
    if isinstance(values, Tensor):
        return values.detach().double() if values.is_floating_point() else values.detach()
    return values


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_any_region_of_eight_modules(name: str) -> None:
    draw = random.Random(0)
    for call in calls_of(name):
        args = [double(a) for a in call.args]
        kwargs = {k: double(v) for k, v in call.kwargs.items()}
        capture, table, tensors = captured(call.block.eval().double(), *args, **kwargs)
        regions = find_regions(table)
        for region in draw.sample(regions, min(12, len(regions))):
            n = draw.randint(2, region.units)
            n = len(pieces(region.units, n))
            chosen = replace(region, n_chunks=n)
            compare(capture, table, tensors, [chosen])
