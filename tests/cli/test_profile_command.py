"""Claim: `profile` of a configuration or of a class says where the memory of its step is, in 80 columns and as JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_amp.cli.main import main

FILE = """
import lightning.pytorch as pl
import torch


class Wide(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(100, 1000), torch.nn.ReLU(), torch.nn.Linear(1000, 3))

    def training_step(self, batch, batch_idx):
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Rows(pl.LightningDataModule):
    def setup(self, stage):
        self.rows = torch.randn(8, 100)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.rows, batch_size=4)
"""

WORDS = """
import lightning.pytorch as pl
import torch


class Words(pl.LightningModule):
    def __init__(self, width, name):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(50, width), torch.nn.Linear(width, 50)
        assert name == "mine"

    def training_step(self, batch, batch_idx):
        scores = self.head(self.embed(batch["ids"]).mean(1))
        return torch.nn.functional.cross_entropy(scores, batch["labels"])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "wide_model.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "wide.yaml"
    path.write_text("seed_everything: 1\nmodel:\n  class_path: wide_model.Wide\ndata:\n  class_path: wide_model.Rows\n")
    return str(path)


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_a_configuration_is_profiled(config: str, capsys: Any) -> None:
    assert main(["profile", "--config", config]) == 0
    text = capsys.readouterr().out
    assert "largest part: parameters, gradients and optimiser state (parameters)" in text
    assert "batch of 4" in text
    assert "net.0.weight.exp_avg" in text
    assert "counted on fake tensors" in text
    assert max(map(len, text.splitlines())) <= 80
    assert main(["profile", "--config", config, "--batch-size", "64", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["batch_size"] == 64
    assert found["largest"] == "parameters"


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_a_step_is_drawn(config: str, tmp_path: Path, capsys: Any) -> None:
    picture = tmp_path / "step.png"
    assert main(["profile", "--config", config, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    for words, said in (
        (["--config", config, "--plot", str(tmp_path / "step.txt")], "allowed is the name of a PNG file"),
        ([str(tmp_path), "--plot", str(picture)], "has no training step to draw"),
    ):
        assert main(["profile", *words]) == 2
        assert said in capsys.readouterr().err


def test_one_of_both_is_asked_for(config: str, capsys: Any) -> None:
    for words in (["profile"], ["profile", "data", "--config", config]):
        assert main(words) == 2
        assert "give one of them: a data directory, or a configuration" in capsys.readouterr().err


def test_a_class_is_profiled_without_a_configuration(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert main(["profile", "wide_model:Wide", "--batch", "4x100"]) == 0
    text = capsys.readouterr().out
    assert "batch of 4" in text
    assert "net.0.weight.exp_avg" in text
    # one of the current folder, which is not on the path of a console script
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "words_model.py").write_text(WORDS)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    words = ["profile", "words_model:Words", "--batch", "ids=4x7:int64", "--batch", "labels=4:int64"]
    assert main([*words, "--init", "width=24", "--init", "name=mine", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["batch_size"] == 4
    assert any(row["name"] == "embed.weight" and row["shape"] == [50, 24] for row in found["tensors"])


def test_what_is_wrong_with_a_class_or_its_batch_is_said_in_one_message(
    config: str, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "words_model.py").write_text(WORDS)
    (tmp_path / "broken_model.py").write_text("import no_such_thing\n")
    batch = ["--batch", "4x100"]
    for words, said in (
        (["wide_modell:Wide", *batch], "there is no module 'wide_modell' in the current folder"),
        (["broken_model:Net", *batch], "importing 'broken_model' fails: ModuleNotFoundError: No module named 'no"),
        (["wide_model:Wid", *batch], "'wide_model' has no 'Wid'; its LightningModules are ['Wide']"),
        (["wide_model:Rows", *batch], "'Rows' is no LightningModule; its LightningModules are ['Wide']"),
        (["wide_model", *batch], "expected MODULE:CLASS, got 'wide_model'; write for example"),
        (["words_model:Words", *batch], "cannot be made: TypeError: Words.__init__() missing 2 required"),
        (["wide_model:Wide", *batch, "--init", "width"], "write --init NAME=VALUE"),
        (["wide_model:Wide", "--batch", "4by100"], "'4by100' is no [NAME=]SIZES[:DTYPE]"),
        (["--config", config, *batch], "--batch goes with MODULE:CLASS alone"),
        (["--config", config, "--init", "a=1"], "--init goes with MODULE:CLASS and --batch"),
        (["wide_model:Wide", "--batch", "4x7"], "with --batch 4x7: "),
    ):
        assert main(["profile", *words]) == 2
        err = capsys.readouterr().err
        assert said in err
        assert err.count("lightning-amp: error: ") == 1
    # which step, with which error, at which line
    assert "training step fails" in err
    assert "mat1 and mat2 shapes cannot be multiplied" in err
    assert "wide_model.py:12: return self.net(batch).mean()" in err
