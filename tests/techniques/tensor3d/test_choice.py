"""Claim: the grid and the roles of its axes are chosen by the seconds of a step, as dry runs give them."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_amp import AMPStrategy
from lightning_amp.cli.main import main
from lightning_amp.costs.device_rates import Links, Rates, rates_for
from lightning_amp.costs.profiled_step import ProfiledStep
from lightning_amp.errors import AmpError
from lightning_amp.footprint.run.run_settings import RunSettings
from lightning_amp.lightning.profiling.dry_steps import DrySteps
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.techniques.tensor3d.grid_seconds import (
    DryRun,
    Message,
    grid_cost,
    one_bandwidth,
    ranked,
    sent_seconds,
)
from lightning_amp.techniques.tensor3d.layouts import with_axes_exchanged
from tests.cli.test_plan_configuration import IGNORED, written_for_processes
from tests.lightning.strategy.strategy_cases import RunningRanks
from tests.ranks import run_ranks
from tests.techniques.tensor3d.cases import GPT, Trained
from tests.techniques.tensor3d.test_tensor3d import QUIET

CPU = rates_for("cpu")
LINKS = Links(intra_bandwidth=8e9, inter_bandwidth=1e9, latency=0.0, ranks_per_node=4)


class Narrow(Trained):
    """A wide layer between narrow ones: sums of few outputs are cheap, and of many dear."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 64), nn.Linear(64, 6)

    def loss(self, batch: Any) -> Tensor:
        return self.two(functional.relu(self.one(batch))).square().mean()  # type: ignore[no-any-return]


def seen_on(
    module: Trained,
    batch: Tensor,
    grid: tuple[int, int, int] | None,
    *,
    ranks: int = 8,
    rates: Rates = CPU,
    budget: int | None = None,
) -> tuple[Any, ProfiledStep]:
    options = SimpleNamespace(tensor_grid=grid)
    steps = DrySteps.of_request(("S1", "tensor3d"), options, 1, run_ranks=ranks, budget=budget)
    assert steps is not None
    step = StepOfModule(module, lambda: batch, run_settings=RunSettings(), steps=steps)
    return steps, step.profiled(rates)


@pytest.mark.long
def test_the_cheaper_deal_of_roles_is_taken() -> None:
    """The grids (2, 1, 1) and (1, 2, 1) are the same ranks, so that the better layout serves both."""
    batch, bytes_alone = torch.randint(0, 11, (4, 7)), replace(CPU, links=replace(CPU.links, latency=0.0))
    grids = ((2, 1, 1), (1, 2, 1))
    found = [seen_on(GPT(), batch, grid, ranks=2, rates=bytes_alone) for grid in grids]
    (one, of_one), (two, of_two) = found
    assert of_one.sent_seconds == of_two.sent_seconds > 0
    assert with_axes_exchanged(one.spec.layouts) == two.spec.layouts
    # columns of the embedding are split over x as planned, and rows over y, which sends less
    assert [any("over y where" in note for note in steps.notes) for steps, _ in found] == [True, False]
    assert {m.axis for m in one.messages()} == {"x"}


@pytest.mark.full
@pytest.mark.long
def test_a_grid_is_chosen_of_all_factorings_of_the_ranks() -> None:
    """It fits, it is as fast as it was predicted to be, and the note compares it with others."""
    batch = torch.randint(0, 11, (4, 7))
    free, as_it_is = seen_on(GPT(width=32), batch, None, ranks=4)
    assert free.ranks == free.spec.model_ranks
    budget = as_it_is.profile.peak_bytes * 2 // 3
    steps, seen = seen_on(GPT(width=32), batch, None, ranks=4, budget=budget)
    assert seen.profile.peak_bytes <= budget
    assert steps.spec.grid != free.spec.grid
    assert steps.run_ranks == 4
    assert "fit in" in steps.notes[0]
    assert len(steps.notes) == 6
    assert all(len(note) < 78 for note in steps.notes[1:]), "a line of a terminal"
    assert steps.notes[1].startswith(f"tensor_grid={steps.spec.sizes}:")


