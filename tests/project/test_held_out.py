"""Claim: the benchmark of held-out contacts holds out contacts of all cells and scores ranks as scikit-learn does."""

from types import SimpleNamespace

import anndata
import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

from benchmarks.domain.held_out import average_precision, hold_out, random_walk, score, shared_map
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.models.inputs import StrataInputs
from lightning_amp.models.nearby import nearby


def layout(n=6, strata=3):
    ends = np.cumsum([0, *(n - k for k in range(strata))])
    rows = [SimpleNamespace(k=k, start=ends[k], stop=ends[k + 1], anchors=np.arange(n - k)) for k in range(strata)]
    return SimpleNamespace(strata=rows, n_anchors=n)


def test_area_is_that_of_scikit_learn():
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores, positive = rng.integers(0, 5, 30).astype(float), rng.random(30) < 0.3
        positive[0] = True
        assert average_precision(scores, positive) == pytest.approx(average_precision_score(positive, scores))


def test_only_pairs_that_are_not_seen_count():
    seen, held = np.zeros((1, 15)), np.zeros((1, 15))
    seen[0, 0], held[0, :2] = 1, 1
    assert score(np.arange(15.0)[None], seen, held, layout()) == pytest.approx(1 / 5)


def test_walk_is_the_limit_of_its_steps():
    x, here = np.random.default_rng(0).poisson(1.0, 15).astype(float), layout()
    whole = np.zeros((8, 8))
    for one in here.strata:
        whole[one.anchors + 1, one.anchors + one.k + 1] = np.log2(1 + x[one.start : one.stop])
    whole = np.maximum(whole, whole.T)
    smooth = sum(whole[1 + a : 7 + a, 1 + b : 7 + b] for a in (-1, 0, 1) for b in (-1, 0, 1))
    steps, q = smooth / smooth.sum(1, keepdims=True), np.eye(6)
    for _ in range(60):
        q = 0.5 * q @ steps + 0.5 * np.eye(6)
    wanted = np.concatenate([(q + q.T)[s.anchors, s.anchors + s.k] for s in here.strata])
    np.testing.assert_allclose(random_walk(x, here), wanted, rtol=1e-9)


def test_a_fifth_of_the_contacts_is_held_out(tmp_path):
    synthesize(tmp_path / "data", cells=12, bins=20, strata=4, genes=20, depth=800)
    held = hold_out(tmp_path / "data", tmp_path / "seen", 0)
    whole, seen = (
        anndata.read_h5ad(next((tmp_path / name / "hic").glob("*.h5ad"))).X.toarray() for name in ("data", "seen")
    )
    np.testing.assert_array_equal(seen + held.toarray(), whole)
    assert held.sum() / whole.sum() == pytest.approx(0.2, abs=0.02)
    assert (held.sum(axis=1) > 0).all()


def test_shared_map_is_the_sum_of_all_cells_at_the_depth_of_each_given_its_contacts_nearby():
    strata = StrataInputs(n_anchors=6, nodes=[np.arange(6 - k) for k in range(3)], distances=[0, 1, 2])
    seen = np.random.default_rng(0).poisson([[1.0], [3.0], [0.2]], (3, 15)).astype(np.float32)
    expected = seen.sum(axis=1, keepdims=True) * seen.sum(axis=0) / seen.sum()
    found = shared_map(seen, strata)
    wanted = nearby(torch.from_numpy(expected), torch.from_numpy(seen), strata)
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-5)
    np.testing.assert_allclose(found.sum(axis=1), seen.sum(axis=1), rtol=1e-5)
    assert not np.allclose(found, expected)
