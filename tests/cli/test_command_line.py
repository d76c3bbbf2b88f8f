"""Claim: a misspelt name under `lightning-amp fit` is one message with the name that was meant, and status 2."""

import sys
from pathlib import Path

import pytest

from lightning_amp.cli.main import main

GOOD = """
trainer:
  accelerator: cpu
  strategy: amp
  max_epochs: 1
model:
  class_path: lightning_amp.GLUE
data:
  class_path: lightning_amp.SingleCellDataModule
  init_args: {data_dir: data, batch_size: 4}
"""
MISTAKES = {
    "strategy: amp": ("strategy: ampp", "strategy 'ampp' was asked for; allowed are ['amp', ", "'amp'"),
    "max_epochs": (
        "max_epoch",
        "'trainer.max_epoch' was set; fit has nothing of that",
        "'trainer.max_epochs'",
    ),
    "trainer:": ("trainr:", "'trainr.accelerator' was set", "'trainer.accelerator'"),
    "batch_size": (
        "batchsize",
        "'batchsize' was given to lightning_amp.SingleCellDataModule",
        "'batch_size'",
    ),
    "lightning_amp.GLUE": ("lightning_amp.GLEU", "the class 'lightning_amp.GLEU' was asked for", "'GLUE'"),
    "amp\n": (
        "\n    class_path: lightning_amp.AMPStrategy\n    init_args: {polcy: paper}\n",
        "'polcy' was given to lightning_amp.AMPStrategy",
        "'policy'",
    ),
}


def said_of(text: str, words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    (folder / "run.yaml").write_text(text)
    assert main([*words, "--config", str(folder / "run.yaml")]) == 2
    return capsys.readouterr().err


@pytest.fixture(autouse=True)
def _words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-amp"])


@pytest.mark.parametrize("right", MISTAKES)
def test_a_misspelt_name_is_told_with_the_nearest(
    right: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong, text, nearest = MISTAKES[right]
    said = said_of(GOOD.replace(right, wrong, 1), ["fit"], tmp_path, capsys)
    assert said.startswith(f"lightning-amp: error: {text}")
    assert said.endswith(f". Did you mean {nearest}?\n")
    assert len(said.splitlines()) == 1


def test_a_name_like_no_other_and_a_missing_file_are_told_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = said_of(GOOD.replace("amp\n", "zzz\n", 1), ["fit"], tmp_path, capsys)
    assert said.endswith("Lightning's own, such as 'auto' and 'ddp'\n")
    assert main(["fit", "--config", str(tmp_path / "none.yaml")]) == 2
    assert "File does not exist" in capsys.readouterr().err


def test_verify_reads_the_same_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = said_of(GOOD.replace("max_epochs", "max_epoch"), ["verify"], tmp_path, capsys)
    assert "Did you mean 'trainer.max_epochs'?" in said
