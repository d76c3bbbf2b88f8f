"""Claim: writing a part of a page leaves the rest of it as it was, and the tables of whole steps are written."""

from pathlib import Path

import pytest

from benchmarks.page import empty_part, read_part, write_part
from benchmarks.training import whole_step


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


def test_a_part_is_replaced_and_the_rest_stays(page):
    before = page.read_text()
    write_part(page, "growth", ["one", "", "two", ""])
    assert read_part(page, "growth") == ["one", "", "two"]
    assert page.read_text().startswith("# Growth\n\n<!--")
    assert page.read_text().endswith("<!-- end of benchmarks.growth -->\n\n## By hand\n")
    write_part(page, "growth", [])
    assert page.read_text() == before


@pytest.mark.parametrize("text", ["", "twice"])
def test_a_page_without_markers_is_refused(page, text):
    page.write_text(page.read_text() * 2 if text else "# Growth\n")
    with pytest.raises(SystemExit, match="once each and in this order, found"):
        write_part(page, "growth", [])


def test_the_pages_of_the_repository_have_their_parts():
    assert read_part(whole_step.PAGE, "whole_step") is not None


def test_tables_of_whole_steps(monkeypatch):
    monkeypatch.setattr(whole_step, "measure", lambda method, request: run_of(request, method))
    *_, lines = whole_step.grown({"Some cells": "nowhere"}, quick=True)
    text = "\n".join(lines)
    assert text.count("| method | step | ratio | plan | fit to first batch |") == len(whole_step.PLACES)
    assert "Some cells, 64 cells a step, one process, 2 threads each:" in text
    assert "| plain Lightning | 84.0 ms | 1.00 |  | 2.50 s |" in text
    assert "| ddp | 72.0 ms | 1.00 |  | 2.50 s |" in text
    assert str(Path.home()) not in text
