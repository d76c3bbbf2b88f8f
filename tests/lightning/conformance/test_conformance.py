"""Claim: Lightning's features give under `strategy="amp"` what they give on one device and under ddp, or are refused.

All features run once, on one rank and on two; each test reads one row. docs/reference/conformance.md has
what was found.
"""

import re
from typing import Any

import pytest
import torch

from tests.each import FEW
from tests.lightning.conformance.cases import FEATURES, Tiny
from tests.lightning.conformance.table import AMP_1, AMP_2, DOCUMENT, Found, Row, differences, document, judge, run_all

# the first test runs everything
pytestmark = [pytest.mark.timeout(1200), pytest.mark.full, pytest.mark.ranks]
REFUSED = DOCUMENT.parent / "refused.md"


@pytest.fixture(scope="module", params=FEW)
def few(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def found(few: bool, tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return run_all(tmp_path_factory.mktemp("conformance"), few=few)


@pytest.fixture(scope="module")
def rows(found: list[Found]) -> dict[str, Row]:
    return {name: judge(FEATURES[name], found) for name in found[0]}


def test_features_work_or_are_refused(rows: dict[str, Row]) -> None:
    problems = [f"{name}: {line}" for name, row in rows.items() for line in row.problems]
    assert not problems, "\n".join(problems)


def test_the_committed_table_is_what_was_found(rows: dict[str, Row], few: bool) -> None:
    text, again = DOCUMENT.read_text(), "python -m tests.lightning.conformance.table --write"
    for row in rows.values():
        name, one, two = row.feature.name, row.cells.get(AMP_1, r"\w+"), row.cells.get(AMP_2, r"\w+")
        start = re.escape(name.replace("||", "\\|\\|"))
        assert re.search(rf"^\| {start} \| {one} \| {two} \| ", text, re.MULTILINE), again
    # at other places the same refusal has other numbers
    assert all(words in text for row in FEATURES.values() for words in row.refused.values()), again
    assert few or text == document(list(rows.values())), again


def test_what_is_compared_has_been_trained(found: list[Found]) -> None:
    trained, start = found[0]["fit"]["plain"], Tiny().double().state_dict()
    moved = [name for name, value in start.items() if (trained[name] - value).norm() > 1e-3 * value.norm()]
    assert {"encoder.weight", "v", "decoder.strata.1.key.qk.weight", "decoder.strata.0.scale"} <= set(moved)
    assert trained["losses"][-1] < trained["losses"][0]


@pytest.mark.parametrize(
    ("mine", "theirs", "told"),
    [
        ({"a": torch.tensor([1.0])}, {"a": torch.tensor([1.0 + 1e-6])}, "off by"),
        ({"a": torch.tensor([1.0])}, {"a": torch.tensor(1.0)}, "shape"),
        ({"a": torch.tensor([float("nan")])}, {"a": torch.tensor([1.0])}, "off by"),
        ({"a": 1}, {"a": 2}, "1 beside 2"),
        ({"a": 1, "b": 1}, {"a": 1}, "only in one"),
        ({"error": "E: no", "where": "here"}, {"a": 1}, "E: no"),
    ],
)
def test_differences_are_told(mine: Any, theirs: Any, told: str) -> None:
    (line,) = differences(mine, theirs, 1e-9)
    assert told in line
    assert not differences(theirs, theirs, 1e-9)


def test_the_page_of_refusals_names_what_is_refused() -> None:
    text = REFUSED.read_text()
    assert not [name for name, row in FEATURES.items() if row.refused and name not in text]
    assert "conformance.md" in text
