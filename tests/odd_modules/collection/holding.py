"""What a module holds besides tensors: references, functions, locks, objects, other state; batches of dataclasses."""

import threading
import weakref
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from functools import partial
from queue import Queue
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.odd_modules.collection.row import Row, features
from tests.optimised import Optimised

X = torch.randn(6, 8)


class Plain(Optimised, by=torch.optim.Adam):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self.net(batch)).square().mean()


class OfParent(nn.Module):
    """Refers to the module that it is a part of, without being its child's owner."""

    def __init__(self, parent: Plain) -> None:
        super().__init__()
        self.parent = weakref.ref(parent)

    def forward(self, x: Tensor) -> Tensor:
        parent = self.parent()
        assert parent is not None
        return parent.head(x)


class WeakReference(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.part = OfParent(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.part(self.net(batch)).square().mean()


class Loss:
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function


class ObjectWithFunction(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.loss = Loss(lambda x: self.head(x).square().mean())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss.function(self.net(batch))


class PartialWithKeyword(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.loss = partial(lambda x, then: then(x), then=lambda x: self.head(x).square().mean())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net(batch))


class Patched(Plain):
    def __init__(self) -> None:
        super().__init__()
        plain = self.net.forward
        self.net.forward = MethodType(lambda layer, x: plain(x) * layer.weight.mean(), self.net)  # type: ignore[method-assign]


class Options(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.options = SimpleNamespace(then=lambda x: x * self.head.bias.mean())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.options.then(self.head(self.net(batch))).square().mean()


class KeepsGraphs(Plain):
    """As one whose fit has ended in the midst of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs = [self.net(X).mean()]
        self.state = {"hidden": (self.net(X), None)}


class Locked(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.lock, self.condition = threading.Lock(), threading.Condition()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with self.lock, self.condition:
            return super().training_step(batch, batch_idx)


MODULES: dict[str, Plain] = {}


class FoundByName(Plain):
    def __init__(self) -> None:
        super().__init__()
        MODULES["newest"] = self

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return MODULES["newest"].head(self.net(batch)).square().mean()


@dataclass
class Pair:
    x: Tensor
    times: InitVar[int]
    y: Tensor = field(init=False)

    def __post_init__(self, times: int) -> None:
        self.y = self.x * times


class OfPairs(Plain):
    def training_step(self, batch: Pair, batch_idx: int) -> Tensor:
        return super().training_step(batch.x + batch.y, batch_idx)


@dataclass
class Rows:
    x: Tensor
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.length = len(self.x)


class OfRows(Plain):
    def training_step(self, batch: Rows, batch_idx: int) -> Tensor:
        return super().training_step(batch.x[: batch.length], batch_idx)


class ByGradients(Plain):
    """Looks at gradients, which no forward pass knows."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None and parameter.grad.sum() > 0:
                parameter.grad.mul_(1)


class OtherState(ByGradients):
    def get_extra_state(self) -> Any:
        return {"steps": 3}


class Waits(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.queue: Any = Queue()


def of(kind: type[Plain], says: dict[str, str] | None = None, *, made: Any = None) -> Row:
    """Ranks have one batch where it is of a dataclass."""
    draw = features(8)
    return Row(kind, draw if made is None else lambda: made(draw()), says or {}, by_rows=made is not None)


HOLDING = {
    "a weak reference to the whole module": of(WeakReference),
    "an object with a function": of(ObjectWithFunction),
    "a partial with a keyword": of(PartialWithKeyword),
    "a layer with another forward": of(Patched),
    "options with a function": of(Options),
    "graphs that are kept": of(KeepsGraphs),
    "locks": of(Locked),
    "a module found by a global name": of(FoundByName),
    "other state than tensors": of(
        OtherState,
        {"tensor3d": "'on_before_optimizer_step' calls 'sum'", "early_update": "on_before_optimizer_step of"},
    ),
    "a queue": of(Waits, {"sequence": "cannot pickle '_thread.lock'", "tensor3d": "cannot be copied"}),
    "a batch with an InitVar": of(OfPairs, made=lambda x: Pair(x, 2)),
    "a batch that counts its rows": of(OfRows, made=Rows),
}
