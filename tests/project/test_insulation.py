"""Claim: the benchmark of insulation takes the means of contacts across each bin, over their stratum's mean."""

import numpy as np
import pytest

from benchmarks.domain.insulation import WINDOW, across, correlations, scores, tracks
from tests.project.test_held_out import layout


def test_tracks_are_the_means_across_each_bin():
    here = layout(n=24, strata=12)
    x = np.random.default_rng(0).poisson(3.0, (2, here.strata[-1].stop)).astype(float)
    matrix = across(here, np.ones(here.strata[-1].stop, bool))
    whole = np.zeros((2, 24, 24))
    for one in here.strata:
        part = x[:, one.start : one.stop]
        whole[:, one.anchors, one.anchors + one.k] = part / part.mean(axis=1, keepdims=True)
    wanted = []
    # the last bin has nothing behind it
    for b in range(23):
        pairs = [
            (i, j)
            for i in range(max(b - WINDOW + 1, 0), b + 1)
            for j in range(b + 1, min(b + WINDOW, 23) + 1)
            if j - i <= 2 * WINDOW - 1 and j - i <= WINDOW + (b - i)
        ]
        wanted.append(np.mean([whole[:, i, j] for i, j in pairs], axis=0))
    np.testing.assert_allclose(tracks(x, here, matrix), np.array(wanted).T, rtol=1e-12)


def test_a_border_is_where_few_contacts_are_across():
    here = layout(n=24, strata=12)
    counts = np.concatenate([((one.anchors < 12) == (one.anchors + one.k < 12)) * 1.0 for one in here.strata])
    track = tracks(counts[None] + 0.01, here, across(here, np.ones(len(counts), bool)))[0]
    assert track.argmin() == 11


def test_bins_without_enough_contacts_are_left_out():
    here = layout(n=24, strata=12)
    seen = np.concatenate([(one.anchors != 12) & (one.anchors + one.k != 12) for one in here.strata])
    assert across(here, seen).shape[1] == 23
    assert across(here, seen & False).shape[1] == 0


def test_cells_of_two_kinds_are_told_apart():
    here, rng = layout(n=24, strata=12), np.random.default_rng(0)
    rate = np.stack(
        [np.concatenate([((o.anchors < c) == (o.anchors + o.k < c)) + 0.2 for o in here.strata]) for c in (8, 16)]
    )
    own = np.repeat([0, 1], 10)
    few, many = (rng.poisson(rate[own] * n).astype(float) for n in (0.5, 50))
    found = scores({"measured": few, "nearby": few, "expected": many}, np.array(["a", "b"])[own], here)
    for of_type in found.values():
        assert of_type["particular, expected"] > 0.9 > of_type["particular, measured"]
        assert of_type["own type, expected"] == 1.0
    assert correlations(np.arange(5.0), np.stack([np.arange(5.0), -np.arange(5.0)])) == pytest.approx([1, -1])
