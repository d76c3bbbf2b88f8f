"""Claim: under fsdp any LightningModule trains the numbers of one process with the union of the ranks' cells."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.techniques.contract.sharded_parameter import is_split
from tests.any_module import load, make
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.ranks import run_ranks

NAMES = ("wide_mlp", "gene_transformer", "unet", "evoformer", "cnn")
SIZES: dict[str, dict[str, int]] = {
    "wide_mlp": {"cells": 8},
    "gene_transformer": {"cells": 8, "length": 14},
    "unet": {"images": 8, "side": 8},
    "evoformer": {"samples": 8, "side": 5},
    "cnn": {"samples": 8, "length": 24},
}
CELLS = {1: [[8]] * 3, 2: [[5, 3], [2, 6], [4, 4]]}
"""Cells of each rank, step by step."""
Found = dict[str, Any]


def whole(tensor: Tensor) -> Tensor:
    """All of it, wherever it lies; a collective for a DTensor."""
    full: Any = tensor
    return full.full_tensor().clone() if is_split(tensor) else tensor.detach().clone()


class Record(Callback):
    """Losses, whole gradients and this rank's bytes after every step."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.norms: list[Tensor] = []

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(trainer.callback_metrics["loss"].clone())
        named = module.named_parameters()
        self.gradients.append({name: whole(p.grad) for name, p in named if p.grad is not None})
        if isinstance(trainer.strategy, AMPStrategy):
            self.norms.append(trainer.strategy.gradient_norm().clone())


def module_of(name: str) -> LightningModule:
    """The module without draws, in double precision."""
    module, _ = make(name)
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0
        if isinstance(getattr(child, "dropout", None), float):
            child.dropout = 0.0
    return module.double()


def batches_of(name: str, rank: int, ranks: int) -> list[Any]:
    """A rank's part of every batch."""
    found = []
    for step, cells in enumerate(CELLS[ranks]):
        torch.manual_seed(step)
        batch = load(name).make_batch(**SIZES[name])
        start = sum(cells[:rank])
        found.append(part(batch, slice(start, start + cells[rank])))
    return found


def part(batch: Any, cells: slice) -> Any:
    if isinstance(batch, Tensor):
        return batch[cells]
    if isinstance(batch, dict):
        return {name: value[cells] for name, value in batch.items()}
    return tuple(value[cells] for value in batch)


def without_draws(name: str) -> Callable[[], None]:
    """Let modules draw functions of their cells; returns what ends it."""
    noise, dropout = torch.randn_like, torch.nn.functional.dropout
    torch.randn_like = lambda x, **_: x.flip(-1) * 0.7 + 0.1  # type: ignore[assignment]
    torch.nn.functional.dropout = lambda x, *_, **__: x  # type: ignore[assignment]

    def end() -> None:
        torch.randn_like, torch.nn.functional.dropout = noise, dropout

    return end


def fit(module: LightningModule, batches: list[Any], rank: int, ranks: int) -> Found:
    """Train, on one process with plain Lightning."""
    record = Record()
    strategy = "auto" if ranks == 1 else AMPStrategy(strategies="fsdp")
    options: dict[str, Any] = {"precision": "64-true", "max_steps": -1, "use_distributed_sampler": False}
    trainer = trainer_of(strategy, rank=rank, ranks=ranks, callbacks=[record], num_sanity_val_steps=0, **options)
    loader: Any = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    classes = [type(child) for child in module.modules()]
    trainer.fit(module, loader)
    return {
        "losses": record.losses,
        "gradients": record.gradients,
        "norms": record.norms,
        "state": {name: value.clone() for name, value in module.state_dict().items()},
        "restored": classes == [type(child) for child in module.modules()]
        and all(type(p) is nn.Parameter for p in module.parameters()),
        "hooks": sum(len(child._forward_hooks) + len(child._forward_pre_hooks) for child in module.modules()),
        "attributes": sorted({key for child in module.modules() for key in vars(child) if "fsdp" in key}),
    }


def any_modules(rank: int, ranks: int) -> dict[str, Found]:
    """All modules; a body for ranks."""
    found = {}
    for name in NAMES:
        end = without_draws(name)
        try:
            found[name] = fit(module_of(name), batches_of(name, rank, ranks), rank, ranks)
        finally:
            end()
        if dist.is_initialized():
            dist.barrier()
    return found


pytestmark = pytest.mark.ranks
RTOL = 1e-10


def close(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    assert list(found) == list(expected), where
    for name, value in expected.items():
        assert found[name].shape == value.shape, f"{where}, {name}"
        off = (found[name] - value).abs().max() if value.numel() else torch.zeros(())
        assert off <= RTOL * value.abs().max() + 1e-12, f"{where}, {name}: off by {float(off):.1e}"


def same_checkpoint(found: dict[str, Any], expected: dict[str, Any], where: str = "") -> None:
    """Weights and the state of the optimiser."""
    close(found["state_dict"], expected["state_dict"], f"{where} weights")
    (own,), (state,) = found["optimizer_states"], expected["optimizer_states"]
    assert own["param_groups"] == state["param_groups"]
    assert list(own["state"]) == list(state["state"])
    for index, values in state["state"].items():
        close(own["state"][index], values, f"{where} state of parameter {index}")


def went_on(found: Found, one: Found, where: str) -> None:
    """As one process, after two epochs."""
    close(found["state"], one["state"], where)
    assert found["whole"]
    for loss in ("val_loss", "test_loss"):
        assert found[loss] == pytest.approx(one[loss], rel=1e-10), loss


@pytest.mark.filterwarnings("ignore")
def test_modules_train_as_on_one_process(tmp_path: Path) -> None:
    plain, ranks = any_modules(0, 1), run_ranks(any_modules, 2, tmp_path, timeout=240)
    for name, one in plain.items():
        trains_as_on_one(one, [found[name] for found in ranks], name)


def trains_as_on_one(one: Found, ranks: list[Found], name: str) -> None:
    assert one["gradients"]
    assert len(set(map(float, one["losses"]))) == 3, "it has been trained"
    for rank, found in enumerate(ranks):
        where = f"{name}, rank {rank}"
        for step, expected in enumerate(one["gradients"]):
            close(found["gradients"][step], expected, f"{where}, gradients of step {step}")
            norm = torch.stack([grad.square().sum() for grad in expected.values()]).sum().sqrt()
            torch.testing.assert_close(found["norms"][step], norm, rtol=RTOL, atol=0)
        close(found["state"], one["state"], f"{where}, parameters")
        assert found["restored"], where
        assert found["hooks"] == one["hooks"], where
        assert not found["attributes"], where
    for step, cells in enumerate(CELLS[len(ranks)]):
        losses = torch.stack([found["losses"][step] for found in ranks])
        mean = (losses * torch.tensor(cells)).sum() / sum(cells)
        torch.testing.assert_close(mean, one["losses"][step], rtol=RTOL, atol=0)
