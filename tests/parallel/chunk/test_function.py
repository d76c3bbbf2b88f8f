"""Claim: a region that runs chunk by chunk computes what the block computes, forward and backward, or is refused."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.errors import ModelError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.graph.capture import Captures
from lightning_amp.graph.check import difference
from lightning_amp.parallel.chunk.lower import Lowered, lower, table_of
from lightning_amp.planning.chunks.find_regions import find_regions
from lightning_amp.planning.chunks.region import Region
from tests.any_module import NAMES
from tests.graph.calls import calls_of
from tests.parallel.chunk.small_blocks import BLOCKS, Attention, FeedForward, Several, x_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def in_chunks(region: Region) -> Any:
    """A form of a block: one region in chunks, the rest as it is."""

    def form(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return lowered(block, args, kwargs, [region])(block, *args, **kwargs)

    return form


def lowered(block: nn.Module, args: Any, kwargs: Any, regions: list[Region]) -> Lowered:
    capture = Captures().of(block, args, kwargs)
    assert capture.reason == ""
    return lower(capture, table_of(capture), regions)


def regions_of(block: nn.Module, args: Any, kwargs: Any | None = None) -> tuple[Region, ...]:
    return find_regions(table_of(Captures().of(block, args, kwargs or {})))


def numbers(region: Region) -> Iterator[Region]:
    """The region in 2 and 3 chunks, in one per position, and in a number that does not divide."""
    uneven = next((n for n in range(2, region.units) if region.units % n), 2)
    for n in sorted({min(k, region.units) for k in (2, 3, uneven, region.units)}):
        yield replace(region, n_chunks=n)


@pytest.mark.long
@pytest.mark.parametrize("name", BLOCKS)
def test_every_region_of_small_blocks_is_exact(name: str) -> None:
    torch.manual_seed(0)
    make, args = BLOCKS[name]
    block, given = make(), args()
    found = regions_of(block, given)
    assert found
    for region in found:
        for some in numbers(region):
            assert difference(block, in_chunks(some), given) == "", some
