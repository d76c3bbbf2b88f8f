"""Claim: any module without a decoder is profiled before it trains, trains to the numbers of a plain Trainer, and the
run notices nothing of the profile: neither its random numbers nor its data nor its hooks.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torchmetrics import MeanMetric

import lightning_amp
from lightning_amp.costs.model_shape import profile_of_module
from lightning_amp.errors import InstallError, PlanError
from lightning_amp.lightning.callbacks.memory_monitor import StratumMemoryMonitor
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.make_plan import plan as make_plan
from lightning_amp.planning.reports.plan_report import plan_report
from lightning_amp.simulation.parse_shape import parse_shape
from tests.any_module import Meter, make
from tests.each import BEFORE_A_RELEASE
from tests.lightning.strategy.strategy_cases import Batches, Small, fitted, same
from tests.planning.profiles import shape_of_decoder
from tests.ranks import run_ranks

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

CELLS = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))


class Wide(Small):
    """Most of its peak are parameters and gradients."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    "added_up", [{"accumulate_grad_batches": 3}, {"callbacks": [GradientAccumulationScheduler({0: 1, 5: 3})]}]
)
def test_gradients_that_are_added_up_are_predicted(added_up: dict[str, Any], tmp_path: Path) -> None:
    meter, monitor = Meter(3), StratumMemoryMonitor(dirpath=tmp_path, plot=False)
    data, own = DataLoader(CELLS.repeat(2, 1), batch_size=4), added_up.get("callbacks")
    fitted(Wide(width=5000), data, "auto", max_steps=-1, accumulate_grad_batches=3, callbacks=[meter])
    options = {"accumulate_grad_batches": 3, "callbacks": [monitor]} if own is None else added_up
    run = fitted(Wide(width=5000), data, AMPStrategy(strategies="S1"), max_steps=-1, **options)
    assert run["plan"].predicted_peak_bytes == meter.live.peak
    if own is None:
        assert monitor.measured_step is not None
        assert monitor.measured_step.peak_bytes == meter.live.peak


class Drawing(Dataset[Any]):
    """Items that are drawn from three streams: torch's, numpy's, and the data set's own."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(5)
        self.generator = torch.Generator().manual_seed(6)
        self.calls = 0

    def __len__(self) -> int:
        return len(CELLS)

    def __getitem__(self, k: int) -> Tensor:
        self.calls += 1
        noise = torch.rand(4) + float(np.random.rand()) + float(self.own.random())
        return CELLS[k] + noise + torch.rand(4, generator=self.generator) + self.calls


class Remembering(Sampler[int]):
    """Begins elsewhere each time that it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return len(CELLS)

    def __iter__(self) -> Any:
        self.asked += 1
        return iter([(k + self.asked) % len(CELLS) for k in range(len(CELLS))])


class Stream(IterableDataset[Any]):
    """Can be read once."""

    def __init__(self) -> None:
        self.left = iter(CELLS)

    def __iter__(self) -> Any:
        return self.left


