"""Claim: a watched loss and a capture change nothing for others: torch functions are passed on as they are, and other
threads read the step's number.
"""

from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_amp.graph.capture import capture
from lightning_amp.lightning.steps.uneven_means import MeansOverLabels


class Names(TorchFunctionMode):
    """Collects the functions that torch passes on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **kwargs or {})


def test_a_watched_loss_is_passed_on_as_the_function_itself() -> None:
    own, logits, labels = F.cross_entropy, torch.randn(4, 3, requires_grad=True), torch.zeros(4, dtype=torch.long)
    seen = []
    for watched in (False, True):
        with Names() as names:
            if watched:
                with MeansOverLabels(looks=True).watching():
                    F.cross_entropy(logits, labels)
            else:
                F.cross_entropy(logits, labels)
        seen.append(names.seen)
    assert seen[0] == seen[1] == [own]


class Head(nn.Module):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(x, labels)


def test_a_watched_loss_is_captured() -> None:
    with MeansOverLabels(looks=True).watching():
        found = capture(Head(), (torch.randn(4, 3, requires_grad=True), torch.zeros(4, dtype=torch.long)), {}, key=())
    assert found.reason == ""


class Slow(nn.Module):
    """Another thread reads the number of the epoch while this forward runs."""

    def forward(self, x: Tensor) -> Tensor:
        thread = Thread(target=lambda: epochs.put(LightningModule().current_epoch))
        thread.start()
        thread.join()
        return x.tanh()


epochs: SimpleQueue[int] = SimpleQueue()
"""No container: a capture restores those of the file."""


def test_other_threads_read_the_epoch_during_a_capture() -> None:
    capture(Slow(), (torch.randn(3),), {}, key=())
    assert epochs.get(timeout=1) == 0
