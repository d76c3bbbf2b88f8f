"""Claim: where memory ends in a step of any module, the error says which module or operator asked for how much, what
was held by kind, and which plan to try next; on a CPU a budget that was named is held for the first batches.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp._torch import autograd_node
from lightning_amp.errors import DoesNotFitError
from lightning_amp.footprint.bounded_step import StepOverBudget
from lightning_amp.lightning.steps.counted_batches import CountedBatches
from lightning_amp.lightning.steps.out_of_memory import advice_on_memory, tell_where
from lightning_amp.lightning.strategy.larger_batches import LargerBatches
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.techniques.data.gradient_sync import GradientSync
from tests.lightning.steps.test_rescue import Ends
from tests.lightning.strategy.strategy_cases import Small, fitted

pytestmark = pytest.mark.filterwarnings("ignore:predicted to run out", "ignore:.*does not have many workers")

ROWS = [torch.randn(16, 4, generator=torch.Generator().manual_seed(k)) for k in range(4)]


class Block(nn.Module):
    """In which memory ends once it is armed."""

    armed = ""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        # at once: a second pass ends with the last tensor that the backward pass needs
        if self.armed == "forward" or (self.armed == "again" and autograd_node() is not None):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        made = x + torch.tanh(self.inner(x))
        return Ends.apply(made) if self.armed == "backward" else made


class Deep(Small):
    """Four blocks; memory ends in the third from the second batch on."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.net = nn.ModuleList(Block() for _ in range(4))
        self.where = where

    def loss(self, batch: Any) -> Tensor:
        for block in self.net:
            batch = block(batch)
        return batch.square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # not in the profile, which runs the step of a copy
        if batch_idx == 1 and isinstance(self.trainer.strategy, AMPStrategy):
            self.net[2].armed = self.where


WHERE = {
    "forward": r"Tried to allocate 2\.00 GiB\. Memory ended in forward of net\.2 \(test_end_of_memory\.py:\d+: raise",
    "again": r"2\.00 GiB\. Memory ended in forward of net\.2, again in the backward pass \(test_end_of_memory\.py",
    "backward": r"3 GiB\. Memory ended in the backward pass, before there was a gradient of net\.2\.inner\.bias \(",
}


@pytest.mark.parametrize("where", WHERE)
def test_an_error_says_where_and_what_was_held(where: str) -> None:
    strategies = "S1,recompute" if where == "again" else "S1"
    with pytest.raises(torch.OutOfMemoryError, match=WHERE[where]) as error:
        fitted(Deep(where), DataLoader(ROWS, batch_size=None), AMPStrategy(strategies=strategies))
    text = str(error.value)
    # four times 4 * 4 + 4 values, Adam's two of each and its count; gradients of what had been reached
    assert "Held were 320 B of parameters" in text
    assert f"{0 if where == 'forward' else 80} B of gradients" in text
    assert "672 B of optimiser state" in text
    assert "was predicted for 16 samples" in text
    assert text.count("Held were") == text.count("Memory ended") == 1
    if where != "again":
        assert "The next plan to try is strategies='S1,recompute'" in text or "smaller batch" in text


def test_an_error_in_the_average_of_gradients_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def reduce(self: GradientSync) -> None:
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    monkeypatch.setattr(GradientSync, "reduce", reduce)
    with pytest.raises(torch.OutOfMemoryError, match="3 GiB. Memory ended in the average of gradients over ranks"):
        fitted(Small(), DataLoader(ROWS, batch_size=None), AMPStrategy(strategies="S1"))


def grown(strategy: Any, rows: int = 6000) -> dict[str, Any]:
    """A run whose second batch has other rows than the first."""
    torch.manual_seed(0)
    return fitted(Small(), DataLoader([ROWS[0], torch.ones(rows, 4), *ROWS], batch_size=None), strategy)


