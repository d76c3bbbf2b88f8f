"""Claim: unusual modules and batches train on a model axis as on one process, or are refused on every rank."""

import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_amp.costs.model_shape import profile_of_module
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import AmpError
from lightning_amp.installing.describe_module import describe
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.make_plan import plan as make_plan
from lightning_amp.techniques.hic.rows import RowParallelLinear
from tests.lightning.strategy.model_axis_cases import ALL, CASE, N_FEATURES, batches, trainer_of
from tests.optimised import Optimised
from tests.ranks import run_ranks
from tests.techniques.sharded_cases import Case, decoder

pytestmark = pytest.mark.ranks

Batch = dict[str, Tensor]
BATCHES = batches(None)[:3]
RTOL = 1e-9


class Corner(Optimised, by=torch.optim.Adam, lr=1e-2):
    """An encoder and a decoder, as a user may write them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.encoder = nn.Sequential(nn.Linear(N_FEATURES, CASE.dim), nn.Tanh())
        self.decoder = decoder(CASE)
        self.v = nn.Parameter(torch.randn(CASE.anchors, CASE.dim))
        self.double()
        self.add()
        self.double()

    def add(self) -> None:
        """What this corner has beside."""

    def cells(self, x: Tensor) -> Tensor:
        return self.encoder(x.log1p())

    def library(self, batch: Batch) -> Tensor:
        return batch["library"]

    def loss(self, batch: Batch) -> Tensor:
        arguments = {"batch": batch["batch"], "library": self.library(batch), "x": batch["x"]}
        return self.decoder(self.cells(batch["x"]), self.v, **arguments)


class Means(Corner):
    """Expected contacts, with gradients."""

    def loss(self, batch: Batch) -> Tensor:
        given = {name: batch[name] for name in ("batch", "library")}
        mean = self.decoder.predicted(self.cells(batch["x"]), self.v, **given)
        return super().loss(batch) + (mean - batch["x"]).square().mean()


class GradientOfInputs(Corner):
    def loss(self, batch: Batch) -> Tensor:
        loss = super().loss(batch)
        (slope,) = torch.autograd.grad(loss, (self.v,), retain_graph=True)
        return loss * slope.norm()


class TwoDecoders(Corner):
    def add(self) -> None:
        self.second = decoder(Case(features={2: 17}, seed=5))

    def loss(self, batch: Batch) -> Tensor:
        arguments = {name: batch[name] for name in ("batch", "library", "x")}
        return super().loss(batch) + self.second(self.cells(batch["x"]), self.v, **arguments)


class Checkpointed(Corner):
    def loss(self, batch: Batch) -> Tensor:
        return checkpoint(super().loss, batch, use_reentrant=False)


class Penalty(Corner):
    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + 1e-2 * self.decoder.strata[0].scale.square().sum()


class PenaltyOfShard(Corner):
    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + 1e-2 * self.encoder[0].weight.norm()


class TiedInput(Corner):
    """The decoder's table is part of the encoder, and so lies behind the decoder's inputs."""

    def cells(self, x: Tensor) -> Tensor:
        tables = torch.cat([stratum.bias for stratum in self.decoder.strata], dim=1)
        return super().cells(x) + (x @ tables.T)[:, :1]


class LearnedLibrary(Corner):
    def add(self) -> None:
        self.size = nn.Linear(CASE.dim, 1)

    def library(self, batch: Batch) -> Tensor:
        return self.size(self.cells(batch["x"])).exp()


class OwnReference(Corner):
    def add(self) -> None:
        self.__dict__["first"] = self.encoder[0]

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + self.first(batch["x"]).square().mean()


class EarlyOptimizer(Corner):
    def add(self) -> None:
        self.early = torch.optim.Adam(self.parameters(), lr=1e-2)

    def configure_optimizers(self) -> Any:
        return self.early


class HookedAttention(Corner):
    def add(self) -> None:
        self.decoder.strata[1].key.attention.register_forward_hook(lambda module, args, rows: 1.5 * rows)


class HookedNorm(Corner):
    def add(self) -> None:
        self.decoder.strata[1].key.prenorm.register_forward_hook(lambda module, args, rows: rows / rows.norm())


class HookedWeight(Corner):
    def add(self) -> None:
        self.encoder[0].weight.register_hook(lambda grad: 2 * grad)


class SparseCells(Corner):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x = batch["x"].to_dense()
        size, rows = x.sum(1, keepdim=True) + 1, torch.zeros(len(x), dtype=torch.long)
        return self.loss({"x": x, "library": size, "batch": rows})


class Boxed:
    """A batch that is an object of the user's own."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch


class UnboxedCells(Corner):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch.batch)


