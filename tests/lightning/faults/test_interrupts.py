"""Claim: whoever ends a run by Ctrl-C, or loses a rank, reads in the last line what to do, or whose fault it was."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_amp.cli import main as cli
from lightning_amp.cli.commands import profile
from lightning_amp.lightning.faults.launchers import how_to_resume
from tests.lightning.conformance.cases import QUIET
from tests.lightning.faults.fault_cases import Case, run_scripts

# it measures seconds of several processes
pytestmark = pytest.mark.alone

STUCK = Case(0, "on_train_batch_start", "stick")


def press(started: list["subprocess.Popen[str]"]) -> None:
    """As a terminal does: all processes of the job get the signal."""
    first = psutil.Process(started[0].pid)
    for process in [*first.children(), first]:
        process.send_signal(signal.SIGINT)


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_an_interrupted_run_says_how_to_go_on_with_status_130(tmp_path: Path, devices: int) -> None:
    outcome = run_scripts(STUCK, tmp_path, [[sys.executable]], devices=devices, after_fault=press)
    assert outcome.statuses == [130]
    assert outcome.left == []
    last = outcome.texts[0].strip().splitlines()[-1]
    path = tmp_path / "step=4.ckpt"
    assert last == (
        f"lightning_amp: interrupted; to go on: trainer.fit(..., ckpt_path={str(path)!r}), or --ckpt_path {path}"
    )


def test_without_a_checkpoint_it_says_so() -> None:
    trainer = Trainer(accelerator="cpu", callbacks=[ModelCheckpoint()], **QUIET)
    assert how_to_resume(trainer) == ""
    trainer.state.fn = "fit"
    assert "no checkpoint has been written" in how_to_resume(trainer)
    assert how_to_resume(None) == ""


@pytest.mark.ranks
def test_what_is_said_of_a_killed_rank_is_the_last_line_under_a_short_traceback(tmp_path: Path) -> None:
    outcome = run_scripts(Case(1, "training_step", "kill"), tmp_path, [[sys.executable]], devices=2)
    lines = outcome.texts[0].strip().splitlines()
    assert "RuntimeError: rank 1 (" in lines[-1], lines
    assert "was ended by SIGKILL" in lines[-1], lines
    assert len([line for line in lines if line.startswith("[rank0]:")]) <= 10
    assert not [line for line in lines if "torch/distributed" in line]


def test_the_command_line_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(profile, "read", interrupt)
    assert cli.main(["profile", "anything"]) == 130
    assert capsys.readouterr().err == "lightning-amp: interrupted\n"
