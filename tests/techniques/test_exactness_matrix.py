"""Claim: every legal combination of techniques of a decoder trains as one device does, to 1e-10 in double precision.

    form of the decoder x placement x attention x decode x likelihood x activations

on one device and over 3 ranks of the model axis, which divide nothing of the sizes. What runs is an array in which
every pair of choices is; before a release it is the whole product, over 2, 3 and 4 ranks. Compared are the losses and
the gradients of every parameter and input in the first step, all values after the steps, and the decoder's mean.
Automatic and manual optimisation, and a mesh of 2 x 2, are in tests/lightning; each technique's own cases and its
counted collectives are in its own tests.
"""

from dataclasses import replace
from itertools import product

import pytest

from lightning_amp.techniques.table import conflicts, in_order
from tests.each import all_pairs
from tests.ranks import run_ranks
from tests.techniques.sharded_cases import (
    Case,
    Model,
    differences,
    install,
    make_plan,
    model_mesh,
    reference,
    sharded,
    train,
)

UNEVEN = Case(dim=10, anchors=21, features={2: 3})
"""5 pairs of channels, 21 anchors in buckets of 5, strata of 20, 19 and 3 features: nothing divides by 2, 3 and 4."""

CASES = {
    "higlue": UNEVEN,
    "higlue chained": replace(UNEVEN, chained=True, n_batches=1),
    "paper": replace(UNEVEN, variant="paper", head=False),
    "paper chained": replace(UNEVEN, variant="paper", chained=True),
    "convolution": replace(UNEVEN, key="convolution"),
    "full": replace(UNEVEN, key="full_attention", chained=True),
}
STEPS = 2
Row = tuple[str, str, str, str, str, str]
"""A form of the decoder, and a technique or "" of every axis."""

LOCAL = (("", "S3", "fused", "sdpa"), ("", "S4"), ("", "sparse"), ("", "recompute", "stream"))
PLACEMENTS = ("S2", "S5", "S2,S5", "strata", "nodes")


def techniques(row: Row) -> tuple[str, ...]:
    return in_order(name for names in row[1:] for name in names.split(",") if name)


def legal(row: Row) -> bool:
    """Whether a combination can be installed: attention is needed for what shards it or computes it otherwise."""
    refused = {
        "attention": set(),
        "full_attention": {"S3", "S5", "fused", "sdpa"},
        "convolution": {"S3", "fused", "sdpa", "nodes"},
    }
    chosen = techniques(row)
    return not refused[CASES[row[0]].key] & set(chosen) and not any(conflicts(chosen))


ON_ONE = [row for row in product(CASES, ("",), *LOCAL) if legal(row) and techniques(row)]
ON_RANKS = [row for row in product(CASES, PLACEMENTS, *LOCAL) if legal(row)]


def compare(rank: int, world_size: int, rows: list[Row]) -> list[str]:
    """What differs from one device."""
    mesh, expected = model_mesh(world_size), {name: reference(case, STEPS) for name, case in CASES.items()}
    wrong = []
    for row in rows:
        found = sharded(CASES[row[0]], techniques(row), mesh, STEPS)
        wrong += [f"{row[0]} {'+'.join(techniques(row))}: {line}" for line in differences(found, expected[row[0]])]
    return wrong


BEFORE_A_RELEASE = [pytest.mark.exhaustive, pytest.mark.release]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "which"), [(3, all_pairs), *(pytest.param(n, list, marks=BEFORE_A_RELEASE) for n in (2, 3, 4))]
)
def test_combinations_over_ranks(world_size: int, which, tmp_path) -> None:
    rows = [row for row in which(ON_RANKS) if world_size < 4 or row[1] in ("S2", "S5", "S2,S5")]
    assert len(rows) >= 25
    results = run_ranks(compare, world_size, tmp_path, rows, timeout=500)
    wrong = [f"rank {rank} of {world_size}, {line}" for rank, lines in enumerate(results) for line in lines]
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
@pytest.mark.parametrize("which", [all_pairs, pytest.param(list, marks=BEFORE_A_RELEASE)])
def test_combinations_on_one_device(which) -> None:
    expected = {name: reference(case, STEPS) for name, case in CASES.items()}
    for row in which(ON_ONE):
        model = Model(CASES[row[0]])
        found = train(model, STEPS, install(model, make_plan(techniques(row), 1)))
        assert not differences(found, expected[row[0]]), row
