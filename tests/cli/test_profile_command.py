"""Claim: `profile --config` says where the memory of a model's step is, in 80 columns and as JSON."""

import json
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


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "wide_model.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "wide.yaml"
    path.write_text(
        "seed_everything: 1\nmodel:\n  class_path: wide_model.Wide\ndata:\n  class_path: wide_model.Rows\n"
    )
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
