"""Claim: what Lightning offers beside plain steps works under fsdp as on one process, or is refused on all ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning.strategy.fsdp_features import MODULES, WAYS, Blocks, pair, plain
from tests.lightning.strategy.fsdp_refused import REFUSED
from tests.lightning.strategy.test_fsdp import close
from tests.ranks import run_all

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, list[Any]]:
    return run_all(((1, plain), (2, pair)), folder, timeout=240)


@pytest.mark.parametrize("name", [*WAYS, *(kind.__name__ for kind in MODULES)])
def test_a_way_to_optimise_gives_what_one_process_gives(runs: Any, name: str) -> None:
    (one,) = runs["plain"]
    for rank, found in enumerate(runs["pair"]):
        close(found["ways"][name], one["ways"][name], f"{name}, rank {rank}")


def test_what_is_compared_has_been_trained(runs: Any) -> None:
    start, end = Blocks().state_dict(), runs["plain"][0]["ways"]["Blocks"]
    moved = {name for name, value in end.items() if (value - start[name]).abs().max() > 1e-4}
    assert {"first.weight", "back.weight", "blocks.1.2.bias", "scale", "shift", "steps"} <= moved
    assert "idle.0.weight" not in moved, "no loss reads it, and it has no gradient to decay by"


@pytest.mark.parametrize("name", ["offloaded", "checked"])
def test_rows_in_the_hosts_memory_and_gradients_that_are_looked_at(runs: Any, name: str) -> None:
    for found in runs["pair"]:
        close(found[name], runs["plain"][0]["ways"]["Blocks"], name)


def test_half_precision_trains_as_under_ddp(runs: Any) -> None:
    for found in runs["pair"]:
        for name, value in found["mixed"]["ddp"].items():
            off = (found["mixed"]["fsdp"][name] - value).norm()
            assert off <= 2e-2 * value.norm() + 1e-7, f"{name}: off by {off:.1e}"


@pytest.mark.parametrize("job", ["saved", "in parts", "from plain", "from parts"])
def test_training_goes_on_from_any_checkpoint(runs: Any, job: str) -> None:
    """One process goes on from any, as its own are equal to them (below)."""
    one = runs["plain"][0]["saved"]
    for rank, report in enumerate(runs["pair"]):
        found = report[job]
        close(found["state"], one["state"], f"{job}, rank {rank}")
        assert found["whole"]
        for loss in ("val_loss", "test_loss"):
            assert found[loss] == pytest.approx(one[loss], rel=1e-10), loss


def test_prediction_may_take_unlike_numbers_of_batches(runs: Any) -> None:
    (one,) = runs["plain"]
    first, second = (report["saved"]["predicted"] for report in runs["pair"])
    assert (len(first), len(second)) == (3, 4)
    for step, expected in enumerate(one["saved"]["predicted"]):
        torch.testing.assert_close(torch.cat([first[step], second[step]]), expected, rtol=1e-10, atol=1e-12)


def test_a_checkpoint_is_the_plain_one(folder: Path, runs: Any) -> None:
    names = ("fsdp/epoch=0.ckpt", "converted.ckpt", "plain/epoch=0.ckpt")
    *saved, plain_one = (torch.load(folder / name, weights_only=True) for name in names)
    for found in saved:
        close(found["state_dict"], plain_one["state_dict"], "weights")
        (own,), (expected,) = found["optimizer_states"], plain_one["optimizer_states"]
        assert own["param_groups"] == expected["param_groups"]
        assert list(own["state"]) == list(expected["state"])
        for index, state in expected["state"].items():
            close(own["state"][index], state, f"state of parameter {index}")
    one, two = (saved[0]["state_dict"][f"{name}.weight"] for name in ("first", "back"))
    assert one.data_ptr() == two.data_ptr(), "tied, as in a plain checkpoint"


def test_every_rank_writes_its_rows_into_a_directory(folder: Path, runs: Any) -> None:
    written = {path.name for path in (folder / "parts" / "epoch=0.ckpt").iterdir()}
    assert {"__0_0.distcp", "__1_0.distcp", "meta.pt", ".metadata"} <= written


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_on_all_ranks(runs: Any, name: str) -> None:
    for found in runs["pair"]:
        told, restored = found["refused"][name]
        assert REFUSED[name][2] in told
        assert restored, "the module is a plain one again"
