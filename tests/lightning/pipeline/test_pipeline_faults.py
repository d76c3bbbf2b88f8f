"""Claim: a stage that dies or is stuck ends the run on all ranks, soon and by name, as every rank does (../faults)."""

from pathlib import Path

import pytest

from tests.lightning.faults.fault_cases import Case, run_group
from tests.lightning.faults.fault_table import said

pytestmark = pytest.mark.ranks

PIPELINE = {"strategies": "pipeline"}
FAULTS = {
    "killed": (Case(1, "training_step", "kill", PIPELINE), "rank 1 ended without a word"),
    "stuck": (Case(0, "training_step", "stick", PIPELINE | {"stuck_after": 3.0}), "rank 0 has made no progress for"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_other_stages_end_and_say_why(name: str, tmp_path: Path) -> None:
    case, says = FAULTS[name]
    outcome = run_group(case, tmp_path)
    assert outcome.seconds < 30
    assert all(outcome.statuses)
    assert not outcome.left
    messages = [m for rank, text in enumerate(outcome.texts) if rank != case.rank for m in said(text)]
    assert messages
    assert all(says in message for message in messages), messages
