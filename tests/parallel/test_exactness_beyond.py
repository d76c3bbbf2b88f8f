"""Claim: every legal combination of what goes beyond the paper, with S2 to S5, trains as one device does, to 1e-10.

    one device    attention (eager, S3, fused) x decode x likelihood x (retain, recompute, stream)
    ranks         placement (S2, S5, both, strata, nodes) x attention x (nothing, S4 and sparse) x (retain, recompute,
                  stream), on 2 ranks, and every second one on 3; on sizes that neither divides

Attention in torch's kernels is there with everything on one device, over ranks with S4, sparse and stream.

What is compared is that of test_exactness_matrix.py, where all subsets of S2 to S5 are. Here nothing is left out but
what `conflicts` and the decoder rule out.
"""

from dataclasses import replace
from itertools import product

import pytest

from lightning_amp.planning.plan.strategies import conflicts, in_order
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
from tests.parallel.test_exactness_matrix import UNEVEN
from tests.ranks import run_ranks

CASES = {
    "higlue": UNEVEN,
    "higlue chained": replace(UNEVEN, chained=True, n_batches=1),
    "paper": replace(UNEVEN, variant="paper", head=False),
    "paper chained": replace(UNEVEN, variant="paper", chained=True),
    "convolution": replace(UNEVEN, key="convolution"),
}
ATTENTIONS = ((), ("S3",), ("fused",), ("sdpa",))
ACTIVATIONS = ((), ("recompute",), ("stream",))
PLACEMENTS = (("S2",), ("S5",), ("S2", "S5"), ("strata",), ("nodes",))
LOCAL = [
    in_order(sum(choices, ()))
    for choices in product(ATTENTIONS, ((), ("S4",)), ((), ("sparse",)), ACTIVATIONS)
]
SHARDED = [
    in_order(sum(choices, ()))
    for choices in product(PLACEMENTS, ATTENTIONS, ((), ("S4", "sparse")), ACTIVATIONS)
    if choices[1] != ("sdpa",) or choices[2:] == (("S4", "sparse"), ("stream",))
]
OURS = {"fused", "sdpa", "sparse", "recompute", "stream", "strata", "nodes"}
STEPS = 2


def legal(case: Case, chosen: tuple[str, ...]) -> bool:
    """Whether a combination can be installed, and is not one of test_exactness_matrix.py."""
    attends = case.key == "attention" or not {"S3", "fused", "sdpa", "nodes"} & set(chosen)
    return attends and bool(OURS & set(chosen)) and not any(conflicts(chosen))


def dealt(world_size: int) -> list[tuple[str, ...]]:
    """What is tried on so many ranks: all, or every second one."""
    return SHARDED[world_size - 2 :: world_size - 1]


def compare_all(rank: int, world_size: int) -> tuple[int, list[str]]:
    """How many combinations this rank has compared, and what differs."""
    mesh = model_mesh(world_size)
    compared, wrong = 0, []
    for name, case in CASES.items():
        expected = reference(case, STEPS)
        for chosen in dealt(world_size):
            if legal(case, chosen):
                compared += 1
                found = differences(sharded(case, chosen, mesh, STEPS), expected)
                wrong += [f"{name} {'+'.join(chosen)}: {line}" for line in found]
    return compared, wrong


@pytest.mark.ranks
@pytest.mark.exhaustive
@pytest.mark.release
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_combination_over_ranks(world_size: int, tmp_path) -> None:
    results = run_ranks(compare_all, world_size, tmp_path, timeout=280)
    expected = sum(legal(case, chosen) for case in CASES.values() for chosen in dealt(world_size))
    assert all(compared == expected >= 140 for compared, _ in results), "nothing was left out"
    wrong = [
        f"rank {rank} of {world_size}, {line}" for rank, (_, lines) in enumerate(results) for line in lines
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_every_combination_on_one_device(name: str) -> None:
    case = CASES[name]
    expected = reference(case, STEPS)
    for chosen in LOCAL:
        if legal(case, chosen):
            model = Model(case)
            found = train(model, STEPS, install(model, make_plan(chosen, 1)))
            assert not differences(found, expected), chosen
