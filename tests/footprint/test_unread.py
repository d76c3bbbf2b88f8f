"""Claim: a step that logs numbers of `.item()` is counted without values; one that decides by them is not."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_amp import profile
from lightning_amp.footprint.copies import fake_copy
from lightning_amp.footprint.copies.known_values import DataDependent

N = 12


class Step(LightningModule):
    def __init__(self, take: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.take, self.losses = nn.Linear(N, N), nn.Linear(N, 2), take, []
        self.total, self.correct = 0.0, 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        found = self.second(self.first(batch).relu())
        loss = found.square().mean()
        taken = self.take(self, loss, (found.argmax(-1) == 1).sum())
        return loss * taken if isinstance(taken, float | Tensor) else loss + (1 if taken else 0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def adds(step: Any, loss: Tensor, correct: Tensor) -> None:
    step.total += loss.item() * 2 - 1
    step.correct += correct.item()
    step.accuracy = step.correct / N


COUNTED = {
    "collected": lambda step, loss, correct: step.losses.append(loss.item()),
    "added up": adds,
    "logged": lambda step, loss, correct: step.log("loss", loss.item()),
    "a share is logged": lambda step, loss, correct: step.log("share", correct.item() / N, prog_bar=True),
    "printed": lambda step, loss, correct: f"{loss.item():.3f} of {correct.item():d}" + str(loss.item()),
    "a mean": lambda step, loss, correct: step.losses.append(sum([loss.item(), loss.detach().item()]) / 2),
    "a factor": lambda step, loss, correct: 1 / loss.item(),
    "finite": lambda step, loss, correct: None if math.isfinite(loss.item()) else 1 / 0,
}
DECIDES = {
    "a branch": lambda step, loss, correct: loss.item() > 3,
    "equal": lambda step, loss, correct: correct.item() == 0,
    "the best": lambda step, loss, correct: min(1.0, loss.item()),
    "true": lambda step, loss, correct: bool(correct.item()),
    "a length": lambda step, loss, correct: torch.zeros(correct.item()).sum(),
    "a range": lambda step, loss, correct: [*range(correct.item())],
    "a slice": lambda step, loss, correct: step.first.weight[: correct.item()].sum(),
    "an int": lambda step, loss, correct: step.losses.append(int(loss.item())),
    "rounded": lambda step, loss, correct: step.losses.append(round(loss.item())),
    "a whole number for torch": lambda step, loss, correct: torch.ones(3, dtype=torch.int64).mul(correct.item()).sum(),
    "known to a set": lambda step, loss, correct: correct.item() in {1, 2},
    "float()": lambda step, loss, correct: float(loss) > 3,
    "sum of floats": lambda step, loss, correct: sum([loss.item(), 1.0]) / 2 > 1,
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_number_that_decides_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, item = Step(COUNTED[name]), torch.Tensor.item
    counted = profile(module, torch.randn(N, N))
    assert counted.reason == ""
    assert (module.losses, module.total, module.correct) == ([], 0.0, 0)

    def refuses() -> Any:
        raise DataDependent("not to be taken")

    monkeypatch.setattr(fake_copy, "numbers_may_be_taken", refuses)
    measured = profile(module, torch.randn(N, N))
    assert measured.reason
    assert (counted.peak_bytes, counted.by_kind) == (measured.peak_bytes, measured.by_kind)
    assert torch.Tensor.item is item
    assert "item" not in vars(torch._subclasses.fake_tensor.FakeTensor)


@pytest.mark.parametrize("name", DECIDES)
def test_a_number_that_decides(name: str) -> None:
    reason = profile(Step(DECIDES[name]), torch.randn(N, N)).reason
    assert "reads the value of a tensor" in reason or "fails on tensors without values" in reason
    assert "test_unread.py" in reason
