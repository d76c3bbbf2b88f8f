"""Claim: with use_rep="pca" decoders begin with what components say about each feature, and with the mean shares."""

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from scipy import sparse

import lightning_amp
from benchmarks.domain.integration import own_type
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.models.decoders.stratum import Stratum
from lightning_amp.models.start_keys import DAMPING, Loadings, damped, directions, loadings

QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
pytestmark = pytest.mark.filterwarnings("ignore:.*max_epochs=0.*")


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    root = tmp_path_factory.mktemp("cells") / "data"
    synthesize(root, cells=60, bins=40, strata=6, genes=40, depth=800)
    return root


def begun(cells, **settings):
    torch.manual_seed(0)
    data = lightning_amp.SingleCellDataModule(cells, batch_size=30, val_fraction=0.0)
    options = {"latent_dim": 12, "hidden_dim": 16, "hidden_depth": 1, "window": 10, "rep_dim": 6, "use_rep": "pca"}
    model = lightning_amp.GLUE(**options | settings)
    Trainer(accelerator="cpu", devices=1, max_epochs=0, limit_val_batches=0, **QUIET).fit(model, datamodule=data)
    return model.eval(), data


def rows_of(data):
    return {name: table.rows(np.arange(table.n_cells)) for name, table in data.tables.items()}


@torch.no_grad()
def test_decoders_begin_with_the_cells_of_a_type_apart(cells):
    model, data = begun(cells)
    v, _ = model.vertices()
    for name, part in rows_of(data).items():
        u, _ = model.encode(name, part)
        assert model.nll(name, part, u=u, v=v) < model.nll(name, part, u=torch.zeros_like(u), v=v) - 0.01
    part = rows_of(data)["hic"]
    labels = data.tables["hic"].read_obs()["celltype"].to_numpy().astype(str)
    assert own_type(model.impute("hic", part).numpy(), part["x"].numpy(), labels, data.layout) > 0.95


@torch.no_grad()
def test_mean_shares_of_features_stay_those_of_the_cells(cells):
    model, data = begun(cells)
    for name, part in rows_of(data).items():
        expected, x = model.impute(name, part), part["x"]
        ends = [(s.start, s.stop) for s in data.layout.strata] if name == "hic" else [(0, x.shape[1])]
        for start, stop in ends:
            own, seen = expected[:, start:stop], x[:, start:stop]
            mean = (own / own.sum(1, keepdim=True) * seen.sum(1, keepdim=True)).sum(0) / seen.sum()
            # biases begin with half a contact more of every feature, and with one more of each, spread in the same way
            shares = seen.sum(0) + 0.5
            torch.testing.assert_close(mean, shares / shares.sum(), rtol=0.03, atol=1e-4)


@pytest.mark.parametrize("settings", [{"key": "convolution"}, {"variant": "paper"}, {"chained": True}])
def test_other_keys_begin_at_random_with_the_mean_shares(cells, settings):
    model, data = begun(cells, **settings)
    part = rows_of(data)["hic"]
    expected, x = model.impute("hic", part), part["x"]
    assert abs(float(expected.sum() / x.sum()) - 1) < 0.02
    keys = [one.key for one in model.decoders["hic"].strata if one.key is not None]
    if "chained" in settings:
        assert all(bool((one.value.weight == torch.eye(12)).all()) for one in keys)
    if "key" not in settings:
        assert all(bool(one.ff.weight.any(dim=1).all()) for one in keys)


def test_half_of_the_gated_layer_begins_as_zero_and_gets_gradients(cells):
    model, data = begun(cells)
    part = rows_of(data)["hic"]
    key = model.decoders["hic"].strata[2].key
    a, gate = key.ff.weight.chunk(2)
    assert not a.any()
    assert gate.any(dim=1).all()
    model.nll("hic", part, u=model.encode("hic", part)[0], v=model.vertices()[0]).backward()
    # of the dims that latents begin with
    assert key.ff.weight.grad.chunk(2)[0][:6].any(dim=1).all()


def stratum(anchors, n_batches=1):
    return Stratum(None, torch.tensor(anchors), distance=1, columns=(0, len(anchors)), n_batches=n_batches)


def test_loadings_are_a_newton_step_of_penalised_poisson_regression():
    rng = np.random.default_rng(0)
    x, r, batch = rng.poisson(rng.gamma(1.0, size=7) * 3, size=(20, 7)), rng.standard_normal((20, 3)), np.arange(20) % 2
    bias = torch.from_numpy(rng.standard_normal((2, 7)))
    share, sums = bias.softmax(1).numpy()[batch], x.sum(1, keepdims=True)
    e = share * sums
    phi = max(1.0, ((x - e) ** 2).sum() / e.sum())
    mean = e.sum(0) / sums.sum()
    wanted = [np.linalg.solve(mean[f] * (r * sums).T @ r / phi + np.eye(3), (x - e)[:, f] @ r / phi) for f in range(7)]
    found, counts = loadings(sparse.csr_matrix(x), batch, r, bias)
    np.testing.assert_allclose(found, wanted, rtol=1e-9)
    np.testing.assert_allclose(counts, e.sum(0))


def test_embedding_is_the_damped_least_squares():
    rng = np.random.default_rng(0)
    dense = rng.standard_normal((12, 12)) * (rng.random((12, 12)) < 0.4)
    v, damping = rng.standard_normal((12, 3)), DAMPING * (dense**2).sum() / 12
    wanted = np.linalg.solve(dense.T @ dense + damping * np.eye(12), dense.T @ v)
    np.testing.assert_allclose(damped(sparse.csr_matrix(dense), v), wanted, rtol=1e-6, atol=1e-8)


def test_directions_of_other_strata_are_those_that_the_first_has_not():
    rng = np.random.default_rng(0)
    first, weights = rng.standard_normal((9, 2)), [rng.standard_normal((n, 2)) for n in (8, 7)]
    strata = [Loadings(stratum(list(range(len(w)))), w, np.ones(len(w))) for w in weights]
    deviation = np.array([1.0, 0.3])
    found = directions(first, strata, deviation, 3)
    whole = np.concatenate([np.pad(w * deviation, ((0, 9 - len(w)), (0, 0))) for w in weights], axis=1)
    left = whole - first @ np.linalg.pinv(first) @ whole
    axes = np.linalg.svd(left)[0][:, :3]
    size = first.std() * 3
    np.testing.assert_allclose(np.abs(axes.T @ found), size * np.eye(3), atol=1e-8)
    assert directions(first, strata, deviation, 0).shape == (9, 0)
    assert directions(first, [], deviation, 3).shape == (9, 0)
