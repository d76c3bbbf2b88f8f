"""Claim: a benchmark that README, CONTRIBUTING or a page names is in `python -m benchmarks --list`, and so is the one
that has written a part of a page; no page points to a commit for a command.

Nothing is imported but the list. Every command has a short run, `python -m benchmarks NAME --quick`; these are run by
hand before a release.
"""

import re

import pytest

from benchmarks.__main__ import FOLDER, QUICK, found
from tests.paths import ROOT

PAGES = {
    str(page.relative_to(ROOT)): page.read_text()
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
}
MARK = re.compile(r"<!-- (?:written by|end of) benchmarks\.([\w.]+) -->")
DOTTED = re.compile(r"(?<![\w/-])benchmarks\.(?!md\b)([a-z_]\w*(?:\.[a-z_]\w*)*)")
SPACED = re.compile(r"python -m benchmarks ([a-z_]\w*(?:\.\w+)*)")
KNOWN = dict(found())
NO_CLAIM = {"side_by_side.one_case", "pipeline.schedule_picture"}
"""Started by another one, and a picture of the documentation."""
COMMIT = re.compile(r"[Cc]ommit [0-9a-f]{7,} has the command|\(`benchmarks[\w./]*` of commit|of that commit")


def names_of(text: str) -> set[str]:
    """Benchmarks that a text names, without the marks of its parts."""
    text = MARK.sub("", text)
    return {*DOTTED.findall(text), *SPACED.findall(text)}


def writes(part: str) -> bool:
    """Whether a part has the name of a benchmark, or that with the name of one of its tables."""
    return part in KNOWN or part.rpartition(".")[0] in KNOWN


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_names_is_there(name: str) -> None:
    text = PAGES[name]
    assert sorted(names_of(text) - KNOWN.keys()) == []
    assert sorted({part for part in MARK.findall(text) if not writes(part)}) == []
    assert COMMIT.findall(text) == []


def test_the_test_can_fail() -> None:
    text = "`python -m benchmarks.gone.away` and `python -m benchmarks gone`, benchmarks.md, benchmarks/page.py"
    assert names_of(text) == {"gone.away", "gone"}
    assert not writes("gone.table")
    assert COMMIT.search("Commit 6e376520 has the commands that are not in the tree.")


def test_every_benchmark_says_what_it_does_and_the_page_of_claims_has_it() -> None:
    assert [name for name, about in KNOWN.items() if len(about) < 20] == []
    listed = re.findall(r"`([a-z_]\w*(?:\.\w+)*)`", PAGES["docs/reports/index.md"])
    assert sorted(KNOWN.keys() - {*listed} - NO_CLAIM) == []
    assert sorted(set(listed) - KNOWN.keys()) == []


@pytest.mark.parametrize("name", sorted(KNOWN.keys() - {"side_by_side.one_case"}))
def test_every_benchmark_has_a_quick_run(name: str) -> None:
    """A flag of its own, or arguments that its parser has."""
    file = FOLDER.joinpath(*name.split(".")).with_suffix(".py")
    folder = file.with_suffix("")
    files = [file] if file.is_file() else [folder / "__main__.py", *folder.glob("run_*.py")]
    text = "".join(one.read_text() for one in files)
    assert ('"--quick"' in text) != (name in QUICK)
    flags = [word for word in QUICK.get(name, []) if word.startswith("--")]
    text += (FOLDER / "page.py").read_text()
    assert [flag for flag in flags if f'"{flag}"' not in text] == []
