"""Claim: what the cut of a pipeline is compared with is right: the dynamic program exactly, IMD as near as proven."""

import pytest

from benchmarks.partition.dynamic_program import least_sum
from benchmarks.partition.imd import EPSILON, imd
from benchmarks.partition.instances import draw
from benchmarks.pipeline import searches


@pytest.mark.parametrize("sending", [1.0, 8.0])
@pytest.mark.parametrize("seed", range(3))
def test_three_ways_agree(seed: int, sending: float) -> None:
    instance = draw(32, seed, sending=sending)
    least = least_sum(instance, 4)
    assert instance.cut(4).total == least
    # Property 3 of the paper
    eta = 50
    assert least <= imd(instance.runs(4), eta) <= EPSILON + least * eta / (eta - 1)


def test_searches_are_compared() -> None:
    layers, stages, short, most, one, four = searches(12, 3, 2)
    assert (layers, stages) == ("12", "3")
    assert short.endswith(" of 2")
    assert float(most) >= 1
    assert min(float(one), float(four)) >= 1
