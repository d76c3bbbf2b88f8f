"""Claim: a recommendation of devices follows its rule at any speed-up, and `lightning-amp plan` prints it, or one line
about a mistake.
"""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from lightning_amp.cli.main import main
from lightning_amp.costs.device_rates import CPU_CORE, rates_for
from lightning_amp.costs.model_shape import reference_shape
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.errors import PlanError
from lightning_amp.planning.plan.plan import Candidate
from lightning_amp.planning.policies import recommend_devices as recommendation
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.planning.policies.recommend_devices import WORTH, Scale, recommend_devices
from lightning_amp.planning.reports.step_report import recommendation_report
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


def recommended(monkeypatch, seconds: dict[int, float], *, peaks: dict[int, int] | None = None):
    """A recommendation where the planner finds these times and peaks for so many devices."""

    def best(profile, *, devices, model_parallel_size, **rest):
        if devices not in seconds:
            raise PlanError("no parts for so many ranks")
        peak = (peaks or {}).get(devices, 1)
        one = Candidate(
            strategies=(),
            data=devices // model_parallel_size,
            model=model_parallel_size,
            peak_bytes=peak,
            step_seconds=seconds[devices],
            cell_seconds=1.0,
        )
        return SimpleNamespace(
            candidates=(one,),
            predicted_step_seconds=seconds[devices],
            predicted_rest_seconds=None,
            fits=peak <= 100 if peaks else None,
        )

    monkeypatch.setattr(recommendation, "plan", best)
    budget = 100 if peaks else None
    cells = max(seconds)
    return recommend_devices(DATA, shape_of, cells=cells, budget=budget, rates=CPU_CORE)


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

    def noted(profile, *, devices, model_parallel_size, batch_size, shape, **rest):
        assert shape.batch_size == batch_size
        seen.add((devices // model_parallel_size, model_parallel_size, batch_size))
        return plan(
            profile,
            devices=devices,
            model_parallel_size=model_parallel_size,
            batch_size=batch_size,
            shape=shape,
            **rest,
        )

    monkeypatch.setattr(recommendation, "plan", noted)
    monkeypatch.setattr(recommendation, "MOST_DEVICES", 4)
    recommend_devices(DATA, shape_of, cells=3, budget=None, rates=CPU_CORE)
    assert seen == {(1, 1, 3), (1, 2, 3), (2, 1, 2), (1, 4, 3), (2, 2, 2)}, "four ranks have no three cells"


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
        recommend_devices(flat, lambda n: reference_shape(flat, batch_size=n), cells=1, budget=None, rates=CPU_CORE)


def test_the_command_line_recommends_in_text_and_json(data_dir, capsys) -> None:
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


def test_a_recommendation_needs_no_torch(data_dir) -> None:
    # anndata 0.11 imports torch wherever it is installed, so that the test hides it
    code = (
        "import sys; sys.modules['torch'] = None; from lightning_amp.cli.main import main;"
        f"sys.exit(main(['plan', {data_dir!r}, '--recommend-devices', '--batch-size', '1']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
