"""Claim: the pages on AMP and AutoChunk are written by their commands, and what they say of the papers' figures holds.

Nothing is simulated: bytes and seconds are predicted.
"""

import pytest

from benchmarks.chunks import autochunk
from benchmarks.page import read_part
from benchmarks.paper.__main__ import PAGE, PART, SECTIONS
from benchmarks.paper.growth import gathered
from benchmarks.paper.runs import COARSE, FINE, LIGHT_COARSE
from benchmarks.paper.seconds import HEAVY, LIGHT, NO_LAUNCHES, STEPS, free, paper_seconds, planned


def test_the_page_has_every_table() -> None:
    written = read_part(PAGE, PART)
    assert [line[4:] for line in written if line.startswith("### ")] == list(SECTIONS)
    # of them one is computed here, as the page has it
    assert "\n".join(gathered()).strip() in "\n".join(written)


def test_the_page_on_autochunk_has_every_table_and_few_words() -> None:
    written = read_part(autochunk.PAGE, autochunk.PART)
    assert [line[4:] for line in written if line.startswith("### ")] == list(autochunk.SECTIONS)
    # of them one takes a second, and is here as the page has it
    assert "\n".join(autochunk.nodes()).strip() in "\n".join(written)
    by_hand = autochunk.PAGE.read_text().partition("<!--")[0].splitlines()
    assert sum(len(line.split()) for line in by_hand if not line.startswith("|")) <= 400


def test_no_division_of_the_same_work_doubles_the_speed() -> None:
    for setting in (COARSE, FINE):
        ratio = paper_seconds(setting, 4, free(NO_LAUNCHES)) / paper_seconds(setting, 8, free(NO_LAUNCHES))
        assert 1 < ratio < 2
        assert paper_seconds(setting, 4) / paper_seconds(setting, 8) < 1
    assert HEAVY[FINE, 4] / HEAVY[FINE, 8] > 2


def test_a_light_step_on_one_gpu_takes_what_the_paper_measured() -> None:
    found = planned(LIGHT_COARSE, "paper", 1, 256).predicted_step_seconds
    assert found == pytest.approx(LIGHT[LIGHT_COARSE, 1] / STEPS, rel=0.1)
