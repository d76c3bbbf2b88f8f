"""Break the files that matter at random, one edit at a time, and see that their tests notice.

    python -m tests.mutants [--only techniques/chunk] [--each 5] [--seed 0]

tests/mutants.toml names the files and their tests. Every mutant is one edit in a copy of the repository: a comparison,
an operator, a condition, a number or a call. The seed decides which, so that a run can be repeated. A mutant that
survives is printed; it is either a test that is missing, or an edit that changes nothing. Status 1 where tests fail
without a mutant, or where fewer mutants are killed than the least share of tests/mutants.toml.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.paths import ROOT

TABLE = ROOT / "tests" / "mutants.toml"
COPIED = ("lightning_amp", "tests", "benchmarks", "examples", "configs", "docs", "pyproject.toml")
CHOSEN = ("-m", "not (release or slow or alone)")
LIMIT_S = 300
SWAPPED: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"), ast.Mod: ("%", "*"),
}  # fmt: skip
Edit = tuple[int, int, str]
"""First and last byte of what is replaced, and by what."""


class Edits(ast.NodeVisitor):
    """All edits of one file; none in a message, an annotation or a decorator."""

    def __init__(self, text: str) -> None:
        self.source = text.encode()
        self.starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[Edit] = []
        self.visit(ast.parse(text))

    def span(self, node: ast.AST) -> tuple[int, int]:
        first = self.starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return first, self.starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def replace(self, node: ast.AST, new: ast.expr | str) -> None:
        self.found.append((*self.span(node), new if isinstance(new, str) else f"({ast.unparse(new)})"))

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom):
            return
        for name, child in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list", "type_params"):
                for one in child if isinstance(child, list) else [child]:
                    if isinstance(one, ast.AST):
                        self.visit(one)
        match node:
            case ast.Compare(ops=[op]) if type(op) in SWAPPED:
                self.between(node.left, node.comparators[0], op)
            case ast.BinOp(op=op) if type(op) in SWAPPED and not isinstance(node.left, ast.JoinedStr):
                self.between(node.left, node.right, op)
            case ast.BoolOp(op=op, values=[left, right, *_]):
                self.between(left, right, op)
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                self.replace(test, ast.UnaryOp(ast.Not(), test))
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                self.replace(node, operand)
            case ast.Constant(value=bool() as value):
                self.replace(node, str(not value))
            case ast.Constant(value=int() as value):
                self.replace(node, str(value + 1))
            case ast.Expr(value=ast.Call()) | ast.AugAssign():
                self.replace(node, "pass")

    def between(self, left: ast.AST, right: ast.AST, op: ast.AST) -> None:
        """Replace the operator that stands between two operands, parentheses and line breaks kept."""
        first, last = self.span(left)[1], self.span(right)[0]
        self.found.append((first, last, self.source[first:last].decode().replace(*SWAPPED[type(op)], 1)))


def passes(folder: Path, tests: list[str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *CHOSEN, *tests]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def mutants(row: dict[str, list[str]], each: int, draw: random.Random) -> Iterator[tuple[str, Edit]]:
    """So many edits of the files of a row, drawn from all of them."""
    files = sorted({file for glob in row["files"] for file in (ROOT / "lightning_amp").glob(glob)})
    if not files:
        raise SystemExit(f"{TABLE.name}: {row['files']!r} are no files of lightning_amp")
    every = [(str(f.relative_to(ROOT)), edit) for f in files for edit in Edits(f.read_text()).found]
    yield from sorted(draw.sample(every, min(each, len(every))))


def main() -> None:
    """Judge the mutants of every row, and print who survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows that name such a file")
    parser.add_argument("--each", type=int, default=4, help="mutants of a row")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    import tomllib

    table = tomllib.loads(TABLE.read_text())
    killed = tried = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in COPIED:
            source = ROOT / part
            (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / part)
        for row in table["row"]:
            if not any(asked.only in file for file in row["files"]):
                continue
            if not passes(folder, row["tests"]):
                raise SystemExit(f"{row['tests']} do not pass without a mutant")
            for file, (first, last, new) in mutants(row, asked.each, random.Random(asked.seed)):
                text = (folder / file).read_bytes()
                (folder / file).write_bytes(text[:first] + new.encode() + text[last:])
                alive = passes(folder, row["tests"])
                (folder / file).write_bytes(text)
                tried, killed = tried + 1, killed + (not alive)
                word, line = "SURVIVED" if alive else "killed  ", text.count(b"\n", 0, first) + 1
                print(f"{word}  {file}:{line}  {text[first:last].decode()} -> {new}", flush=True)
    print(f"{killed} of {tried} killed, {table['least']:.0%} required")
    sys.exit(killed < table["least"] * tried)


if __name__ == "__main__":
    main()
