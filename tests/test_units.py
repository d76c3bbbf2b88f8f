"""Claim: a decoder made of a user's own units needs a loss per unit and nothing else to be streamed, computed again, or
dealt to ranks, exactly; test_adapters.py starts the ranks.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from lightning_amp.errors import InstallError, ModelError
from lightning_amp.models.stratum import AllCells
from lightning_amp.models.units import UnitDecoder
from lightning_amp.parallel.capabilities import with_unsupported
from lightning_amp.parallel.describe import describe, unpredicted
from lightning_amp.parallel.install import install
from tests.foreign_cases import units
from tests.sharded_cases import make_plan
from tests.unit_cases import DIM, SIZES, Chromosome, Counts


def test_one_device_trains_the_same() -> None:
    assert all(far <= 1e-10 for far in units(0, 1).values())


def test_the_plan_knows_what_units_can_do() -> None:
    module = Counts()
    shape = with_unsupported(module, describe(module, batch_size=7))
    assert shape.decoder is not None
    assert shape.decoder.features == SIZES
    assert shape.decoder.unsupported == ("S2", "S3", "S4", "S5", "fused", "sparse", "nodes")
    assert "what the units of UnitDecoder keep is not predicted" in unpredicted(module, shape)[0]


def test_no_unit_and_something_else_are_refused() -> None:
    with pytest.raises(ModelError, match=r"UnitDecoder got 'nothing' for units; allowed are one or more"):
        UnitDecoder([], n_anchors=3, dim=DIM)
    with pytest.raises(ModelError, match=r"UnitDecoder got \['Linear'\] for units"):
        UnitDecoder([Chromosome(0, 3), nn.Linear(2, 2)], n_anchors=3, dim=DIM)  # type: ignore[list-item]


class Handing(nn.Module):
    """A stratum that hands on another v, and says so or not."""

    def __init__(self, *, chained: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.chained = chained
        self.cells = AllCells()
        self.value = nn.Linear(DIM, DIM)
        self.drop = nn.Dropout(dropout)

    def arguments(self, k: int, log_weights: Tensor, **cells: Tensor) -> dict[str, Tensor]:
        return {**cells, "log_weight": log_weights[:, k : k + 1]}

    def spine(self, v: Tensor) -> Tensor:
        return self.drop(self.value(v))

    def nll(self, v: Tensor, u: Tensor, **cells: Tensor) -> Tensor:
        return (u @ v.T).square().sum()

    def forward(self, v: Tensor, u: Tensor, **cells: Tensor) -> tuple[Tensor, Tensor]:
        return self.cells(self.nll, v, u, parameters=(), **cells), self.spine(v)


def handed(**options: Any) -> Tensor:
    decoder = UnitDecoder([Chromosome(0, 2)], n_anchors=5, dim=DIM)
    decoder.strata = nn.ModuleList(Handing(**options) for _ in range(4))
    model = nn.Module()
    model.decoder = decoder
    install(model, make_plan(("stream",), 1))
    u, v = torch.randn(3, DIM, requires_grad=True), torch.randn(5, DIM, requires_grad=True)
    return decoder(u, v)


def test_strata_that_hand_something_on_say_so() -> None:
    handed(chained=True).backward()
    with pytest.raises(
        InstallError, match="stratum 0 hands on another v than it was given, but none of them"
    ):
        handed(chained=False)


def test_random_numbers_on_the_spine_are_refused() -> None:
    with pytest.raises(InstallError, match="draws random numbers"):
        handed(chained=True, dropout=0.5)


@pytest.mark.parametrize("strategy", ["stream", "recompute"])
@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(4), nn.utils.spectral_norm(nn.Linear(4, 4)), spectral_norm(nn.Linear(4, 4))]
)
def test_layers_that_read_the_whole_batch_are_refused(strategy: str, layer: nn.Module) -> None:
    decoder = UnitDecoder([Chromosome(0, 2)], n_anchors=5, dim=DIM)
    decoder.strata[0].add_module("layer", layer)
    model = nn.Module()
    model.decoder = decoder
    with pytest.raises(InstallError, match="'0.layer.*read or keep something of the whole batch"):
        install(model, make_plan((strategy,), 1))


def test_rows_that_are_not_of_cells_are_refused() -> None:
    decoder = UnitDecoder([Chromosome(0, 2)], n_anchors=5, dim=DIM)
    model = nn.Module()
    model.decoder = decoder
    install(model, make_plan(("stream",), 1))
    u, v = torch.randn(3, DIM, requires_grad=True), torch.randn(5, DIM, requires_grad=True)
    with pytest.raises(InstallError, match="3 cells were to be taken in blocks, .*'proto': 9.* rows"):
        decoder(u, v, x=torch.ones(3, 2), proto=torch.ones(9, 4))
