"""Every text of an AmpError that the library raises, to be read at once.

    python -m tests.messages [--longest]

A text is as the source has it: what is filled in stands in braces.
"""

import argparse
import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import lightning_amp
from lightning_amp import errors
from tests.paths import ROOT

LIBRARY = Path(lightning_amp.__file__).parent
CLASSES = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.AmpError)}


@dataclass(frozen=True)
class Message:
    """A text, the class of its error, and where it is raised."""

    place: str
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.place} {self.kind}\n    {self.text}"


def messages() -> Iterator[Message]:
    """In the order of files and lines; a text that is made elsewhere is the expression that has it."""
    for path in sorted(LIBRARY.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and _name(node.func) in CLASSES and node.args:
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                yield Message(place, _name(node.func), text(node.args[0]))


def text(node: ast.expr) -> str:
    """What an expression says: constants as they are, the rest in braces."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(text(value) for value in values)
        case ast.FormattedValue(value=value, conversion=conversion, format_spec=spec):
            shown = "!r" if conversion == ord("r") else ":" + text(spec) if spec else ""
            return "{" + ast.unparse(value) + shown + "}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text(left) + text(right)
    return "{" + ast.unparse(node) + "}"


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", action="store_true", help="the longest first")
    asked = parser.parse_args()
    found = list(messages())
    if asked.longest:
        found.sort(key=lambda message: -len(message.text))
    print(*found, f"{len(found)} messages", sep="\n")


if __name__ == "__main__":
    main()
