"""Claim: every legal combination of S2, S3, S4 and S5 trains as one device does, to 1e-10 in double precision.

All subsets x model axis of 1 to 4 ranks x both forms of the attention key, independent and chained strata, convolution
keys x sizes that no number of ranks divides: the losses and the gradients of every parameter and input in the first
step, all values after three optimiser steps, and the decoder's mean. Automatic and manual optimisation, and a mesh of
2 x 2, are in test_model_axis.py; each technique's own cases and its counted collectives are in its own tests.
"""

from dataclasses import replace
from itertools import combinations

import pytest

from tests.parallel.sharded_cases import (
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
from tests.ranks import run_ranks

UNEVEN = Case(dim=10, anchors=21, features={2: 3})
"""5 pairs of channels, 21 anchors in buckets of 5, strata of 20, 19 and 3 features: nothing divides by 2, 3 and 4."""

CASES = {
    "higlue": UNEVEN,
    "higlue chained": replace(UNEVEN, chained=True),
    "paper": replace(UNEVEN, variant="paper"),
    "paper chained": replace(UNEVEN, variant="paper", chained=True),
    "convolution": replace(UNEVEN, key="convolution"),
}
SUBSETS = [subset for n in range(5) for subset in combinations(("S2", "S3", "S4", "S5"), n)]
SHARDED = [subset for subset in SUBSETS if {"S2", "S5"} & set(subset)]
LOCAL = [subset for subset in SUBSETS if subset and subset not in SHARDED]

MORE = [pytest.mark.exhaustive, pytest.mark.release]


def legal(case: Case, subset: tuple[str, ...]) -> bool:
    """S3 needs attention."""
    return case.key == "attention" or "S3" not in subset


def compare_all(rank: int, world_size: int) -> tuple[int, list[str]]:
    """How many combinations this rank has compared, and what differs."""
    mesh = model_mesh(world_size)
    compared, wrong = 0, []
    for name, case in CASES.items():
        expected = reference(case)
        for subset in SHARDED:
            if legal(case, subset):
                compared += 1
                found = sharded(case, subset, mesh)
                wrong += [f"{name} {'+'.join(subset)}: {line}" for line in differences(found, expected)]
    return compared, wrong


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=MORE) for n in (3, 4))])
def test_every_combination_over_ranks(world_size: int, tmp_path) -> None:
    results = run_ranks(compare_all, world_size, tmp_path, timeout=250)
    assert all(compared == 4 * len(SHARDED) + 6 for compared, _ in results), "nothing was left out"
    wrong = [
        f"rank {rank} of {world_size}, {line}" for rank, (_, lines) in enumerate(results) for line in lines
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", CASES)
def test_every_combination_on_one_device(name: str) -> None:
    case = CASES[name]
    expected = reference(case)
    for subset in LOCAL:
        if legal(case, subset):
            model = Model(case)
            found = train(model, 3, install(model, make_plan(subset, 1)))
            assert not differences(found, expected), subset
