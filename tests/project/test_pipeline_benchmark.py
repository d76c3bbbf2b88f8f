"""Claim: training by stages is compared with one process, and the command says how far it is from that."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.pipeline.networks import rates
from benchmarks.pipeline.tokens import slice_times
from benchmarks.pipeline.training import (
    TOLERANCE,
    Run,
    Watch,
    all_runs,
    ends_of,
    fit,
    key_of,
    measured,
    rows_in,
    runs_of,
)


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


def test_the_difference_is_that_of_the_furthest_parameter(tmp_path: Path) -> None:
    run, file = Run(model="vgg"), tmp_path / "expected.pt"
    module = fit(run, "auto", Watch(None), devices=1, quick=True)
    expected = {name: p.detach() for name, p in module.named_parameters()}
    for moved in (0.0, 0.5):
        torch.save(expected | {"head.bias": expected["head.bias"] + moved}, file)
        watch = Watch(file)
        fit(run, "auto", watch, devices=1, quick=True)
        assert watch.difference == pytest.approx(moved, abs=TOLERANCE)
    # parameters and momentum
    assert watch.held == 2 * sum(p.nbytes for p in expected.values())


def test_runs_that_a_page_has_are_left_out() -> None:
    every = list(all_runs("gpt2", quick=False))
    page = [f"| {' | '.join([*run.named[:2], run.cut + ' 1,2', run.named[3]])} | 0 |" for run in every]
    kept = [line for line in page if "| 1f1b | even" not in line]
    has = [key_of(row) for row in rows_in(["# Title", *kept])]
    found = [(run.schedule, run.cut, run.accumulation) for run in runs_of("gpt2", has, quick=False)]
    # the planned one makes the plan of the others
    assert found == [("1f1b", "planned", 1), ("1f1b", "even", 1), ("1f1b", "even", 3)]
    assert runs_of("gpt2", [key_of(row) for row in rows_in(page)], quick=False) == []


@pytest.mark.ranks
@pytest.mark.exhaustive
@pytest.mark.release
def test_training_by_stages_is_compared(tmp_path: Path) -> None:
    found = [found for _, found in measured(["vgg", "chained"], tmp_path, quick=True)]
    assert len(found) == 4
    assert all(one["difference"] <= TOLERANCE for one in found)
    assert ["strata" in one["refused"] for one in found] == [False, False, True, False]
