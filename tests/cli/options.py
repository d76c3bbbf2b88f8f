"""The options of every command as a page, docs/reference/options.md, made of the parsers.

python -m tests.cli.options
"""

import argparse
from collections.abc import Iterator

from benchmarks.page import table
from lightning_amp.cli.main import _parser
from lightning_amp.cli.verbs import VERBS
from tests.paths import ROOT

PAGE = ROOT / "docs" / "reference" / "options.md"


def page() -> str:
    lines = ["# Options of the commands", "", "<!-- written by tests.cli.options -->", ""]
    lines += ["What `lightning-amp COMMAND --help` says, for the commands that are not Lightning's. Made by"]
    lines += ["`python -m tests.cli.options`.", ""]
    for verb, parser in parsers().items():
        if rows := list(options(parser)):
            lines += [f"## {verb}", "", f"{VERBS[verb][1]}", "", *table(["option", "meaning"], rows)]
    return "\n".join([*lines, "<!-- end of tests.cli.options -->", ""])


def parsers() -> dict[str, argparse.ArgumentParser]:
    for action in _parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    raise AssertionError("the program has no commands")


def options(parser: argparse.ArgumentParser) -> Iterator[list[str]]:
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        shown = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
        if action.choices:
            shown = "{" + ",".join(map(str, action.choices)) + "}"
        name = f"{', '.join(action.option_strings)} {shown}".strip()
        meaning = (action.help or "") % {**vars(action), "prog": parser.prog}
        yield [f"`{name}`".replace("|", "\\|"), " ".join(meaning.split()).replace("|", "\\|")]


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
