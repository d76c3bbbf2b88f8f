"""Claim: what a Trainer does around a step goes together with `tensor3d`: accumulation, clipping, recomputed blocks,
optimisers, checkpoints that another grid and one process go on from, other stages than fit.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_amp import AMPStrategy
from lightning_amp.techniques.put_methods import put_methods
from lightning_amp.techniques.tensor3d.grid import Grid as RankGrid
from lightning_amp.techniques.tensor3d.row import TensorParallel3D
from lightning_amp.techniques.tensor3d.units import GridUnits, steps_of
from tests.lightning.strategy.strategy_cases import RunningRanks
from tests.ranks import run_ranks
from tests.techniques.tensor3d.cases import CASES, GPT, Gated
from tests.techniques.tensor3d.test_tensor3d import QUIET, Grid, close


class Other(GPT):
    """With blocks that run again in the backward pass, another optimiser, and a scheduler.

    Args:
        optimizer: Its name in torch.optim.
    """

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer, self.norms = optimizer, list[float]()

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        # clamping is exact where ranks share the rows of a batch
        if torch.is_grad_enabled() and self.optimizer == "Adagrad":
            x.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        return x

    def configure_optimizers(self) -> Any:
        # gradients of keys' biases are zero but for rounding
        made = getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.02, eps=1e-4)
        return {"optimizer": made, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(made, 0.5)}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = getattr(self.trainer.strategy, "gradient_norm", None)
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(grads) if norm is None else norm()))


OPTIONS: dict[str, dict[str, Any]] = {
    "accumulated and clipped": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "clipped by value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    # it has state when it is made; with a hook on a gradient
    "Adagrad": {"optimizer": "Adagrad"},
}
Grids = list[tuple[str, Grid]]
GRIDS: Grids = [("accumulated and clipped", (1, 1, 2)), ("clipped by value", (1, 2, 1)), ("Adagrad", (2, 1, 1))]


def trained(
    grid: Grid | None,
    rank: int = 0,
    ranks: int = 1,
    *,
    optimizer: str = "Adam",
    ckpt: str | None = None,
    epochs: int = 1,
    save: str = "",
    **options: Any,
) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    seed_everything(5, verbose=False)
    batches = [CASES["gpt"].batch() for _ in range(4)]
    given: dict[str, Any] = {"accelerator": "cpu", "max_epochs": epochs, "devices": 1, "use_distributed_sampler": False}
    if grid is not None:
        model = grid[0] * grid[1]
        rows = 4 * model // ranks
        batches = [batch[rank // model * rows :][:rows] for batch in batches]
        given["devices"], given["plugins"] = ranks, [RunningRanks(rank, ranks)]
        given["strategy"] = AMPStrategy(strategies="tensor3d", tensor_grid=grid)
    # an optimiser that is made of its elements only
    module: LightningModule = Other(optimizer).double()
    trainer = Trainer(**QUIET | given | options)
    loader: Any = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, loader, ckpt_path=ckpt)
    if save:
        trainer.save_checkpoint(save)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    valid = trainer.validate(module, loader, verbose=False)[0]["valid"]
    predicted = trainer.predict(module, loader)
    return {"state": state, "norms": module.norms, "valid": valid, "predicted": predicted}


def first_validated(grid: Grid | None, rank: int = 0, ranks: int = 1) -> float:
    """Of a strategy that has not trained, so that no layouts are known."""
    seed_everything(5, verbose=False)
    given: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "use_distributed_sampler": False}
    if grid is not None:
        given |= {"devices": ranks, "plugins": [RunningRanks(rank, ranks)]}
        given["strategy"] = AMPStrategy(strategies="tensor3d", tensor_grid=grid)
    loader: Any = DataLoader([CASES["gpt"].batch()], batch_size=None)  # type: ignore[arg-type]
    return Trainer(**QUIET | given).validate(GPT().double(), loader, verbose=False)[0]["valid"]


def on_ranks(rank: int, ranks: int, folder: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {(name, grid): trained(grid, rank, ranks, **OPTIONS[name]) for name, grid in GRIDS}
    found["first"] = first_validated((2, 1, 1), rank, ranks)
    found["saved"] = trained((2, 1, 1), rank, ranks, save=f"{folder}/grid.ckpt")
    found["resumed"] = trained((1, 1, 2), rank, ranks, ckpt=f"{folder}/grid.ckpt", epochs=2)
    found["from one"] = trained((1, 2, 1), rank, ranks, ckpt=f"{folder}/one.ckpt", epochs=2)
    return found


@pytest.mark.full
@pytest.mark.ranks
def test_what_a_trainer_does_around_a_step_is_exact(tmp_path: Path) -> None:
    """Also `validate`, and `predict`, where ranks have whole parameters."""
    one = trained(None, save=str(tmp_path / "one.ckpt"))
    ranks = run_ranks(on_ranks, 2, tmp_path, str(tmp_path))
    rights = {name: trained(None, **options) for name, options in OPTIONS.items()}
    for name, grid in GRIDS:
        right = rights[name]
        for found in ranks:
            close(found[name, grid]["state"], right["state"], (name, grid))
            assert found[name, grid]["norms"] == pytest.approx(right["norms"], rel=1e-10), (name, grid)
        valid = sum(found[name, grid]["valid"] for found in ranks) / 2
        assert valid == pytest.approx(right["valid"], rel=1e-10), (name, grid)
        predicted = [found[name, grid]["predicted"] for found in ranks]
        for mine, theirs in zip(zip(*predicted, strict=True), right["predicted"], strict=True):
            assert float(sum(mine)) / 2 == pytest.approx(float(theirs), rel=1e-10)
    two = trained(None, epochs=2)
    saved = torch.load(tmp_path / "grid.ckpt", weights_only=False)
    close(saved["state_dict"], one["state"], "saved")
    (states,) = saved["optimizer_states"]
    shapes = [p.shape for p in GPT().parameters()]
    assert [states["state"][i]["exp_avg"].shape for i in range(len(shapes))] == shapes
    close(trained(None, ckpt=str(tmp_path / "grid.ckpt"), epochs=2)["state"], two["state"], "on one process")
    first = first_validated(None)
    for found in ranks:
        assert found["first"] == pytest.approx(first, rel=1e-10)
        close(found["saved"]["state"], one["state"], "after saving")
        close(found["resumed"]["state"], two["state"], "on another grid")
        close(found["from one"]["state"], two["state"], "from one process")


class TwoSteps(Gated):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.one.weight.grad = None
        self.validation_step(batch, batch_idx)
        return self.loss(batch)


def test_a_step_may_call_another_and_drop_a_gradient() -> None:
    module = TwoSteps()
    weight = module.one.weight
    units = GridUnits(module, TensorParallel3D(grid="2x1x1"), RankGrid.dry((2, 1, 1)), begun=True)
    units.cut()
    units.wrap_steps()
    put_methods(module, steps_of(module))
    weight.grad = torch.ones_like(weight)
    loss = module.training_step(torch.randn(4, 5), 0)
    assert weight.grad is None
    with units.backward(loss):
        loss.backward()
    assert all(p.grad is not None for p in module.parameters() if p.requires_grad)
    units.undo()
