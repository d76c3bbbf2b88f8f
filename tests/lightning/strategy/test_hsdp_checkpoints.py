"""Claim: a run in groups of ranks goes on from any checkpoint, and any other run from its own, files and directories.

Four ranks in two groups of two, two ranks under fsdp and S1, and one process with plain Lightning.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning.strategy.hsdp_cases import four_resumed, one_resumed, plain_saved, two_resumed
from tests.lightning.strategy.test_fsdp import close
from tests.ranks import run_all

pytestmark = [pytest.mark.exhaustive, pytest.mark.release]
JOBS = [
    *(("four_resumed", f"from {name}") for name in ("plain", "parts", "all")),
    ("four_resumed", "in parts"),
    *(("two_resumed", name) for name in ("fsdp", "S1")),
    *(("one_resumed", f"from {name}") for name in ("groups", "converted")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hsdp")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, list[Any]]:
    return run_all(
        ((1, plain_saved), (4, four_resumed), (2, two_resumed), (1, one_resumed)), folder, timeout=240
    )


@pytest.mark.parametrize(("body", "job"), JOBS)
def test_training_goes_on_from_any_checkpoint(runs: Any, body: str, job: str) -> None:
    one = runs["plain_saved"][0]["saved"]
    for rank, report in enumerate(runs[body]):
        found = report[job]
        close(found["state"], one["state"], f"{job}, rank {rank}")
        assert found["whole"]
        for loss in ("val_loss", "test_loss"):
            assert found[loss] == pytest.approx(one[loss], rel=1e-10), loss


def test_a_converted_directory_is_the_plain_checkpoint(folder: Path, runs: Any) -> None:
    found, expected = (
        torch.load(folder / name, weights_only=True) for name in ("converted.ckpt", "plain/epoch=0.ckpt")
    )
    close(found["state_dict"], expected["state_dict"], "weights")
    (own,), (state,) = found["optimizer_states"], expected["optimizer_states"]
    assert list(own["state"]) == list(state["state"])
    for index, values in state["state"].items():
        close(own["state"][index], values, f"state of parameter {index}")


def test_the_first_group_alone_writes_a_directory(folder: Path, runs: Any) -> None:
    written = {
        name: {path.name for path in (folder / name / "epoch=0.ckpt").glob("__*") if path.stat().st_size}
        for name in ("parts", "all")
    }
    assert written["parts"] == {"__0_0.distcp", "__1_0.distcp"}
    assert written["all"] == {f"__{rank}_0.distcp" for rank in range(4)}
