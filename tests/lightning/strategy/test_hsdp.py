"""Claim: parameters that are split in groups of ranks, and are the same in each, train the numbers of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_amp.footprint.profile_module import profile_module
from lightning_amp.techniques.fsdp.bytes_of_ranks import fsdp_peak_bytes
from lightning_amp.techniques.fsdp.look import units_of
from lightning_amp.techniques.fsdp.row import ON_HOST, FullyShard
from tests.lightning.strategy.hsdp_cases import WAYS, four, plain
from tests.lightning.strategy.test_fsdp import close, trains_as_on_one
from tests.ranks import run_all
from tests.techniques.fsdp.test_fsdp_bytes import module_and_batch

pytestmark = [pytest.mark.ranks, pytest.mark.exhaustive]
OF_STEP = 16
"""Sums that a step without groups sends too."""


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


def test_a_module_trains_as_on_one_process(runs: Any) -> None:
    trains_as_on_one(runs["plain"][0]["cnn"], [found["cnn"] for found in runs["four"]])


def test_single_precision_differs_by_rounding(runs: Any) -> None:
    for found in runs["four"]:
        for name, value in runs["plain"][0]["ways"]["single"].items():
            torch.testing.assert_close(found["ways"]["single"][name], value, rtol=1e-4, atol=1e-5)


def test_a_rank_has_its_rows_of_the_group_and_one_sum_of_each_unit_is_sent_between_groups(runs: Any) -> None:
    for rank, found in enumerate(runs["four"]):
        assert found["rows"]["blocks.0.0.weight"] == ((4, 5), (3, 5))[rank % 2], "of 7"
        assert found["rows"]["shift"] == ((1, 1), (0, 1))[rank % 2], "of 1"
        assert found["rows"]["scale"] == (), "it has no dimension and is whole"
        # three blocks that are used, and the root, which is gathered once
        sent = {name: found["counts"][name] for name in ("_allgather_base_", "alltoall_base_", "allreduce_")}
        assert sent == {"_allgather_base_": 2 * 3 + 1, "alltoall_base_": 4, "allreduce_": 4 + OF_STEP}


def test_the_predicted_peak_is_the_measured_one(runs: Any) -> None:
    module, batch = module_and_batch("stack")
    predicted = fsdp_peak_bytes(profile_module(module, batch), units_of(module), 2)
    most = max(found["peak"] for found in runs["four"])
    assert abs(predicted - most) <= 0.05 * most, f"predicted {predicted:,}, measured {most:,}"


@pytest.mark.parametrize("job", ["saved", "on the host"])
def test_two_epochs_with_a_checkpoint_between_them(folder: Path, runs: Any, job: str) -> None:
    one = runs["plain"][0]["saved"]
    for rank, report in enumerate(runs["four"]):
        found = report[job]
        close(found["state"], one["state"], f"{job}, rank {rank}")
        assert found["whole"]
        for loss in ("val_loss", "test_loss"):
            assert found[loss] == pytest.approx(one[loss], rel=1e-10), loss
    written = {path.name for path in (folder / "host/epoch=1.ckpt").glob("__*") if path.stat().st_size}
    assert written == {"__0_0.distcp", "__1_0.distcp"}, "of the first group alone"


@pytest.mark.parametrize("name", ["groups/epoch=0.ckpt", "groups/epoch=1.ckpt"])
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
        assert "'blocks.1', rank 2 gathers the parameters of 'blocks.2'" in found["refused"]
        assert "fsdp_ranks=3 is not supported, found 4 ranks" in found["three"]


def test_groups_that_drift_apart_are_told_once(runs: Any) -> None:
    first, *others = (found["drifts"] for found in runs["four"])
    for words in ("parameters differ between ranks", "'blocks.0.0.bias' by", "on ranks [3]"):
        assert words in first
    assert not any("differ between ranks" in other for other in others)
