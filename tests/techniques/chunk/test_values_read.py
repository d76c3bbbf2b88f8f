"""Claim: a block in chunks that reads any value of Python trains to the same numbers, or is refused by its name."""

import contextvars
import enum
import functools
import os
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_amp.errors import ModelError
from lightning_amp.techniques.chunk.run.in_chunks import InChunks
from tests.techniques.chunk.small_blocks import Attention

SCALE = 1.0
KNOWN: dict[str, Any] = {}
TURN = contextvars.ContextVar("TURN", default=1.0)
COUNTS: list[int] = []


GENERATOR = torch.Generator()


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


class Holder:
    scale = 1.0

    def __init__(self, inside: Any = None) -> None:
        self.inside, self.value = inside, 1.0

    @property
    def other(self) -> float:
        return SCALE


class Reads(Attention):
    """Attention times a number that `read` returns."""

    t = 1.0

    def __init__(self, read: Callable[["Reads"], Any]) -> None:
        super().__init__(8)
        self.read, self.level, self.held = read, Level.LOW, [Holder()]
        for _ in range(7):
            self.held = [Holder(self.held)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.read(self)


def deep(block: Reads) -> Any:
    found = block.held[0]
    while found.inside is not None:
        found = found.inside[0]
    return found


def counted(values: list[Any]) -> float:
    values.append(len(values))
    return 1.0 + (len(values) % 3 == 0)


def rule_of(default: list[float] = [1.0]) -> Callable[[Any], float]:  # noqa: B006
    cell = default[0]

    def read(_: Any) -> float:
        return cell

    read.__kwdefaults__ = {}
    read.change = lambda v: [vars(read).update(v=v), setattr(read.__closure__[0], "cell_contents", v)]
    return read


def set_global(value: float) -> None:
    global SCALE
    SCALE = value


MUTATED = [1.0]
CLOSED = rule_of()
READS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, float], Any]]] = {
    "global": (lambda b: SCALE, lambda b, v: set_global(v)),
    "branch on a global": (lambda b: 2.0 if SCALE > 1 else b.t, lambda b, v: set_global(v)),
    "class attribute": (lambda b: type(b).t, lambda b, v: setattr(Reads, "t", v)),
    "attribute of another class": (lambda b: Holder.scale, lambda b, v: setattr(Holder, "scale", v)),
    "nested seven deep": (lambda b: deep(b).value, lambda b, v: setattr(deep(b), "value", v)),
    "closure": (CLOSED, lambda b, v: CLOSED.change(v)),
    "partial": (functools.partial(lambda o, b: o[0], MUTATED), lambda b, v: MUTATED.__setitem__(0, v)),
    "default argument": (lambda b, o=MUTATED: o[0], lambda b, v: MUTATED.__setitem__(0, v)),
    "numpy scalar": (lambda b: KNOWN.get("n", np.float64(1)), lambda b, v: KNOWN.update(n=np.float64(v))),
    "environment": (lambda b: float(os.environ.get("AMP_T", "1")), lambda b, v: os.environ.update(AMP_T=str(v))),
    "property": (lambda b: b.held[0].other, lambda b, v: set_global(v)),
    "context variable": (lambda b: TURN.get(), lambda b, v: TURN.set(v)),
    "enum": (lambda b: b.level.value, lambda b, v: setattr(b, "level", Level(1 + (v > 1)))),
    "signed zero": (
        lambda b: torch.full((8,), KNOWN.get("z", 0.0)).atan2(torch.tensor(-1.0)),
        lambda b, v: KNOWN.update(z=-0.0 if v > 1 else 0.0),
    ),
    "size of a constant": (lambda b: torch.ones(int(SCALE), 1).sum(), lambda b, v: set_global(v)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_at_first() -> Any:
    yield
    set_global(1.0)
    KNOWN.clear(), COUNTS.clear(), os.environ.pop("AMP_T", None), TURN.set(1.0)
    Reads.t, Holder.scale, MUTATED[0] = 1.0, 1.0, 1.0
    CLOSED.change(1.0)


def trained(block: nn.Module, run: Callable[[nn.Module, Tensor], Tensor], change: Callable[[int], Any]) -> list[Tensor]:
    """Losses and parameters of four steps."""
    optimizer = torch.optim.SGD(block.parameters(), 0.1)
    found = []
    for step in range(4):
        change(step)
        torch.manual_seed(step)
        loss = run(block, torch.randn(2, 32, 8, dtype=torch.float64)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [*found, *(p.detach() for p in block.parameters())]


def make(read: Callable[[Any], Any]) -> Reads:
    torch.manual_seed(0)
    return Reads(read).double()


@pytest.mark.parametrize("name", READS)
def test_a_value_that_changes_between_steps_is_read_anew(name: str) -> None:
    read, change = READS[name]
    outcomes = []
    for runner in (None, InChunks(60_000, train=True)):
        block = make(read)
        change(block, 1.0)
        run = runner or (lambda block, x: block(x))
        outcomes.append(trained(block, run, lambda step, b=block: change(b, float(1 + step // 2))))
    assert runner.known
    assert [p.chunks.regions[""] for p in runner.known.values()]
    for one, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0.0)


def by_mask(block: Reads) -> Any:
    """Leave a mask out that changes nothing, unless the tensors are fake, as transformers does."""
    mask = torch.ones(8, dtype=torch.float64)
    left_out = not isinstance(mask, torch._subclasses.FakeTensor) and bool((mask == 1).all())
    return 1.0 if left_out else mask


def test_a_library_that_asks_whether_tensors_are_fake_is_captured() -> None:
    runner = InChunks(60_000, train=True)
    plain, found = (trained(make(by_mask), run, lambda step: None) for run in (lambda block, x: block(x), runner))
    assert [plan.chunks.regions[""] for plan in runner.known.values()]
    for one, other in zip(plain, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize(("read", "reason"), [
    (lambda b: time.perf_counter(), r"calls mul\(tensor, .*another time: it reads a value that changes"),
    (lambda b: random.SystemRandom().random(), "it reads a value that changes from call to call"),
    (lambda b: counted(COUNTS), "changes a variable of a file, a class, or what one of them holds"),
    (lambda b: setattr(Holder, "scale", Holder.scale + 1) or 1.0, "changes a variable of a file, a class"),
    (lambda b: random.random(), "draws from Python's or NumPy's random numbers"),
    (lambda b: LightningModule().global_step + 1, "reads 'global_step' of the Trainer, which changes from step"),
    (lambda b: LightningModule().current_epoch + 1, "reads 'current_epoch' of the Trainer"),
    (lambda b: LightningModule().log("a", 1.0) or 1.0, "calls 'log' of a LightningModule"),
    (lambda b: torch.rand(8, generator=GENERATOR), "which cannot be captured"),
])  # fmt: skip
def test_what_no_plan_can_be_made_for_is_named(read: Any, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        InChunks(60_000, train=True)(make(read), torch.randn(2, 32, 8, dtype=torch.float64))


@functools.cache
def mask_of(n: int) -> Tensor:
    return torch.ones(n).cumsum(0)


TENSORS: dict[str, Tensor] = {}


def remembered(n: int) -> Tensor:
    if "m" not in TENSORS:
        TENSORS["m"] = torch.ones(n).cumsum(0)
    return TENSORS["m"]


@pytest.mark.parametrize("read", [lambda b: mask_of(8), lambda b: remembered(8)])
def test_what_a_forward_remembers_is_no_empty_tensor(read: Any) -> None:
    block, run, x = make(read), InChunks(60_000, train=True), torch.randn(2, 32, 8, dtype=torch.float64)
    for _ in range(2):
        found = run(block, x)
        assert read(block).numel() == 8
        torch.testing.assert_close(found, block(x), rtol=1e-12, atol=0.0)
        mask_of.cache_clear(), TENSORS.clear()
