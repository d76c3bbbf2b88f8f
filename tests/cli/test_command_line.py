"""Claim: a misspelt name under `lightning-amp fit` is one message with the name that was meant, and status 2."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_amp
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
    "strategy: amp": ("strategy: ampp", "strategy 'ampp' is not supported; allowed are ['amp', ", "'amp'"),
    "max_epochs": ("max_epoch", "'trainer.max_epoch' was set; fit has nothing of that", "'trainer.max_epochs'"),
    "trainer:": ("trainr:", "'trainr.accelerator' was set", "'trainer.accelerator'"),
    "batch_size": ("batchsize", "'batchsize' was given to lightning_amp.SingleCellDataModule", "'batch_size'"),
    "lightning_amp.GLUE": ("lightning_amp.GLEU", "the class 'lightning_amp.GLEU' does not exist", "'GLUE'"),
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


def test_a_missing_configuration_is_told_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("fit", "validate"):
        assert main([verb]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"lightning-amp: error: --config is missing: lightning-amp {verb} --config FILE.yaml")
        assert len(said.splitlines()) == 1


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"lightning-amp {lightning_amp.__version__}\n"


def test_verify_reads_the_same_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = said_of(GOOD.replace("max_epochs", "max_epoch"), ["verify"], tmp_path, capsys)
    assert "Did you mean 'trainer.max_epochs'?" in said


def printed(text: str, words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    (folder / "run.yaml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main([*words[:1], "--config", str(folder / "run.yaml"), *words[1:], "--print_config"])
    assert ended.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_options_of_the_strategy_are_taken_beside_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unnamed, given = (
        GOOD.replace("  strategy: amp\n", ""),
        GOOD.replace("y: amp\n", "y: {class_path: lightning_amp.AMPStrategy, init_args: {rescue: true}}\n"),
    )
    option = ["--trainer.strategy.device_memory", "20MiB"]
    for text, start in ((GOOD, "popen"), (unnamed, "popen"), (GOOD.replace("amp\n", "amp_spawn\n", 1), "spawn")):
        strategy = printed(text, ["fit", *option], tmp_path, capsys)["trainer"]["strategy"]
        assert strategy["class_path"] == "lightning_amp.AMPStrategy"
        assert strategy["init_args"]["device_memory"] == "20MiB"
        assert strategy["init_args"]["start_method"] == start
    strategy = printed(given, ["fit", "=".join(option)], tmp_path, capsys)["trainer"]["strategy"]
    assert strategy["init_args"]["device_memory"] == "20MiB"
    assert strategy["init_args"]["rescue"] is True
    said = said_of(GOOD.replace("amp\n", "ddp\n", 1), ["fit", *option], tmp_path, capsys)
    assert "'--trainer.strategy.device_memory' was set, and strategy 'ddp' has no options" in said
    said = said_of(GOOD, ["fit", "--trainer.strategy.device_memry=20MiB"], tmp_path, capsys)
    assert "Did you mean 'device_memory'?" in said


def test_classes_are_found_in_the_current_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_model.py").write_text("from lightning_amp import GLUE\n\n\nclass Own(GLUE): ...\n")
    monkeypatch.chdir(tmp_path)
    # a console script has its own folder there instead of the current one
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    config = printed(GOOD.replace("lightning_amp.GLUE", "own_model.Own"), ["fit"], tmp_path, capsys)
    assert config["model"]["class_path"] == "own_model.Own"
