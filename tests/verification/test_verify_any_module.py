"""Claim: verify finds modules that nobody wrote for this library equal under the techniques of any module, and names
what breaks equivalence where blocks are computed again or sharded.
"""

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_amp.verification.verify import compare, subject_of
from lightning_amp.verification.workers import Workers
from tests.paths import ROOT

pytestmark = [pytest.mark.ranks, pytest.mark.long]

EXAMPLES = str(ROOT / "examples" / "any_module")


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    # processes are to find the examples' classes
    sys.path.insert(0, EXAMPLES)
    with Workers(2, tmp_path_factory.mktemp("workers"), timeout=240) as pool:
        yield pool
    sys.path.remove(EXAMPLES)


def verified(workers: Workers, name: str, strategies: str, *, dropout: bool = False) -> Any:
    file = importlib.import_module(name)
    torch.manual_seed(0)
    if name == "gene_transformer":
        rate = 0.1 if dropout else 0.0
        # each block draws at two places, each of which is probed by runs of its own
        module, batch = file.GeneTransformer(dim=16, layers=2, dropout=rate), file.make_batch(6, 14)
    else:
        module, batch = file.UNet(channels=8), file.make_batch(4, 8)
    (workers.folder / "subject.pt").write_bytes(subject_of(module, batch, 2))
    (workers.folder / "batches.pt").unlink(missing_ok=True)
    options = {"strategies": strategies}
    return compare(workers, devices=2, options=options, steps=2, precisions=("float64",))


@pytest.mark.parametrize("strategies", ["S1,recompute", "S1,fsdp", "S1,recompute,fsdp"])
def test_an_example_is_equal(workers: Workers, strategies: str) -> None:
    found = verified(workers, "gene_transformer", strategies)
    assert found.ok, str(found)
    assert found.strategies == tuple(strategies.split(","))
    quantities = {row.quantity for row in found.rows}
    assert {"forward, step 1", "gradients, step 1", "parameters after 2 steps"} <= quantities


@pytest.mark.exhaustive
@pytest.mark.release
def test_masks_of_the_ranks_own_are_named(workers: Workers) -> None:
    """A block that is computed again draws its masks again, and a sharded one has another class."""
    found = verified(workers, "gene_transformer", "S1,recompute,fsdp", dropout=True)
    assert not found.ok
    assert {culprit.cause for culprit in found.culprits} == {"random draws"}
    sites = " ".join(culprit.where for culprit in found.culprits)
    assert "blocks.0 (Block)" in sites
    assert "FSDP" not in sites


@pytest.mark.exhaustive
@pytest.mark.release
def test_manual_optimisation_with_noise(workers: Workers) -> None:
    found = verified(workers, "unet", "S1,fsdp")
    assert not found.ok, "noise is drawn by each rank"
    assert {culprit.cause for culprit in found.culprits} == {"random draws"}