@pytest.mark.full
@pytest.mark.long
def test_bytes_of_all_grids_follow_from_one_dry_run_of_each_pair() -> None:
    """Of z and of the copies too, which average gradients (Eq. 8 of AxoNN); the peak is within 5 %."""
    batch = torch.randint(0, 11, (4, 7))

    def run(x: int, y: int, z: int, copies: int) -> DryRun:
        # no other deal than the one that was planned for (x, y)
        steps, seen = seen_on(GPT(width=32), batch, (x, y, z), ranks=x * y * z * copies, rates=same)
        sizes = dict(zip(("x", "y", "z", "data"), (x, y, z, copies), strict=True))
        return DryRun(sizes=sizes, seconds=seen.chain.seconds, messages=steps.messages(), profile=seen.profile)

    same = CPU
    first = run(2, 2, 2, 2)
    for z, copies in ((4, 1), (1, 4), (2, 1)):
        right, found = run(2, 2, z, copies), grid_cost(first, z, copies, LINKS)
        own = grid_cost(right, z, copies, LINKS)
        # runs are padded to whole numbers of entries
        assert found.sent_bytes == pytest.approx(own.sent_bytes, rel=0.03), (z, copies)
        assert found.peak_bytes == pytest.approx(right.profile.peak_bytes, rel=0.05), (z, copies)
        assert found.seconds - first.seconds == pytest.approx(own.seconds - right.seconds, rel=0.03)


def test_bandwidth_is_that_of_where_ranks_are() -> None:
    """Eq. 10: in nodes of four ranks x and y lie within, and z crosses, with four rings at a time."""
    sizes, message = {"x": 2, "y": 2, "z": 2, "data": 1}, Message("all_reduce", 8e9, "z")
    assert sent_seconds([message._replace(axis="x")], sizes, LINKS) == pytest.approx(1.0)
    assert sent_seconds([message], sizes, LINKS) == pytest.approx(8.0 * 4)
    assert sent_seconds([message], sizes, LINKS, order=("x", "z", "y", "data")) == pytest.approx(1.0)
    assert sent_seconds([message], sizes, one_bandwidth(LINKS)) == pytest.approx(1.0)
    wide = {"x": 2, "y": 4, "z": 1, "data": 1}
    assert sent_seconds([message._replace(axis="y")], wide, LINKS) == pytest.approx(12.0 * 2)


def test_the_roles_of_axes_decide_which_sends_between_nodes() -> None:
    """Of one layout on (4, 2) and (2, 4), in nodes of four ranks, the axis that sends more is innermost."""
    steps, seen = seen_on(Narrow(), torch.randn(4, 6), (4, 2, 1))
    run = DryRun(
        sizes={"x": 4, "y": 2, "z": 1, "data": 1},
        seconds=0.0,
        messages=(Message("all_reduce", 1e9, "x"), Message("all_reduce", 1e6, "y")),
        profile=seen.profile,
    )
    costs = [grid_cost(run, 1, 1, LINKS, exchanged=exchanged) for exchanged in (True, False)]
    assert [cost.sizes for cost in ranked(costs, None)] == [(4, 2, 1), (2, 4, 1)]
    assert ranked(costs, 0)[0].peak_bytes == costs[0].peak_bytes
    agnostic = [grid_cost(run, 1, 1, one_bandwidth(LINKS), exchanged=exchanged) for exchanged in (True, False)]
    assert agnostic[0].seconds == agnostic[1].seconds
    assert steps.ranks == 8


def test_a_step_that_can_be_run_on_no_grid_says_why() -> None:
    module = Narrow()
    module.norm = nn.SyncBatchNorm(4)
    with pytest.raises(AmpError, match="is a SyncBatchNorm, which is not supported"):
        seen_on(module, torch.randn(4, 6), None)


