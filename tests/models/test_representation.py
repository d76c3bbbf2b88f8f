"""Claim: with use_rep="pca" latents begin as the components of normalised counts, the same for new cells, sparse counts
and after a checkpoint; tables begin with the sums of the data.
"""

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from scipy import sparse
from sklearn.decomposition import PCA

import lightning_amp
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.errors import ModelError
from lightning_amp.models.representation import Projection, principal_axes

GROUPS = (30, 20, 10)
QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


@pytest.fixture(scope="module")
def counts():
    rng = np.random.default_rng(0)
    rate = rng.gamma(1.0, size=(3, sum(GROUPS)))[np.arange(40) % 3] * rng.lognormal(size=(40, 1))
    found = rng.poisson(rate).astype(np.float32)
    found[3, :30] = 0  # a cell without contacts in a stratum
    return found


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    root = tmp_path_factory.mktemp("cells") / "data"
    synthesize(root, cells=60, bins=40, strata=6, genes=40, depth=800)
    return root


def fitted(cells, epochs=0, **settings):
    torch.manual_seed(0)
    data = lightning_amp.SingleCellDataModule(cells, batch_size=30)
    options = {"latent_dim": 8, "hidden_dim": 16, "hidden_depth": 1, "window": 10, "rep_dim": 6, "use_rep": "pca"}
    model = lightning_amp.GLUE(**options | settings)
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=epochs, limit_val_batches=0, **QUIET)
    trainer.fit(model, datamodule=data)
    return model.eval(), data, trainer


def rows_of(data):
    return {name: table.rows(np.arange(table.n_cells)) for name, table in data.tables.items()}


def by_hand(counts):
    parts = []
    for a, b in ((0, 30), (30, 50), (50, 60)):
        sums = counts[:, a:b].sum(1, keepdims=True)
        parts.append(np.log1p(counts[:, a:b] * sums.mean() / np.maximum(sums, 1)))
    return np.concatenate(parts, axis=1)


def test_components_are_those_of_the_normalised_counts(counts):
    projection = Projection(GROUPS, 5, total=None).double()
    projection.fit(sparse.csr_matrix(counts))
    found = projection(torch.from_numpy(counts).double()).numpy()
    expected = PCA(5, svd_solver="full").fit_transform(by_hand(counts.astype(np.float64)))
    signs = np.sign((found * expected).sum(0))
    np.testing.assert_allclose(found * signs, expected / expected[:, 0].std(ddof=1), atol=1e-8)
    again = projection(SparseCounts.from_csr(sparse.csr_matrix(counts, dtype=np.float64)))
    np.testing.assert_allclose(again.numpy(), found, atol=1e-10)


def test_depth_and_decay_of_a_cell_do_not_move_it(counts):
    projection = Projection(GROUPS, 5, total=None).double()
    projection.fit(sparse.csr_matrix(counts))
    x = torch.from_numpy(counts).double()[4:]
    factors = torch.tensor([2.0, 3.0, 5.0]).repeat_interleave(torch.tensor(GROUPS))
    torch.testing.assert_close(projection(x * factors), projection(x))


def test_fewer_cells_than_components_leave_the_others_zero(counts):
    axes, _ = principal_axes(sparse.csr_matrix(counts[:4], dtype=np.float64), 10)
    assert len(axes) == 3
    assert len(principal_axes(sparse.csr_matrix(np.ones((4, 6))), 3)[0]) == 0
    projection = Projection(GROUPS, 10, total=None)
    projection.fit(sparse.csr_matrix(counts[:1]))
    assert not projection.weight.any()
    assert projection(torch.from_numpy(counts)).isfinite().all()


@pytest.mark.filterwarnings("ignore:.*max_epochs=0.*")
def test_latents_begin_as_components_and_expected_sums_as_those_of_the_cells(cells):
    model, data, _ = fitted(cells)
    for name, part in rows_of(data).items():
        loc, _ = model.encode(name, part)
        components = model.encoders[name].projection(part["x"])
        torch.testing.assert_close(loc[:, :6], components)
        assert not loc[:, 6:].any()
        expected, x = model.impute(name, part), part["x"]
        assert abs(float(expected.sum() / x.sum()) - 1) < 0.02
    strata = data.layout.strata
    expected, x = model.impute("hic", rows_of(data)["hic"]), rows_of(data)["hic"]["x"]
    for stratum in strata:
        own = slice(stratum.start, stratum.stop)
        # held-out cells are not read, and have other sums by chance
        assert abs(float(expected[:, own].sum() / x[:, own].sum()) - 1) < 0.03


