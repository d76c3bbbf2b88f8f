"""Training on paired cells brings the two latents of a cell together, in cells that are held out too."""

from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from numpy.typing import NDArray

from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.data.prepare.prepare import prepare
from lightning_amp.data.prepare.synthetic import synthesize_files
from lightning_amp.errors import ModelError
from lightning_amp.models.glue import GLUE

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval:UserWarning"),
]
QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
SMALL: dict[str, Any] = {"latent_dim": 8, "hidden_dim": 16, "hidden_depth": 1, "window": 8}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Paired cells whose genes have the names of others, so that the guidance graph says nothing."""
    folder = tmp_path_factory.mktemp("pairs")
    hic, labels, rna, genes = synthesize_files(folder / "files", cells=60, bins=40, strata=4, genes=60, paired=True)
    cells, rng = anndata.read_h5ad(rna), np.random.default_rng(1)
    cells.var_names = rng.permutation(cells.var_names)
    cells[rng.permutation(60)].copy().write_h5ad(rna)
    prepare(hic=hic, labels=labels, rna=rna, genes=genes, strata=4, out=folder / "data", paired=True)
    return folder / "data"


def trained(pairs: Path, paired: bool | None, epochs: int = 4, **settings: Any) -> GLUE:
    seed_everything(0, verbose=False)
    data = SingleCellDataModule(pairs, batch_size=16, val_fraction=0.25, paired=paired)
    model = GLUE(**SMALL | settings)
    Trainer(max_epochs=epochs, limit_val_batches=0, accelerator="cpu", **QUIET).fit(model, data)
    return model.eval()


def held_out(pairs: Path, model: GLUE) -> dict[str, NDArray[np.float32]]:
    """Return the embeddings of the cells that are held out, in one order."""
    data = SingleCellDataModule(pairs, val_fraction=0.25)
    embedding, rows = model.embed(data), data._split()[1]
    return {modality: embedding[modality][rows[modality]] for modality in embedding}


def nearer(cells: dict[str, NDArray[np.float32]]) -> tuple[float, float]:
    """Return the share of cells that are nearer than the true one (FOSCTTM), and its distance over the mean of all."""
    far = np.linalg.norm(cells["hic"][:, None] - cells["rna"][None], axis=2)
    true = np.diag(far)
    closer = (far < true[:, None]).mean() + (far < true).mean()
    return float(closer / 2), float(true.mean() / far.mean())


def test_held_out_pairs_are_closer_than_unpaired_training_gives(pairs: Path) -> None:
    found = {
        paired: nearer(held_out(pairs, trained(pairs, paired, use_rep="pca", rep_dim=8))) for paired in (None, False)
    }
    # with four types and nothing else in common, the best is about 0.125
    assert found[None][0] < 0.15 < 0.25 < found[False][0], found
    assert found[None][1] < 0.45 < 0.65 < found[False][1], found


def test_latents_of_counts_come_together_too(pairs: Path) -> None:
    found = {paired: nearer(held_out(pairs, trained(pairs, paired, epochs=40))) for paired in (None, False)}
    assert found[None][1] < found[False][1] - 0.03, found


def test_all_decoders_read_one_latent_of_a_cell(pairs: Path) -> None:
    model = trained(pairs, None, epochs=1)
    data = SingleCellDataModule(pairs, batch_size=40)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    latents = model.latents(batch)
    read = model.read(batch, latents)
    torch.testing.assert_close(read["hic"], read["rna"], rtol=0, atol=0)
    own = [(read["hic"] == latents[name].sample).all(dim=1) for name in ("hic", "rna")]
    assert (own[0] ^ own[1]).all()
    assert 0.2 < own[0].float().mean() < 0.8
    # a function of the cell and the step, so that ranks draw what one device draws
    half: Any = {name: {"draw": part["draw"][:20]} for name, part in batch.items()}
    some = {name: u._replace(sample=u.sample[:20]) for name, u in latents.items()}
    torch.testing.assert_close(model.read(half, some)["hic"], read["hic"][:20], rtol=0, atol=0)
    some["rna"] = latents["rna"]
    with pytest.raises(ModelError, match=r"batch of \{'hic': 20, 'rna': 40\} paired cells"):
        model.read(half, some)


def test_a_model_of_pairs_is_not_trained_on_other_cells(pairs: Path, tmp_path: Path) -> None:
    model = trained(pairs, None, epochs=1).train()
    trainer = Trainer(max_epochs=1, accelerator="cpu", **QUIET)
    with pytest.raises(ModelError, match="built for paired cells, and those of these data are not paired"):
        trainer.fit(model, SingleCellDataModule(pairs, batch_size=16, paired=False))
    trainer = Trainer(max_epochs=1, limit_val_batches=0, accelerator="cpu", **QUIET)
    trainer.fit(model, SingleCellDataModule(pairs, batch_size=16))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = GLUE.load(tmp_path / "last.ckpt")
    assert again.inputs is not None
    assert again.inputs.paired
