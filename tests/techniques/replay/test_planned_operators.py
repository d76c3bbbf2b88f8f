"""A replayed step that runs other operators than its count is warned of once, by the first that differs."""

import re
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_amp import AMPStrategy
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.techniques.checks.planned_order import PlannedOrder, as_text, lines_in
from lightning_amp.techniques.replay.install import RUNS_OTHERS
from tests.techniques.replay.models import MODELS, Trained, difference, fit


@torch.library.custom_op("lightning_amp_tests::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    """A kernel that returns another layout than it says."""
    return x.t().contiguous().t() * 2.0


@turned.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


turned.register_autograd(lambda _, gradient: gradient * 2.0)


class Layers(Trained):
    """Its eighth step, or a layout that only real tensors have, decides whether an operator runs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.n_steps = kind, 0
        for i in range(4):
            setattr(self, f"layer{i}", nn.Linear(16, 16))

    def loss(self, batch: Tensor) -> Tensor:
        self.n_steps += 1
        x = self.layer0(batch)
        if self.kind == "layout":
            # copies if the kernel's result is not contiguous
            x = turned(x).contiguous()
        elif self.kind == "counter" and self.n_steps > 7:
            x = x.sin()
        elif self.kind == "one_hot":
            x = x + functional.one_hot(batch[:, 0].argsort() % 16, 16)
        elif self.kind == "log":
            self.log("mean", x.mean(), on_step=True, on_epoch=True)
        elif self.kind == "once" and self.n_steps == 1:
            x = x.cos()
        for i in (1, 2, 3):
            x = functional.gelu(getattr(self, f"layer{i}")(x))
        return x.square().mean()


class Accumulates(Layers):
    """Every second batch ends with an update: what is after the last segment is not compared."""

    def __init__(self) -> None:
        super().__init__("")
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class Taught(Layers):
    """A frozen network in evaluation mode, whose attention torch computes at once, unless functions are watched."""

    def __init__(self) -> None:
        super().__init__("")
        self.teacher = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True).requires_grad_(False)

    def loss(self, batch: Tensor) -> Tensor:
        self.teacher.eval()
        with torch.no_grad():
            aim = self.teacher(batch[None])[0]
        return super().loss(batch) + (self.layer0(batch) - aim).square().mean()


def trained(
    kind: str, strategy: Any, monkeypatch: pytest.MonkeyPatch, steps: int = 10
) -> tuple[Trained, Any, list[str]]:
    """The module, its plan, and what was said of its operators."""
    kinds = {"accumulates": Accumulates, "taught": Taught}
    monkeypatch.setitem(MODELS, "layers", (kinds.get(kind, lambda: Layers(kind)), lambda n: torch.randn(64 * n, 16)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module, _, plan = fit("layers", strategy, steps=steps)
    return module, plan, [said for one in caught if (said := str(one.message)).startswith(("replay:", "offload:"))]


@pytest.mark.parametrize(("kind", "said"), [
    ("layout", r"operator \d+, where the step runs aten.clone.default, and the count aten.t.default"),
    ("counter", r"operator \d+, where the step runs aten.sin.default, and the count aten.t.default"),
    ("once", ""), ("one_hot", ""), ("log", ""), ("accumulates", ""), ("taught", ""), ("", ""),
])  # fmt: skip
def test_a_step_that_runs_other_operators_than_its_count_is_warned_of_once(
    kind: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _, _ = trained(kind, "auto", monkeypatch)
    module, plan, found = trained(kind, AMPStrategy(strategies="replay"), monkeypatch)
    assert "replay" in plan.strategies
    assert len(found) == bool(said)
    assert all(re.search(said, one) for one in found)
    assert difference(plain, module) == 0.0


def test_a_plan_of_an_earlier_version_has_no_operators_and_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan, _ = trained("counter", AMPStrategy(strategies="replay"), monkeypatch, steps=1)
    (rule,) = (one for one in plan.rules if one.strategy == "replay")
    text = plan.to_json()
    assert text.count(rule.spec.operators) == 1
    older = re.sub(r',\s*"operators": "[^"]*"', "", text)
    assert rule.spec.operators not in older
    again = Plan.from_json(older)
    (found,) = (one.spec for one in again.rules if one.strategy == "replay")
    assert found == replace(rule.spec, operators="")
    assert trained("counter", AMPStrategy(plan=again), monkeypatch)[2] == []
    # with them it is compared after it was read, too
    assert len(trained("counter", AMPStrategy(plan=Plan.from_json(text)), monkeypatch)[2]) == 1


def test_operators_are_compared_by_name_and_the_end_counts() -> None:
    ran = [torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor]
    text = as_text([(2, 3, 4)], ran)
    assert lines_in(text) == ["2x3x4", "aten.add.Tensor", "aten.mul.Tensor"]
    planned = PlannedOrder(text, RUNS_OTHERS)
    for _ in range(2):
        planned.compare([(2, 3, 4)], [*ran], bool)
    with pytest.warns(
        UserWarning, match=r"operator 1, where the step runs nothing more, and the count aten\.mul\.Tensor"
    ):
        planned.compare([(2, 3, 4)], ran[:1], bool)
    # once, and not in a count
    other = PlannedOrder(text, RUNS_OTHERS)
    other.compare([(2, 3, 4)], [], lambda: True)
    # nor for a batch of other shapes
    other.compare([(1, 3, 4)], [], bool)
    planned.compare([(2, 3, 4)], [], bool)
