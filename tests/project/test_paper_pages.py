"""Claim: the pages on ShardTensor and AxoNN are written by their commands, and agree with what is counted anew."""

import re

import pytest

import benchmarks.tensor3d.scale as scale
from benchmarks.domain import paper as shardtensor
from benchmarks.page import read_part
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
