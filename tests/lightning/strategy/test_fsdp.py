"""Claim: under fsdp any LightningModule trains the numbers of one process with the union of the ranks' cells.

The five modules of examples/any_module/ that need nothing else, on 2 and on 4 ranks of unequal numbers of cells, with
automatic and manual optimisation, several optimisers, clipping by the module, and batch statistics shared over ranks:
loss, all gradients and parameters after three steps, in double precision. Each group of ranks runs once.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning.strategy.fsdp_cases import CELLS, NAMES, Found, any_modules
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
RTOL = 1e-10
RANKS = (2, pytest.param(4, marks=[pytest.mark.exhaustive, pytest.mark.release]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Found]]]:
    class Runs(dict[int, list[dict[str, Found]]]):
        def __missing__(self, ranks: int) -> list[dict[str, Found]]:
            meet = tmp_path_factory.mktemp("meet")
            self[ranks] = run_ranks(any_modules, ranks, meet, Path(), timeout=240)
            return self[ranks]

    return Runs()


def close(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    assert list(found) == list(expected), where
    for name, value in expected.items():
        assert found[name].shape == value.shape, f"{where}, {name}"
        off = (found[name] - value).abs().max() if value.numel() else torch.zeros(())
        assert off <= RTOL * value.abs().max() + 1e-12, f"{where}, {name}: off by {float(off):.1e}"


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_a_module_trains_as_on_one_process(runs: Any, name: str, ranks: int) -> None:
    (one,) = runs[1]
    for rank, found in enumerate(runs[ranks]):
        where = f"{name}, rank {rank} of {ranks}"
        for step, expected in enumerate(one[name]["gradients"]):
            close(found[name]["gradients"][step], expected, f"{where}, gradients of step {step}")
            norm = torch.stack([grad.square().sum() for grad in expected.values()]).sum().sqrt()
            torch.testing.assert_close(found[name]["norms"][step], norm, rtol=RTOL, atol=0)
        close(found[name]["state"], one[name]["state"], f"{where}, parameters")


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_the_mean_of_the_losses_by_cells_is_that_of_one_process(runs: Any, name: str, ranks: int) -> None:
    for step, cells in enumerate(CELLS[ranks]):
        losses = torch.stack([found[name]["losses"][step] for found in runs[ranks]])
        mean = (losses * torch.tensor(cells)).sum() / sum(cells)
        torch.testing.assert_close(mean, runs[1][0][name]["losses"][step], rtol=RTOL, atol=0)


def test_what_is_compared_has_been_trained(runs: Any) -> None:
    for name, one in runs[1][0].items():
        assert one["gradients"], name
        assert len(set(map(float, one["losses"]))) == 3, name


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_the_module_is_as_it_was(runs: Any, name: str, ranks: int) -> None:
    for found in runs[ranks]:
        assert found[name]["restored"]
        assert found[name]["hooks"] == runs[1][0][name]["hooks"]
        assert not found[name]["attributes"]
