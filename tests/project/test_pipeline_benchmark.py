"""Claim: three ways to cut a pipeline agree, and the one that is printed in the paper packs as ours."""

import pytest

from benchmarks.pipeline.dynamic_program import least_sum
from benchmarks.pipeline.imd import EPSILON, imd, layer_by_layer
from benchmarks.pipeline.instances import draw


@pytest.mark.parametrize("sending", [1.0, 8.0])
@pytest.mark.parametrize("seed", range(3))
def test_three_ways_agree(seed: int, sending: float) -> None:
    instance = draw(32, seed, sending=sending)
    least = least_sum(instance, 4)
    assert instance.cut(4).total == least
    # Property 3 of the paper
    eta = 50
    assert least <= imd(instance.runs(4), eta) <= EPSILON + least * eta / (eta - 1)


@pytest.mark.parametrize("seed", range(3))
def test_imd_as_printed_packs_as_ours_where_nothing_is_sent(seed: int) -> None:
    silent, sending = (draw(32, seed, sending=share).runs(4) for share in (0.0, 8.0))
    assert imd(silent, 50, layer_by_layer) == imd(silent, 50)
    assert imd(sending, 50, layer_by_layer) >= imd(sending, 50)
