"""What a step returns and logs, and what is around it."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn

from tests.odd_modules.collection.blocks import DIM, Plain
from tests.odd_modules.collection.row import X, around, both, odd, two, words

LOGGED: list[float] = []


class Logging(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(DIM, DIM)

    def log(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        LOGGED.append(float(value))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        self.log("mean", x.mean().detach())
        return x


class LogsForAnother(Plain):
    """Logs by way of the module that it is part of."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = [Logging()]

    def forward(self, x: Tensor) -> Tensor:
        self.owner[0].log("mean", x.mean().detach())
        return super().forward(x)


def _measured(m: Any, batch: Any) -> Tensor:
    x, y = batch
    logits = m.net(x)
    m.accuracy(logits, y)
    m.log("accuracy", m.accuracy, on_step=False, on_epoch=True)
    m.log_dict({"confidence": logits.softmax(-1).amax(-1).mean(), "weight": m.net[0].weight.norm()})
    return F.cross_entropy(logits, y)


def dictionary(m: Any, batch: Any, batch_idx: int) -> Any:
    found = m.net(batch)
    loss = (found - 1).square().mean()
    m.losses.append(loss.detach().clone())
    return {"loss": loss, "hidden": found, "weight": m.net[0].weight.detach().clone()}


def look(m: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
    m.log("hidden", outputs["hidden"].square().sum(), sync_dist=True, reduce_fx="mean")
    m.log("seen", outputs["weight"].square().sum())


def _groups(m: Any) -> Any:
    head, rest = m.net[2].parameters(), m.net[0].parameters()
    opt = torch.optim.SGD([{"params": head, "lr": 0.1}, {"params": rest}], 0.05, 0.9, nesterov=True)
    return [opt], [torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5**step)]


OUTPUTS = {
    "metrics and logs": odd(both(X, words(most=3)), _measured, True, net=two(),
        accuracy=lambda: torchmetrics.Accuracy("multiclass", num_classes=3)),
    "a step that returns a dictionary": odd(X, lambda m, x: x, True,
        hooks={"training_step": dictionary, "on_train_batch_end": look}, net=two()),
    "groups of an optimiser and a schedule": around({"configure_optimizers": _groups}),
    "a layer made in configure_model": around({"configure_model": lambda m: setattr(m, "extra",
        nn.Linear(3, 3).double())}, lambda m, x: m.extra(m.net(x))),
}  # fmt: skip