class Data(pl.LightningDataModule):
    """Changes batches, and counts its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def setup(self, stage: str) -> None:
        self.calls.append("setup")

    def train_dataloader(self) -> Any:
        self.calls.append("loader")
        return DataLoader(CELLS, batch_size=4, shuffle=True)  # type: ignore[arg-type]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return torch.cat([batch, batch])

    def teardown(self, stage: str) -> None:
        self.calls.append("teardown")

    def on_exception(self, exception: BaseException) -> None:
        self.calls.append("exception")


def shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(Drawing(), batch_size=4, shuffle=True, **options)


DATA: dict[str, Any] = {
    "shuffled": shuffled,
    "workers": lambda: shuffled(num_workers=1, persistent_workers=True, multiprocessing_context="fork"),
    "own generator": lambda: shuffled(generator=torch.Generator().manual_seed(8)),
    "sampler with state": lambda: DataLoader(Drawing(), batch_size=4, sampler=Remembering()),
    "of a batch sampler": lambda: DataLoader(Drawing(), batch_sampler=[[0, 1], [2, 3], [4, 5]]),
    "data module": Data,
    "two loaders": lambda: {"a": shuffled(), "b": shuffled()},
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "order that is read once": lambda: DataLoader(Drawing(), batch_sampler=iter([[0, 1], [2, 3], [4, 5]])),
}
UNREAD = {"order that is read once": "its order is an iterator"}


class Two(Small):
    def loss(self, batch: Any) -> Tensor:
        self.seen.append(batch)
        return super().loss(batch["a"]) + F.mse_loss(self.net(batch["b"]), batch["b"][:, :2])


def plain_and_ours(kind: type[Small], make: Any) -> tuple[dict[str, bool], Any]:
    """Whether a plain run and one of ours leave the same, and the plan."""
    runs = []
    for strategy in ("auto", AMPStrategy()):
        data = make()
        torch.manual_seed(0)
        run = fitted(kind(), data, strategy)
        if isinstance(data, Data):
            run["seen"].append(data.calls)
        runs.append(run)
    plain, ours = runs
    return {key: same(plain[key], ours[key]) for key in ("parameters", "seen", "random", "steps")}, ours["plan"]


@pytest.mark.parametrize("name", DATA)
def test_the_run_notices_nothing(name: str) -> None:
    alike, plan = plain_and_ours(Two if name == "two loaders" else Small, DATA[name])
    assert all(alike.values()), alike
    assert max(map(len, plan_report(plan).splitlines())) <= 80
    if name in UNREAD:
        assert plan.diagnosis is None
        assert any("was not profiled" in note and UNREAD[name] in note for note in plan.notes), plan.notes
    else:
        assert plan.diagnosis is not None, plan.notes
        # the data module's hook doubles a batch that is 4 when it is taken
        assert plan.batch_size == (2 if name == "of a batch sampler" else 4)


class Manual(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, net in zip(self.optimizers(), (self.net, self.other), strict=True):
            optimizer.zero_grad()
            self.manual_backward(F.mse_loss(net(batch), batch[:, :2]))
            optimizer.step()
        self.seen.append(batch)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.net.parameters()), torch.optim.SGD(self.other.parameters(), lr=0.1)]


class Branching(Small):
    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return 2 * loss if loss.item() > 1 else loss


class Scheduled(Small):
    """Asks the Trainer how long the run is, and for its data module."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        steps = int(self.trainer.estimated_stepping_batches)
        self.logger.log_hyperparams({}) if self.logger else None
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Lazy(Small):
    """Has no shapes before `setup`, which must be called once."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(7), nn.ReLU(), nn.Linear(7, 2))
        self.set_up = 0

    def setup(self, stage: str) -> None:
        self.set_up += 1
        assert self.set_up == 1
        self.net(torch.zeros(1, 4))


class Stubborn(Small):
    """Cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = (line for line in "ab")


MEASURED = {Manual: "fake tensors", Branching: "fake tensors", Scheduled: "fake tensors", Lazy: "fake tensors"}


@pytest.mark.parametrize("kind", [*MEASURED, Stubborn])
def test_hostile_modules_train_as_on_a_plain_trainer(kind: type[Small]) -> None:
    alike, plan = plain_and_ours(kind, lambda: DataLoader(CELLS, batch_size=4, shuffle=True))  # type: ignore[arg-type]
    assert all(alike.values()), alike
    assert Plan.from_json(plan.to_json()) == plan
    if kind is Stubborn:
        assert plan.diagnosis is None
        assert plan.fits is None
        assert any("was not profiled" in note for note in plan.notes), plan.notes
    else:
        assert plan.diagnosis.measured == MEASURED[kind], (plan.notes, plan.diagnosis.reason)
        assert plan.fits is True
        noted = any("counted for the first batch" in note for note in plan.notes)
        assert noted == (kind is Branching)


class Talking(Small):
    """Looks at all ranks in its step: by a metric, by what it logs, and by a collective of its own."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.metric, self.own = MeanMetric(), own

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.metric.update(loss.detach())
        self.log("mean", self.metric.compute(), sync_dist=True)
        if self.own:
            dist.all_reduce(torch.ones(1))
        return loss


def talking(rank: int, ranks: int) -> list[Any]:
    found = []
    for own in (False, True):
        torch.manual_seed(0)
        run = fitted(Talking(own=own), DataLoader(CELLS, batch_size=2), AMPStrategy(), rank=rank, ranks=ranks)
        found.append((run["plan"].diagnosis, run["plan"].notes, run["steps"]))
    return found


@pytest.mark.ranks
def test_a_profile_waits_for_no_other_rank(tmp_path: Path) -> None:
    for metric, own in run_ranks(talking, 2, tmp_path):
        assert metric[0] is not None, metric
        assert metric[2] == own[2] == 3
        assert own[0] is None
        assert any("Default process group has not been initialized" in note for note in own[1]), own


class Deep(Small):
    """Blocks that recompute can run again."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 4)) for _ in range(3))
        self.net = nn.Sequential(*blocks, nn.Linear(4, 2))


