"""Claim: what README and the pages show works: Python runs, commands are understood, links lead somewhere.

A block with a title is a file, which later blocks of the page may use. A block after `<!-- not run: why -->` is only
read by people. `max_epochs` is lowered to 1. Commands are parsed, and run where they are cheap, or after `<!-- run -->`
or `<!-- run: status N -->`. A text block is what the block above has printed, unless `<!-- not compared: why -->`
stands before it: `...` is anything, and numbers may differ by a tenth.
"""

import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from lightning_amp import AMPStrategy
from lightning_amp.cli.main import TRAINING, main
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.diagnosis import FROM_OUTSIDE
from lightning_amp.techniques.table import STRATEGIES
from tests.cli import options
from tests.each import BEFORE_A_RELEASE
from tests.paths import ROOT

PAGES = {str(page.relative_to(ROOT)): page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))}
SLOW = [f"docs/tutorials/{name}.md" for name in ("slurm", "long_inputs", "many_gpus", "data_to_maps")]
"""Pages that take longest; before a release."""
NOT_RUN = 20
"""Blocks that are marked as not run; a page that marks one more says so here."""
LIGHTNINGS = ("process_group_backend", "timeout", "start_method")
"""Options that Lightning's strategies have too."""
RUN = ("profile", "plan")
"""Commands that are cheap; the others are parsed."""
BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>python|console|yaml|text)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
MOST_WORDS = 23_000
"""Words that people wrote in README and pages: who reads everything reads for an hour and a half."""
NOT_PROSE = (
    re.compile(r"<!-- written by ([\w.]+).*?<!-- end of \1 -->", re.DOTALL),
    re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL),
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"^ *\|.*$", re.MULTILINE),
    re.compile(r"(?<=\n\n)(?: {4}.*\n+)+"),
    re.compile(r"(?<=\])\([^)\s]*\)"),
)
"""Generated parts, fenced code, comments, rows of tables, indented code, targets of links."""
MARK = re.compile(r"<!-- (?:not (?:run|compared): .*|run(?:: status (?P<status>\d+))?) -->")
TOKEN = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?|[^\W\d]+|[^\w\s]")
RULE = re.compile(r"-{3,}")  # under the head of a table, as long as its column
LINK = re.compile(r"(?<!`)\[[^\]\n]*(?:\n[^\]\n]*)?\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `status` is that of its commands if they are run whatever they cost."""

    language: str
    title: str | None
    text: str
    runs: bool
    status: int | None


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in BLOCK.finditer(text):
        before = text[: found.start()].rstrip().splitlines()
        mark = MARK.fullmatch(before[-1].strip()) if before else None
        runs = mark is None or mark[0].startswith("<!-- run")
        indent = len(found["indent"])
        lines = (line[indent:] for line in found["text"].splitlines())
        status = int(mark["status"] or 0) if mark and runs else None
        yield Block(found["language"], found["title"], "\n".join(lines), runs, status)


def missing(page: str, printed: str) -> list[str]:
    """The parts of a page's output, between `...`, that were not printed in their order."""
    have, at, lost = TOKEN.findall(RULE.sub("", printed)), 0, []
    for part in page.split("..."):
        want = TOKEN.findall(RULE.sub("", part))
        places = range(at, len(have) - len(want) + 1)
        found = next((i for i in places if all(map(same, want, have[i:]))), None)
        at = at if found is None else found + len(want)
        lost += [part] if found is None else []
    return lost


def same(word: str, other: str) -> bool:
    """Equal, or numbers that differ by a tenth at most."""
    if word[0].isdigit() and other[0].isdigit():
        one, two = (float(text.replace(",", "")) for text in (word, other))
        return abs(one - two) <= 0.1 * max(one, two)
    return word == other


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each `$ command`, without its comment; lines that end in a backslash go on."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            yield shlex.split(line[2:], comments=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place with a data directory and the repository's configurations, where a reader would stand."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    synthesize("data", cells=48, bins=70, strata=4, genes=40, depth=300)
    for name in ("configs", "examples", "Makefile"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.fixture
def forget() -> Iterator[None]:
    """What a page registers is forgotten after it."""
    tables: tuple[dict[str, Any], ...] = (STRATEGIES, FROM_OUTSIDE)
    before = [dict(table) for table in tables]
    yield
    for table, rows in zip(tables, before, strict=True):
        table.clear()
        table.update(rows)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "README.md" else BEFORE_A_RELEASE if name in SLOW else pytest.mark.long)
        for name, page in PAGES.items()
        if any(block.language != "text" for block in blocks(page))
    ],
)
def test_the_blocks_of_a_page_work(
    name: str, folder: Path, forget: None, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    names: dict[str, object] = {"__name__": "page"}
    printed = ""
    for block in blocks(PAGES[name]):
        if not block.runs:
            continue
        if block.language == "text":
            if lost := missing(block.text, printed):
                pytest.fail(f"not printed: {lost}\nprinted: {printed}")
            continue
        capfd.readouterr()
        caplog.clear()
        text = re.sub(r"max_epochs([=:]) ?\d+", r"max_epochs\1 1", block.text)
        if block.title:
            (folder / block.title).write_text(text)
        elif block.language == "python":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(compile(text, name, "exec"), names)
        for words in commands(block):
            if block.status is None:
                understood(words)
            else:
                assert start(words) == block.status, words
        printed = "\n".join([*capfd.readouterr(), *caplog.messages])


def start(words: list[str]) -> int:
    """Run `python` or `lightning-amp` in a process of its own; returns the exit status."""
    module = [] if words[0] == "python" else ["-m", words[0].replace("-", "_")]
    # a Trainer of this process leaves them, and a process that has them waits for others to start its ranks
    left = {"LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    names = {name: value for name, value in os.environ.items() if name not in left}
    command = [sys.executable, *module, *words[1:]]
    return subprocess.run(command, check=False, env=names, stderr=subprocess.STDOUT, timeout=300).returncode


def understood(words: list[str]) -> None:
    """Run or parse a command of `lightning-amp`; of the others, see that what they name is there."""
    match words:
        case ["lightning-amp", verb, *_] if verb in RUN:
            assert main(words[1:]) == 0, words
        case ["lightning-amp", verb, *rest]:
            # parsed: help is printed once all flags before it are known
            last = ["--print_config"] if verb in TRAINING else ["--help"]
            with pytest.raises(SystemExit) as end:
                main([verb, *rest, *last])
            assert end.value.code == 0, words
        case ["make", target]:
            assert f"\n{target}:" in Path("Makefile").read_text(), words
        case _:
            pytest.fail(f"{words} is no command that this test knows; mark the block as not run, and why")


def test_few_blocks_are_not_run() -> None:
    marked = [
        (name, block.text)
        for name, page in PAGES.items()
        for block in blocks(page)
        if not block.runs and block.language != "text"
    ]
    assert len(marked) == NOT_RUN, "\n".join(f"{name}: {text.splitlines()[0]}" for name, text in marked)
    comments = sum(page.read_text().count("<!-- not run:") for page in PAGES.values())
    assert comments == NOT_RUN, "a mark stands before no block"


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, and of the names that the Python page documents."""
    text = page.read_text()
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}
    return slugs | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    page = PAGES[name]
    for link in LINK.findall(page.read_text()):
        target, _, anchor = link.partition("#")
        if target.startswith("https://") or anchor.startswith("only-"):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.is_file(), f"{name}: {link}"
        assert not anchor or anchor in anchors(file), f"{name}: {link}"


def test_every_page_is_in_the_navigation_and_every_public_name_on_the_python_page() -> None:
    import lightning_amp

    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)
    assert sorted(f"docs/{path}" for path in listed) == sorted(set(PAGES) - {"README.md"})
    python = PAGES["docs/reference/api.md"].read_text()
    assert [name for name in lightning_amp.__all__ if f"::: lightning_amp.{name}\n" not in python] == []


def test_the_options_of_the_commands_are_those_of_their_parsers() -> None:
    assert PAGES["docs/reference/options.md"].read_text() == options.page(), (
        "write it again: python -m tests.cli.options"
    )


def test_every_technique_and_every_option_of_the_strategy_is_in_the_reference() -> None:
    text = PAGES["docs/reference/strategy.md"].read_text()
    rows = re.findall(r"^\| (?:\[)?(\w+)", text, re.MULTILINE)
    assert [name for name in STRATEGIES if name not in rows] == []
    code = text.partition("AMPStrategy(\n")[2].partition("\n)")[0]
    own = [name for name, of in signature(AMPStrategy).parameters.items() if of.kind is of.KEYWORD_ONLY]
    assert [name for name in own if f"{name}=" not in code and name not in LIGHTNINGS] == []


def test_the_readme_is_short() -> None:
    text = PAGES["README.md"].read_text()
    prose = re.sub(r"^(```.*?^```| {4}.*?)$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert len(re.findall(r"\S*\w\S*", prose)) <= 450
    assert "docs/memory_per_stratum.png" in text
    assert len(LINK.findall(text)) >= 15


@pytest.mark.parametrize("name", [name for name in PAGES if name.startswith("docs/reports/")])
def test_a_report_begins_with_its_date(name: str) -> None:
    head = PAGES[name].read_text().split("\n\n")[1]
    assert re.search(r"\b20\d\d-\d\d-\d\d\b", head), head
    assert re.search(r"GPU|torch", head), head


def words(page: Path) -> int:
    """The words of a page that a person wrote as text."""
    text = page.read_text()
    for pattern in NOT_PROSE:
        text = pattern.sub("", text)
    return len(re.findall(r"[A-Za-z][\w'-]*", text))


def test_the_pages_have_few_words() -> None:
    counts = {name: words(page) for name, page in PAGES.items()}
    listed = sorted(counts.items(), key=lambda row: -row[1])
    assert sum(counts.values()) <= MOST_WORDS, "\n".join(f"{count:6} {name}" for name, count in listed)
