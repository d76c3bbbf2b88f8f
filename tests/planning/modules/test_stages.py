"""Claim: blocks are cut by their seconds and within the bytes of a device, the peak of a rank is that of its passes in
their order, and a pipeline is compared with all other plans, and taken where nothing else fits.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from lightning_amp import cut_pipeline
from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import PlanError
from lightning_amp.footprint.chain.passes import Parameter, Passes
from lightning_amp.planning.modules.candidates import _candidate
from lightning_amp.planning.modules.plan_module import plan_again, plan_module
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.reports.module_report import advice_table
from lightning_amp.techniques.pipeline.row import PipelineStages
from lightning_amp.techniques.pipeline.schedule.schedules import schedule
from lightning_amp.techniques.pipeline.schedule.stage_bytes import Pipeline, rank_peaks, stage_bytes
from lightning_amp.techniques.pipeline.stage_facts import stages_of
from lightning_amp.techniques.pipeline.stage_forms import computed_again, fewest_again
from lightning_amp.techniques.pipeline.stages import staged
from lightning_amp.techniques.stage_search import StageOptions
from lightning_amp.techniques.table import conflicts
from tests.planning.modules.facts import with_stages
from tests.planning.modules.test_plan_of_a_module import base, profiled, seen

ROWS, SAVED, SENT, WEIGHT = 8, 100, 8, 10


def passes(
    rows: int = ROWS, *, seconds: Sequence[float] = (1.0,) * 6, saved: int = SAVED, weight: int = WEIGHT
) -> Passes:
    """One operator forward and one backward of each block and of what follows; bytes and seconds grow with the rows.

    A block keeps `saved` bytes and returns SENT for every row; its parameter has `weight` bytes, its state twice that.
    """
    blocks = len(seconds)
    forward, back = range(1, blocks + 2), range(blocks + 2, 2 * blocks + 3)
    backward_of = {i: back[blocks - i] for i in range(blocks + 1)}
    segment = np.full(2 * blocks + 4, -1)
    segment[list(back)] = list(range(blocks, -1, -1))
    took = np.zeros(2 * blocks + 4)
    took[list(forward)] = [*(rows * s for s in seconds), rows * 0.5]
    took[list(back)] = [rows * 0.5, *(2 * rows * s for s in reversed(seconds))]
    return Passes(
        rows=rows,
        names=tuple(f"blocks.{i}" for i in range(blocks)),
        first=np.array([0, *range(2, blocks + 2), blocks + 2]),
        called=np.arange(1, blocks + 1),
        last_kept=np.arange(1, blocks + 1),
        asks=np.array([backward_of[i] for i in range(blocks)]),
        segment=segment,
        optimises=np.arange(2 * blocks + 4) == 2 * blocks + 3,
        seconds=took,
        # what each block keeps, then what each returns
        birth=np.array([*forward[:-1], *forward[:-1]]),
        held=np.array([*forward[:-1], *(t + 1 for t in forward[:-1])]),
        n_bytes=np.array([rows * saved] * blocks + [rows * SENT] * blocks),
        computed=np.ones(2 * blocks, dtype=bool),
        of_blocks=np.ones(2 * blocks, dtype=bool),
        needs=(np.array([], dtype=int),) * (blocks + 1),
        maker=np.full(2 * blocks + 4, -1),
        returned=(),
        inputs=tuple((blocks + i - 1,) if i else () for i in range(blocks)),
        outputs=tuple((blocks + i,) for i in range(blocks)),
        sent_bytes=(rows * SENT,) * blocks,
        strided_bytes=(0,) * blocks,
        copies=(),
        writes_batch=False,
        sums=np.zeros((0, 3), dtype=int),
        uses=np.array([(i, i, backward_of[i], -1, backward_of[i]) for i in range(blocks)]),
        gradients=np.array([(backward_of[i], weight, i, backward_of[i] + 1) for i in range(blocks)]),
        parameters=tuple(
            Parameter(
                name=f"blocks.{i}.w",
                n_bytes=weight,
                gradient_bytes=weight,
                state_bytes=2 * weight,
                segments=(i,),
                block=i,
            )
            for i in range(blocks)
        ),
        buffer_bytes=0,
        batch_bytes=4 * rows,
    )


def step(held: int = 100, **options: object) -> ProfiledStep:
    made = seen(profiled(held=held))
    return with_stages(made, passes=lambda rows: passes(rows or ROWS, **options))  # type: ignore[arg-type]


def made(found: Draft | str) -> Draft:
    assert isinstance(found, Draft), found
    return found


@pytest.mark.parametrize("fixed", [0.0, 0.2, 3.0])
def test_the_number_of_micro_batches_is_the_fastest_of_all(fixed: float) -> None:
    """Part of every operator's time does not shrink with the micro-batch, so many small ones may be slower."""
    rows = 24

    def of(length: int | None) -> Passes:
        found = passes(length or rows, seconds=(1.0, 2.0, 1.0, 1.0, 2.0, 1.0))
        return replace(found, seconds=np.where(found.seconds > 0, found.seconds + fixed, 0.0))

    there = with_stages(step(), passes=of)

    def seconds(count: int | None) -> tuple[float, int]:
        found = made(staged(there, 2, data=1, budget=None, options=StageOptions(micro_batches=count)))
        return found.seconds, found.targets[0].spec.micro_batches  # type: ignore[union-attr]

    every = {count: seconds(count)[0] for count in range(1, rows + 1)}
    free, chosen = seconds(None)
    assert free == pytest.approx(min(every.values()))
    assert every[chosen] == pytest.approx(free)


