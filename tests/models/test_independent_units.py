"""Claim: a decoder made of a user's own units needs a loss per unit and nothing else to be streamed, computed again, or
dealt to ranks, exactly; test_adapters.py starts the ranks.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from lightning_amp.errors import InstallError, ModelError
from lightning_amp.footprint.target_device import settings_of
from lightning_amp.installing.install import install
from lightning_amp.models.decoders.independent_units import UnitDecoder
from lightning_amp.models.decoders.stratum import AllCells
from lightning_amp.techniques.hic.rows import StreamStrata
from tests.adapters.foreign_cases import units
from tests.models.unit_cases import DIM, SIZES, Chromosome, Counts, batches
from tests.techniques.sharded_cases import assert_same, make_plan


def test_one_device_trains_the_same() -> None:
    assert all(far <= 1e-10 for far in units(0, 1).values())


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
        self.sum_over_cells = AllCells()
        self.value = nn.Linear(DIM, DIM)
        self.drop = nn.Dropout(dropout)

    def arguments(self, k: int, log_weights: Tensor, **cells: Tensor) -> dict[str, Tensor]:
        return {**cells, "log_weight": log_weights[:, k : k + 1]}

    def spine(self, v: Tensor) -> Tensor:
        return self.drop(self.value(v))

    def nll(self, v: Tensor, u: Tensor, **cells: Tensor) -> Tensor:
        return (u @ v.T).square().sum()

    def forward(self, v: Tensor, u: Tensor, **cells: Tensor) -> tuple[Tensor, Tensor]:
        return self.sum_over_cells(self.nll, v, u, parameters=(), **cells), self.spine(v)


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
    with pytest.raises(InstallError, match="stratum 0 returns another v than it got, and no stratum has"):
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
    with pytest.raises(InstallError, match="of its 3 cells: .*'proto': 9.* rows"):
        decoder(u, v, x=torch.ones(3, 2), proto=torch.ones(9, 4))


class Weighted(Chromosome):
    """A unit that is told something that is not of cells."""

    def nll(self, v: Tensor, u: Tensor, **cells: Any) -> Tensor:
        weight, mask = cells["weight"], cells["mask"]
        return super().nll(v, u, **cells) * (weight if mask is None else weight * mask)


def unit(name: str, nll: Any) -> type[Chromosome]:
    return type(name, (Chromosome,), {"nll": nll})


Centred = unit("Centred", lambda m, v, u, **cells: Chromosome.nll(m, v, u - u.mean(0), **cells))
Penalised = unit("Penalised", lambda m, v, u, **cells: Chromosome.nll(m, v, u, **cells) + m.gate.weight.square().sum())
Slightly = unit(
    "Slightly", lambda m, v, u, **cells: Chromosome.nll(m, v, u, **cells) + 1e-9 * m.gate.weight.square().sum()
)
Noisy = unit("Noisy", lambda m, v, u, **cells: Chromosome.nll(m, v, u + torch.rand_like(u), **cells))


class Shaped(Chromosome):
    def nll(self, v: Tensor, u: Tensor, **cells: Tensor) -> Tensor:
        return super().nll(v, u.view(len(u), -1), **cells)


class Remembering(Chromosome):
    def nll(self, v: Tensor, u: Tensor, **cells: Tensor) -> Tensor:
        self.last = v.square().mean()
        return super().nll(v, u, **cells)


class Twice(Chromosome):
    """A layer in two places, a weight in two layers, and one with two names."""

    def __init__(self, first: int, size: int) -> None:
        super().__init__(first, size)
        self.same, self.tied = self.gate, nn.Linear(DIM, DIM, bias=False)
        self.tied.weight = self.gate.weight
        self.slope = self.offset

    def nll(self, v: Tensor, u: Tensor, **cells: Tensor) -> Tensor:
        return super().nll(self.tied(self.same(v)), u, **cells) + (u[:, :1] * self.slope).sum()


def counts(kind: type[Chromosome], strategy: str = "") -> Counts:
    module = Counts()
    firsts = [unit.columns.start for unit in module.decoder.strata]
    torch.manual_seed(5)
    units = [kind(first, size).double() for first, size in zip(firsts, SIZES, strict=True)]
    module.decoder = UnitDecoder(units, n_anchors=sum(SIZES), dim=DIM)
    if strategy:
        install(module, make_plan((strategy,), 1, {"stream": StreamStrata(cells=3)}))
    return module


@pytest.mark.parametrize(("weight", "mask"), [(0.5, None), (torch.tensor(0.5, dtype=torch.float64), True)])
def test_what_has_no_rows_is_the_same_for_all_cells(weight: Any, mask: Any) -> None:
    batch, results = batches()[0], []
    for strategy in ("", "stream"):
        module = counts(Weighted, strategy)
        u = module.encoder(batch["x"].log1p())
        loss = module.decoder(u, module.v, **batch | {"weight": weight, "mask": mask})
        loss.backward()
        results.append({name: p.grad for name, p in module.named_parameters()} | {"loss": loss.detach()})
    assert_same(results[1], results[0], rtol=1e-12)


@pytest.mark.parametrize(("kind", "few"), [(Centred, "two cells"), (Penalised, "no cells"), (Slightly, "no cells")])
def test_a_loss_that_is_no_sum_over_cells_is_refused(kind: type[Chromosome], few: str) -> None:
    module = counts(kind, "stream")
    for _ in range(2):
        with pytest.raises(InstallError, match=rf"its loss is no sum over cells: that of {few} is"):
            module.training_step(batches()[0], 0)
    three = {name: rows[:3] for name, rows in batches()[0].items()}
    module.training_step(three, 0).backward()


class Named(Chromosome):
    def nll(self, v: Tensor, u: Tensor, **cells: Any) -> Tensor:
        return super().nll(v, u, **cells) * {"poisson": 1.0, "halved": 0.5}[cells["kind"]]


@pytest.mark.parametrize("kind", ["poisson", "halved"])
def test_a_name_is_the_same_for_all_cells(kind: str) -> None:
    batch, losses = batches()[0], []
    assert len(batch["x"]) == len("poisson"), "as many letters as cells"
    for strategy in ("", "stream"):
        module = counts(Named, strategy)
        losses.append(module.decoder(module.encoder(batch["x"].log1p()), module.v, **batch | {"kind": kind}))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)


def test_a_loss_that_cannot_be_computed_of_no_cells_is_streamed() -> None:
    module = counts(Shaped, "stream")
    expected = counts(Shaped).training_step(batches()[0], 0)
    torch.testing.assert_close(module.training_step(batches()[0], 0), expected, rtol=1e-12, atol=0)


def test_looking_at_the_sum_draws_nothing_and_is_done_once() -> None:
    module, calls = counts(Noisy, "stream"), []
    unit = module.decoder.strata[1]
    unit.gate.register_forward_hook(lambda *_: calls.append(1))
    drawn = []
    for _ in range(2):
        torch.manual_seed(1)
        drawn.append(float(module.training_step(batches()[0], 0).detach()))
    assert drawn[0] == drawn[1]
    assert len(calls) == 4 + 3 + 3, "three blocks each time"


def test_a_term_that_a_unit_has_kept_is_refused() -> None:
    module = counts(Remembering, "stream")
    loss = module.training_step(batches()[0], 0)
    with pytest.raises(InstallError, match="its gradient would be lost"):
        (loss + module.decoder.strata[1].last).backward()


@pytest.mark.parametrize("strategy", ["stream", "recompute"])
def test_layers_and_weights_in_two_places(strategy: str) -> None:
    results = []
    for module in (counts(Twice), counts(Twice, strategy)):
        own = [id(p) for p in module.parameters()]
        optimizer = module.configure_optimizers()
        for batch in batches():
            optimizer.zero_grad()
            module.training_step(batch, 0).backward()
            optimizer.step()
        assert [id(p) for p in module.parameters()] == own
        results.append({name: p.detach() for name, p in module.named_parameters()})
    assert_same(results[1], results[0], rtol=1e-10)


class Offset(Chromosome):
    """With a number that is added to the loss as it is."""

    def __init__(self, first: int, size: int) -> None:
        super().__init__(first, size)
        self.added = nn.Parameter(torch.zeros((1,) * (first % 2)))

    def nll(self, v: Tensor, u: Tensor, **cells: Tensor) -> Tensor:
        return super().nll(v, u, **cells) + self.added.sum()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_number_that_is_added_to_the_loss_has_the_gradient_of_the_loss(device: str) -> None:
    results = []
    for module in (counts(Offset), counts(Offset)):
        if results:
            install(module, make_plan(("stream",), 1, {"stream": StreamStrata(cells=9)}))
        with settings_of(device):
            module.training_step(batches()[0], 0).backward()
        results.append({name: p.grad for name, p in module.named_parameters()})
    assert_same(results[1], results[0], rtol=1e-12)
