"""Claim: policy "auto" takes the fastest legal plan that fits, always the same one, and shows what it compared."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from lightning_amp.costs.device_rates import CPU_CORE
from lightning_amp.costs.model_shape import ModelShape, reference_shape
from lightning_amp.errors import PlanError
from lightning_amp.planning import sizes
from lightning_amp.planning.plan.plan import MeshShape
from lightning_amp.planning.policies.auto import TIE, candidates
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.planning.reports.plan_report import LESS, SHOWN, plan_report, shown_candidates
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.table import STRATEGIES
from tests.planning.profiles import hic, profile, rna, with_full_attention

DATA = profile(hic(anchors=1500, strata=6), rna())
CONVOLUTION = profile(hic(anchors=1500, strata=6, attention=False), rna())
auto = partial(plan, DATA, batch_size=64)


def shape(**decoder: object) -> ModelShape:
    whole = reference_shape(DATA, batch_size=64)
    return replace(whole, decoder=replace(whole.decoder, **decoder))


def compared(**options: object):
    return candidates(shape(), **{"devices": 1, "budget": None, "rates": CPU_CORE} | options)


def test_the_chosen_one_comes_first_and_is_the_plan() -> None:
    for devices, budget in ((1, None), (2, "100MiB"), (4, "24GiB"), (1, "1KiB")):
        made = auto(devices=devices, device_memory=budget)
        first = made.candidates[0]
        assert [c.verdict for c in made.candidates].count("chosen") == 1
        assert first.verdict == "chosen"
        assert made.strategies == first.strategies
        assert made.mesh == MeshShape(data=first.data, model=first.model)
        assert made.predicted_peak_bytes == first.peak_bytes
        assert made.predicted_step_seconds == first.step_seconds
        assert first.cell_seconds == pytest.approx(first.step_seconds / (64 * first.data))


def test_it_is_the_fastest_that_fits_and_of_those_as_fast_the_simplest() -> None:
    found = compared(devices=2)
    budget = sorted(c.peak_bytes for c in found)[len(found) // 2]
    best, *others = compared(devices=2, budget=budget)
    fitting = [c for c in (best, *others) if c.peak_bytes <= budget]
    assert 1 < len(fitting) < len(found)
    fastest = min(c.cell_seconds for c in fitting)
    level = [c for c in fitting if c.cell_seconds <= TIE * fastest]
    assert best in level
    assert len(level) > 1
    assert len(best.strategies) == min(len(c.strategies) for c in level)
    assert compared(devices=2, budget=best.peak_bytes)[0].strategies == best.strategies, "it fits exactly"
    assert compared(devices=2, budget=best.peak_bytes - 1)[0].strategies != best.strategies
    # without a tie the simplest would be slower than needed
    assert min(fitting, key=lambda c: len(c.strategies)).cell_seconds > TIE * fastest


def test_of_equal_times_the_fewest_techniques_win_and_the_library_decides_between_as_few(monkeypatch) -> None:
    monkeypatch.setattr("lightning_amp.planning.policies.auto.decoder_seconds", lambda *args, **kwargs: 1.0)
    assert compared()[0].strategies == ()
    assert {c.verdict for c in compared()[1:]} == {"within 2 %, no simpler"}
    peaks = {c.strategies: c.peak_bytes for c in compared()}
    assert peaks["recompute",] < peaks["stream",] < peaks[()]
    level = [s for s in STRATEGIES if (s,) in peaks and peaks[s,] <= peaks["stream",]]
    assert level == ["recompute", "stream"]
    assert compared(budget=peaks["stream",])[0].strategies == ("recompute",)
    assert compared(budget=peaks["recompute",])[0].strategies == ("recompute",)


@pytest.fixture
def weights_of_attention_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in large decoders; in small ones they make stream the fastest, and the choice is none."""
    # sizes that were counted before are remembered
    sizes.same_strata.cache_clear()
    monkeypatch.setattr("lightning_amp.planning.sizes.keeps_weights", lambda anchors, *, window: False)
    yield
    sizes.same_strata.cache_clear()


@pytest.mark.usefixtures("weights_of_attention_are_not_kept")
def test_a_smaller_budget_never_means_a_larger_peak_or_a_faster_plan() -> None:
    peaks = sorted({c.peak_bytes for c in compared()})
    made = [auto(device_memory=budget) for budget in reversed(peaks)]
    assert all(m.fits for m in made)
    assert all(m.predicted_peak_bytes <= m.budget_bytes for m in made)
    taken = [m.predicted_peak_bytes for m in made]
    assert taken == sorted(taken, reverse=True)
    assert len(set(taken)) >= 3
    times = [m.predicted_step_seconds for m in made]
    assert all(later >= before / TIE for before, later in pairwise(times))
    assert taken[-1] == peaks[0]


def test_where_nothing_fits_it_takes_the_smallest_peak_and_says_so() -> None:
    made = auto(devices=2, device_memory="1MiB")
    assert made.fits is False
    assert made.predicted_peak_bytes == min(c.peak_bytes for c in made.candidates)
    assert {c.verdict for c in made.candidates[1:]} == {"exceeds 1.00 MiB"}
    peaks = [c.peak_bytes for c in made.candidates[1:]]
    assert peaks == sorted(peaks)
    text = plan_report(made)
    assert "does NOT fit" in text
    assert "predicted to run out of memory" in text
    assert f"the best of {len(peaks) + 1} by time and memory; 0 fit 1.00 MiB" in " ".join(text.split())


