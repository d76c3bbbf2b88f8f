"""Claim: a step in which blocks of stages are computed again is that of the recorded one, operator by operator; as few
are taken as a rank's budget asks for, and a plan has them where a pipeline alone does not fit; where they are not
enough, blocks of the ranks that need it run in chunks.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import PlanError
from lightning_amp.footprint.chain.passes import Passes
from lightning_amp.planning.modules.plan_module import plan_again, plan_module
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.techniques.chunk.row import ChunkBlock
from lightning_amp.techniques.pipeline.row import PipelineStages
from lightning_amp.techniques.pipeline.schedule.schedules import schedule
from lightning_amp.techniques.pipeline.schedule.stage_bytes import Pipeline, rank_peaks, stage_bytes
from lightning_amp.techniques.pipeline.stage_facts import StageChunks, stages_of
from lightning_amp.techniques.pipeline.stage_forms import Levels, computed_again, fewest_again, fewest_chunks
from lightning_amp.techniques.pipeline.stages import staged
from lightning_amp.techniques.stage_search import StageOptions
from tests.planning.modules.facts import with_stages
from tests.planning.modules.test_plan_of_a_module import base
from tests.planning.modules.test_stages import ROWS, SAVED, SENT, WEIGHT, made, passes, step

LEVELS = {20: 4.0, 50: 1.0, 70: 0.5}
"""Bytes for every sample that a block in chunks is given, and keeps, and the seconds that it takes more."""
WHOLE = [0, 5]
"""Blocks of which no part takes less in chunks."""
FOUR = StageOptions(micro_batches=4, schedule="1f1b")
REPEATABLE = [f"blocks.{i}" for i in range(4)]
"""Of the six blocks; the chain of the step knows nothing of the others."""


def again_of(found: Draft | Plan) -> list[str]:
    listed = found.targets if isinstance(found, Draft) else found.rules
    return [one.fqn for one in listed if one.strategy == "recompute"]


def test_a_block_keeps_what_it_is_given_and_runs_before_its_backward_pass() -> None:
    rows = 2
    plain = passes(rows)
    again = computed_again(plain, (0, 1, 2))
    kept, least = (stage_bytes(one, 0, 3, to_the_end=False) for one in (plain, again))
    # of the second and third block what they are given stays, which is what the one before returns
    assert kept.kept - least.kept == rows * (3 * SAVED - 2 * SENT)
    # in the backward pass those of one block are there at a time, with its result
    assert kept.first_backward - least.first_backward >= rows * (2 * SAVED - 3 * SENT) - 3 * WEIGHT
    assert least.first_backward >= rows * SAVED
    assert again.seconds.sum() == plain.seconds.sum() + 3 * rows
    # once more in the order of the backward pass, before the block's own operator, which is twice as long
    own = np.flatnonzero(again.segment == 1)
    assert again.seconds[own].tolist() == [rows, 2 * rows]
    # what follows is as it was, somewhat later
    assert (len(again.seconds), again.optimises.argmax()) == (len(plain.seconds) + 3, len(plain.seconds) + 2)
    assert again.gradients[:, 0].tolist() == [int(np.flatnonzero(again.segment == i)[-1]) for i in range(6)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_rank_computes_as_few_blocks_again_as_it_needs(name: str) -> None:
    part, ranks, count = passes(ROWS // 4), 2, 4
    orders = schedule(name, ranks, count)
    pipeline = Pipeline(part=part, whole=passes(), ends=(3, 6), orders=orders, at_once=name == "gpipe")
    peaks = rank_peaks(pipeline)
    assert fewest_again(pipeline, range(6), [max(peaks)] * ranks) == ()
    fullest = peaks.index(max(peaks))
    one = fewest_again(pipeline, range(6), [max(peaks) - 1] * ranks)
    assert len(one) == 1
    assert one[0] // 3 == fullest
    # what cannot be computed again is left as it is, and too small a budget takes all others
    assert fewest_again(pipeline, (0, 1, 5), [1] * ranks) == (0, 1, 5)


def test_a_budget_asks_for_blocks_of_a_stage_and_their_time() -> None:
    free = made(staged(step(), 2, data=1, budget=None, asked=FOUR))
    assert again_of(free) == []
    every = made(staged(step(), 2, data=1, budget=None, asked=replace(FOUR, again=("*",))))
    assert again_of(every) == REPEATABLE
    assert every.seconds > free.seconds
    assert every.stages[0].backward_seconds > free.stages[0].backward_seconds
    budget = (free.peak_bytes + every.peak_bytes) // 2
    some = made(staged(step(), 2, data=1, budget=budget, asked=FOUR))
    assert 0 < len(again_of(some)) < 4
    assert some.peak_bytes <= budget
    assert free.seconds < some.seconds < every.seconds
    named = made(staged(step(), 2, data=1, budget=None, asked=replace(FOUR, again=("blocks.[12]",))))
    assert again_of(named) == ["blocks.1", "blocks.2"]
    fixed = staged(step(), 2, data=1, budget=None, asked=replace(FOUR, again=("other",)))
    assert "can run a second time" in str(fixed)


def test_plans_have_what_was_asked_for_or_what_fits() -> None:
    stages = PipelineStages(ends="3,6", schedule="1f1b")
    rule = Rule(fqn="blocks", spec=stages, strategy="pipeline", why="requested")
    asked = base(None, devices=2)
    asked = replace(
        asked, mesh=replace(asked.mesh, data=1, model=2), rules=(*asked.rules, rule), strategies=("S1", "pipeline")
    )
    plain = plan_module(asked, step(), named=())
    assert again_of(plain) == []
    every = plan_module(asked, step(), named=("recompute",), budget_named=False)
    assert again_of(every) == REPEATABLE
    assert every.predicted_peak_bytes < plain.predicted_peak_bytes
    assert plan_again(every, step()).predicted_peak_bytes == every.predicted_peak_bytes
    tight = replace(asked, budget_bytes=(plain.predicted_peak_bytes + every.predicted_peak_bytes) // 2)
    some = plan_module(tight, step(), named=("recompute",))
    assert some.fits
    assert 0 < len(again_of(some)) < 4
    assert plan_module(tight, step(), named=()).fits is False
    # with a budget that needs none of them, all are, for they were asked for
    wide = replace(asked, budget_bytes=100_000)
    assert len(again_of(plan_module(wide, step(), named=("recompute",)))) == 4
    with pytest.raises(PlanError, match="its blocks were not looked at for chunks; leave 'chunk' out"):
        plan_module(asked, step(), named=("recompute", "chunk"))
    with pytest.raises(PlanError, match="pipeline together with fsdp is not supported"):
        plan_module(asked, step(), named=("fsdp", "chunk"))


def test_auto_recomputes_in_stages_where_nothing_else_fits() -> None:
    heavy = step(held=200_000)
    free = made(staged(heavy, 2, data=1, budget=None, asked=StageOptions(again=())))
    least = made(staged(heavy, 2, data=1, budget=1, asked=StageOptions(again=("*",))))
    found = plan_module(base((free.peak_bytes + least.peak_bytes) // 2, devices=2), heavy)
    assert found.strategies == ("S1", "recompute", "pipeline")
    assert found.fits
    assert Plan.from_json(found.to_json()) == found


class Forms:
    """As ChunkForms, of a micro-batch: its slowest level is four times as slow as the block."""

    def __init__(self, rows: int) -> None:
        self._rows, self.reason = rows, "it has one sample" if rows == 1 else ""

    def budgets(self, fqn: str, *, slow: bool = True) -> tuple[int, ...]:
        # of one sample nothing is cut
        if int(fqn.rpartition(".")[2]) in WHOLE or self._rows == 1:
            return ()
        return tuple(self._rows * level for level in (LEVELS if slow else [50, 70]))


def in_chunks(rows: int, chunks: Mapping[str, ChunkBlock]) -> Passes:
    """The step in which some blocks keep less and take longer backward."""
    plain = passes(rows)
    n_bytes, seconds = plain.n_bytes.copy(), plain.seconds.copy()
    for name, spec in chunks.items():
        i, level = int(name.rpartition(".")[2]), spec.budget_bytes // rows
        n_bytes[i] = rows * level
        seconds[np.flatnonzero(plain.segment == i)[0]] += rows * LEVELS[level]
    return replace(plain, n_bytes=n_bytes, seconds=seconds)


def chunkable(**options: Any) -> ProfiledStep:
    forms: Any = Forms
    return with_stages(step(**options), chunks=StageChunks(forms=forms, passes=in_chunks))


def test_every_rank_takes_the_fastest_chunks_with_which_it_fits() -> None:
    rows, orders = ROWS // 4, schedule("1f1b", 2, 4)
    part = passes(rows)
    pipeline = Pipeline(part=part, whole=passes(), ends=(3, 6), orders=orders, at_once=False)
    levels = Levels(stages_of(chunkable()).chunks, part)  # type: ignore[arg-type]
    peaks = rank_peaks(pipeline)
    assert fewest_chunks(pipeline, levels, (), [max(peaks)] * 2) == ({}, ())

    def peak(level: int) -> tuple[int, ...]:
        names = [f"blocks.{i}" for i in range(6) if i not in WHOLE]
        chunks = {name: ChunkBlock(budget_bytes=rows * level) for name in names}
        return rank_peaks(replace(pipeline, part=in_chunks(rows, chunks)))

    fullest = peaks.index(max(peaks))
    own = {f"blocks.{i}" for i in ((1, 2), (3, 4))[fullest]}
    for least, budget in ((70, max(peaks) - 1), (50, peak(70)[fullest] - 1), (20, peak(50)[fullest] - 1)):
        found, again = fewest_chunks(pipeline, levels, (), [budget] * 2)
        assert {name: found[name].budget_bytes for name in own} == dict.fromkeys(own, rows * least)
        assert again == ()
        line = replace(pipeline, part=in_chunks(rows, found))
        assert max(rank_peaks(line)) <= budget
    # with nothing that fits, that of the least bytes
    found, _ = fewest_chunks(pipeline, levels, (), [1, 1])
    assert {spec.budget_bytes for spec in found.values()} == {rows * 20}
    # computing a block again takes a second for every sample: two of them take as long as two in chunks of 50, which
    # do not fit here by themselves, and are faster than those of 20
    found, again = fewest_chunks(pipeline, levels, range(6), [peak(50)[fullest] - 1] * 2)
    assert {i for i in again if f"blocks.{i}" in own} or max(s.budget_bytes for s in found.values()) > rows * 20


def test_auto_takes_chunks_in_stages_where_nothing_else_fits() -> None:
    heavy = chunkable(held=200_000)
    least = made(staged(heavy, 2, data=1, budget=1, asked=StageOptions(again=("*",), chunks={})))
    found = plan_module(base(least.peak_bytes - 1, devices=2), heavy)
    assert found.fits
    assert "chunk" in found.strategies
    assert "pipeline" in found.strategies
    assert "chunk" not in plan_module(base(least.peak_bytes, devices=2), heavy).strategies
