"""Claim: verify finds modules that nobody wrote for this library equal under the techniques of any module, and names
random draws where blocks are computed again or sharded.
"""

import importlib
from pathlib import Path

import pytest
import torch

from tests.verification.verify_cases import EXAMPLES, verified

pytestmark = [pytest.mark.ranks, pytest.mark.long]


def test_examples_are_equal_and_random_draws_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    transformer, unet = importlib.import_module("gene_transformer"), importlib.import_module("unet")
    torch.manual_seed(0)
    batch = transformer.make_batch(6, 14)
    equal = {
        strategies: (transformer.GeneTransformer(dim=16, layers=2, dropout=0.0), batch, {"strategies": strategies})
        for strategies in ("S1,recompute", "S1,fsdp", "S1,recompute,fsdp")
    }
    drawing = {
        "dropout": (
            transformer.GeneTransformer(dim=16, layers=2, dropout=0.1),
            batch,
            {"strategies": "S1,recompute,fsdp"},
        ),
        "manual optimisation with noise": (unet.UNet(channels=8), unet.make_batch(4, 8), {"strategies": "S1,fsdp"}),
    }
    for name, found in verified(tmp_path, equal | drawing).items():
        if name in equal:
            assert found.ok, str(found)
            assert found.strategies == tuple(name.split(","))
            quantities = {row.quantity for row in found.rows}
            assert {"gradients, step 1", "parameters after 2 steps"} <= quantities
        else:
            assert found.suspects[0].suspect == "random draws", name
            assert name != "dropout" or "blocks.0 (Block)" in found.suspects[0].where
