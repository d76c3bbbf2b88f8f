"""Claim: parameters that are split in groups of ranks, and are the same in each, train the numbers of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_amp.footprint.profile_module import profile_module
from lightning_amp.techniques.fsdp.bytes_of_ranks import fsdp_peak_bytes
from lightning_amp.techniques.fsdp.row import ON_HOST, FullyShard
from lightning_amp.techniques.fsdp.units import units_of
from tests.lightning.strategy.fsdp_cases import CELLS
from tests.lightning.strategy.hsdp_cases import MODULES, WAYS, four, plain
from tests.lightning.strategy.test_fsdp import RTOL, close
from tests.ranks import run_all
from tests.techniques.fsdp.test_fsdp_bytes import module_and_batch

pytestmark = [pytest.mark.ranks, pytest.mark.exhaustive]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hsdp")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, list[Any]]:
    return run_all(((1, plain), (4, four)), folder, timeout=240)


@pytest.mark.parametrize("name", WAYS)
def test_a_way_to_optimise_gives_what_one_process_gives(runs: Any, name: str) -> None:
    (one,) = runs["plain"]
    for rank, found in enumerate(runs["four"]):
        close(found["ways"][name], one["ways"][name], f"{name}, rank {rank}")


@pytest.mark.parametrize("name", MODULES)
def test_a_module_trains_as_on_one_process(runs: Any, name: str) -> None:
    one = runs["plain"][0]["modules"][name]
    ranks = [found["modules"][name] for found in runs["four"]]
    for rank, found in enumerate(ranks):
        for step, expected in enumerate(one["gradients"]):
            close(found["gradients"][step], expected, f"{name}, rank {rank}, gradients of step {step}")
            norm = torch.stack([grad.square().sum() for grad in expected.values()]).sum().sqrt()
            torch.testing.assert_close(found["norms"][step], norm, rtol=RTOL, atol=0)
        close(found["state"], one["state"], f"{name}, rank {rank}, parameters")
        assert found["restored"]
        assert not found["attributes"]
    for step, cells in enumerate(CELLS[4]):
        losses = torch.stack([found["losses"][step] for found in ranks])
        mean = (losses * torch.tensor(cells)).sum() / sum(cells)
        torch.testing.assert_close(mean, one["losses"][step], rtol=RTOL, atol=0)


def test_single_precision_differs_by_rounding(runs: Any) -> None:
    (one,) = runs["plain"]
    for found in runs["four"]:
        for name, value in one["single"].items():
            torch.testing.assert_close(found["single"][name], value, rtol=1e-4, atol=1e-5)


def test_a_rank_has_its_rows_of_the_group(runs: Any) -> None:
    for rank, found in enumerate(runs["four"]):
        rows = found["counted"]["groups"]["rows"]
        assert rows["blocks.0.0.weight"] == ((4, 5), (3, 5))[rank % 2], "of 7"
        assert rows["shift"] == ((1, 1), (0, 1))[rank % 2], "of 1"
        assert rows["scale"] == (), "it has no dimension and is whole"


def test_between_the_groups_one_sum_of_each_unit_is_sent(runs: Any) -> None:
    for found in runs["four"]:
        among, over_all = (found["counted"][name]["counts"] for name in ("groups", "all"))
        # three blocks that are used, and the root, which is gathered once
        assert among["_allgather_base_"] == over_all["_allgather_base_"] == 2 * 3 + 1
        assert among["alltoall_base_"] == over_all["alltoall_base_"] == 4
        assert among["allreduce_"] == over_all["allreduce_"] + 4


def test_the_predicted_peak_is_the_measured_one(runs: Any) -> None:
    module, batch = module_and_batch("stack")
    predicted = fsdp_peak_bytes(profile_module(module, batch), units_of(module), 2)
    most = max(found["peak"] for found in runs["four"])
    assert abs(predicted - most) <= 0.05 * most, f"predicted {predicted:,}, measured {most:,}"


@pytest.mark.parametrize("job", ["saved", "on the host", "in parts"])
def test_two_epochs_with_a_checkpoint_between_them(folder: Path, runs: Any, job: str) -> None:
    one = runs["plain"][0]["saved"]
    for rank, report in enumerate(runs["four"]):
        found = report[job]
        close(found["state"], one["state"], f"{job}, rank {rank}")
        assert found["whole"]
        for loss in ("val_loss", "test_loss"):
            assert found[loss] == pytest.approx(one[loss], rel=1e-10), loss
    written = {path.name for path in (folder / "parts/epoch=0.ckpt").glob("__*") if path.stat().st_size}
    assert written == {"__0_0.distcp", "__1_0.distcp"}, "of the first group alone"


@pytest.mark.parametrize("name", ["groups/epoch=0.ckpt", "groups/epoch=1.ckpt", "host/epoch=1.ckpt"])
def test_a_checkpoint_is_the_plain_one(folder: Path, runs: Any, name: str) -> None:
    of_one = f"plain/{Path(name).name}"
    found, expected = (torch.load(folder / path, weights_only=True) for path in (name, of_one))
    close(found["state_dict"], expected["state_dict"], name)
    (own,), (state,) = found["optimizer_states"], expected["optimizer_states"]
    assert own["param_groups"] == state["param_groups"]
    assert list(own["state"]) == list(state["state"])
    for index, values in state["state"].items():
        close(own["state"][index], values, f"{name}, state of parameter {index}")


def test_the_policy_splits_within_a_node(runs: Any) -> None:
    assert [found["chosen"] for found in runs["four"]] == [FullyShard(shard_ranks=2)] * 4


def test_that_rows_in_the_hosts_memory_save_nothing_on_a_cpu_is_said(runs: Any) -> None:
    for found in runs["four"]:
        assert ON_HOST in found["notes"]


def test_what_cannot_be_is_told_on_all_ranks(runs: Any) -> None:
    for found in runs["four"]:
        assert (
            "rank 1 gathers the parameters of 'blocks.1', rank 2 gathers the parameters of 'blocks.2'"
            in (found["refused"])
        )
        assert found["three"].startswith(
            "PlanError: fsdp_ranks=3 is not supported, found 4 ranks that average gradients, to be divided"
            " into groups of as many ranks, 2 or more; choose one of [2, 4], or None for one group of all"
        )


def test_groups_that_drift_apart_are_told_once(runs: Any) -> None:
    first, *others = (found["drifts"] for found in runs["four"])
    assert "parameters differ between ranks" in first
    assert "'blocks.0.0.bias' by" in first
    assert "on ranks [3]" in first
    assert not any("differ between ranks" in other for other in others)
