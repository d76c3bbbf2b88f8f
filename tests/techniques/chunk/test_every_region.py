"""Claim: every legal region computes in chunks what it computes whole: results, loss and all gradients in float64."""

from dataclasses import replace
from typing import Any

import pytest

from lightning_amp.graph.guards import signature
from lightning_amp.techniques.chunk.run.module_chunks import plain
from tests.graph.calls import calls_of
from tests.techniques.chunk.case import Case, case, which
from tests.techniques.chunk.small_blocks import BLOCKS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.long
@pytest.mark.parametrize(("name", "regions"), which(BLOCKS, "attention"))
def test_every_region_of_small_blocks_is_exact(name: str, regions: Any) -> None:
    """Results, loss and all gradients in float64, to 1e-10."""
    found = case(name)
    assert found.regions
    for some in regions(found.regions):
        assert found.error(some) == "", some


def distinct_calls(name: str) -> list[Any]:
    """Of blocks that are alike in all but their values one."""
    return list({signature(plain(c.block), c.args, c.kwargs): c for c in calls_of(name)}.values())


@pytest.mark.full
@pytest.mark.parametrize("name", ["gene_transformer", "evoformer"])
def test_regions_of_the_example_modules_are_exact(name: str) -> None:
    """The longest region of every last operator and dim, in three chunks; dropout is on, and in none of them."""
    n_regions = 0
    for call in distinct_calls(name):
        found = Case(call.block, call.args, call.kwargs)
        longest = {(found.table.rows[r.last].op, r.dims.get(r.last)): r for r in found.regions}
        for region in longest.values():
            assert found.error(replace(region, n_chunks=min(3, region.units))) == "", (call.fqn, region)
        n_regions += len(longest)
    assert n_regions
