"""Claim: under fsdp any LightningModule trains the numbers of one process with the union of the ranks' cells."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning.strategy.fsdp_cases import CELLS, NAMES, Found, any_modules
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
RTOL = 1e-10


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Found]]]:
    return {
        ranks: run_ranks(any_modules, ranks, tmp_path_factory.mktemp("meet"), Path(), timeout=240) for ranks in (1, 2)
    }


def close(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    assert list(found) == list(expected), where
    for name, value in expected.items():
        assert found[name].shape == value.shape, f"{where}, {name}"
        off = (found[name] - value).abs().max() if value.numel() else torch.zeros(())
        assert off <= RTOL * value.abs().max() + 1e-12, f"{where}, {name}: off by {float(off):.1e}"


@pytest.mark.parametrize("name", NAMES)
def test_a_module_trains_as_on_one_process(runs: Any, name: str) -> None:
    trains_as_on_one(runs[1][0][name], [found[name] for found in runs[2]])


def trains_as_on_one(one: Found, ranks: list[Found]) -> None:
    assert one["gradients"]
    assert len(set(map(float, one["losses"]))) == 3, "it has been trained"
    for rank, found in enumerate(ranks):
        where = f"rank {rank}"
        for step, expected in enumerate(one["gradients"]):
            close(found["gradients"][step], expected, f"{where}, gradients of step {step}")
            norm = torch.stack([grad.square().sum() for grad in expected.values()]).sum().sqrt()
            torch.testing.assert_close(found["norms"][step], norm, rtol=RTOL, atol=0)
        close(found["state"], one["state"], f"{where}, parameters")
        assert found["restored"]
        assert found["hooks"] == one["hooks"]
        assert not found["attributes"]
    for step, cells in enumerate(CELLS[len(ranks)]):
        losses = torch.stack([found["losses"][step] for found in ranks])
        mean = (losses * torch.tensor(cells)).sum() / sum(cells)
        torch.testing.assert_close(mean, one["losses"][step], rtol=RTOL, atol=0)
