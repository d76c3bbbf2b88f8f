"""Claim: `--ckpt_path last` is the checkpoint that `fit` of the same configuration wrote, wherever that is; what cannot
be found is refused with status 2 and a list of what there is, and nothing is predicted by an untrained model.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_amp.cli.main import main

OWN = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule

class Model(LightningModule):
    def __init__(self, rate: float = 0.1):
        super().__init__()
        self.layer, self.rate = torch.nn.Linear(2, 1), rate
    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()
    def predict_step(self, batch, batch_idx):
        with open("predicted", "a") as file:
            print(self.layer.bias.item(), file=file)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)

class Data(LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)
    predict_dataloader = train_dataloader
"""
"""A file in the current folder; its bias loses the rate in each of two steps of an epoch."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    name = f"own_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-amp"])
    # a console script has no current folder there
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    return tmp_path


def write(folder: Path, *, rate: float = 0.1, **trainer: Any) -> str:
    options = {"strategy": "auto", "accelerator": "cpu", "max_epochs": 1, "enable_progress_bar": False}
    own = f"own_{folder.name}"
    text = {
        "seed_everything": 1,
        "trainer": options | {"enable_model_summary": False} | trainer,
        "model": {"class_path": f"{own}.Model", "init_args": {"rate": rate}},
        "data": {"class_path": f"{own}.Data"},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(text))
    return "run.yaml"


def predicted(config: str, checkpoint: str) -> list[str]:
    Path("predicted").unlink(missing_ok=True)
    assert main(["predict", "--config", config, "--ckpt_path", checkpoint]) == 0
    return Path("predicted").read_text().split()


@pytest.mark.filterwarnings("ignore")
def test_last_is_what_fit_of_the_same_configuration_wrote(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write(folder)
    assert main(["predict", "--config", config, "--ckpt_path", "last"]) == 2
    assert "'last': fit has written no checkpoint" in (said := capsys.readouterr().err)
    assert "run `lightning-amp fit` with this configuration and without --ckpt_path first" in said
    assert main(["fit", "--config", config]) == 0
    (path,) = folder.glob("lightning_logs/version_*/checkpoints/*.ckpt")
    expected = predicted(config, str(path))
    capsys.readouterr()
    assert predicted(config, "last") == expected
    # another model in a newer run is not this one
    assert main(["fit", "--config", write(folder, rate=0.5)]) == 0
    assert predicted(write(folder), "last") == expected
    assert main(["predict", "--config", write(folder, rate=0.7), "--ckpt_path", "last"]) == 2
    assert f"Found of other configurations: {folder}/lightning_logs/" in capsys.readouterr().err.replace("'", "")
    for asked in ("best", "hpc", "absent.ckpt"):
        Path("predicted").unlink(missing_ok=True)
        assert main(["predict", "--config", write(folder), "--ckpt_path", asked]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith(f"lightning-amp: error: --ckpt_path {asked!r}: ")
        assert said.endswith(f"Found of this configuration: {str(path)!r}. Name one by its path")
        assert not Path("predicted").exists()


@pytest.mark.filterwarnings("ignore")
def test_last_is_found_in_the_folder_that_the_configuration_names(folder: Path) -> None:
    saved = {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {"dirpath": "here", "filename": "{epoch}", "save_top_k": -1},
    }
    for logger in (False, True):
        config = write(folder, callbacks=[saved], logger=logger, max_epochs=2)
        assert main(["fit", "--config", config]) == 0
        first, last = (predicted(config, f"here/epoch={epoch}.ckpt") for epoch in (0, 1))
        assert predicted(config, "last") == last != first
