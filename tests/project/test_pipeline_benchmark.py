"""Claim: training by stages is compared with one process, and the command says how far it is from that."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.pipeline.baselines import programmed, recursive
from benchmarks.pipeline.dynamic_program import least_sum
from benchmarks.pipeline.imd import EPSILON, imd, layer_by_layer
from benchmarks.pipeline.instances import draw
from benchmarks.pipeline.networks import rates
from benchmarks.pipeline.tokens import slice_times
from benchmarks.pipeline.training import (
    TOLERANCE,
    ends_of,
    measured,
)


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


def test_recursion_finds_what_the_dynamic_program_finds() -> None:
    instance = draw(24, 0)
    assert recursive(instance, 5) == programmed(instance, 5)


def test_slices_of_texts_compute_together_what_whole_texts_do() -> None:
    """Products alone: neither operators' starts nor bytes."""
    of = replace(rates(10), memory_bytes=1e30, overhead_seconds=0)
    sizes = {"dim": 64, "heads": 4, "layers": 6}
    whole, slices = (slice_times(sizes, 4, n, of) for n in (1, 8))
    for name in ("forward", "backward"):
        one, of_slice = getattr(whole[1], name), getattr(slices[1], name)
        assert one.shape == (1, 6)
        # the first and the last have the embedding and the loss, of which a text has no slice
        assert 8 * of_slice[0, 1:5] == pytest.approx(one[0, 1:5], rel=1e-6)
    assert [times.counts for times in slices.values()] == [(8,), (16,), (32,)]


@pytest.mark.parametrize(("blocks", "stages"), [(12, 4), (12, 8), (14, 4), (14, 8), (4, 4)])
@pytest.mark.parametrize("cut", ["even", "uneven"])
def test_every_stage_has_a_block(cut: str, blocks: int, stages: int) -> None:
    ends = ends_of(cut, blocks, stages)
    sizes = [b - a for a, b in zip((0, *ends), ends, strict=False)]
    assert (len(ends), ends[-1]) == (stages, blocks)
    assert min(sizes) > 0
    assert max(sizes) - min(sizes) <= 1 or cut == "uneven"


@pytest.mark.ranks
@pytest.mark.exhaustive
@pytest.mark.release
def test_training_by_stages_is_compared(tmp_path: Path) -> None:
    found = [found for _, found in measured(["vgg", "chained"], tmp_path, quick=True)]
    assert len(found) == 4
    assert all(one["difference"] <= TOLERANCE for one in found)
    assert ["strata" in one["refused"] for one in found] == [False, False, True, False]
