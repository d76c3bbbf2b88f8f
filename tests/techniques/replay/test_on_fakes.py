"""Claim: a count whose replays run none of their operators is the one in which they run: every operator and storage."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_amp.costs.rule import Rule
from lightning_amp.footprint.profile_module import counted_step
from lightning_amp.footprint.step_recorder import StepRecorder
from lightning_amp.installing.install import install_rules
from lightning_amp.techniques.replay import on_fakes, segment
from lightning_amp.techniques.replay.row import ReplayOperators
from tests.techniques.replay.models import MODELS, Trained
from tests.techniques.replay.test_odd_steps import OddStep, WritesInLoop, WritesToViews

ENDS = {"at once": "20,45,70", "one by one": "20+,45+,70+", "both": "15,30-,50+,80"}


class ReadsMask(torch.autograd.Function):
    """Its backward pass reads a value of what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return (grad * mask if mask[0, 0] > 0 else grad.sin()), None


class Known(OddStep):
    """Saves a tensor whose values are known; later, a result outlives its segment and another of its operator does not.

    What keeps it is a graph that no backward pass frees.
    """

    def loss(self, batch: Tensor) -> Tensor:
        h = self._layers(batch)
        h = ReadsMask.apply(h, torch.ones(16, 16).tril()[:6] + 1)  # type: ignore[no-untyped-call]
        top, _ = self.first(h).max(-1, keepdim=True)
        y = self._layers(self._layers(h * top))
        self.unused = (y * top).sin() * top
        return y.square().mean()


def models() -> dict[str, tuple[Any, Any]]:
    found = {name: (kind, rows(2)) for name, (kind, rows) in MODELS.items() if name in ("U-Net", "ResNet", "points")}
    return found | {kind.__name__: (kind, torch.randn(8, 6, 16)) for kind in (WritesInLoop, WritesToViews, Known)}


def counted(module: Trained, batch: Any, spec: ReplayOperators) -> Iterator[Any]:
    rule = Rule(strategy="replay", fqn="", spec=spec, why="asked")
    installed = install_rules(module, [rule])
    try:
        step = counted_step(module, batch, None, StepRecorder)[0]
    finally:
        installed.undo()
    yield step.work
    yield step.operators
    yield step.first_bytes, step.measured, step.noted
    # autograd's numbers go on from step to step
    first = min(life.order for life in step.lives if life.order >= 0)
    yield [replace(life, order=max(-1, life.order - first)) for life in step.lives]


@pytest.mark.parametrize("window", [0, 10_000])
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("name", models())
def test_every_operator_and_storage_is_the_same(
    name: str, ends: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kind, batch), run = models()[name], on_fakes.replayed_on_fakes
    spec, known = ReplayOperators(ends=ENDS[ends], window=window, views=False), list[bool]()

    def noted(*args: Any, **kwargs: Any) -> bool:
        known.append(run(*args, **kwargs))
        return known[-1]

    monkeypatch.setattr(segment, "replayed_on_fakes", noted)
    found = list(counted(kind(), batch, spec))
    # values that are known are read of what a replay of its second segment makes
    assert any(known) or (kind, ends) == (Known, "both")
    monkeypatch.setattr(segment, "replayed_on_fakes", lambda *args, **kwargs: False)
    assert list(counted(kind(), batch, spec)) == found