def test_a_checkpoint_keeps_the_projection_and_its_fit_can_go_on(cells, tmp_path):
    model, data, trainer = fitted(cells, epochs=1)
    path = tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    again = lightning_amp.GLUE.load_from_checkpoint(path, map_location="cpu").eval()
    for name, part in rows_of(data).items():
        torch.testing.assert_close(again.encode(name, part)[0], model.encode(name, part)[0], rtol=0, atol=0)
    resumed = lightning_amp.GLUE(**model.hparams)
    further = Trainer(accelerator="cpu", devices=1, max_epochs=2, limit_val_batches=0, **QUIET)
    further.fit(resumed, datamodule=lightning_amp.SingleCellDataModule(cells, batch_size=30), ckpt_path=path)
    torch.testing.assert_close(resumed.encoders["hic"].projection.weight, model.encoders["hic"].projection.weight)


@pytest.mark.filterwarnings("ignore:.*max_epochs=0.*")
@pytest.mark.parametrize("sizes", [{"hic": 3, "rna": 6}, {"hic": 6, "rna": 3}, {"rna": 4}])
def test_modalities_have_components_of_their_own_number(cells, sizes):
    model, data, _ = fitted(cells, rep_dim=sizes)
    latents = {}
    for name, part in rows_of(data).items():
        assert len(model.encoders[name].projection.bias) == sizes.get(name, 50)
        latents[name] = model.encode(name, part)[0].detach().numpy()
        assert not latents[name][:, sizes.get(name, 50) :].any()
    types = {name: table.read_obs()["celltype"].to_numpy() for name, table in data.tables.items()}
    near = np.linalg.norm(latents["hic"][:, None] - latents["rna"], axis=2).argsort(axis=1)[:, :5]
    assert (types["rna"][near] == types["hic"][:, None]).mean() > 0.9


def test_unknown_settings_are_refused(cells):
    with pytest.raises(ModelError, match="use_rep='lsi'"):
        lightning_amp.GLUE(use_rep="lsi")
    with pytest.raises(ModelError, match="rep_dim=0"):
        lightning_amp.GLUE(rep_dim=0)
    with pytest.raises(ModelError, match="rep_dim={'rna': 0}"):
        lightning_amp.GLUE(rep_dim={"rna": 0})
    with pytest.raises(ModelError, match=r"rep_dim={'atac': 5}\) names \['atac'\]"):
        fitted(cells, rep_dim={"atac": 5})


@pytest.mark.filterwarnings("ignore:.*max_epochs=0.*")
def test_types_of_both_modalities_meet_before_the_first_step_and_distances_stay(cells, monkeypatch):
    model, data, _ = fitted(cells)
    latents = {name: model.encode(name, part)[0].detach().numpy() for name, part in rows_of(data).items()}
    types = {name: table.read_obs()["celltype"].to_numpy() for name, table in data.tables.items()}
    near = np.linalg.norm(latents["hic"][:, None] - latents["rna"], axis=2).argsort(axis=1)[:, :5]
    assert (types["rna"][near] == types["hic"][:, None]).mean() > 0.9
    monkeypatch.setattr("lightning_amp.models.start_values.rotate", lambda *args, **kwargs: None)
    other, _, _ = fitted(cells)
    plain = other.encode("rna", rows_of(data)["rna"])[0].detach()
    torch.testing.assert_close(torch.pdist(plain), torch.pdist(torch.from_numpy(latents["rna"])), rtol=1e-3, atol=1e-4)
    assert (plain.numpy() - latents["rna"]).std() > 0.1


def test_sums_by_distance_stay_those_of_the_cells_in_training(cells):
    model, data, _ = fitted(cells, epochs=6, lr=0.01)
    part = rows_of(data)["hic"]
    expected, x = model.impute("hic", part).detach(), part["x"]
    for stratum in data.layout.strata:
        own = slice(stratum.start, stratum.stop)
        assert abs(float(expected[:, own].sum() / x[:, own].sum()) - 1) < 0.03
    shares = model.inputs.strata.shares
    torch.testing.assert_close(model.decoders["hic"].strata_weights.exp(), torch.tensor(shares))
    # a step without the data module's sums trains the weights
    assert len(model.configure_optimizers()[1].param_groups) == 2
