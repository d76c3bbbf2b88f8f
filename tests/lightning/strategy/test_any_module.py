"""Claim: any module without a decoder is profiled before it trains, trains to the numbers of a plain Trainer, and the
run notices nothing of the profile: neither its random numbers nor its data nor its hooks.
"""

import json
import multiprocessing
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
from lightning_amp.costs.model_shape import profile_of_module, shape_of_decoder
from lightning_amp.errors import InstallError, PlanError
from lightning_amp.lightning.callbacks.memory_monitor import StratumMemoryMonitor
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.make_plan import plan as make_plan
from lightning_amp.planning.reports.plan_report import plan_report
from lightning_amp.simulation.parse_shape import parse_shape
from tests.any_module import Meter, make
from tests.lightning.strategy.strategy_cases import Small, example, example_on_ranks, fitted, same
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

CELLS = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["gene_transformer", "wide_mlp", "cnn"])
def test_examples_are_predicted_and_train_as_they_do_on_a_plain_trainer(name: str, tmp_path: Path) -> None:
    (found,) = run_ranks(example, 1, tmp_path, name, (1.0, 0.75, 0.5), timeout=200)
    for run in found:
        assert run["predicted"] == pytest.approx(run["measured"], rel=0.05)
        assert run["error"] <= 1e-10
        assert run["steps"] == run["plain steps"] >= 3
        assert run["fits"] is (run["predicted"] <= run["budget"])
        plain = json.loads(run["json"])
        assert plain["diagnosis"]["largest"] == ("parameters" if name == "wide_mlp" else "saved")
        assert plain["diagnosis"]["measured"] == "fake tensors", plain["diagnosis"]["reason"]
        assert plain["diagnosis"]["evidence"]
        assert plain["candidates"]
        assert Plan.from_json(run["json"]).to_json() == run["json"]


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
UNREAD = {"stream": "the data set is a stream ('Stream')", "order that is read once": "its order is an iterator"}


class Two(Small):
    """Of two loaders."""

    def loss(self, batch: Any) -> Tensor:
        self.seen.append(batch)
        return super().loss(batch["a"]) + F.mse_loss(self.net(batch["b"]), batch["b"][:, :2])


def undisturbed(rank: int, ranks: int, names: list[str]) -> dict[str, Any]:
    found = {}
    # a rank is a daemon, which may have no loader workers
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    for name in names:
        kind = Two if name == "two loaders" else Small
        runs = []
        for strategy in ("auto", AMPStrategy()):
            data = DATA[name]()
            torch.manual_seed(0)
            run = fitted(kind(), data, strategy)
            if isinstance(data, Data):
                run["seen"].append(data.calls)
            runs.append(run)
        plain, ours = runs
        alike = {key: same(plain[key], ours[key]) for key in ("parameters", "seen", "random", "steps")}
        plan = ours["plan"]
        found[name] = alike, plan.batch_size, plan.diagnosis, plan.notes, plan_report(plan)
    return found


def test_the_run_notices_nothing(tmp_path: Path) -> None:
    (found,) = run_ranks(undisturbed, 1, tmp_path, list(DATA), timeout=200)
    sizes = {"of a batch sampler": 2, "data module": 8}
    for name, (alike, size, diagnosis, notes, report) in found.items():
        assert all(alike.values()), (name, alike)
        assert max(map(len, report.splitlines())) <= 80
        if name in UNREAD:
            assert diagnosis is None, name
            assert any("was not profiled" in note and UNREAD[name] in note for note in notes), notes
        else:
            assert diagnosis is not None, (name, notes)
            # the data module's hook doubles a batch that is 4 when it is taken
            assert size == (4 if name == "data module" else sizes.get(name, 4)), name


class Manual(Small):
    """Steps two optimisers itself."""

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
    """Looks at a value."""

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


MODULES = (Manual, Branching, Scheduled, Lazy, Stubborn)
MEASURED = {Branching: "a real step", Stubborn: None}


def hostile(rank: int, ranks: int) -> dict[str, Any]:
    found = {}
    for kind in MODULES:
        runs = []
        for strategy in ("auto", AMPStrategy()):
            torch.manual_seed(0)
            module = kind()
            runs.append(fitted(module, DataLoader(CELLS, batch_size=4, shuffle=True), strategy))  # type: ignore[arg-type]
        alike = {key: same(runs[0][key], runs[1][key]) for key in ("parameters", "seen", "random", "steps")}
        plan = runs[1]["plan"]
        found[kind.__name__] = alike, plan.diagnosis, plan.notes, plan.to_json(), plan.fits
    return found


