"""Claim: components of RNA are rotated towards those of Hi-C by the share of a bin's contacts that are near."""

import numpy as np
import pytest
from scipy import sparse

from lightning_amp.models import rotate
from lightning_amp.models.inputs import GraphInputs, ModalityInputs, ModelInputs, StrataInputs
from lightning_amp.models.representation import projection_of

BINS, TYPES, CELLS = 24, 3, 90


def inputs_of(distances, nodes=None):
    nodes = [np.arange(BINS - k) for k in distances] if nodes is None else nodes
    bins, genes = np.arange(BINS), BINS + np.arange(BINS)
    modalities = {
        "hic": ModalityInputs(n_features=sum(map(len, nodes)), n_batches=1, vertices=bins),
        "rna": ModalityInputs(n_features=BINS, n_batches=1, vertices=genes),
    }
    ones = np.ones(BINS, dtype=np.float32)
    graph = GraphInputs(n_vertices=2 * BINS, source=bins, target=genes, weight=ones, sign=ones)
    strata = StrataInputs(n_anchors=BINS, nodes=nodes, distances=list(distances))
    return ModelInputs(modalities=modalities, strata=strata, graph=graph)


def cells_of(distances, near, far):
    """Cells of three types; each expresses genes of its own bins, whose contacts are `near` and `far` times as many."""
    rng = np.random.default_rng(0)
    on = rng.random((TYPES, BINS)) < 0.5
    own = np.arange(CELLS) % TYPES
    parts = []
    for k in distances:
        active = on[:, : BINS - k].astype(int) + on[:, k:]
        parts.append(8.0 * np.power(near if k <= 1 else far, active))
    counts = {"hic": rng.poisson(np.concatenate(parts, axis=1)[own]), "rna": rng.poisson(1 + 9.0 * on[own])}
    return {name: sparse.csr_matrix(one, dtype=np.float32) for name, one in counts.items()}, own


def share_of_own_type(distances, near, far):
    inputs = inputs_of(distances)
    counts, own = cells_of(distances, near, far)
    projections = {name: projection_of(name, inputs, 6) for name in counts}
    for name, one in projections.items():
        one.fit(counts[name])
    rotate.rotate(projections, counts, inputs, 6)
    latents = {name: one.components(counts[name]) for name, one in projections.items()}
    apart = np.linalg.norm(latents["hic"][:, None] - latents["rna"], axis=2)
    return (own[apart.argsort(axis=1)[:, :10]] == own[:, None]).mean()


@pytest.mark.parametrize(
    ("distances", "near", "far"),
    [(range(8), 1.0, 0.6), (range(8), 1.5, 1.0), (range(8), 0.9, 0.5), (range(2), 1.5, 1.0)],
    ids=["fewer far contacts", "more near contacts", "fewer of both", "none far"],
)
def test_types_meet_whichever_contacts_follow_expression(distances, near, far):
    assert share_of_own_type(distances, near, far) > 0.9


def test_value_of_a_bin_is_its_near_share_over_both_ends():
    # the first ten bins are a chromosome, and some pairs are missing
    nodes = [np.arange(BINS), np.delete(np.arange(BINS - 1), 9), np.array([0, 1, 12]), np.array([2, 13])]
    inputs = inputs_of((0, 1, 2, 5), nodes)
    z = np.random.default_rng(1).poisson(0.7, (4, inputs.modalities["hic"].n_features)).astype(float)
    z[2] = 0
    near, total = np.zeros((4, BINS)), np.zeros((4, BINS))
    pairs = [(i, i + k) for k, own in zip((0, 1, 2, 5), nodes, strict=True) for i in own]
    for column, pair in enumerate(pairs):
        for one in set(pair):
            total[:, one] += z[:, column]
            near[:, one] += z[:, column] * (pair[1] - pair[0] <= 1)
    found = rotate._values(sparse.csr_matrix(z), "hic", inputs)
    np.testing.assert_allclose(found.toarray()[:, :BINS], near / np.where(total, total, 1), rtol=1e-12)
    assert not found.toarray()[:, BINS:].any()
