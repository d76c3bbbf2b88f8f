"""Claim: every package that the library imports is declared, so that an installation of it alone runs."""

import ast
import re
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions

import pytest

import lightning_amp
from tests.paths import ROOT


def imported(tree: ast.AST) -> Iterator[str]:
    """The top-level packages that a file imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]


def same(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_package_that_is_imported_is_declared() -> None:
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["umap"]]
    declared = {same(re.match(r"[\w.-]+", line)[0]) for line in lines}  # type: ignore[index]
    files = list((ROOT / "lightning_amp").rglob("*.py"))
    names = {name for file in files for name in imported(ast.parse(file.read_text()))}
    foreign = names - sys.stdlib_module_names - {"lightning_amp"}
    assert {"numpy", "torch", "h5py"} <= foreign
    provided = packages_distributions()
    missing = {n for n in foreign if not {same(d) for d in provided.get(n, [n])} & declared}
    assert missing - {"umap"} == set()
    assert all(">=" in line for line in project["dependencies"])


def test_the_version_is_said_once() -> None:
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["project"]["dynamic"] == ["version"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "lightning_amp.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", lightning_amp.__version__)
