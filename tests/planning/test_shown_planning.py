"""Claim: planning that takes seconds says what it counts, on standard error: a bar on a terminal, else lines; nothing
is shown of shorter work, without a progress bar, or twice.
"""

import io
import sys
import time
from typing import Any

import pytest
from torch import ones
from torch.utils.data import DataLoader

import lightning_amp
from lightning_amp import progress
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.progress import counting, shown_if_long
from tests.lightning.strategy.strategy_cases import Small, fitted


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(*, seconds: float, show: bool = True) -> None:
    with shown_if_long("planning", show=show):
        counting("as it is, a batch of 600")
        time.sleep(seconds)
        with shown_if_long("planning"):
            counting("with recompute")
            time.sleep(seconds)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LONG", 0.1)


def test_one_line_says_what_is_counted_where_there_is_no_terminal(capsys: Any) -> None:
    work(seconds=0.2)
    assert capsys.readouterr().err == "planning: 0 steps counted, now as it is, a batch of 600 ...\n"
    work(seconds=0.0)
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_long_work_says_again_what_is_counted(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(progress, "SLOW", 0.2)
    work(seconds=0.35)
    first, *others = capsys.readouterr().err.splitlines()
    assert first == "planning: 0 steps counted, now as it is, a batch of 600 ..."
    assert others[-1] == "planning: 1 step counted, now with recompute ..."
    time.sleep(0.5)
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_a_bar_that_goes_on_and_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", Terminal())
    work(seconds=0.3)
    shown = sys.stderr.getvalue()
    assert "planning: 0 steps counted, now as it is" in shown
    assert "planning: 1 step counted, now with recompute" in shown
    # the line is erased at the end
    assert shown.rstrip().endswith("\x1b[2K")


def test_a_fit_and_a_plan_show_it_unless_the_progress_bar_is_off(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(progress, "LONG", 0.0)
    data = DataLoader([ones(16, 4)] * 2, batch_size=None)
    fitted(Small(), data, AMPStrategy(strategies="S1"))
    assert "planning" not in capsys.readouterr().err
    fitted(Small(), data, AMPStrategy(device_memory="1GiB"), enable_progress_bar=True)
    assert capsys.readouterr().err.count("planning: ") == 1
    lightning_amp.plan(Small(), "16x4")
    assert capsys.readouterr().err.count("planning: ") == 1