def test_what_is_named_is_done_or_refused(tmp_path: Path) -> None:
    def run(strategy: Any, kind: type[Small] = Deep) -> Any:
        torch.manual_seed(0)
        return fitted(kind(), DataLoader(CELLS, batch_size=4), strategy)  # type: ignore[arg-type]

    plain, named = run("auto"), run(AMPStrategy(strategies="recompute"))
    (tmp_path / "plan.json").write_text(named["plan"].to_json())
    given = run(AMPStrategy(plan=tmp_path / "plan.json"))
    for found in (named, given):
        plan = found["plan"]
        assert same(plain["parameters"], found["parameters"])
        assert plan.strategies == ("S1", "recompute")
        assert [rule.fqn for rule in plan.rules if rule.strategy == "recompute"] == [f"net.{k}" for k in range(4)]
        assert plan.diagnosis is not None
    assert named["plan"].predicted_peak_bytes == given["plan"].predicted_peak_bytes
    with pytest.raises(PlanError, match="recompute is not supported: the step was not profiled.*cannot be copied"):
        run(AMPStrategy(strategies="recompute"), Stubborn)
    with pytest.raises(PlanError, match="fsdp"):
        run(AMPStrategy(strategies="fsdp"))


def test_a_module_without_strata_refuses_the_plan_of_a_decoder() -> None:
    shape = shape_of_decoder(parse_shape("anchors=300,dim=8,strata=3").decoder, batch_size=4)
    given = make_plan(profile_of_module(shape), strategies="S3,stream", shape=shape, batch_size=4)
    with pytest.raises(InstallError, match="S3 cannot change 'decoder.strata.*', which matches no module of Small"):
        fitted(Small(), DataLoader(CELLS, batch_size=4), AMPStrategy(plan=given))


class Typed(nn.Module):
    """It makes a tensor without a type, which Lightning's precision "64-true" gives one during a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.layer(x) * torch.linspace(0.1, 1, 4)).tanh()


class TypedStack(Small):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(Typed(), Typed(), nn.Linear(4, 2))


def test_a_block_that_is_computed_again_makes_tensors_of_the_type_of_the_step() -> None:
    data, found = DataLoader(CELLS.double(), batch_size=4), []  # type: ignore[arg-type]
    for strategies in ("S1", "S1,recompute"):
        run = fitted(TypedStack(), data, AMPStrategy(strategies=strategies), precision="64-true")
        assert torch.get_default_dtype() == torch.float32
        found.append(run["parameters"])
    assert same(*found)


def on_ranks(rank: int, ranks: int, name: str, budgets: tuple[int, ...], named: str | None) -> list[Any]:
    """Under each budget the plan, what the meter has seen, and whether parameters have moved."""
    found = []
    for budget in budgets:
        (module, batch), meter = make(name), Meter()
        before = [p.detach().clone() for p in module.parameters()]
        data, strategy = Batches(batch, 8), AMPStrategy(device_memory=budget, strategies=named, on_predicted_oom="warn")
        run = fitted(module, DataLoader(data, batch_size=None), strategy, rank=rank, ranks=ranks, callbacks=[meter])
        found.append((run["plan"], meter.live.peak, not all(map(torch.equal, before, module.parameters()))))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "shares", "strategies", "named"),
    [
        ("wide_mlp", (1.1, 0.75), (("S1",), ("S1", "fsdp")), None),
        pytest.param("gene_transformer", (0.32,), (("S1", "replay"),), None, marks=BEFORE_A_RELEASE),
        ("gene_transformer", (0.32,), (("S1", "recompute", "fsdp", "chunk"),), "S1,recompute,fsdp,chunk"),
    ],
)
def test_two_ranks_are_predicted_and_fitted(
    name: str, shares: Any, strategies: Any, named: str | None, tmp_path: Path
) -> None:
    peak = lightning_amp.profile(*make(name)).peak_bytes
    budgets = tuple(int(share * peak) for share in shares)
    for rank in run_ranks(on_ranks, 2, tmp_path, name, budgets, named, timeout=200):
        for budget, expected, (plan, measured, trained) in zip(budgets, strategies, rank, strict=True):
            assert trained
            assert plan.strategies == expected
            assert plan.predicted_peak_bytes == pytest.approx(measured, rel=0.05)
            assert plan.fits
            assert measured <= 1.05 * budget
