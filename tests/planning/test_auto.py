"""Claim: policy "auto" takes the fastest legal plan that fits, always the same one, and shows what it compared."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest

from lightning_amp.cli.main import main
from lightning_amp.costs.device_rates import CPU_CORE, rates_for
from lightning_amp.costs.model_shape import ModelShape, reference_shape
from lightning_amp.costs.profiled_step import TIE
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.errors import PlanError
from lightning_amp.planning import sizes
from lightning_amp.planning.plan.mesh_shape import MeshShape
from lightning_amp.planning.plan.plan import Candidate
from lightning_amp.planning.policies import recommend_devices as recommendation
from lightning_amp.planning.policies.auto import candidates
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.planning.policies.recommend_devices import WORTH, Scale, recommend_devices
from lightning_amp.planning.reports.plan_report import LESS, SHOWN, plan_report, shown_candidates
from lightning_amp.planning.reports.step_report import recommendation_report
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
    whole = reference_shape(CONVOLUTION, batch_size=64, latent_dim=8)
    whole = replace(whole, decoder=replace(whole.decoder, unsupported=("S2",)))
    with pytest.raises(PlanError, match="model_parallel_size=64 .* share this model among so many ranks"):
        plan(CONVOLUTION, devices=64, model_parallel_size=64, shape=whole)


def test_a_node_may_have_more_devices_than_are_used() -> None:
    for request in ({"strategies": "S5"}, {"policy": "paper"}, {}):
        whole, part = (auto(devices=6, device_memory="60MiB", node_devices=n, **request) for n in (None, 8))
        assert part.mesh == whole.mesh
        assert part.strategies == whole.strategies


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


GIB = 2**30
LARGE = profile(hic(anchors=1500, strata=4), rna())


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    out = tmp_path_factory.mktemp("outlook") / "data"
    synthesize(out, cells=24, bins=30, strata=3, genes=20, seed=1)
    return str(out)


def shape_of(cells: int):
    return reference_shape(LARGE, batch_size=cells)


def recommended(monkeypatch, seconds: dict[int, float], *, peaks: dict[int, int] | None = None):
    """A recommendation where the planner finds these times and peaks for so many devices."""

    def best(profile, *, devices, model_parallel_size, **rest):
        if devices not in seconds:
            raise PlanError("no parts for so many ranks")
        peak, took, model = (peaks or {}).get(devices, 1), seconds[devices], model_parallel_size
        mesh = {"data": devices // model, "model": model}
        one = Candidate(strategies=(), **mesh, peak_bytes=peak, step_seconds=took, cell_seconds=1.0)
        found = {"candidates": (one,), "predicted_step_seconds": took, "predicted_rest_seconds": None}
        return SimpleNamespace(**found, fits=peak <= 100 if peaks else None)

    monkeypatch.setattr(recommendation, "plan", best)
    budget = 100 if peaks else None
    cells = max(seconds)
    return recommend_devices(LARGE, shape_of, cells=cells, budget=budget, rates=CPU_CORE)


@pytest.mark.parametrize(
    ("seconds", "devices", "why"),
    [
        ({1: 8.0, 2: 4.1, 4: 2.5, 8: 2.0, 16: 2.0}, 4, "8 devices would be 1.25 x as fast as 4"),
        ({1: 8.0, 2: 6.0, 4: 2.0, 8: 2.0}, 1, "2 devices would be 1.33 x as fast as 1"),
        ({1: 6.0, 2: 4.0, 4: 4.0, 8: 4.0}, 2, "4 devices would be 1.00 x as fast as 2"),
        ({1: 6.0, 2: 4.001, 4: 4.0}, 1, "2 devices would be 1.49 x as fast as 1"),
        ({1: 8.0, 2: 4.0}, 2, "neither cells nor parts of the decoder for more devices"),
        ({2**i: 2.0**-i for i in range(12)}, 256, "more were not looked at"),
    ],
)
def test_the_largest_number_up_to_which_every_doubling_is_worth_it(monkeypatch, seconds, devices, why) -> None:
    found = recommended(monkeypatch, seconds)
    assert found.devices == devices
    assert why in found.why


def test_rows_say_what_every_doubling_gives(monkeypatch) -> None:
    found = recommended(monkeypatch, {1: 8.0, 2: 4.0, 4: 3.2, 8: 1.6, 16: 1.5, 32: 1.0})
    rows = [(s.devices, s.speed_up, s.efficiency, s.gain, s.worth) for s in found.scales]
    assert rows == [
        (1, 1.0, 1.0, None, "the fewest"),
        (2, 2.0, 1.0, 2.0, "yes"),
        (4, 2.5, 0.625, 1.25, "no"),
        (8, 5.0, 0.625, 2.0, "no"),
        (16, pytest.approx(8 / 1.5), pytest.approx(1 / 3), pytest.approx(1.6 / 1.5), "no"),
    ], "the second doubling that is not worth it ends the list"
    assert json.loads(json.dumps(found.to_dict()))["worth_from_gain"] == WORTH


def test_no_fewer_than_fit(monkeypatch) -> None:
    seconds = {1: 8.0, 2: 4.0, 4: 3.9, 8: 3.8, 16: 3.8}
    found = recommended(monkeypatch, seconds, peaks={1: 300, 2: 200, 4: 100, 8: 50})
    assert [s.fits for s in found.scales][:3] == [False, False, True]
    assert [s.worth for s in found.scales][:4] == ["does not fit", "does not fit", "the fewest", "no"]
    assert found.devices == 4
    assert found.scales[2].speed_up == 1.0
    never = recommended(monkeypatch, seconds, peaks=dict.fromkeys(seconds, 101))
    assert never.devices is None
    assert "does not fit on 16 devices either" in never.why
    assert "Worth having: no number of devices" in recommendation_report(never)


def test_ranks_of_the_data_axis_share_the_cells_of_a_step(monkeypatch) -> None:
    seen = set()

    def noted(profile, **asked):
        devices, model, cells = (asked[name] for name in ("devices", "model_parallel_size", "batch_size"))
        assert asked["shape"].batch_size == cells
        seen.add((devices // model, model, cells))
        return plan(profile, **asked)

    monkeypatch.setattr(recommendation, "plan", noted)
    monkeypatch.setattr(recommendation, "MOST_DEVICES", 4)
    recommend_devices(LARGE, shape_of, cells=3, budget=None, rates=CPU_CORE)
    assert seen == {(1, 1, 3), (1, 2, 3), (2, 1, 2), (1, 4, 3), (2, 2, 2)}, "four ranks have no three cells"


def test_links_between_nodes_are_slower_and_the_model_axis_stays_inside_one() -> None:
    rates = rates_for("A100")

    def of_nodes(devices: int) -> dict[int, Scale]:
        asked = {"cells": 512, "budget": None, "rates": rates.on_nodes_of(devices)}
        return {s.devices: s for s in recommend_devices(LARGE, shape_of, **asked).scales}

    large, small = of_nodes(8), of_nodes(2)
    assert all(s.best.model <= 2 for s in small.values())
    assert [large[n].step_seconds == small[n].step_seconds for n in (1, 2, 4)] == [True, True, False]
    assert large[4].step_seconds < small[4].step_seconds


@pytest.mark.parametrize("cells", [0, -3, True, 2.5, 10**7])
def test_a_recommendation_needs_cells_and_a_decoder(cells) -> None:
    with pytest.raises(PlanError, match="allowed is a whole number of cells from 1 to 1,000,000"):
        recommend_devices(LARGE, shape_of, cells=cells, budget=None, rates=CPU_CORE)
    flat = profile(rna())
    with pytest.raises(PlanError, match=r"no modality with strata \(Hi-C\)"):
        recommend_devices(flat, lambda n: reference_shape(flat, batch_size=n), cells=1, budget=None, rates=CPU_CORE)


def test_the_command_line_recommends_in_text_and_json(data_dir, capsys) -> None:
    asked = ["plan", data_dir, "--recommend-devices", "--batch-size", "4", "--device-memory", "8GiB"]
    assert main([*asked, "--device", "A100"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "with the rates of an A100" in " ".join(text.split())
    assert main([*asked, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["rates_device"] == "one CPU core"


@pytest.mark.long
def test_status_3_where_nothing_fits_the_memory_that_was_named(data_dir, capsys) -> None:
    alone = ["--shape", "anchors=5400,dim=64,strata=8,batch=1"]
    for words in ([data_dir], [data_dir, "--recommend-devices"], alone):
        assert main(["plan", *words, "--device-memory", "1MiB"]) == 3
        assert main(["plan", *words, "--device-memory", "80GiB"]) == 0
        assert main(["plan", *words]) == 0
    assert main(["plan", data_dir, "--strategies", "S1", "--device-memory", "1MiB", "--format", "json"]) == 3
    capsys.readouterr()


@pytest.mark.long
def test_a_recommendation_needs_no_torch(data_dir) -> None:
    # anndata 0.11 imports torch wherever it is installed, so that the test hides it
    code = (
        "import sys; sys.modules['torch'] = None; from lightning_amp.cli.main import main;"
        f"sys.exit(main(['plan', {data_dir!r}, '--recommend-devices', '--batch-size', '1']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