def test_what_a_decoder_refuses_is_never_taken() -> None:
    refused = ("fused", "sparse", "stream", "strata")
    found = candidates(shape(unsupported=refused), devices=2, budget=None, rates=CPU_CORE)
    taken = {s for c in found for s in c.strategies}
    assert not taken & set(refused)
    # scores in chunks where they cannot be fused, and only there
    assert {"S3", "recompute", "nodes", "S5"} <= taken
    assert all("S5" in c.strategies for c in compared(devices=2) if "S3" in c.strategies)


def test_decoders_without_attention_and_models_without_a_decoder() -> None:
    found = plan(CONVOLUTION, devices=2, batch_size=64).candidates
    assert not {s for c in found for s in c.strategies} & {"S3", "fused", "sdpa", "nodes"}
    assert any("S5" in c.strategies for c in found)
    alone = plan(profile(rna()), devices=2)
    assert (alone.strategies, alone.candidates, alone.predicted_step_seconds) == (("S1",), (), None)
    assert plan(profile(rna())).strategies == ()


FULL = profile(with_full_attention(hic(anchors=1500, strata=6)), rna())


def test_full_attention_gets_what_does_not_need_buckets() -> None:
    found = plan(FULL, devices=4, batch_size=64).candidates
    taken = {s for c in found for s in c.strategies}
    assert not taken & {"S3", "S5", "fused", "sdpa"}
    assert {"S2", "S4", "nodes", "strata", "stream", "recompute"} <= taken
    for strategy in ("S3", "S5", "fused", "sdpa"):
        with pytest.raises(
            PlanError, match=rf"local attention is required by {strategy}.*is full \(as asked\).*use 'nodes'"
        ):
            plan(FULL, devices=4, strategies=strategy)
    with pytest.raises(PlanError, match="window=20 is not supported: full attention has no window"):
        reference_shape(FULL, batch_size=4, window=20)
    # anchors are split one by one
    assert plan(FULL, devices=1024, node_devices=1024, strategies="nodes").mesh.model == 1024


def test_the_model_axis_is_as_long_as_asked_for() -> None:
    for size in (1, 2, 4):
        made = auto(devices=4, model_parallel_size=size)
        assert {(c.data, c.model) for c in made.candidates} == {(4 // size, size)}
        assert not any("policy paper" in note for note in made.notes)
    with pytest.raises(PlanError, match=r"model_parallel_size=3 .* with 4 devices; .* one of \[1, 2, 4\]"):
        auto(devices=4, model_parallel_size=3)
    with pytest.raises(PlanError, match="model_parallel_size=64 .* share this model among so many ranks"):
        plan(CONVOLUTION, devices=64, model_parallel_size=64, shape=shape_of_convolution())


def shape_of_convolution() -> ModelShape:
    whole = reference_shape(CONVOLUTION, batch_size=64, latent_dim=8)
    return replace(whole, decoder=replace(whole.decoder, unsupported=("S2",)))


def test_strata_and_nodes_go_to_no_more_ranks_than_there_are() -> None:
    found = compared(devices=16, model_parallel_size=16)
    assert not any("strata" in c.strategies for c in found), "6 strata"
    assert not any("nodes" in c.strategies for c in found), "13 buckets"
    assert any("nodes" in c.strategies for c in compared(devices=8, model_parallel_size=8))


def test_the_candidates_of_the_text_are_those_between_which_one_may_choose() -> None:
    for budget in (None, "90MiB", "1KiB"):
        made = auto(devices=2, device_memory=budget)
        first, *others = shown = shown_candidates(made.candidates)
        assert first == made.candidates[0]
        assert len(shown) <= SHOWN < len(made.candidates)
        assert any(set(c.strategies) <= {"S1"} for c in shown), "the step as it is"
        assert min(c.peak_bytes for c in shown) * LESS <= min(c.peak_bytes for c in made.candidates)
        best = [c for c in others if not set(c.strategies) <= {"S1"}]
        for slower, faster in pairwise(sorted(best, key=lambda c: -c.cell_seconds)):
            assert slower.peak_bytes < faster.peak_bytes, "it is slower and needs less"
    assert shown_candidates(made.candidates[:SHOWN]) == made.candidates[:SHOWN]


def test_the_papers_mapping_is_named_where_it_is_another() -> None:
    made = auto(devices=4, device_memory="60MiB")
    note = next(note for note in made.notes if note.startswith("policy paper would take"))
    other = auto(devices=4, device_memory="60MiB", policy="paper")
    assert other.strategies != made.strategies
    assert f"take {', '.join(other.strategies)} on {other.mesh.data} x {other.mesh.model}:" in note
    assert f"a peak of {format_bytes(other.predicted_peak_bytes)} and" in note
    assert note.endswith(format_seconds(made.candidates[0].cell_seconds))
    same = [auto(device_memory=b) for b in ("1TiB",)] + [plan(profile(rna()), devices=2)]
    assert not [n for m in same if m.strategies in ((), ("S1",)) for n in m.notes if "policy paper" in n]


@pytest.mark.usefixtures("weights_of_attention_are_not_kept")
def test_of_plans_as_fast_one_with_memory_to_spare_is_taken() -> None:
    # keeping less takes time in Python, which this decoder is too small to hide
    rates = replace(CPU_CORE, overhead_seconds=0.0)
    usual = compared(rates=rates)[0]
    streamed = next(c for c in compared(rates=rates) if c.strategies == (*usual.strategies, "stream"))
    assert streamed.peak_bytes < usual.peak_bytes
    near = compared(budget=2 * usual.peak_bytes - 1, rates=rates)
    assert near[0].peak_bytes < usual.peak_bytes
    assert near[0].strategies != usual.strategies
    verdicts = {c.strategies: c.verdict for c in near}
    assert verdicts[usual.strategies] == "over half the memory"
    assert compared(budget=2 * usual.peak_bytes, rates=rates)[0].strategies == usual.strategies
