"""Replayed steps with writes to views, in a loop, with one_hot or self.log, and with forward-mode derivatives take what
their plan says and train as plain steps do; steps of which nothing can be replayed are refused with the reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from lightning_amp import AMPStrategy
from lightning_amp.costs.device_rates import CPU_CORE
from lightning_amp.errors import PlanError
from lightning_amp.footprint.operator_rates import OperatorRates
from lightning_amp.techniques.replay.choose_cuts import ONE_BY_ONE
from lightning_amp.techniques.replay.install import recorded
from lightning_amp.techniques.replay.segment import Segment
from lightning_amp.techniques.replay.stretches import Look
from lightning_amp.techniques.replay.tape import Tape
from tests.optimised import Optimised
from tests.techniques.replay.models import MODELS, Trained, difference, fit


class OddStep(Trained, Optimised, by=torch.optim.SGD, lr=1e-2):
    def __init__(self, width: int = 16, after: int = 16) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, after), nn.Linear(after, width)
        for i in range(4):
            setattr(self, f"layer{i}", nn.Linear(after, after))

    def _layers(self, x: Tensor) -> Tensor:
        for i in range(4):
            x = functional.gelu(getattr(self, f"layer{i}")(x))
        return x


class WritesToViews(OddStep):
    """Adds and activates in place what is a view, as a norm that reshapes returns."""

    def loss(self, batch: Tensor) -> Tensor:
        x = batch
        for i in range(4):
            y = getattr(self, f"layer{i}")(x.flatten(0, 1)).view(x.shape)
            y += x
            x = functional.leaky_relu_(y, 0.1).sin()
        return x.square().mean()


class WritesInLoop(OddStep):
    def loss(self, batch: Tensor) -> Tensor:
        h, found, given = batch[:, 0], torch.zeros_like(batch), self.first(batch)
        for t in range(batch.shape[1]):
            h = torch.tanh(self.layer0(h) + given[:, t])
            found[:, t] = h
        return (self._layers(found.sin()) - batch).square().mean()


class OneHot(OddStep):
    """`one_hot` is other operators on fake tensors than on real ones."""

    def loss(self, batch: Tensor) -> Tensor:
        x = self.first(batch)
        for _ in range(3):
            x = x + functional.one_hot(batch.argmax(-1), 16)
        return (self._layers(x) - batch).square().mean()


class Logs(OddStep):
    """Lightning keeps logged values by other operators in a run than in a count, which has no logger."""

    def loss(self, batch: Tensor) -> Tensor:
        x = self.first(batch)
        for i in range(4):
            x = functional.gelu(getattr(self, f"layer{i}")(x))
            self.log(f"mean{i}", x.mean())
        return x.sin().square().mean()


class LogsMore(Logs):
    """Its own `log` computes something."""

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        super().log(name, value * 2.0, *args, **kwargs)


class Jvp(OddStep):
    def loss(self, batch: Tensor) -> Tensor:
        y, tangent = torch.func.jvp(self._layers, (batch,), (torch.ones_like(batch),))
        return y.square().mean() + tangent.square().mean()  # type: ignore[no-any-return]


class Dual(OddStep):
    def loss(self, batch: Tensor) -> Tensor:
        with forward_ad.dual_level():
            y = self._layers(forward_ad.make_dual(batch, torch.ones_like(batch)))
            y, tangent = forward_ad.unpack_dual(y)
            return y.square().mean() + tangent.square().mean()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.parametrize(("kind", "share"), [
    (WritesToViews, 0.55), (WritesInLoop, None), (OneHot, 0.6), (Logs, 0.8), (LogsMore, 0.8), (Jvp, 0.85), (Dual, None),
])  # fmt: skip
def test_odd_steps_are_replayed_at_the_predicted_peak(
    kind: Callable[[], Trained], share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "odd", (kind, lambda n: torch.randn(64 * n, 6, 16)))
    before, meter, _ = fit("odd", "auto", steps=2, double=True)
    budget = None if share is None else int(share * meter.live.peak)
    after, metered, plan = fit("odd", AMPStrategy(strategies="replay", device_memory=budget), steps=2, double=True)
    assert "replay" in plan.strategies
    assert metered.live.peak == pytest.approx(plan.predicted_peak_bytes, rel=1e-3)
    assert metered.live.peak < 0.95 * meter.live.peak
    assert budget is None or metered.live.peak <= budget
    assert difference(before, after) == 0.0


class Penalty(OddStep):
    def loss(self, batch: Tensor) -> Tensor:
        x = batch.clone().requires_grad_()
        y = self._layers(x)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.square().mean() + grad.square().mean()


class Jagged(OddStep):
    def loss(self, batch: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor([batch[0], batch[1, :3]], layout=torch.jagged)
        return self._layers(rows).values().square().mean()


@pytest.mark.long
@pytest.mark.parametrize(("kind", "why"), [(Penalty, "create_graph=True"), (Jagged, "'NestedTensor'")])
def test_a_step_of_which_nothing_can_be_replayed_is_refused_with_its_reason(
    kind: Callable[[], Trained], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "odd", (kind, lambda n: torch.randn(64 * n, 6, 16)))
    with pytest.raises(PlanError, match=why):
        fit("odd", AMPStrategy(strategies="replay"), steps=2, double=True)


def test_a_replay_for_one_tensor_also_makes_those_before_it_in_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.GRUCell(8, 8).double(), torch.randn(4, 8, dtype=torch.float64)
    needed, ran, gradients = Segment._needed, list[int](), list[list[Tensor]]()
    monkeypatch.setattr(Segment, "_needed", lambda *args: ran.append(len(found := needed(*args))) or found)
    times = list[int]()
    for window in (None, 0, 5 * x.nbytes, 20 * x.nbytes):
        layer.zero_grad()
        ran.clear()
        tape = Tape([] if window is None else [(1000, ONE_BY_ONE)], window=window or 0)
        with recorded(tape, layer):
            h = x
            for _ in range(20):
                h = layer(x, h)
            loss = h.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        times.append(sum(ran))
        gradients.append([p.grad.clone() for p in layer.parameters() if p.grad is not None])
        assert all(map(torch.equal, gradients[0], gradients[-1]))
    plain, alone, some, many = times
    assert (plain, alone > 3 * some, some > 2 * many) == (0, True, True)


def test_a_write_to_memory_whose_earlier_owner_had_views_is_none_to_a_view() -> None:
    look = Look(OperatorRates.of(CPU_CORE))
    with look, look.hooks():
        several = [torch.ones(4) for _ in range(100)]
        for i in range(100):
            several[i].view(2, 2)
        several.clear()
        # at the same addresses
        several += [torch.empty(4).fill_(1.0) for _ in range(100)]
    assert not look.writes_to_views
    with look:
        torch.ones(4).view(2, 2).fill_(0.0)
    assert look.writes_to_views
