"""Claim: every package that the library imports is declared, so that an installation of it alone runs."""

import ast
import re
import runpy
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions

import pytest
import yaml

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


def test_links_of_a_wheel_lead_to_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its description is the README, from which a package index can follow no path."""
    found: dict[str, str] = {}
    monkeypatch.setattr("setuptools.setup", found.update)
    runpy.run_path(str(ROOT / "setup.py"))
    url = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["repository-code"] == url
    links = re.findall(r"\]\(([^)]+)\)", found["long_description"])
    assert len(links) > 15
    assert [link for link in links if not link.startswith("https://")] == []
    assert f"]({url}/raw/main/docs/memory_per_stratum.png)" in found["long_description"]
    paths = [link.removeprefix(f"{url}/blob/main/").partition("#")[0] for link in links if f"{url}/blob" in link]
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_no_page_installs_from_a_package_index_what_was_not_published_there() -> None:
    folders = ("docs", "examples", "benchmarks", "lightning_amp", "tests")
    files = [ROOT / "README.md", *(file for folder in folders for file in (ROOT / folder).rglob("*.*"))]
    texts = {file: file.read_text() for file in files if file.suffix in (".md", ".py", ".ipynb", ".sh")}
    told = [str(file) for file, text in texts.items() if re.search(r"pip install ['\"]?lightning-amp", text)]
    assert told == []


def test_the_recipe_of_conda_needs_what_the_package_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    recipe = yaml.safe_load((ROOT / ".ci" / "recipe.yaml").read_text())
    # conda's names of two packages; extras are packages of their own there
    names = {"torch": "pytorch", "matplotlib": "matplotlib-base", "PyYAML": "pyyaml"}
    declared = [re.sub(r"\[.*\]", "", line) for line in project["dependencies"]]
    wanted = {re.sub(r"^[\w-]+", lambda name: names.get(name[0], name[0]), line) for line in declared}
    found = {line.replace(" ", "") for line in recipe["requirements"]["run"]}
    assert found - {f"python{project['requires-python']}"} == wanted
    assert recipe["context"]["version"] == lightning_amp.__version__
    assert recipe["package"]["name"] == project["name"]
    (entry,) = recipe["build"]["python"]["entry_points"]
    assert dict([entry.split(" = ")]) == project["scripts"]


def test_private_names_are_in_one_file_each() -> None:
    private = re.compile(r"(torch|lightning)(\.\w+)*\._[a-z]|from (torch|lightning)\S* import \(?\s*_", re.I)
    # how operators reach a subclass of Tensor is nobody's business but that of sharded tensors
    homes = {"lightning_amp/lightning/_compat.py"}
    homes |= {
        f"lightning_amp/{room}_torch.py"
        for room in ("", "sharding/", "techniques/fsdp/", "techniques/compiled_budget/")
    }
    files = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "lightning_amp").rglob("*.py")}
    uses = {
        name
        for name, text in files.items()
        if private.search(text.replace("lightning_amp.lightning", "amp").replace("lightning_amp", "amp"))
    }
    assert uses == homes
