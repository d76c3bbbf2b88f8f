"""Claim: a recommendation of devices follows its rule at any speed-up, what-if asks the planner about scaled data, and
the command line tells both, or one line about a mistake.
"""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest

from lightning_amp.cli.main import main
from lightning_amp.costs.device_rates import CPU_CORE, rates_for
from lightning_amp.costs.model_shape import reference_shape
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.errors import PlanError
from lightning_amp.planning.plan.axes import MeshShape
from lightning_amp.planning.plan.decoder_only import profile_of_module, shape_of_decoder
from lightning_amp.planning.plan.plan import Candidate
from lightning_amp.planning.policies.auto import candidates
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.planning.questions import recommend_devices as recommendation
from lightning_amp.planning.questions.parse_questions import Questions, parse_questions
from lightning_amp.planning.questions.recommend_devices import WORTH, Recommendation, Scale, recommend_devices
from lightning_amp.planning.questions.what_if import Source, most_strata, what_if
from lightning_amp.planning.reports.answers_report import recommendation_report, what_if_report
from lightning_amp.planning.time.model_seconds import on_device, rest_seconds
from lightning_amp.profiling.read_profile import profile as read_profile
from lightning_amp.simulation.parse_shape import parse_shape
from tests.planning.profiles import hic, profile, rna

GIB = 2**30
DATA = profile(hic(anchors=1500, strata=4), rna())


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    out = tmp_path_factory.mktemp("outlook") / "data"
    synthesize(out, cells=24, bins=30, strata=3, genes=20, seed=1)
    return str(out)


def shape_of(cells: int):
    return reference_shape(DATA, batch_size=cells)


