"""Claim: the draws of a micro-batch depend on its seed, and go on on another rank where they were left."""

import random

import numpy as np
import torch

from lightning_amp.techniques.pipeline.run.draws import draws_stay, go_on_with, packed_draws, seed_draws
from lightning_amp.techniques.pipeline.schedule.stage_bytes import DRAWS


def drawn() -> tuple[float, ...]:
    return (
        float(torch.rand(())),
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
    )


def test_a_seed_and_a_place_tell_all_draws() -> None:
    seed_draws(2**50 + 1)
    first = drawn()
    # one number of each pair is kept for the next draw
    state = packed_draws()
    second = drawn()
    seed_draws(3)
    assert drawn() != first
    seed_draws(2**50 + 1)
    assert drawn() == first
    seed_draws(4)
    go_on_with(state)
    assert drawn() == second
    assert len(packed_draws()) == len(state) == DRAWS, "as it is planned with"


def test_draws_stay_where_they_were() -> None:
    before = packed_draws()
    with draws_stay():
        seed_draws(5)
        drawn()
    assert torch.equal(packed_draws(), before)