EXACT = [Means, GradientOfInputs, TwoDecoders, Checkpointed]
OUTSIDE = "reads outside of the decoder or layer that is split over the model axis"
REFUSED: dict[type[Corner], str] = {
    Penalty: f"'decoder.strata.0.scale', which it {OUTSIDE}",
    PenaltyOfShard: f"'encoder.0.weight', which it {OUTSIDE}",
    TiedInput: f".bias', which it {OUTSIDE}",
    LearnedLibrary: ", which it reads inside of the decoder that is split over the model axis",
    OwnReference: "'weight' of a layer that S2 or nodes has replaced, which it still reads",
    EarlyOptimizer: "the optimizer 'Adam' has 1 parameters that the plan has replaced by the rank's shard",
    HookedAttention: "'decoder.strata.1.key.attention' cannot be replaced: it has forward_hooks",
    HookedNorm: "'decoder.strata.1.key.prenorm' cannot be replaced: it has forward_hooks",
    HookedWeight: "S2 does not support a layer that has weight.backward_hooks",
}
OTHER_CELLS: dict[str, tuple[type[Corner], Callable[[Batch, int], Any]]] = {
    "coo": (SparseCells, lambda batch, rank: {"x": batch["x"].roll(rank, 0).to_sparse()}),
    "object": (UnboxedCells, lambda batch, rank: Boxed({k: v.roll(rank, 0) for k, v in batch.items()})),
}


def fit(module: Corner, rank: int, ranks: int, *, data: Any = None, plan: Plan | None = None) -> dict[str, Tensor]:
    """The state after two epochs."""
    seed_everything(7)
    options: dict[str, Any] = {"plan": plan} if plan else {"strategies": ALL, "model_parallel_size": ranks}
    strategy = AMPStrategy(**options) if ranks > 1 else None
    loader: DataLoader[Any] = DataLoader(data or BATCHES, batch_size=None)  # type: ignore[arg-type]
    trainer_of(rank, ranks, strategy).fit(module, loader)
    return {name: value.clone() for name, value in module.state_dict().items()}


def refusal(kind: type[Corner], rank: int, ranks: int, **options: Any) -> str:
    """What is said before the first step, with the module as it was."""
    module, before = kind(), kind().state_dict()
    try:
        fit(module, rank, ranks, **options)
    except AmpError as error:
        after = module.state_dict()
        assert list(after) == list(before), "the module has changed"
        assert all(map(torch.equal, after.values(), before.values())), "values have changed"
        return f"{type(error).__name__}: {error}"
    return "trained"


def split_twice(ranks: int) -> Plan:
    """A plan edited by hand: a layer inside of the decoder is to be split by its inputs too."""
    shape = describe(Corner(), batch_size=4)
    options: dict[str, Any] = {"strategies": "S2", "model_parallel_size": ranks, "device_memory": 2**34}
    made = make_plan(profile_of_module(shape), devices=ranks, batch_size=4, shape=shape, **options)
    inside = Rule(fqn="decoder.strata.1.key.qk", spec=RowParallelLinear(), strategy="S2", why="by hand")
    return replace(made, rules=(*made.rules, inside))


def everything(rank: int, ranks: int) -> dict[str, Any]:
    logging.getLogger("lightning").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {kind.__name__: fit(kind(), rank, ranks) for kind in EXACT}
    if ranks > 1:
        found |= {kind.__name__: refusal(kind, rank, ranks) for kind in REFUSED}
        found["split twice"] = refusal(Corner, rank, ranks, plan=split_twice(ranks))
        for name, (kind, made) in OTHER_CELLS.items():
            found[name] = refusal(kind, rank, ranks, data=[made(batch, rank) for batch in BATCHES])
            assert refusal(kind, rank, ranks, data=[made(batch, 0) for batch in BATCHES]) == "trained"
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    return [*run_ranks(everything, 1, Path(one), timeout=120), *run_ranks(everything, 2, Path(two), timeout=240)]


@pytest.mark.full
@pytest.mark.parametrize("kind", EXACT)
def test_trains_as_on_one_process(runs: list[dict[str, Any]], kind: type[Corner]) -> None:
    one, first, second = (found[kind.__name__] for found in runs)
    for name, value in one.items():
        error = (first[name] - value).norm()
        assert error <= RTOL * value.norm() + 1e-12, f"{name}: off by {error:.1e}"
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_train_wrongly_is_refused(runs: list[dict[str, Any]], kind: type[Corner]) -> None:
    for found in runs[1:]:
        assert found[kind.__name__].startswith("InstallError: ")
        assert REFUSED[kind] in found[kind.__name__]


def test_a_layer_is_not_split_in_two_ways(runs: list[dict[str, Any]]) -> None:
    for found in runs[1:]:
        assert "its layer lies in a decoder that is split already" in found["split twice"]


@pytest.mark.parametrize("name", OTHER_CELLS)
def test_different_cells_are_noticed_in_any_form(runs: list[dict[str, Any]], name: str) -> None:
    for found in runs[1:]:
        assert "DataError: the same batch is needed on the 2 ranks of a model group" in found[name]
