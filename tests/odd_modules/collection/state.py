"""Modules that remember: buffers, counters and objects that a step changes, and copies that follow."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.odd_modules.collection.blocks import DIM, Plain, of, of_blocks
from tests.odd_modules.collection.row import IN_EVERY_PASS, UNCAPTURED, X, around, buf, lin, odd, par, two

InPlaceInput = of("InPlaceInput", lambda m, x: Plain.forward(m, x.mul_(2)))


class BatchNorm(Plain):
    """Its buffers are changed by every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class ZerosAtFirst(BatchNorm):
    """Its first batch leaves the mean in the buffers as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(DIM, DIM, bias=False)
        nn.init.zeros_(self.c.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.c(x))


class PowerIteration(Plain):
    """Reads a buffer, and changes it, as spectral norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("u", torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.u.copy_(F.normalize(self.b.weight @ (self.b.weight.t() @ self.u) + x.mean(0), dim=0))
        return super().forward(x) * (self.u * x).sum(1, keepdim=True)


class OtherBuffer(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x - self.mean)


class Counter(Plain):
    """A branch that depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) if self.calls % 2 else super().forward(torch.sin(x))


class PlainTensor(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(DIM, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(1.1)
        return super().forward(x) * self.scale


class SideLoss(Plain):
    """Leaves a part of the loss in an attribute, as mixtures of experts do."""

    side: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.side = (self.a(x) ** 2).mean()
        return super().forward(x)


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)


class Remembers(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(float(x.detach().mean()))
        return super().forward(x) * len(self.seen)


class Memory(Plain):
    class Store:
        def __init__(self) -> None:
            self.n = 0

    def __init__(self) -> None:
        super().__init__()
        self.store = self.Store()

    def forward(self, x: Tensor) -> Tensor:
        self.store.n += 1
        return super().forward(x) * self.store.n


class SlottedMemory(Memory):
    """Of an object without a dictionary."""

    @dataclass(slots=True)
    class Store:  # type: ignore[misc]
        n: int = 0


class PrivateSlot(Memory):
    """Of an object whose only slot has a private name, which Python changes."""

    class Store:  # type: ignore[misc]
        __slots__ = ("__count",)

        def __init__(self) -> None:
            self.__count = 0

        @property
        def n(self) -> int:
            return self.__count

        @n.setter
        def n(self, n: int) -> None:
            self.__count = n


class ChangesParameter(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.a.weight.mul_(0.99)
        return super().forward(x)


def _teacher(m: Any, x: Tensor) -> Tensor:
    hidden = m.before(x) if hasattr(m, "before") else x
    with torch.no_grad():
        target = m.teacher(hidden)
    return (m.net(x) - target - 1).square().mean()


def _follow(m: Any, *_: Any) -> None:
    with torch.no_grad():
        for a, b in zip(m.teacher.parameters(), m.net.parameters(), strict=True):
            a.mul_(0.5).add_(b, alpha=0.5)


def _unit(m: Any, *_: Any) -> None:
    with torch.no_grad():
        m.net[0].weight.div_(m.net[0].weight.norm())


def queue(m: Any, x: Tensor) -> Tensor:
    h = m.net(x)
    found = h @ m.queue.clone().T
    m.queue[: len(h)] = h.detach()
    return found


def _running(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    m.mean = 0.9 * m.mean + 0.1 * h.detach().mean(0)
    return m.b(h - m.mean)


def store(**more: str) -> dict[str, str]:
    """What techniques say of a block that changes what it holds."""
    return {"recompute": "it changes what 'store' holds", "chunk": "changes the attribute 'store'"} | more


STATE = {
    "batch norm": of_blocks(BatchNorm, {"pipeline": "has BatchNorm layers"}),
    "a batch norm of zeros at first": of_blocks(ZerosAtFirst, {"pipeline": "has BatchNorm layers"}),
    "a buffer that is read and changed": of_blocks(PowerIteration, {
        "pipeline": "writes a value of another rank into a tensor of this rank"}, by_rows=True),
    "a buffer that is assigned": of_blocks(OtherBuffer, {"chunk": "replaces its parameter or buffer 'mean'",
        "tensor3d": "a file would hold one rank's part", "pipeline": IN_EVERY_PASS}, by_rows=True),
    "a counter that a branch depends on": of_blocks(Counter, {"chunk": "changes the attribute 'calls'",
        "pipeline": IN_EVERY_PASS}),
    "a tensor that is no buffer, changed": of_blocks(PlainTensor, {"chunk": UNCAPTURED, "pipeline": IN_EVERY_PASS}),
    "a list that grows": of_blocks(Remembers, {"recompute": "it changes what 'seen' holds",
        "chunk": "its forward cannot run on fake tensors", "pipeline": IN_EVERY_PASS}),
    "an object that counts": of_blocks(Memory, store(pipeline=IN_EVERY_PASS)),
    "an object without a dictionary": of_blocks(SlottedMemory, store(pipeline=IN_EVERY_PASS)),
    "an object with a private slot": of_blocks(PrivateSlot, store(pipeline=IN_EVERY_PASS)),
    "a parameter that is changed in a pass": of_blocks(ChangesParameter, {
        "recompute": "it changes 'a.weight' in place", "fsdp": "'a.weight' is gathered .* was changed in place",
        "tensor3d": "it writes into a copy", "pipeline": "the step has changed the parameters or buffers"}),
    "an input that is changed in place": of_blocks(InPlaceInput, {"recompute": "it changes its argument 0 in place",
        "fsdp": "writes in place into a tensor that it is called with",
        "pipeline": "'InPlaceInput' of another rank, writes in place into an argument"}),
    "a loss that is left in an attribute": of_blocks(SideLoss, {"chunk": "changes the attribute 'side'",
        "pipeline": "reads, outside the blocks of"}),
    "a frozen layer": of_blocks(Frozen),
    "a teacher that follows": around({"on_train_batch_end": _follow}, _teacher,
        {"pipeline": "'add_' reads a parameter that another rank holds"},
        teacher=lambda: two()().requires_grad_(False)),
    "a teacher that sees other features": around({"on_train_batch_end": _follow}, _teacher,
        {"tensor3d": "calls 'add_' on the parameter", "pipeline": "'add_' reads a parameter that another rank holds"},
        teacher=lambda: two()().requires_grad_(False), before=lin(6, 6)),
    "a weight of norm 1 after a step": around({"on_train_batch_end": _unit}, says={
        "tensor3d": "calls 'linalg_vector_norm' on the parameter"}),
    "gradients clipped by hand": around({"configure_gradient_clipping": lambda m,
        *_, **__: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01) and None}, says={
        "tensor3d": "'configure_gradient_clipping' calls", "pipeline": "cannot be used with 'clip_grad_norm_'",
        "early_update": "configure_gradient_clipping of the module"}),
    "gradients clipped by Lightning": around({"configure_gradient_clipping": lambda m, opt,
        *_, **__: m.clip_gradients(opt, 0.01, "norm")}, says={
        "early_update": "configure_gradient_clipping of the module"}),
    "a layer thawed after a step": around({"on_train_batch_start": lambda m,
        *_: m.net[0].requires_grad_(m.global_step > 0) and None}),
    "a queue of features": odd(X, queue, True, says={"sequence": "'__setitem__' in 'Small'",
        "tensor3d over x and y": "writes sharded values into a tensor that every rank has whole",
        "pipeline": r"changed the parameters or buffers \['queue'"}, net=two(), queue=buf(5, 3)),
    "a running mean, assigned": odd(X, _running, True, says={"tensor3d": "a file would hold one rank's part"},
        a=lin(6, 8), b=lin(8, 3), mean=buf(8)),
    "an empty and an unused parameter": around({}, lambda m, x: torch.cat([m.net(x), x @ m.none], 1), {
        "fsdp": r"the parameter 'none' .* has the shape \(6, 0\) and no element"}, none=par(6, 0), idle=lin(7, 5)),
}  # fmt: skip
