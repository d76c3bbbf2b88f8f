"""Claim: the network of the package scglue, wrapped as in the example, trains under "amp" as on one device.

Two ranks run everything once. "exact" has no dropout, and compares two ranks of unequal numbers of cells with one
process on the union of their cells, in float64; "dropout" has the package's own, whose draws are the ranks' own.
Skipped where scglue is not installed: `pip install '.[scglue]'`.
"""

import importlib.util
import logging
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.techniques.data.batch_norm import is_shared
from tests.lightning.strategy.strategy_cases import RunningRanks
from tests.paths import EXAMPLES
from tests.ranks import run_ranks

# looked for, not imported: its own imports warn of much that is deprecated
pytestmark = pytest.mark.skipif(importlib.util.find_spec("scglue") is None, reason="scglue is not installed")

EXAMPLE = EXAMPLES / "scglue_lightning.py"
CELLS, STEPS = (5, 3), 4
"""Cells of each modality on the two ranks, and steps."""


class Watch(Callback):
    """What trains, and with which losses."""

    def __init__(self, types: dict[str, type]) -> None:
        self.types = types
        self.shared: set[type] = set()
        self.losses: list[Tensor] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.types == {name: type(module) for name, module in pl_module.named_modules()}
        changed = [module for module in pl_module.modules() if "forward" in vars(module)]
        assert all(map(is_shared, changed))
        self.shared = {*map(type, changed)}

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self.losses.append(loss.detach().clone())


def example() -> Any:
    spec = importlib.util.spec_from_file_location("scglue_lightning", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batches_of(data: SingleCellDataModule, rank: int | None) -> list[Any]:
    """The cells of a rank, or with None those of all ranks."""
    own = slice(None) if rank is None else slice(sum(CELLS[:rank]), sum(CELLS[: rank + 1]))
    steps = [batch for _, batch in zip(range(STEPS), data.train_dataloader(), strict=False)]
    assert len(steps) == STEPS
    return [
        {
            name: {key: part[own].double() if part.is_floating_point() else part[own] for key, part in c.items()}
            for name, c in batch.items()
        }
        for batch in steps
    ]


def plain_descent(network: nn.Module) -> list[torch.optim.Optimizer]:
    judge = list(network.du.parameters())
    others = [p for name, p in network.named_parameters() if not name.startswith("du.")]
    return [torch.optim.SGD(parameters, lr=0.02, momentum=0.5) for parameters in (judge, others)]


def train(
    glue: Any, data: SingleCellDataModule, rank: int | None, *, dropout: float = 0.0, **options: Any
) -> dict[str, Any]:
    """Train with "amp" on the running ranks, or with rank None on one device without it."""
    torch.manual_seed(0)
    module = glue.LightningSCGLUE(glue.build(data, dim=6, hidden=8, dropout=dropout), data.graph).double()
    if not dropout:
        # RMSprop would make steps of the rounding of gradients that are 0, as those of a bias before a BatchNorm
        module.configure_optimizers = lambda: plain_descent(module.network)
    start = {key: value.clone() for key, value in module.state_dict().items()}
    watch = Watch({name: type(child) for name, child in module.named_modules()})
    ranks = [] if rank is None else [RunningRanks(rank, dist.get_world_size())]
    strategy: Any = AMPStrategy(**options) if ranks else "auto"
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(
        **dict.fromkeys((*quiet, "use_distributed_sampler"), False),
        accelerator="cpu",
        strategy=strategy,
        devices=dist.get_world_size() if ranks else 1,
        plugins=ranks,
        max_epochs=1,
        callbacks=[watch],
    )
    cells = batches_of(data, rank if dist.get_world_size() > 1 else None)
    trainer.fit(module, DataLoader(cells, batch_size=None))  # type: ignore[arg-type]
    return {
        "start": start,
        "state": module.state_dict(),
        "parameters": [name for name, _ in module.named_parameters()],
        "losses": torch.stack(watch.losses),
        "shared": watch.shared,
        "left": [name for name, child in module.named_modules() if "forward" in vars(child)],
        "plan": strategy.plan.strategies if ranks else None,
    }


def on_ranks(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    glue, data = example(), SingleCellDataModule(folder, batch_size=sum(CELLS), val_fraction=0)
    data.setup()
    seen = {"dropout": train(glue, data, rank, dropout=0.2)}
    if world_size == 1:
        seen["alone"] = train(glue, data, None, dropout=0.2)
        return seen
    seen["exact"] = train(glue, data, rank)
    seen["own statistics"] = train(glue, data, rank, share_batch_statistics=False)
    if rank == 0:
        seen["union"] = train(glue, data, None)
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scglue") / "data"
    synthesize(path, cells=40, bins=12, strata=3, genes=15, chromosomes=1, depth=200)
    return path


@pytest.fixture(scope="module")
def two(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(on_ranks, 2, tmp_path_factory.mktemp("two"), folder)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert list(one) == list(other), "the same state"
    return max(((one[k] - other[k]).double().norm() / (1 + other[k].double().norm())).item() for k in one)


@pytest.mark.ranks
def test_two_ranks_train_as_one_device_on_the_union(two: list[dict[str, Any]]) -> None:
    union = two[0]["union"]
    assert all(not torch.equal(union["start"][key], union["state"][key]) for key in union["parameters"])
    for rank in two:
        assert distance(rank["exact"]["start"], union["start"]) == 0
        assert distance(rank["exact"]["state"], union["state"]) < 1e-10
    shares = [n / sum(CELLS) for n in CELLS]
    losses = sum(share * rank["exact"]["losses"] for share, rank in zip(shares, two, strict=True))
    assert len(losses) == 2 * STEPS, "the discriminator's and the generator's"
    torch.testing.assert_close(losses, union["losses"], rtol=1e-10, atol=0)


@pytest.mark.ranks
def test_ranks_stay_equal_with_the_packages_own_dropout(two: list[dict[str, Any]]) -> None:
    for which in ("exact", "dropout"):
        first, second = (rank[which]["state"] for rank in two)
        assert all(torch.equal(first[key], second[key]) for key in first)
        assert not torch.equal(two[0][which]["losses"], two[1][which]["losses"]), "each has its own cells"


@pytest.mark.ranks
def test_nothing_but_batch_statistics_is_changed_and_the_plan_says_why(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert rank["exact"]["shared"] == {nn.BatchNorm1d}
        assert rank["own statistics"]["shared"] == set()
        assert rank["exact"]["left"] == []
        assert rank["exact"]["plan"] == ("S1",)


@pytest.mark.ranks
def test_one_rank_trains_as_without_the_strategy(folder: Path, tmp_path: Path) -> None:
    (found,) = run_ranks(on_ranks, 1, tmp_path, folder)
    amp, alone = found["dropout"], found["alone"]
    assert torch.equal(amp["losses"], alone["losses"])
    assert all(torch.equal(value, alone["state"][key]) for key, value in amp["state"].items())


@pytest.mark.exhaustive
@pytest.mark.release
def test_the_example_runs_and_writes_what_it_says(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--out", str(tmp_path), "--epochs", "3"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=250)
    assert run.returncode == 0, run.stderr
    assert "plan            S1 data parallel" in run.stderr
    losses = [float(value) for value in re.findall(r"generator_loss (\S+)", run.stdout)]
    assert len(losses) == 3
    assert losses[-1] < losses[0] / 2
    for name in ("hic", "rna"):
        embedding = anndata.read_h5ad(tmp_path / f"embeddings_{name}.h5ad").obsm["X_amp"]
        assert embedding.shape == (200, 32)
        assert np.isfinite(embedding).all()
    assert run.stdout.count("after training: ") == 2