def test_hostile_modules_train_as_on_a_plain_trainer(tmp_path: Path) -> None:
    (found,) = run_ranks(hostile, 1, tmp_path, timeout=200)
    for kind in MODULES:
        alike, diagnosis, notes, text, fits = found[kind.__name__]
        assert all(alike.values()), (kind, alike)
        assert Plan.from_json(text).to_json() == text
        expected = MEASURED.get(kind, "fake tensors")
        if expected is None:
            assert diagnosis is None
            assert fits is None
            assert any("was not profiled" in note for note in notes), notes
        else:
            assert diagnosis.measured == expected, (kind, notes, diagnosis.reason)
            assert fits is True
            assert any("measured with real values" in note for note in notes) == (expected == "a real step")


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
        run = fitted(
            Talking(own=own),
            DataLoader(CELLS, batch_size=2),  # type: ignore[arg-type]
            AMPStrategy(),
            rank=rank,
            ranks=ranks,
        )
        found.append((run["plan"].diagnosis, run["plan"].notes, run["steps"]))
    return found


def test_a_profile_waits_for_no_other_rank(tmp_path: Path) -> None:
    for metric, own in run_ranks(talking, 2, tmp_path):
        assert metric[0] is not None, metric
        assert metric[2] == own[2] == 3
        assert own[0] is None
        assert any("Default process group has not been initialized" in note for note in own[1]), own


def by_name(rank: int, ranks: int, folder: str) -> list[Any]:
    """Techniques that are named, a plan that is given, and one that cannot be."""
    found: list[Any] = []

    class Deep(Small):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                *(nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 4)) for _ in range(3)), nn.Linear(4, 2)
            )

    def run(strategy: Any, kind: Any = Deep) -> Any:
        torch.manual_seed(0)
        return fitted(kind(), DataLoader(CELLS, batch_size=4), strategy)  # type: ignore[arg-type]

    plain = run("auto")
    named = run(AMPStrategy(strategies="recompute"))
    path = Path(folder) / "plan.json"
    path.write_text(named["plan"].to_json())
    given = run(AMPStrategy(plan=path))
    for one in (named, given):
        found.append((same(plain["parameters"], one["parameters"]), one["plan"]))
    for strategies, kind in (("recompute", Stubborn), ("fsdp", Deep)):
        try:
            run(AMPStrategy(strategies=strategies), kind)
        except PlanError as error:
            found.append(str(error))
    return found


def test_what_is_named_is_done_or_refused(tmp_path: Path) -> None:
    ((named, given, stubborn, alone),) = run_ranks(by_name, 1, tmp_path, str(tmp_path))
    for equal, plan in (named, given):
        assert equal
        assert plan.strategies == ("S1", "recompute")
        names = [rule.fqn for rule in plan.rules if rule.strategy == "recompute"]
        assert names == [f"net.{k}" for k in range(4)]
        assert plan.diagnosis is not None
    assert named[1].predicted_peak_bytes == given[1].predicted_peak_bytes
    assert "recompute is not supported: the step was not profiled" in stubborn
    assert "cannot be copied" in stubborn
    assert "fsdp" in alone


def test_a_module_without_strata_refuses_the_plan_of_a_decoder() -> None:
    shape = shape_of_decoder(parse_shape("anchors=300,dim=8,strata=3").decoder, batch_size=4)
    given = make_plan(profile_of_module(shape), strategies="S3,stream", shape=shape, batch_size=4)
    with pytest.raises(InstallError, match="S3 cannot change 'decoder.strata.*', which matches no module of Small"):
        fitted(Small(), DataLoader(CELLS, batch_size=4), AMPStrategy(plan=given))


@pytest.mark.parametrize(
    ("name", "shares", "strategies"),
    [
        ("wide_mlp", (1.1, 0.75), (("S1",), ("S1", "fsdp"))),
        ("gene_transformer", (0.32,), (("S1", "recompute", "fsdp", "chunk"),)),
    ],
)
def test_two_ranks_are_predicted_and_fitted(name: str, shares: Any, strategies: Any, tmp_path: Path) -> None:
    peak = lightning_amp.profile(*make(name)).peak_bytes
    budgets = tuple(int(share * peak) for share in shares)
    for rank in run_ranks(example_on_ranks, 2, tmp_path, name, budgets, timeout=200):
        for budget, expected, (plan, measured, trained) in zip(budgets, strategies, rank, strict=True):
            assert trained
            assert plan.strategies == expected
            assert plan.predicted_peak_bytes == pytest.approx(measured, rel=0.05)
            assert plan.fits
            assert measured <= 1.05 * budget
