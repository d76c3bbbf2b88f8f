"""Claim: a draw for cells is the same function of the cell from whatever generator and overload it is drawn."""

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from lightning_amp.verification.keyed_draws import KeyedDraws

CELLS, WIDE = 4, 9
SHAPE = (CELLS, WIDE)
DRAWS: dict[str, Callable[[Generator | None], Tensor]] = {
    "randn": lambda g: torch.randn(SHAPE, generator=g),
    "rand": lambda g: torch.rand(SHAPE, generator=g),
    "randint": lambda g: torch.randint(99, SHAPE, generator=g),
    "randint from": lambda g: torch.randint(5, 99, SHAPE, generator=g),
    "normal": lambda g: torch.normal(0.0, 1.0, SHAPE, generator=g),
    "normal of tensors": lambda g: torch.normal(torch.zeros(SHAPE), torch.ones(SHAPE), generator=g),
    "bernoulli": lambda g: torch.bernoulli(torch.full(SHAPE, 0.5), generator=g),
    "poisson": lambda g: torch.poisson(torch.full(SHAPE, 9.0), generator=g),
    "multinomial": lambda g: torch.multinomial(torch.ones(CELLS, WIDE), WIDE, generator=g),
    "in place": lambda g: torch.empty(SHAPE).uniform_(generator=g),
}


def test_draws_of_any_generator_are_functions_of_the_cell() -> None:
    for name, draw in DRAWS.items():
        found = []
        for generator in (None, Generator().manual_seed(1), Generator().manual_seed(2)):
            with KeyedDraws({CELLS: 0}, lambda: "module", native=()):
                found.append(draw(generator))
        assert all(torch.equal(found[0], other) for other in found[1:]), name
