"""Claim: the pictures and pages of growth show what was measured, a stopped command continues, and writing a part of a
page leaves the rest of it as it was.
"""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.page import empty_part, read_part, write_part
from benchmarks.training import growth, loading, whole_step
from benchmarks.training.growth import QUICK, all_runs, measure_all, write
from benchmarks.training.growth_picture import Panel, crossings

HEAD = {"origin": "Written here.", "version": "1", "machine": "one", "quick": True, "cores": 2, "rounds": 1}


def run_of(request, method):
    """Two ranks are faster where there is much to do, auto where there are many bins."""
    work = request["cells"] * request["ranks"] * 1e-3
    seconds = 0.02 * request["ranks"] + work / request["ranks"] / request["threads"]
    return {"steps": [seconds] * whole_step.STEPS, "plan": "S1,sparse" if method == {} else "", "first": 2.5}


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "growth.md"
    path.write_text("\n".join(["# Growth", "", *empty_part("growth"), "## By hand", ""]))
    return path


@pytest.fixture
def asked(monkeypatch):
    """Requests that reached a process; nothing is trained."""
    found = []

    def measure(method, request):
        found.append(request)
        return run_of(request, method)

    monkeypatch.setattr(growth, "measure", measure)
    monkeypatch.setattr(growth, "_cells", lambda folder, run: folder / "data")
    return found


def test_a_part_is_replaced_and_the_rest_stays(page):
    before = page.read_text()
    write_part(page, "growth", ["one", "", "two", ""])
    assert read_part(page, "growth") == ["one", "", "two"]
    assert page.read_text().startswith("# Growth\n\n<!--")
    assert page.read_text().endswith("<!-- end of benchmarks.growth -->\n\n## By hand\n")
    write_part(page, "growth", [])
    assert page.read_text() == before


def test_the_pages_of_the_repository_have_their_parts():
    assert read_part(whole_step.PAGE, "whole_step") is not None
    for name in ("growth", "loading"):
        assert read_part(loading.PAGE, name) is not None


def test_a_crossing_lies_where_straight_lines_on_logarithmic_axes_meet():
    plain = {1.0: 1.0, 10.0: 10.0, 100.0: 100.0}
    ((x, y),) = crossings({1.0: 10.0, 10.0: 10.0 * 10**0.5, 100.0: 10.0}, plain)
    assert (x, y) == pytest.approx((10 ** (4 / 3), 10 ** (4 / 3)))
    assert crossings(plain, plain) == []
    assert crossings({1.0: 1.1, 10.0: 9.9, 100.0: 99.0}, plain) == [], "1 % is noise"
    assert crossings({1.0: 0.5, 10.0: 5.0, 100.0: 50.0}, plain) == [], "faster from the first size on"


def test_a_method_begins_to_pay_at_a_whole_number_of_ranks():
    curves = {"plain": {1: 1.0}, "ddp": {1: 1.2, 2: 0.7, 4: 0.4}}
    panel = Panel(label="ranks", what="a step", title="", curves=curves, whole=True)
    ((x, y),) = panel.begins("ddp")
    assert (x, y) == pytest.approx((2, 0.7))


def test_a_command_that_was_stopped_continues(tmp_path, asked):
    file, runs = tmp_path / "growth.json", all_runs(QUICK, 2)
    assert not measure_all(file, HEAD, QUICK, seconds=-1)
    assert asked == []
    file.write_text(json.dumps({"head": HEAD, "runs": []}))
    assert measure_all(file, HEAD, QUICK, seconds=60)
    found = json.loads(file.read_text())
    assert [row["run"] for row in found["runs"]] == [asdict(run) for run in runs]
    assert {(r["ranks"], r["threads"]) for r in asked} == {(1, 1), (1, 2), (2, 1)}
    file.write_text(json.dumps({"head": HEAD, "runs": found["runs"][:-3]}))
    asked.clear()
    assert measure_all(file, HEAD, QUICK, seconds=60)
    assert len(asked) == 3
    with pytest.raises(SystemExit, match="which do not go together"):
        measure_all(file, {**HEAD, "cores": 4}, QUICK, seconds=60)


@pytest.mark.parametrize("left_out", [0, 20])
def test_page_and_picture(tmp_path, page, asked, left_out):
    file = tmp_path / "growth.json"
    measure_all(file, HEAD, QUICK, seconds=60)
    found = json.loads(file.read_text())
    found["runs"] = found["runs"][: len(found["runs"]) - left_out]
    write(tmp_path, found)
    assert (tmp_path / "growth.png").stat().st_size > 10_000
    text = page.read_text()
    assert "| 64 | 52.0 ms, 312 ms | 52.0 ms, 312 ms | 72.0 ms, 432 ms |" in text
    words = " ".join(text.split())
    assert "The small sizes of --quick." in words
    assert ("*ddp* begins to pay at about 2 ranks" in words) == (not left_out)
    assert "*ddp, 2 ranks* is not faster than plain Lightning at these sizes" in words
    assert text.endswith("## By hand\n")


def test_tables_of_whole_steps(tmp_path, monkeypatch):
    page = tmp_path / "benchmarks.md"
    page.write_text("\n".join(["# One", "", *empty_part("whole_step"), "## Two", ""]))
    monkeypatch.setattr(whole_step, "measure", lambda method, request: run_of(request, method))
    whole_step.write(page, {"Some cells": "nowhere"}, cells=64, quick=True)
    text = "\n".join(read_part(page, "whole_step"))
    assert text.count("| method | step | ratio | plan | fit to first batch |") == len(whole_step.PLACES)
    assert "Some cells, 64 cells a step, one process, 2 threads each:" in text
    assert "| plain Lightning | 84.0 ms | 1.00 |  | 2.50 s |" in text
    assert "| ddp | 72.0 ms | 1.00 |  | 2.50 s |" in text
    assert str(Path.home()) not in text
