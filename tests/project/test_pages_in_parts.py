"""Claim: writing a part of a page leaves the rest of it as it was, and the tables of whole steps are written."""

import pytest

from benchmarks.page import empty_part, read_part, write_part


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