def test_a_batch_beyond_the_budget_is_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DoesNotFitError, match=r"batch 1, which is larger than those before \(\[6000, 4\], .* not run"):
        grown(AMPStrategy(device_memory="300KiB"))
    words = (
        r"made a tensor \[6000, \d+\] float32 of \d+ KiB in addition to .* of parameters, .* of optimiser"
        r" state, .* of activations.*; allowed are 300 KiB\."
        r" Memory ended in forward of net\.\d .*smaller batch"
    )
    # as of a step that cannot be counted again
    monkeypatch.setattr(LargerBatches, "are_counted", lambda *_: False)
    with pytest.raises(StepOverBudget, match=words):
        grown(AMPStrategy(device_memory="300KiB"))
    assert grown(AMPStrategy(device_memory="300KiB", on_predicted_oom="warn"))["steps"] == 3


def test_the_first_batches_of_every_plan_are_counted() -> None:
    module: Any = nn.Linear(4, 4)
    module.trainer = SimpleNamespace(optimizers=[], accumulate_grad_batches=1)
    counted = CountedBatches(module, 1000)

    def batch(rows: int) -> None:
        with counted.counting(()):
            module(torch.ones(rows, 4))

    for rows in (1, 1, 9000):
        batch(rows)
    counted.begin_again()
    with pytest.raises(StepOverBudget, match="allowed are 0.98 KiB|allowed are 1000 B"):
        batch(9000)


@pytest.mark.parametrize(("budget", "looked_at"), [(3_000, True), (10_000, False)])
def test_a_larger_batch_is_counted_where_its_growth_may_exceed_the_budget(budget: int, looked_at: bool) -> None:
    module: Any = nn.Linear(4, 4)
    module.trainer = SimpleNamespace(optimizers=[], accumulate_grad_batches=1)
    counted = CountedBatches(module, budget)
    for rows in (10, 10, 20):
        x = torch.ones(rows, 4)
        with counted.counting((x,)):
            module(x)
            found = counted._step is not None
    # 400 bytes with 10 rows, at most eight times as many with 20
    assert found == looked_at


def test_growth_is_that_of_each_tensor_since_the_parameters_changed() -> None:
    module: Any = nn.Linear(4, 4)
    module.trainer = SimpleNamespace(optimizers=[], accumulate_grad_batches=1)
    counted, features, found = CountedBatches(module, 500_000), torch.ones(1000, 4), list[bool]()

    def batch(rows: int) -> None:
        with counted.counting((features, torch.ones(rows, 4))):
            module(torch.ones(rows, 4))
            found.append(counted._step is not None)

    for rows in (10, 10, 200):
        batch(rows)
    module.weight.requires_grad_(False)
    for rows in (10, 10, 200):
        batch(rows)
    assert found == [True] * 6


def test_state_of_an_optimiser_may_be_any_value() -> None:
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    optimizer.state.update(
        {"steps": 3, net.weight: {"momentum_buffer": torch.zeros(4, 4), "past": [None, torch.zeros(2)]}}
    )
    error = torch.OutOfMemoryError("tried to allocate 3 GiB")
    tell_where(error, net, [optimizer], torch.device("cpu"))
    assert str(error).endswith("Held were 80 B of parameters, 0 B of gradients, 72 B of optimiser state")


def test_batches_of_any_layout_are_counted() -> None:
    module: Any = nn.Linear(4, 4)
    module.trainer = SimpleNamespace(optimizers=[], accumulate_grad_batches=1)
    ragged = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(1, 4)], layout=torch.jagged)
    for batch in (torch.eye(4).to_sparse(), ragged, None, "names"):
        with CountedBatches(module, 10_000).counting({"x": batch}):
            module(torch.ones(2, 4))


def test_the_next_plan_has_no_techniques_that_cannot_be_combined() -> None:
    helps = {"fsdp": "fsdp would", "recompute": "recompute would"}
    plan: Any = SimpleNamespace(
        uncounted="",
        predicted_peak_bytes=100,
        budget_bytes=100,
        candidates=(),
        gradient_ranks=1,
        batch_size=1,
        strata_bytes=(),
    )
    plan.diagnosis, plan.evaluates = SimpleNamespace(helps=helps), ""
    plan.strategies = ("S1", "replay")
    text = advice_on_memory(plan, torch.device("cpu"))
    assert "which may choose recompute: leave `strategies` out" in text
    plan.strategies = ("S1",)
    assert "strategies='S1,recompute'" in advice_on_memory(plan, torch.device("cpu"))
