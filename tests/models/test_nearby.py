"""Claim: "nearby" contacts are expected ones times the quotient of the cell's own and expected contacts nearby."""

import numpy as np
import pytest
import torch

from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.errors import ModelError
from lightning_amp.models.glue import GLUE
from lightning_amp.models.inputs import StrataInputs
from lightning_amp.models.nearby import nearby
from tests.models.test_glue import SMALL, batch, inputs

KERNEL = (1, 2, 1)
# bins 0 to 4 are one chromosome, 5 to 8 another
NODES, DISTANCES = [range(9), [0, 1, 2, 3, 5, 6, 7], [0, 1, 2, 5, 6]], [0, 1, 2]


def by_hand(e, x):
    pairs = [(i, i + k) for k, nodes in zip(DISTANCES, NODES, strict=True) for i in nodes]
    column = {pair: place for place, pair in enumerate(pairs)}
    found = np.zeros_like(e)
    for place, (i, j) in enumerate(pairs):
        own = others = 1.0
        for a in (-1, 0, 1):
            for b in (-1, 0, 1):
                one, two = sorted((i + a, j + b))
                there = column.get((one, two))
                if there is None or (one < 5) != (i < 5):
                    continue
                weight = KERNEL[a + 1] * KERNEL[b + 1]
                own, others = own + weight * x[:, there], others + weight * e[:, there]
        found[:, place] = e[:, place] * own / others
    start = 0
    for nodes in NODES:
        own = slice(start, start := start + len(nodes))
        found[:, own] *= e[:, own].sum(1, keepdims=True) / found[:, own].sum(1, keepdims=True)
    return found


def test_quotient_is_of_the_pairs_around_and_sums_of_strata_stay():
    rng = np.random.default_rng(0)
    e, x = rng.gamma(1.0, size=(3, 21)), rng.poisson(1.0, size=(3, 21)).astype(float)
    strata = StrataInputs(n_anchors=9, nodes=[np.array(one) for one in NODES], distances=DISTANCES)
    found = nearby(torch.from_numpy(e), torch.from_numpy(x), strata)
    np.testing.assert_allclose(found.numpy(), by_hand(e, x), rtol=1e-12)
    # nothing is corrected where a cell has what is expected of it
    torch.testing.assert_close(nearby(torch.from_numpy(e), torch.from_numpy(e), strata), torch.from_numpy(e))


def test_glue_gives_them_of_dense_and_sparse_counts_and_of_hic_alone():
    torch.manual_seed(0)
    model, cells = GLUE(**SMALL).build(inputs()).eval(), batch()
    own = cells["hic"]
    found = model.impute("hic", own, output="nearby")
    torch.testing.assert_close(found, nearby(model.impute("hic", own), own["x"], model.inputs.strata))
    again = model.impute("hic", own | {"x": SparseCounts.from_dense(own["x"])}, output="nearby")
    torch.testing.assert_close(again, found)
    with pytest.raises(ModelError, match=r"impute\('rna', output='nearby'\)"):
        model.impute("rna", cells["rna"], output="nearby")