def spec_of(draft: Draft) -> PipelineStages:
    (target,) = (target for target in draft.targets if target.strategy == "pipeline")
    assert isinstance(target.spec, PipelineStages)
    return target.spec


def test_the_cut_is_that_of_least_slowest_stages() -> None:
    seconds = (1.0, 1.0, 1.0, 1.0, 5.0, 1.0)
    found = made(staged(step(seconds=seconds), 3, data=1, budget=None, options=StageOptions(micro_batches=4)))
    ends = tuple(map(int, spec_of(found).ends.split(",")))
    assert ends == (4, 5, 6)
    assert cut_pipeline(seconds, [2 * s for s in seconds], 3).ends == ends
    assert [stage.forward_seconds for stage in found.stages] == [8.0, 10.0, 2.0]
    assert spec_of(found).schedule == "gpipe"
    assert found.stages[-1].rest_seconds == 8.0
    # all stages once, the slowest one thrice more, and what follows the blocks
    assert found.seconds == pytest.approx(3 * 20.0 + 3 * 30.0 + 8.0, abs=0.01)
    # as many ranks wait as the timeline says: the slowest one least
    assert min(found.stages, key=lambda stage: stage.idle).first == 4


def test_less_memory_asks_for_another_cut_and_more_micro_batches() -> None:
    # the first block is slow, so that the fastest cut leaves all others to the second rank
    options = {"seconds": (5.0, 1.0, 1.0, 1.0, 1.0, 1.0)}
    free = made(staged(step(**options), 2, data=1, budget=None, options=StageOptions(micro_batches=2)))
    assert spec_of(free).ends == "1,6"
    kept = StageOptions(micro_batches=2, again=())
    tight = made(staged(step(**options), 2, data=1, budget=free.peak_bytes - 1, options=kept))
    assert tight.peak_bytes < free.peak_bytes
    assert tight.seconds > free.seconds
    assert int(spec_of(tight).ends.partition(",")[0]) > 1
    chosen = made(staged(step(**options), 2, data=1, budget=None, options=StageOptions()))
    assert spec_of(chosen).micro_batches == 8
    assert chosen.seconds < free.seconds
    # stages that take turns on a rank keep to the budget too
    # the fastest cut gives three blocks to the first stage, which shares a rank with the third
    options = {"seconds": (1.0, 1.0, 1.0, 5.0, 5.0, 5.0)}
    stage_options = StageOptions(micro_batches=2, schedule="interleaved", again=())
    free = made(staged(step(**options), 2, data=1, budget=None, options=stage_options))
    assert spec_of(free).ends == "3,4,5,6"
    tight = made(staged(step(**options), 2, data=1, budget=free.peak_bytes - 1, options=stage_options))
    assert tight.peak_bytes < free.peak_bytes
    assert tight.seconds > free.seconds


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_peak_of_a_rank_is_that_of_its_passes(name: str) -> None:
    ranks, count = 2, 4
    part, whole = passes(ROWS // count), passes()
    pipeline = Pipeline(
        part=part, whole=whole, ends=(3, 6), orders=schedule(name, ranks, count), at_once=name == "gpipe"
    )
    rows = ROWS // count
    # weights, state, and gradients of the step before; the batch
    always = 3 * WEIGHT * (1 + 2 + 1) + 4 * ROWS
    kept, sent = 3 * rows * SAVED, rows * SENT
    flying = count if name == "gpipe" else ranks
    # at the last forward pass of the most in flight
    first = always + flying * (kept + sent)
    if name == "1f1b":
        # after two have gone back nothing of them stays, and the gradients of a step are there
        first = always + 3 * WEIGHT + 2 * (kept + sent)
    # beside it, what comes back from the second stage
    assert rank_peaks(pipeline)[0] == pytest.approx(first + sent + WEIGHT, abs=4 * sent)
    assert rank_peaks(pipeline)[0] >= first
    if name == "gpipe":
        # the second receives as much in each micro-batch, twice, and has the gradient of all results
        second = always + count * (kept + 2 * sent)
        assert rank_peaks(pipeline)[1] == pytest.approx(second + ROWS * SENT, abs=6 * sent)


def test_what_cannot_be_stages_says_why() -> None:
    stage_options = StageOptions(micro_batches=2)
    assert "6 blocks for 8 stages" in str(staged(step(), 8, data=1, budget=None, options=stage_options))
    refused = with_stages(step(), passes=lambda rows: "block 'a' reads 'b'")
    assert staged(refused, 2, data=1, budget=None, options=stage_options) == "block 'a' reads 'b'"
    none = with_stages(step(), passes=None, reason="it has hooks")
    assert staged(none, 2, data=1, budget=None, options=stage_options) == "it has hooks"
    odd = StageOptions(micro_batches=7, schedule="interleaved")
    assert "rounds" in str(staged(step(), 3, data=1, budget=None, options=odd))


def test_a_pipeline_is_compared_and_taken_where_nothing_else_fits() -> None:
    found = plan_module(base(None, devices=2), step())
    rows = {row.strategies: row for row in found.candidates}
    row = rows["S1", "pipeline"]
    assert (row.data, row.model) == (1, 2)
    assert row.verdict == f"{2 * row.step_seconds / found.candidates[0].step_seconds:.2f} x the time"
    # of half the samples that two ranks of a data axis have
    assert row.cell_seconds == pytest.approx(row.step_seconds / ROWS)
    assert found.stages == ()
    assert "pipeline" in found.diagnosis.helps
    chosen = plan_module(base(10_000, devices=2), step(), options=StageOptions(model=2))
    assert "pipeline" in chosen.diagnosis.helps
    heavy = step(held=200_000, weight=WEIGHT)
    tight = plan_module(base(9_000, devices=2), heavy)
    assert tight.strategies == ("S1", "pipeline")
    assert (tight.mesh.data, tight.mesh.model) == (1, 2)
    assert any("a step takes 1 batch of the loader, where 2 ranks" in note for note in tight.notes)
    assert tight.fits
    assert tight.predicted_peak_bytes == max(stage.peak_bytes for stage in tight.stages)
    assert tight.rules[0].why == "1 rank on the data axis"
    assert Plan.from_json(tight.to_json()) == tight
    hopeless = plan_module(base(100, devices=2), heavy)
    assert hopeless.fits is False
    assert any("with pipeline" in note for note in hopeless.notes)


def test_a_faster_plan_over_the_model_axis_is_said_to_be_faster() -> None:
    best = Draft(ranks=2, peak_bytes=10, seconds=8.0)
    verdicts = [
        _candidate(draft, best, None, base=(), batch_size=1).verdict
        for draft in (replace(best, ranks=1, model=2, seconds=1.0), replace(best, seconds=8.1))
    ]
    assert verdicts == ["4.00 x as fast", "within 2 %, no simpler"]


def test_stages_are_not_looked_for_where_the_step_fits() -> None:
    whole = step()

    def passes(rows: int | None) -> Passes | str:
        assert rows is None, "a step would be counted, which takes seconds"
        counted = stages_of(whole).passes
        return counted(rows)

    found = plan_module(base(10_000, devices=2), with_stages(whole, passes=passes))
    assert not any("pipeline" in row.strategies for row in found.candidates)
    assert found.diagnosis.does_not_help["pipeline"].startswith("pipeline was not looked for")
    assert "pipeline not tried takes seconds: no budget asks" in " ".join(advice_table(found.diagnosis).split())
    narrow = replace(whole.rates, links=replace(whole.rates.links, intra_bandwidth=1.0))
    narrow_links = plan_module(base(10_000, devices=2), replace(whole, rates=narrow))
    compared = [row.strategies for row in narrow_links.candidates]
    assert ("S1", "pipeline") in compared, "stages have no gradients to average, and may be faster"
    named = plan_module(base(10_000, devices=2), with_stages(replace(whole, rates=narrow), passes=passes), named=())
    assert named.diagnosis.does_not_help["pipeline"].startswith("pipeline was not looked for"), "nothing is compared"


def test_a_model_axis_that_is_asked_for_is_a_pipeline_or_refused() -> None:
    found = plan_module(base(10_000, devices=4), step(), options=StageOptions(model=2))
    assert (found.mesh.data, found.mesh.model) == (2, 2)
    assert found.rules[0].why == "2 ranks on the data axis"
    with pytest.raises(PlanError, match="requires a pipeline .* which is not possible: it has hooks"):
        plan_module(
            base(None, devices=2),
            with_stages(step(), passes=None, reason="it has hooks"),
            options=StageOptions(model=2),
        )
    # a plan that was given keeps its cut and is predicted anew
    given = plan_module(base(10_000, devices=2), step(), options=StageOptions(model=2, micro_batches=4))
    again = plan_again(replace(given, stages=()), step(saved=2 * SAVED))
    assert again.rules == given.rules
    assert [stage.end for stage in again.stages] == [stage.end for stage in given.stages]
    assert again.predicted_peak_bytes > given.predicted_peak_bytes


def test_slow_ranks_have_fewer_blocks() -> None:
    def cut(*speeds: float, schedule: str = "1f1b") -> Draft:
        stage_options = StageOptions(micro_batches=4, schedule=schedule, speeds=speeds, again=())
        return made(staged(step(), 2, data=max(1, len(speeds) // 2), budget=None, options=stage_options))

    assert spec_of(cut()).ends == spec_of(cut(1.0, 1.0)).ends == "3,6"
    assert spec_of(cut(0.5, 1.0)).ends == "2,6"
    # of two pipelines the slowest rank of every place, for they wait for each other's gradients
    assert spec_of(cut(1.0, 1.0, 0.5, 1.0)).ends == "2,6"
    # one that is best left idle has a block all the same
    assert [spec_of(found).ends for found in (cut(0.01, 1.0), cut(1.0, 0.01))] == ["1,6", "5,6"]
    # two blocks of two seconds each at half the speed
    assert cut(0.5, 1.0).stages[0].forward_seconds == 2 * 2 / 0.5
    ends = list(map(int, spec_of(cut(0.5, 1.0, schedule="interleaved")).ends.split(",")))
    sizes = [b - a for a, b in zip((0, *ends), ends, strict=False)]
    assert sizes[0] + sizes[2] < sizes[1] + sizes[3]


def test_little_is_sent_between_nodes() -> None:
    """Of six equal blocks the third and the fourth return an eighth; of three ranks the third is on another node."""
    links = replace(step().rates.links, intra_bandwidth=64.0, inter_bandwidth=8.0, latency=0.0, adapters=1)
    sent = (64, 64, 8, 8, 64, 8)

    def cut(node: int, *, ranks: int = 3, data: int = 1) -> Draft:
        rates = replace(step().rates, links=replace(links, ranks_per_node=node))

        def of(rows: int | None) -> Passes:
            found = passes(rows or ROWS)
            return replace(found, sent_bytes=tuple(found.rows * n for n in sent))

        there = with_stages(replace(step(), rates=rates), passes=of)
        return made(staged(there, ranks, data=data, budget=None, options=StageOptions(micro_batches=8)))

    within, between, apart = cut(3), cut(2), cut(1)
    assert spec_of(within).ends == spec_of(between).ends == "2,4,6" != spec_of(apart).ends
    # 64 bytes a row at 64 bytes a second, and 8 at 8, there and back
    assert [stage.send_forward_seconds for stage in between.stages] == [1.0, 1.0, 0.0]
    assert [stage.send_backward_seconds for stage in between.stages] == [0.0, 1.0, 1.0]
    assert [stage.send_forward_seconds for stage in within.stages] == [1.0, 0.125, 0.0]
    assert within.seconds < between.seconds < apart.seconds
    (why,) = (rule.why for rule in between.targets if rule.strategy == "pipeline")
    assert "; stage 1 sends to another node" in why
    assert "another node" not in within.targets[0].why + apart.targets[0].why
    # a second pipeline begins on the second node and goes on to the third one, so that either link is between nodes
    assert cut(2, data=2).stages == apart.stages


def test_ranks_of_unlike_memory_have_blocks_for_it() -> None:
    """Of each block the first rank needs 450 bytes more, the second one 250: see the peaks of the cuts by hand."""
    kept = StageOptions(micro_batches=4, schedule="1f1b", again=())

    def cut(*memory: int, **more: object) -> Draft:
        stage_options = replace(kept, memory=memory, **more)  # type: ignore[arg-type]
        data = max(1, len(memory) // 2)
        return made(staged(step(), 2, data=data, budget=min(memory, default=None), options=stage_options))

    free = cut()
    first, second = (stage.peak_bytes for stage in free.stages)
    assert spec_of(free).ends == "3,6"
    for blocks in (1, 2, 4, 5):
        peaks = [stage.peak_bytes for stage in cut(ends=(blocks, 6)).stages]
        assert peaks == [first + 450 * (blocks - 3), second - 250 * (blocks - 3)]
    # one byte less than three blocks need, on either rank
    assert spec_of(cut(first - 1, first)).ends == "2,6"
    assert spec_of(cut(first + 450, second - 1)).ends == "4,6"
    # the peak is that of the rank nearest to its memory, less what its device has more than the smallest one
    wide = cut(first, second + 50)
    assert (spec_of(wide).ends, wide.more_bytes) == ("3,6", first - second - 50)
    assert wide.peak_bytes + wide.more_bytes == first
    # of two pipelines the smallest device of every place
    assert spec_of(cut(first, second + 250, first - 1, 2 * second)).ends == "2,6"
    # a plan of unlike memory fits by that of each rank
    stage_options = StageOptions(model=2, micro_batches=4, schedule="1f1b", again=())
    first, second = (s.peak_bytes for s in plan_module(base(None, devices=2), step(), options=stage_options).stages)
    least, memory = second + 10, (first, second + 10)
    assert plan_module(base(least, devices=2), step(), options=stage_options).fits is False
    stage_options = replace(stage_options, memory=memory)
    found = plan_module(base(least, devices=2), step(), options=stage_options)
    again = plan_again(replace(found, budget_bytes=least, stages=()), step(), memory=memory)
    for plan in (found, again):
        assert plan.fits
        assert plan.predicted_peak_bytes == plan.budget_bytes == first > least


# Claim: a step in which blocks of stages are computed again is that of the recorded one, operator by operator; as few
# are taken as a rank's budget asks for, and a plan has them where a pipeline alone does not fit.

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
    free = made(staged(step(), 2, data=1, budget=None, options=FOUR))
    assert again_of(free) == []
    every = made(staged(step(), 2, data=1, budget=None, options=replace(FOUR, again=("*",))))
    assert again_of(every) == REPEATABLE
    assert every.seconds > free.seconds
    assert every.stages[0].backward_seconds > free.stages[0].backward_seconds
    budget = (free.peak_bytes + every.peak_bytes) // 2
    some = made(staged(step(), 2, data=1, budget=budget, options=FOUR))
    assert 0 < len(again_of(some)) < 4
    assert some.peak_bytes <= budget
    assert free.seconds < some.seconds < every.seconds
    named = made(staged(step(), 2, data=1, budget=None, options=replace(FOUR, again=("blocks.[12]",))))
    assert again_of(named) == ["blocks.1", "blocks.2"]
    fixed = staged(step(), 2, data=1, budget=None, options=replace(FOUR, again=("other",)))
    assert "can run a second time" in str(fixed)


def test_plans_have_what_was_asked_for_or_what_fits() -> None:
    stages = PipelineStages(ends="3,6", schedule="1f1b")
    rule = Rule(fqn="blocks", spec=stages, strategy="pipeline", why="requested")
    two_ranks = base(None, devices=2)
    two_ranks = replace(
        two_ranks,
        mesh=replace(two_ranks.mesh, data=1, model=2),
        rules=(*two_ranks.rules, rule),
        strategies=("S1", "pipeline"),
    )
    plain = plan_module(two_ranks, step(), named=())
    assert again_of(plain) == []
    every = plan_module(two_ranks, step(), named=("recompute",), budget_named=False)
    assert again_of(every) == REPEATABLE
    assert every.predicted_peak_bytes < plain.predicted_peak_bytes
    assert plan_again(every, step()).predicted_peak_bytes == every.predicted_peak_bytes
    tight = replace(two_ranks, budget_bytes=(plain.predicted_peak_bytes + every.predicted_peak_bytes) // 2)
    some = plan_module(tight, step(), named=("recompute",))
    assert some.fits
    assert 0 < len(again_of(some)) < 4
    assert plan_module(tight, step(), named=()).fits is False
    # with a budget that needs none of them, all are, for they were asked for
    wide = replace(two_ranks, budget_bytes=100_000)
    assert len(again_of(plan_module(wide, step(), named=("recompute",)))) == 4
    with pytest.raises(PlanError, match="pipeline together with chunk is not supported"):
        plan_module(two_ranks, step(), named=("recompute", "chunk"))
    # as a plan of a file is
    assert [*conflicts(("S1", "pipeline", "recompute", "chunk"))] == [
        "pipeline and chunk cannot be together: stages hold blocks as they are, or recompute them; use recompute"
    ]


def test_auto_recomputes_in_stages_where_nothing_else_fits() -> None:
    heavy = step(held=200_000)
    free = made(staged(heavy, 2, data=1, budget=None, options=StageOptions(again=())))
    least = made(staged(heavy, 2, data=1, budget=1, options=StageOptions(again=("*",))))
    found = plan_module(base((free.peak_bytes + least.peak_bytes) // 2, devices=2), heavy)
    assert found.strategies == ("S1", "recompute", "pipeline")
    assert found.fits
    assert Plan.from_json(found.to_json()) == found
