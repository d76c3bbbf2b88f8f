"""Claim: on the demo's data and settings, in the demo's steps, the modalities of the reference model meet."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from lightning.pytorch import Trainer, seed_everything

from lightning_amp.cli.commands.demo import CONFIG, SYNTHETIC
from lightning_amp.data.files.write_results import same_type_share
from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.models.glue import GLUE

RANKS, EPOCHS = 2, 40


@pytest.mark.exhaustive
@pytest.mark.release
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_neighbours_in_the_other_modality_are_of_the_same_type(seed: int, tmp_path: Path) -> None:
    """One process with the cells of both ranks, which is what two ranks compute."""
    synthesize(tmp_path / "data", **SYNTHETIC, seed=seed)
    settings = yaml.safe_load(CONFIG.substitute(out=tmp_path, devices=RANKS, epochs=EPOCHS))
    seed_everything(seed)
    model = GLUE(**settings["model"]["init_args"])
    data = SingleCellDataModule(tmp_path / "data", batch_size=RANKS * settings["data"]["init_args"]["batch_size"])
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=EPOCHS, limit_val_batches=0, **quiet)
    trainer.fit(model, data)
    embeddings: dict[str, np.ndarray] = {}
    for batch in trainer.predict(model, data):
        for name, cells in batch.items():
            rows = embeddings.setdefault(
                name, np.full((data.tables[name].n_cells, cells["embedding"].shape[1]), np.nan)
            )
            rows[cells["index"]] = cells["embedding"]
    types = {name: table.read_obs()["celltype"].astype(str).to_numpy() for name, table in data.tables.items()}
    share, chance = same_type_share(embeddings, types)
    assert chance == pytest.approx(0.25)
    assert share >= 0.9, f"seed {seed}: {share:.2f}"
