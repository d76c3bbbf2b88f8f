"""Claim: blocks outside of a decoder run again, or in chunks, beside the techniques of the decoder, on several ranks,
to the numbers of one device; by name too, with the peak that was predicted."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from lightning_amp.costs.rule import Rule
from lightning_amp.errors import InstallError, PlanError
from lightning_amp.installing.install import install
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.planning.plan.plan import Axes, Plan
from lightning_amp.techniques.chunk.row import ChunkBlock
from lightning_amp.techniques.hic.rows import StrataParallel
from lightning_amp.techniques.recompute.row import RecomputeBlock
from lightning_amp.techniques.table import in_order
from tests.any_module import Meter
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.optimised import Optimised
from tests.ranks import run_ranks
from tests.techniques.chunk.small_blocks import Attention
from tests.techniques.sharded_cases import Case, Model, Results, differences, inputs, make_plan, model_mesh, train

CASE = Case()
DECODER = {"one": ("S3", "S4", "stream"), "ranks": ("S4", "stream", "strata"), "kept": ("S4",)}


class Encoded(Model):
    """u of cells and v of anchors come from blocks outside of the decoder."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        torch.manual_seed(0)
        self.encoders = nn.ModuleList(Attention(case.dim) for _ in range(4)).double()

    def forward(self, batch: Any = None) -> Tensor:
        u, v = self.u[None], self.v[None]
        for k, block in enumerate(self.encoders):
            u, v = (u, block(v)) if k % 2 else (block(u), v)
        loss: Tensor = self.decoder(u[0], v[0], **(batch if isinstance(batch, dict) else self.batch))
        return loss + 0.1 * u.square().mean() + 0.1 * v.square().mean()


def beside(strategies: tuple[str, ...], ranks: int = 1, *, fqn: str = "encoders") -> Plan:
    """Of two blocks one runs again and one in chunks, of the third both; the decoder has its own techniques."""
    plan = make_plan(strategies, ranks, {"strata": StrataParallel(ends="1,3")})
    asked = (
        *(("recompute", f"{fqn}.{k}", RecomputeBlock()) for k in (0, 3)),
        *(("chunk", f"{fqn}.{k}", ChunkBlock(budget_bytes=30_000)) for k in (1, 3)),
    )
    rules = (*plan.rules, *(Rule(fqn=n, spec=spec, strategy=s, why="test") for s, n, spec in asked))
    strategies = in_order({*strategies, "recompute", "chunk"})
    return replace(plan, strategies=strategies, rules=rules, axes=Axes.of(strategies, [r.spec for r in rules]))


def trained(strategies: tuple[str, ...], mesh: DeviceMesh | None = None) -> tuple[Results, list[str]]:
    model, ranks = Encoded(CASE), 1 if mesh is None else mesh["model"].size()
    plan = beside(strategies, ranks)
    assert Plan.from_json(plan.to_json()) == plan
    installed = install(model, plan, mesh)
    # what a plan of chunks was made for is a block of fewer anchors; that it ran so is seen below
    found = train(model, 2, installed, mesh)
    planned = [p for p in installed._chunk_plans.values() if p.chunks.regions[""]]
    return found, [region for p in planned for region in map(str, p.chunks.regions[""])]


def on_rank(rank: int, ranks: int) -> list[str]:
    found, regions = trained(DECODER["ranks"], model_mesh(ranks))
    assert regions
    return differences(found, train(Encoded(CASE), 2))


@pytest.mark.parametrize("name", ["one", "kept"])
@pytest.mark.filterwarnings("ignore:.*by the plan, made for another batch")
def test_on_one_device(name: str) -> None:
    found, regions = trained(DECODER[name])
    assert regions, "some block has run in chunks"
    assert differences(found, train(Encoded(CASE), 2)) == []


@pytest.mark.ranks
def test_on_two_ranks_that_split_the_strata(tmp_path: Path) -> None:
    assert run_ranks(on_rank, 2, tmp_path, timeout=120) == [[], []]


@pytest.mark.parametrize("fqn", ["decoder.strata", "decoder"])
def test_a_part_of_the_decoder_is_no_block_outside(fqn: str) -> None:
    model = Encoded(CASE)
    plan = beside(("S4",), fqn="decoder.strata")
    rules = tuple(replace(r, fqn=fqn) if r.strategy == "recompute" else r for r in plan.rules[:2])
    with pytest.raises(InstallError, match="which is a part of the decoder 'decoder' or holds it"):
        install(model, replace(plan, rules=rules, strategies=("S4", "recompute")))
    assert not any("forward" in vars(child) for child in model.modules())


class Run(Optimised, by=torch.optim.RMSprop, lr=2e-3):
    def __init__(self, case: Case = CASE) -> None:
        super().__init__()
        self.model = Encoded(case)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(batch)


def cells(case: Case = CASE) -> DataLoader[Any]:
    """Three times the batch of a case."""
    return DataLoader([inputs(case)[2]] * 3, batch_size=None)  # type: ignore[arg-type]


def by_name(rank: int, ranks: int, asked: str) -> dict[str, Any]:
    """A run by names of strategies and its second step's bytes; the parameters that both runs leave."""
    runs, strategy, meter = {}, AMPStrategy(strategies=asked), Meter()
    for name in ("plain", "amp"):
        runs[name] = Run()
        options: Any = {"rank": rank, "ranks": ranks, "callbacks": [meter]} if name == "amp" else {}
        trainer = trainer_of(strategy if name == "amp" else "auto", max_steps=3, **options)
        trainer.fit(runs[name], cells())
    assert strategy.plan is not None
    left = [{name: p.detach() for name, p in runs[run].named_parameters()} for run in ("amp", "plain")]
    return {"plan": strategy.plan, "measured": meter.live.peak, "differences": differences(*left)}


ENCODERS = [f"model.encoders.{k}" for k in range(4)]


@pytest.mark.ranks
@pytest.mark.parametrize(("asked", "ranks"), [("S3,S4,recompute", 1), ("S4,stream,strata,recompute", 2)])
def test_by_name_all_blocks_outside_run_again(tmp_path: Path, asked: str, ranks: int) -> None:
    for found in run_ranks(by_name, ranks, tmp_path, asked, timeout=200):
        plan = found["plan"]
        assert [rule.fqn for rule in plan.rules if rule.strategy == "recompute"] == ENCODERS
        assert plan.axes.activations == ("stream" if "stream" in asked else "retain")
        assert plan.predicted_peak_bytes == pytest.approx(found["measured"], rel=0.05)
        assert found["differences"] == []


class NoEncoders(Run):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model(CASE)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model()


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("S3,S4,recompute", "recompute is not possible: no block can run a second time; .* it is of the"),
        ("S3,S4,chunk", "chunk is not possible: .* it is of the decoder"),
    ],
)
def test_by_name_without_blocks_outside_is_refused(asked: str, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        trainer_of(AMPStrategy(strategies=asked), max_steps=2).fit(
            NoEncoders(), DataLoader(torch.zeros(4, 1), batch_size=2)
        )
