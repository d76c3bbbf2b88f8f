"""Claim: what a pipeline would train otherwise than one process is refused on all ranks, before a parameter changes."""

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_amp.errors import AmpError, DataError
from lightning_amp.techniques.pipeline.steps.sample_check import cut
from tests.lightning.pipeline.pipeline_cases import CNN, GPT, Batch, fit, tokens, trainer_of
from tests.lightning.pipeline.test_pipeline import close
from tests.ranks import run_ranks


class Masked(GPT):
    """A mean over the entries that are not masked: of the first samples fewer."""

    def loss(self, batch: Batch) -> Tensor:
        y = batch["y"].clone()
        y[batch["x"][:, 0] < 5, :3] = -100
        return F.cross_entropy(self(batch["x"]).flatten(0, 1), y.flatten())


class Summed(GPT):
    # Adam would divide gradients that are zero but for rounding by something as small
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="sum")


class Contrastive(Summed):
    """Every sample among the others of the batch."""

    def loss(self, batch: Batch) -> Tensor:
        h = self(batch["x"]).mean(1)
        return F.cross_entropy(h @ h.T, torch.arange(len(h)))


class Drawn(GPT):
    """Inputs are hidden at random, and the loss is of these."""

    def loss(self, batch: Batch) -> Tensor:
        hidden = torch.rand(batch["x"].shape) < 0.5
        logits = self(batch["x"].masked_fill(hidden, 0))
        return F.cross_entropy(logits.flatten(0, 1), batch["y"].masked_fill(~hidden, -100).flatten())


class Hooked(CNN):
    def __init__(self) -> None:
        super().__init__()
        self.features[0].register_forward_hook(lambda *_: None)


class HookedGradient(CNN):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(lambda grad: grad / 2)


class NoList(CNN):
    def __init__(self) -> None:
        super().__init__()
        self.features, self.classifier = nn.Conv2d(1, 1, 1), nn.Linear(64, 3)  # type: ignore[assignment]


class Twice(CNN):
    def __init__(self) -> None:
        super().__init__()
        self.features.append(self.features[1])


CASES: dict[str, tuple[type[LightningModule], dict[str, Any], str]] = {
    "masked": (Masked, {}, "it is no mean over samples"),
    "sum": (Summed, {}, "it is no mean over samples"),
    "drawn": (Drawn, {}, "it is no mean over samples"),
    "contrastive": (Contrastive, {}, "it is no mean over samples"),
    "hooks": (Hooked, {}, "forward_hooks"),
    "hooks on gradients": (HookedGradient, {}, "hooks on its gradient"),
    "no list": (NoList, {}, "requires a ModuleList or Sequential"),
    "twice": (Twice, {}, "a module in it twice"),
    "finite": (GPT, {"check_finite": True}, "check_finite=True"),
    "shards": (GPT, {"save_distributed_checkpoint": True}, "save_distributed_checkpoint=True"),
    "rounds": (GPT, {"schedule": "interleaved", "micro_batches": 5}, "rounds of unequal length"),
}


def refusals(rank: int, ranks: int) -> dict[str, tuple[str, bool]]:
    """What was said, and whether the module is as it was."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    found = {}
    for name, (kind, settings, _) in CASES.items():
        module = kind()
        before = {key: value.clone() for key, value in module.state_dict().items()}
        batches = tokens() if isinstance(module, GPT) else [(torch.randn(4, 1, 8, 8).double(), torch.arange(4) % 3)]
        try:
            # one micro-batch alone has any loss
            trainer = trainer_of((rank, ranks), {"micro_batches": 4, **settings}, {})
            trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
            found[name] = ("", True)
        except AmpError as error:
            own = [(key, value) for key, value in module.state_dict().items() if not value.isnan().any()]
            found[name] = (str(error), all(torch.equal(value, before[key]) for key, value in own))
    return found


@pytest.mark.full
@pytest.mark.ranks
def test_all_ranks_refuse(tmp_path: Path) -> None:
    for found in run_ranks(refusals, 2, tmp_path, timeout=200):
        for name, (*_, told) in CASES.items():
            said, unchanged = found[name]
            assert told in said, f"{name}: {said!r}"
            assert unchanged, name


UNCUT: dict[str, tuple[type[LightningModule], dict[str, Any]]] = {
    "one micro-batch": (Masked, {"micro_batches": 1}),
    "masked": (Masked, {"schedule": "gpipe"}),
    "sum": (Summed, {"schedule": "gpipe"}),
    "contrastive": (Contrastive, {"schedule": "gpipe"}),
}


@pytest.mark.full
@pytest.mark.ranks
def test_any_loss_is_exact_where_it_is_computed_for_the_whole_batch(tmp_path: Path) -> None:
    for found in run_ranks(whole_losses, 2, tmp_path, timeout=100):
        for name, (kind, _) in UNCUT.items():
            close(found[name], fit(None, kind(), {}, {}))


def whole_losses(rank: int, ranks: int) -> dict[str, dict[str, Any]]:
    return {name: fit((rank, ranks), kind(), settings, {}) for name, (kind, settings) in UNCUT.items()}


def test_a_batch_is_cut_by_samples_or_refused() -> None:
    parts, sizes = cut({"x": torch.arange(7), "scale": torch.tensor(2.0), "name": "a"}, 3)
    assert sizes == [2, 2, 3]
    assert [len(part["x"]) for part in parts] == sizes
    assert all(part["scale"] == 2.0 and part["name"] == "a" for part in parts)
    assert cut([torch.arange(2)], 5)[1] == [1, 1]
    for odd in (
        {"x": torch.arange(7), "edges": torch.ones(2, 9)},
        {"x": torch.arange(7), "names": list("abcdefg")},
        {"x": torch.arange(7), "graph": object()},
        {"scale": torch.tensor(2.0)},
    ):
        with pytest.raises(DataError, match="micro-batches"):
            cut(odd, 3)
