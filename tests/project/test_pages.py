"""Claim: the pages on papers are written by their commands, and agree with what is counted anew and with the papers'
figures; writing a part of a page leaves the rest of it as it was.

Nothing is simulated: bytes and seconds are predicted.
"""

import re

import pytest
import torch

import benchmarks.tensor3d.scale as scale
from benchmarks.chunks import autochunk
from benchmarks.domain import paper as shardtensor
from benchmarks.page import ROOT, read_part, write_part
from benchmarks.paper.__main__ import PAGE, PART, SECTIONS
from benchmarks.paper.growth import gathered
from benchmarks.paper.runs import COARSE, FINE, LIGHT_COARSE
from benchmarks.paper.seconds import HEAVY, LIGHT, NO_LAUNCHES, STEPS, free, paper_seconds, planned
from benchmarks.pipeline import networks
from benchmarks.tensor3d import paper as axonn


def numbers(cell: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(r"[\d,.]+", cell)]


def test_the_pages_have_every_table() -> None:
    written = read_part(shardtensor.PAGE, "domain.paper")
    assert [line[4:] for line in written if line.startswith("### ")] == list(shardtensor.SECTIONS)
    parts = {name: read_part(axonn.PAGE, f"tensor3d.paper.{part.__name__}") for name, part in axonn.SECTIONS.items()}
    for name, lines in parts.items():
        assert lines[0] == f"### {name}"
        assert any(line.startswith("|---") for line in lines)
    assert "\n".join(axonn.sizes()).strip() in axonn.PAGE.read_text()


def test_linear_layers_have_the_bytes_of_the_paper_s_table() -> None:
    found = [line.split(" | ") for line in shardtensor.linear_layers()][2:-1]
    assert len(found) == 6
    for _, paper, counted in found:
        assert numbers(counted.rstrip(" |")) == pytest.approx(numbers(paper), rel=1e-3)
    assert "\n".join(" | ".join(row) for row in found) in shardtensor.PAGE.read_text()


# long, and tensor3d requires torch 2.13, which the run on the lowest versions has not
@pytest.mark.exhaustive
@pytest.mark.release
def test_a_gpt_of_more_blocks_is_counted_from_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace_paper(depth=6)
    monkeypatch.setitem(scale.GPTS, "small", small)
    monkeypatch.setattr(scale, "LENGTH", 64)
    found, whole = (scale.of_gpt("small", (2, 1, 2), 4, first=first) for first in (3, 5))
    for name in ("compute", "sent_s", "flat", "sent", "held", "peak"):
        assert getattr(found, name) == pytest.approx(getattr(whole, name), rel=0.01), name
    assert found.flat < found.sent_s * 1.001


def replace_paper(**changes: int) -> scale.Paper:
    return scale.GPTS["GPT-5B"]._replace(width=64, heads=4, **changes)


def test_the_page_has_every_table() -> None:
    written = read_part(PAGE, PART)
    assert [line[4:] for line in written if line.startswith("### ")] == list(SECTIONS)
    # of them one is computed here, as the page has it
    assert "\n".join(gathered()).strip() in "\n".join(written)


@pytest.mark.long
def test_the_page_on_autochunk_has_every_table_and_few_words() -> None:
    written = read_part(autochunk.PAGE, autochunk.PART)
    assert [line[4:] for line in written if line.startswith("### ")] == list(autochunk.SECTIONS)
    # of them one takes a second, and is here as the page has it
    assert "\n".join(autochunk.nodes()).strip() in "\n".join(written)
    by_hand = autochunk.PAGE.read_text().partition("<!--")[0].splitlines()
    assert sum(len(line.split()) for line in by_hand if not line.startswith("|")) <= 400


def test_the_networks_of_csimd_are_the_papers() -> None:
    [(vgg, images)] = networks.vgg()
    # torchvision's VGG-16 has as many
    assert sum(p.numel() for p in vgg.parameters()) == 138_357_544
    assert (len(vgg.blocks), images.shape) == (16, torch.Size([64, 3, 224, 224]))
    rows = [line.split(" | ")[:2] for line in read_part(networks.PAGE, networks.PART) if line.startswith("| ")]
    every = [[f"| {name}", f"{n} Gb/s"] for name, one in networks.NETWORKS.items() for n in one.gigabits]
    assert rows[1:] == every
    assert [n for name, n in every if name == "| VGG-16"] == ["1 Gb/s", "10 Gb/s", "100 Gb/s"]


def test_the_source_of_axonn_is_named_where_it_is_cited() -> None:
    for name in ("README.md", "docs/status.md", "docs/techniques/tensor3d.md", "docs/paper/axonn.md"):
        text = (ROOT / name).read_text()
        assert "2305.13525" in text
        assert not re.search(r"Singh[^|.]*SC (20)?24", text)


def test_no_division_of_the_same_work_doubles_the_speed() -> None:
    for setting in (COARSE, FINE):
        ratio = paper_seconds(setting, 4, free(NO_LAUNCHES)) / paper_seconds(setting, 8, free(NO_LAUNCHES))
        assert 1 < ratio < 2
        assert paper_seconds(setting, 4) / paper_seconds(setting, 8) < 1
    assert HEAVY[FINE, 4] / HEAVY[FINE, 8] > 2


def test_a_light_step_on_one_gpu_takes_what_the_paper_measured() -> None:
    found = planned(LIGHT_COARSE, "paper", 1, 256).predicted_step_seconds
    assert found == pytest.approx(LIGHT[LIGHT_COARSE, 1] / STEPS, rel=0.1)


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "growth.md"
    markers = "<!-- written by benchmarks.growth -->\n\n<!-- end of benchmarks.growth -->"
    path.write_text(f"# Growth\n\n{markers}\n\n## By hand\n")
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
