"""Markdown, and parts of pages that a command writes between two markers; the rest is written by hand or by another
command.

    <!-- written by benchmarks.NAME -->
    ...
    <!-- end of benchmarks.NAME -->
"""

import argparse
import platform
import subprocess
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from lightning_amp.quantities import format_bytes

ROOT = Path(__file__).resolve().parents[1]


def table(header: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    """Markdown."""
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * len(header)
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def paragraph(text: str) -> Iterator[str]:
    """Text of several lines as one paragraph."""
    yield from textwrap.wrap(" ".join(text.split()), 110, break_on_hyphens=False)
    yield ""


def empty_part(name: str) -> list[str]:
    """The two markers, for a page that is written anew."""
    begin, end = _markers(name)
    return [begin, "", end, ""]


def write_part(page: Path, name: str, lines: Iterable[str]) -> None:
    """Put lines in the place of those between the markers.

    Raises:
        SystemExit: the page is not there, or has not both markers once and in order
    """
    before, _, after = _cut(page, name)
    page.write_text("\n".join([before, "", *lines]).rstrip() + f"\n\n{after}")


def write_as_it_grows(
    page: Path, name: str, first: str, header: list[str], rows: Iterable[list[str]], *, write: bool
) -> None:
    """Print a paragraph and a table; with `write` the page has them after every row, as far as they are known."""
    if write:
        # a page without markers is refused before anything is measured
        read_part(page, name)
    lines, known = list(paragraph(first)), list[list[str]]()
    for row in rows:
        known.append(row)
        if write:
            write_part(page, name, [*lines, *table(header, known)])
    print("\n".join([*lines, *table(header, known)]))


def read_part(page: Path, name: str) -> list[str]:
    """The lines between the markers; none where there is no such page.

    Raises:
        SystemExit: the page has not both markers once and in order
    """
    return _cut(page, name)[1].strip("\n").splitlines() if page.exists() else []


def origin(command: str) -> str:
    """What wrote a part: command, day, version and machine."""
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    return f"Written by `{command}` on {date.today().isoformat()}, version {version()}; {machine()}, {device}."


def asked_tables(
    doc: str | None, page: Path, sections: Mapping[str, Any], parser: argparse.ArgumentParser | None = None
) -> argparse.Namespace:
    """The flags of a command that prints or writes the tables of one part of a page; `only` and `write`."""
    parser = parser or argparse.ArgumentParser()
    parser.description, parser.formatter_class = doc, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", nargs="+", choices=list(sections), help="some of the tables, printed")
    parser.add_argument("--write", action="store_true", help=f"put all tables into {page.relative_to(ROOT)}")
    asked = parser.parse_args()
    if asked.only and asked.write:
        parser.error("--write puts all tables into the page: leave out --only")
    return asked


def show_tables(
    asked: argparse.Namespace, page: Path, part: str, sections: Mapping[str, Callable[[], Iterable[str]]], *, first: str
) -> None:
    """Print the tables that were asked for under one paragraph, and write them where that was asked for."""
    lines = list(paragraph(first))
    for name in asked.only or sections:
        lines += [f"### {name}", "", *sections[name]()]
    if asked.write:
        write_part(page, part, lines)
    print("\n".join(lines))


def show_parts(page: Path, parts: Iterable[tuple[str, str, Callable[[], Iterable[str]]]], *, write: bool) -> None:
    """Print tables as they come, each under its heading, and write each into its own part of a page.

    Args:
        page: The page.
        parts: Heading that is printed, name of the part, and what gives its lines.
        write: Whether to write. A page without the markers of a part is refused before the part is measured.
    """
    for heading, name, lines_of in parts:
        if write:
            read_part(page, name)
        lines = list(lines_of())
        print(*filter(None, [heading]), *lines, sep="\n", flush=True)
        if write:
            write_part(page, name, lines)


def version() -> str:
    """Of the sources, by git."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> str:
    """Processors, memory, and versions of Python and torch."""
    names = _after_colon(Path("/proc/cpuinfo"), "model name")
    memory = int(_after_colon(Path("/proc/meminfo"), "MemTotal")[0].split()[0]) * 1024
    kind = f"{len(names)} x {names[0] if names else platform.machine()}"
    return f"{kind}, {format_bytes(memory)} of memory, Python {platform.python_version()}, torch {torch.__version__}"


def _after_colon(path: Path, name: str) -> Sequence[str]:
    return [line.split(":")[1].strip() for line in path.read_text().splitlines() if line.startswith(name)]


def _markers(name: str) -> tuple[str, str]:
    return f"<!-- written by benchmarks.{name} -->", f"<!-- end of benchmarks.{name} -->"


def _cut(page: Path, name: str) -> tuple[str, str, str]:
    """The page up to the first marker, what is between the two, and from the second one on."""
    begin, end = _markers(name)
    text = page.read_text() if page.exists() else ""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise SystemExit(
            f"{page}: the page requires the lines {begin!r} and {end!r}, once each and in this"
            f" order, found {text.count(begin)!r} and {text.count(end)!r} of them; write them where the"
            " part is to stand"
        )
    before, rest = text.split(begin)
    between, after = rest.split(end)
    return before + begin, between, end + after