class Wide(Trained):
    """Nearly all bytes are those of parameters, of which `fsdp` gathers half at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 4000), nn.Linear(4000, 64)

    def loss(self, batch: Any) -> Tensor:
        return self.two(self.one(batch).relu()).square().mean()  # type: ignore[no-any-return]


def by_policy(rank: int, ranks: int, rates: str) -> list[Plan]:
    plans = list[Plan]()
    for budget, own in (("20MB", None), ("6MB", None), ("9MB", None), ("9MB", rates)):
        strategy = AMPStrategy(device_memory=budget, rates=own)
        given: dict[str, Any] = {"devices": ranks, "plugins": [RunningRanks(rank, ranks)], "max_epochs": 1}
        trainer = Trainer(**QUIET, accelerator="cpu", strategy=strategy, **given)
        trainer.fit(Wide(), DataLoader([torch.randn(8, 64)], batch_size=None))  # type: ignore[arg-type]
        assert strategy.plan is not None
        plans.append(strategy.plan)
    return plans


@pytest.mark.ranks
def test_a_policy_takes_it_where_others_do_not_fit_or_are_slow(tmp_path: Path) -> None:
    """Links of 1 MB/s make fsdp slow, which sends parameters, and not tensor3d, which sends features of eight rows."""
    slow = replace(CPU, links=replace(CPU.links, intra_bandwidth=1e6))
    (tmp_path / "rates.json").write_text(slow.to_json())
    plans, _ = run_ranks(by_policy, 2, tmp_path, str(tmp_path / "rates.json"))
    chosen = [plan.strategies[1:] for plan in plans]
    assert chosen == [(), ("tensor3d",), ("fsdp",), ("tensor3d",)]
    assert all(plan.fits and plan.policy == "auto" for plan in plans)
    assert any("needs 8.00 MiB or more" in note for note in plans[1].notes)
    assert any("S1, fsdp takes" in note for note in plans[3].notes)


@pytest.fixture
def deep(tmp_path: Path, monkeypatch: Any) -> str:
    return written_for_processes(tmp_path, monkeypatch, "deep_of_grid")


@IGNORED
@pytest.mark.exhaustive
@pytest.mark.release
def test_the_fastest_of_the_first_grids_is_found_by_training(
    deep: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """One grid is trained on; where three are, the fastest counts, and one that fails does not."""
    out = tmp_path / "plan.json"
    words = ["tune", "--config", deep, "--devices", "2", "--strategies", "tensor3d", "--out", str(out)]
    assert main([*words, "--plans", "1", "--steps", "3"]) == 0
    assert re.search(r"1, 1, 2 +[\d.]+ m?s +[\d.]+ m?s\n", capsys.readouterr().out)
    assert Plan.from_json(out.read_text()).rules[-1].spec.grid == "1x1x2"  # type: ignore[attr-defined]
    seconds = {"1x1x2": "4.0", "1x2x1": "1.0", "2x1x1": ""}

    def run(command: list[str], **_: Any) -> Any:
        given = dict(word.partition("=")[::2] for word in command)
        plan = Plan.read(given["--trainer.strategy.plan"])
        found = seconds[plan.rules[-1].spec.grid]  # type: ignore[attr-defined]
        if found:
            (timer,) = json.loads(given["--trainer.callbacks"])
            Path(timer["init_args"]["path"]).write_text(found)
        return SimpleNamespace(returncode=0 if found else 1, stderr="out of memory\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert main([*words, "--overwrite"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"1, 1, 2 .* 2.00 s\n1, 2, 1 .* 1.00 s\n2, 1, 1 .* fails: out of memory\n", text), text
    assert Plan.from_json(out.read_text()).rules[-1].spec.grid == "1x2x1"  # type: ignore[attr-defined]
    assert main([*words, "--overwrite", "--steps", "2"]) == 2
    assert "which leaves nothing to compare" in capsys.readouterr().err
    assert main(words) == 2
