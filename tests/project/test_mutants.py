"""Claim: every mutant can be made and judged: its line is in its file once, and the tests named beside it are there."""

from tests.mutant_table import MUTANTS
from tests.paths import ROOT


def test_a_mutant_is_one_edit_of_what_is_there() -> None:
    found = {mutant: (ROOT / mutant.file).read_text().count(mutant.old) for mutant in MUTANTS}
    stale = [f"{m.technique}, {m.kind}: {m.old!r}, {n} times in {m.file}" for m, n in found.items() if n != 1]
    assert not stale, "bring tests/mutant_table/ up to date"


def test_a_mutant_changes_something() -> None:
    assert not [mutant for mutant in MUTANTS if mutant.old == mutant.new]


def test_tests_of_a_mutant_are_there() -> None:
    named = {word for mutant in MUTANTS for word in mutant.tests.split() if word.startswith("tests/")}
    for path, _, test in (word.partition("::") for word in named):
        assert (ROOT / path).exists(), f"{path} is in tests/mutant_table/"
        if test:
            assert f"def {test.partition('[')[0]}(" in (ROOT / path).read_text(), f"{path}::{test} is none"