def recommended(
    monkeypatch, seconds: dict[int, float], *, peaks: dict[int, int] | None = None, cells: int = 512
):
    """A recommendation where the planner finds these times and peaks for so many devices."""

    def best(shape, *, devices, model_parallel_size, **rest):
        if devices not in seconds:
            return ()
        peak = (peaks or {}).get(devices, 1)
        one = Candidate(
            strategies=(),
            data=devices // model_parallel_size,
            model=model_parallel_size,
            peak_bytes=peak,
            step_seconds=seconds[devices],
            cell_seconds=1.0,
        )
        return (one,)

    monkeypatch.setattr(recommendation, "candidates", best)
    monkeypatch.setattr(recommendation, "rest_seconds", lambda *args: None)
    return recommend_devices(DATA, shape_of, cells=cells, budget=100 if peaks else None, rates=CPU_CORE)


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
def test_the_largest_number_up_to_which_every_doubling_is_worth_it(
    monkeypatch, seconds, devices, why
) -> None:
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
    real = recommendation.candidates

    def noted(shape, *, devices, model_parallel_size, **rest):
        seen.add((devices // model_parallel_size, model_parallel_size, shape.batch_size))
        return real(shape, devices=devices, model_parallel_size=model_parallel_size, **rest)

    monkeypatch.setattr(recommendation, "candidates", noted)
    monkeypatch.setattr(recommendation, "MOST_DEVICES", 4)
    recommend_devices(DATA, shape_of, cells=3, budget=None, rates=CPU_CORE)
    assert seen == {(1, 1, 3), (1, 2, 3), (2, 1, 2), (1, 4, 3), (2, 2, 2)}, "four ranks have no three cells"


def test_cells_of_a_step_are_fixed_and_the_best_mesh_is_found() -> None:
    found = recommend_devices(DATA, shape_of, cells=6, budget=None, rates=rates_for("A100"))
    assert [s.devices for s in found.scales][:3] == [1, 2, 4]
    for s in found.scales[:3]:
        assert s.cells == -(-6 // s.best.data)
        every = [
            c
            for model in (m for m in (1, 2, 4) if s.devices % m == 0)
            for c in candidates(
                on_device(shape_of(-(-6 // (s.devices // model))), rates_for("A100")),
                devices=s.devices,
                budget=None,
                rates=rates_for("A100"),
                own=frozenset({"S1"} if s.devices > 1 else ()),
                model_parallel_size=model,
            )
        ]
        rest = [
            rest_seconds(shape_of(-(-6 // n.data)), n, rates_for("A100"))
            for n in (MeshShape(data=c.data, model=c.model) for c in every)
        ]
        assert s.step_seconds <= 1.05 * min(c.step_seconds + n for c, n in zip(every, rest, strict=True))
        assert s.step_seconds > s.best.step_seconds, "a step is more than its decoder"
        assert s.best.peak_bytes in [c.peak_bytes for c in every if c.strategies == s.best.strategies]
    # one cell leaves nothing to ranks of the data axis
    alone = recommend_devices(DATA, shape_of, cells=1, budget=None, rates=CPU_CORE)
    assert {s.best.data for s in alone.scales} == {1}
    text = recommendation_report(alone)
    assert "for steps of 1 cell:" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


def test_one_device_where_one_is_enough() -> None:
    small = profile(hic(anchors=300, strata=6), rna())
    found = recommend_devices(
        small,
        lambda cells: reference_shape(small, batch_size=cells),
        cells=32,
        budget=40 * GIB,
        rates=rates_for("A100"),
    )
    assert found.scales[0].best.peak_bytes < 80 * 2**20
    assert found.devices == 1
    assert "2 devices would be 1." in found.why


def test_links_between_nodes_are_slower_and_the_model_axis_stays_inside_one() -> None:
    rates = rates_for("A100")

    def of_nodes(devices: int) -> dict[int, Scale]:
        asked = {"cells": 512, "budget": None, "rates": rates.on_nodes_of(devices)}
        return {s.devices: s for s in recommend_devices(DATA, shape_of, **asked).scales}

    large, small = of_nodes(8), of_nodes(2)
    assert all(s.best.model <= 2 for s in small.values())
    assert [large[n].step_seconds == small[n].step_seconds for n in (1, 2, 4)] == [True, True, False]
    assert large[4].step_seconds < small[4].step_seconds


@pytest.mark.parametrize("cells", [0, -3, True, 2.5, 10**7])
def test_a_recommendation_needs_cells_and_a_decoder(cells) -> None:
    with pytest.raises(PlanError, match="allowed is a whole number of cells from 1 to 1,000,000"):
        recommend_devices(DATA, shape_of, cells=cells, budget=None, rates=CPU_CORE)
    flat = profile(rna())
    with pytest.raises(PlanError, match=r"no modality with strata \(Hi-C\)"):
        recommend_devices(
            flat, lambda n: reference_shape(flat, batch_size=n), cells=1, budget=None, rates=CPU_CORE
        )


def of_data(**changes) -> Source:
    spatial = hic(anchors=1500, strata=4, scale=(1500 + 1499 + 1498 + 1497) / rna().features)
    parts = replace(spatial.decomposition, bin_bases=500_000)
    return Source(profile=profile(replace(spatial, decomposition=parts), rna()), latent_dim=64, **changes)


def test_what_is_there_already_is_answered_as_the_planner_does() -> None:
    source = of_data()
    asked = parse_questions(["bin=500kb", "strata=4", "batch=32", "memory=90MiB,24GiB"])
    answers = what_if(source, asked, rates=CPU_CORE)
    assert [a.budget_bytes for a in answers] == [90 * 2**20, 24 * GIB]
    for a in answers:
        assert (a.bin_bases, a.anchors, a.strata, a.batch_size) == (500_000, 1500, 4, 32)
        request = {"batch_size": 32, "device_memory": a.budget_bytes}
        assert plan(source.profile, **request).candidates[0] == a.auto
        fitting = [c for c in plan(source.profile, **request).candidates if c.peak_bytes <= a.budget_bytes]
        assert a.enough in fitting
        assert len(a.enough.strategies) == min(len(c.strategies) for c in fitting)
        made = plan(source.profile, devices=a.paper_devices, policy="paper", **request)
        assert (made.strategies, made.predicted_peak_bytes) == (a.paper_strategies, a.paper_peak_bytes)
        assert made.fits
        if a.paper_devices > 1:
            assert not plan(source.profile, devices=a.paper_devices // 2, policy="paper", **request).fits
    assert answers[0].paper_devices > answers[1].paper_devices == 1
    assert answers[0].enough.strategies != answers[1].enough.strategies == ()


def test_smaller_bins_are_more_anchors_and_strata_fewer_features() -> None:
    asked = parse_questions(["bin=1mb,500kb,100kb", "strata=2,6", "batch=1", "memory=24GiB"])
    answers = what_if(of_data(), asked, rates=CPU_CORE)
    assert [(a.anchors, a.strata) for a in answers] == [
        (750, 2),
        (750, 6),
        (1500, 2),
        (1500, 6),
        (7500, 2),
        (7500, 6),
    ]
    peaks = [a.auto.peak_bytes for a in answers]
    assert peaks[::2] == sorted(peaks[::2])
    bigger = profile(hic(anchors=3000, strata=6), rna())
    other = reference_shape(replace(bigger, graph=None), batch_size=1)
    source = replace(of_data(), profile=replace(of_data().profile, graph=None))
    (found,) = what_if(
        source, parse_questions(["bin=250kb", "strata=6", "batch=1", "memory=24GiB"]), rates=CPU_CORE
    )
    best = candidates(other, devices=1, budget=24 * GIB, rates=CPU_CORE)[0]
    assert found.auto == best, "scaled data are planned like data of that size"
    tight = parse_questions(["bin=500kb,50kb", "strata=4", "batch=1", "memory=1MiB"])
    few, many = what_if(of_data(), tight, rates=CPU_CORE)
    assert "S2" not in few.paper_strategies
    assert "S2" in many.paper_strategies, "features grow over ten times those of the genes"
    # every piece of a chromosome loses one feature per distance
    pieces = hic(anchors=1500, strata=4)
    features = tuple(1500 - 20 * k for k in range(4))
    parts = replace(pieces.decomposition, features=features, bin_bases=500_000)
    cut = Source(profile=profile(replace(pieces, decomposition=parts), rna()), latent_dim=64)
    (fewer,) = what_if(
        cut, parse_questions(["bin=500kb", "strata=6", "batch=64", "memory=24GiB"]), rates=CPU_CORE
    )
    (more,) = what_if(
        of_data(), parse_questions(["bin=500kb", "strata=6", "batch=64", "memory=24GiB"]), rates=CPU_CORE
    )
    assert fewer.auto.peak_bytes < more.auto.peak_bytes


def test_a_window_of_ones_own_stays_and_the_usual_one_grows_with_the_strata() -> None:
    ask = partial(parse_questions, ["anchors=3000", "strata=2,8", "batch=1", "memory=24GiB"])

    def peaks(text: str) -> list[int]:
        decoder = parse_shape(text).decoder
        source = Source(
            profile=profile_of_module(shape_of_decoder(decoder, batch_size=1)), decoder=decoder, latent_dim=16
        )
        return [a.paper_peak_bytes for a in what_if(source, ask(), rates=CPU_CORE)]

    usual, own = peaks("anchors=3000,dim=16,strata=4"), peaks("anchors=3000,dim=16,strata=4,window=40")
    assert usual[0] == own[0], "20 x 2 = 40"
    assert usual[1] > own[1]


def test_defaults_are_what_the_help_says() -> None:
    assert parse_questions([]) == Questions()
    decoder = parse_shape("anchors=600,dim=8,strata=3").decoder
    parts = profile_of_module(shape_of_decoder(decoder, batch_size=1)).modalities[0].decomposition
    assert Questions().sizes_of(parts) == ((None, 300), (None, 600), (None, 3000), (None, 6000))
    large = replace(parts, anchors=150_000)
    assert Questions().sizes_of(large) == ((None, 75_000), (None, 150_000), (None, 750_000))
    spatial = replace(parts, anchors=5400, bin_bases=500_000)
    assert [n for _, n in Questions().sizes_of(spatial)] == [2700, 5400, 27_000, 54_000]
    assert parse_questions(["memory=24GiB,8GiB,8GiB"]).budgets == (8 * GIB, 24 * GIB)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["depth=3"],
            "--what-if 'depth=3' is not supported; allowed is each of bin, anchors, strata, batch, memory",
        ),
        (["strata"], "--what-if 'strata' is not supported"),
        (["batch=1", "batch=2"], "--what-if 'batch=2' is not supported; allowed is each .* once"),
        (["batch=1,0"], "batch='0' is not supported; allowed are whole numbers from 1 to 1,000,000"),
        (["strata=10001"], "from 1 to 10,000"),
        (["batch=" + "9" * 5000], "whole numbers from 1"),
        (["bin=half"], "--what-if bin='half' was asked for: resolution 'half' is not a bin width"),
        (["memory=much"], "'much' is not a memory size"),
        (["bin=1mb", "anchors=5"], "both bin and anchors; give one of them"),
    ],
)
def test_questions_that_cannot_be_asked(words, message) -> None:
    with pytest.raises(PlanError, match=message):
        parse_questions(words)


def test_strata_that_are_not_there_are_refused_where_a_person_named_them() -> None:
    ask = partial(what_if, of_data(), rates=CPU_CORE)
    few = "strata=20 was asked for with 15 anchors of 50,000,000 bases, which have features in 15 strata at most"
    with pytest.raises(PlanError, match=few):
        ask(parse_questions(["bin=50mb", "strata=2,20"]))
    usual = ask(parse_questions(["bin=50mb", "batch=1", "memory=8GiB"]))
    assert [a.strata for a in usual] == [10], "of the usual 10 and 32 those that are there"
    with pytest.raises(PlanError, match="strata=10 was asked for with 8 anchors of 100,000,000 bases"):
        ask(parse_questions(["bin=100mb"]))
    pieces = replace(of_data().profile.modalities[0].decomposition, features=(1500, 1400, 1300, 1200))
    assert most_strata(pieces, anchors=1500) == 15, "every piece loses a feature per distance"


def test_memories_are_written_as_they_were_named_and_what_fits_as_it_is_says_so() -> None:
    asked = parse_questions(["bin=500kb", "strata=4", "batch=1", "memory=8GB,24GB,80GiB"])
    text = what_if_report(what_if(of_data(), asked, rates=CPU_CORE))
    row = text.splitlines()[-1]
    assert row.split("  ")[0] == "8 GB to 80 GiB", text
    assert "fits as it is" in row
    assert "none" not in row


def test_bin_sizes_need_the_one_that_is_there() -> None:
    nameless = Source(profile=DATA, latent_dim=8)
    with pytest.raises(PlanError, match="bin=1000000 was asked for, .* not known; give anchors .* 1,500 now"):
        what_if(nameless, parse_questions(["bin=1mb"]), rates=CPU_CORE)
    with pytest.raises(PlanError, match="75,000,000 anchors would be asked for; 1,000,000 is the most"):
        what_if(of_data(), parse_questions(["bin=10bp"]), rates=CPU_CORE)


def test_the_profile_knows_its_bins(data_dir) -> None:
    parts = read_profile(data_dir).modality("hic").decomposition
    assert parts.bin_bases == 1_000_000


def test_the_command_line_asks_both_in_text_and_json(data_dir, capsys) -> None:
    asked = ["plan", data_dir, "--what-if", "bin=1mb,500kb", "strata=2,3", "batch=4", "memory=1MiB,8GiB"]
    assert main(asked) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "500kb: 60 anchors, 3 strata" in text
    assert "nothing fits" in text
    assert "> 64 x " in text
    assert main([*asked, "--format", "json", "--device", "H100"]) == 0
    assert len(json.loads(capsys.readouterr().out)["answers"]) == 8
    shape = "anchors=113505,dim=128,strata=32,batch=1"
    assert main(["plan", "--shape", shape, "--what-if", "anchors=113505", "strata=32", "memory=24GiB"]) == 0
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("24 GiB  1 "), row
    assert " none " not in row, row
    assert " 2 x " in row, row
    asked = ["plan", data_dir, "--recommend-devices", "--batch-size", "4", "--device-memory", "8GiB"]
    assert main([*asked, "--device", "A100"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "with the rates of an A100" in " ".join(text.split())
    assert main([*asked, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["rates_device"] == "one CPU core"


def test_status_3_where_nothing_fits_the_memory_that_was_named(data_dir, capsys) -> None:
    alone = ["--shape", "anchors=5400,dim=64,strata=8,batch=1"]
    for words in ([data_dir], [data_dir, "--recommend-devices"], alone):
        assert main(["plan", *words, "--device-memory", "1MiB"]) == 3
        assert main(["plan", *words, "--device-memory", "80GiB"]) == 0
        assert main(["plan", *words]) == 0
    assert main(["plan", data_dir, "--strategies", "S1", "--device-memory", "1MiB", "--format", "json"]) == 3
    capsys.readouterr()


def test_times_are_those_of_the_device_or_the_file(data_dir, capsys, tmp_path) -> None:
    file = tmp_path / "rates.json"
    file.write_text(replace(rates_for("H100"), device="mine").to_json())
    for option, whose in (
        ([], "one CPU core"),
        (["--device", "RTX 3090"], "an RTX 3090"),
        (["--rates", str(file)], "mine"),
    ):
        assert main(["plan", data_dir, *option]) == 0
        assert f" rates of {whose}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent", "--what-if", "--recommend-devices"], "--what-if and --recommend-devices were asked for"),
        (
            ["absent", "--what-if", "--devices", "2", "--policy", "paper"],
            "--devices, --policy, which it decides",
        ),
        (["absent", "--what-if", "--batch-size", "2"], "say batch=... and memory=..."),
        (["--what-if"], "DIR=None and --shape None; give one of them"),
        (["absent", "--what-if", "--shape", "anchors=9,dim=4,strata=2"], "give one of them"),
        (
            ["--what-if", "batch=3", "--shape", "anchors=9,dim=4,strata=2,batch=1"],
            "batch=1 was asked for in --shape",
        ),
        (["--what-if", "--shape", "anchors=9,dim=4,strata=2", "--window", "3"], "together with --window"),
        (["--what-if", "absent"], "give one of them"),
        (
            ["absent", "--recommend-devices", "--model-parallel-size", "2"],
            "together with --model-parallel-size",
        ),
        (["absent", "--recommend-devices", "--shape", "x"], "together with --shape"),
        (["--recommend-devices"], "without DIR"),
        (["absent", "--recommend-devices", "--device-memory", "8 apples"], "'8 apples'"),
        (["absent", "--recommend-devices"], "absent"),
        (["absent", "--device", "A100", "--rates", "r.json"], "give one of them"),
        (["absent", "--rates", "absent.json"], "absent.json"),
        (["absent", "--device", "abacus"], "rates of 'abacus' were asked for"),
        (["absent", "--shape", "anchors=9,dim=4,strata=2"], "both DIR='absent' and shape='anchors=9"),
        (["--shape", "anchors=9,dim=4,strata=2", "--window", "4"], "together with --window"),
        (["--shape", "anchors=9,dim=4,strata=2,batch=1", "--batch-size", "4"], "give one of them"),
        (
            ["absent", "--device-memory", "8"],
            "would be bytes; add the unit, for example '8GiB' or '8MiB'",
        ),
        ([], "neither DIR nor --shape"),
    ],
)
def test_mistakes_end_with_status_2_and_one_line(words, message, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_neither_needs_torch(data_dir) -> None:
    code = (
        "import sys; from lightning_amp.cli.main import main;"
        f"status = main(['plan', {data_dir!r}, '--what-if', 'strata=2', 'batch=1'])"
        f" or main(['plan', {data_dir!r}, '--recommend-devices', '--batch-size', '1']);"
        "sys.exit(status or ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_recommendation_is_plain_data() -> None:
    one = Recommendation(
        cells=1, budget_bytes=None, rates_device="x", node_devices=8, devices=None, why="", scales=()
    )
    assert one.to_dict()["scales"] == ()
