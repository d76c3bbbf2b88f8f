"""Claim: a fit shows its plan in five lines and writes all of it beside its logs; a mistake is one message."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader

from lightning_amp import AMPStrategy, Plan
from lightning_amp.errors import PlanError
from lightning_amp.lightning._compat import MultiProcessingLauncher
from lightning_amp.lightning.faults.launchers import end_as_ours
from tests.lightning.strategy.strategy_cases import Small, trainer_of
from tests.paths import ROOT


def cells() -> Any:
    return DataLoader(torch.randn(24, 4), batch_size=4)  # type: ignore[arg-type]


def fitted(folder: Path, caplog: pytest.LogCaptureFixture, *, logger: bool = True, **options: Any) -> list[str]:
    """The lines that a fit says."""
    caplog.clear()
    own: dict[str, Any] = {"max_steps": -1, "log_every_n_steps": 1, "default_root_dir": folder}
    trainer_of(AMPStrategy(**options), logger=CSVLogger(folder) if logger else False, **own).fit(Small(), cells())
    return caplog.text.splitlines()


def test_a_fit_says_five_lines_and_writes_the_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = fitted(tmp_path, caplog)
    start = next(n for n, line in enumerate(said) if line.startswith("plan  "))
    end = said.index("", start)
    names = [name for line in said[start:end] if (name := line[:16].strip())]
    assert names == ["plan", "predicted peak", "predicted step", "less memory", "more"]
    assert "4 samples" in said[start + 2]
    assert "a step: predicted" in said[-1]
    assert "; measured " in said[-1]
    assert not [line for line in said if "cell" in line or "paper" in line]
    logs = tmp_path / "lightning_logs" / "version_0"
    assert f"more            {logs}/amp_plan.txt, or AMPStrategy(verbose=True)" in " ".join(
        "\n".join(said[start:end]).replace("\n" + " " * 16, " ").splitlines()
    )
    assert not [line for line in said[start:end] if len(line) > 80 and str(logs) not in line]
    report = (logs / "amp_plan.txt").read_text()
    assert report.startswith("Plan (policy auto): ")
    assert "cell" not in report
    plan = Plan.read(logs / "amp_plan.json")
    assert f"{plan}\n" == report
    assert f"amp_predicted_peak_bytes: {plan.predicted_peak_bytes}\n" in (logs / "hparams.yaml").read_text()

    whole = fitted(tmp_path, caplog, verbose=True)
    assert "\n".join(whole).count(report.strip()) == 1
    assert not [line for line in whole if line.startswith("more ")]

    before = sorted(tmp_path.rglob("*"))
    assert any("print(trainer.strategy.plan)" in line for line in fitted(tmp_path, caplog, logger=False))
    assert sorted(tmp_path.rglob("*")) == before


def test_one_device_opens_no_port_and_leaves_no_rank_behind(tmp_path: Path) -> None:
    script = """
        import os, torch, torch.distributed as dist
        from lightning.pytorch import Trainer
        from lightning.pytorch.demos.boring_classes import BoringModel
        import lightning_amp

        def no_port(*args, **kwargs):
            raise RuntimeError("a port was opened")

        dist.TCPStore.__init__ = no_port
        trainer = Trainer(strategy="amp", devices=1, accelerator="cpu", max_steps=2, logger=False, num_nodes=1,
                          enable_checkpointing=False, enable_progress_bar=False)
        trainer.fit(BoringModel())
        print("trained", trainer.global_step, "LOCAL_RANK" in os.environ)
    """
    words = [sys.executable, "-c", textwrap.dedent(script)]
    found = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert "trained 2 False" in found.stdout, found.stderr[-2000:]


def test_a_plan_that_is_refused_is_written_and_one_that_trains_anyway_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(PlanError, match="predicted to run out of memory"):
        fitted(tmp_path, caplog, device_memory="1KiB")
    assert "does NOT fit" in (tmp_path / "lightning_logs" / "version_0" / "amp_plan.txt").read_text()
    assert "does NOT fit" in caplog.text
    with pytest.warns(UserWarning, match="predicted to run out of memory"):
        fitted(tmp_path, caplog, device_memory="1KiB", unfit="train")


def test_ranks_that_were_started_by_multiprocessing_raise_the_mistake_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher: Any = object.__new__(MultiProcessingLauncher)
    end_as_ours(launcher)
    for text, kind in (("lightning_amp.errors.PlanError: what to do", PlanError), ("ValueError: other", Exception)):

        def launch(self: Any, *args: Any, text: str = text) -> None:
            raise ProcessRaisedException(f"Process 1 terminated\nTraceback (most recent call last):\n{text}\n", 1, 2)

        monkeypatch.setattr(MultiProcessingLauncher, "launch", launch)
        with pytest.raises(kind, match="what to do|other") as found:
            launcher.launch()
        assert isinstance(found.value, PlanError) is (kind is PlanError)


SCRIPT = """
from lightning.pytorch import Trainer
from lightning_amp import AMPStrategy
from tests.lightning.strategy.test_first_contact import Small, cells


strategy = AMPStrategy(device_memory="1KiB")
options = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}
Trainer(strategy=strategy, **options).fit(Small(), cells())
"""


@pytest.mark.ranks
def test_two_ranks_say_a_mistake_once_without_a_traceback(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=280
    )
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    assert run.stderr.count("predicted to run out of memory") == 1
    assert "lightning_amp.errors.PlanError: predicted to run out of memory" in run.stderr
