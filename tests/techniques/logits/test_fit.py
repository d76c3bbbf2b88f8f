"""Language models train with logits in chunks, at the predicted peak, with the numbers of a plain run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import lightning_amp
from benchmarks.gpu.language_model import LanguageModel
from lightning_amp import AMPStrategy
from lightning_amp.errors import PlanError
from lightning_amp.techniques.logits.install import in_chunks
from tests.ranks import run_ranks
from tests.techniques.replay.models import MODELS, Llama, difference, fit
from tests.techniques.replay.test_fit import by_hand, on_ranks


def test_logits_are_never_whole_and_the_peak_is_the_predicted_one() -> None:
    _, meter, _ = fit("Llama", "auto", steps=3)
    exact, _, _ = fit("Llama", "auto", steps=3, double=True)
    for names, share in ((["logits"], 0.5), (["logits", "replay"], 0.25)):
        _, metered, plan = fit("Llama", AMPStrategy(strategies=names), steps=3)
        assert metered.live.peak < share * meter.live.peak, names
        assert metered.live.peak == pytest.approx(plan.predicted_peak_bytes, rel=0.01), names
        after, _, _ = fit("Llama", AMPStrategy(strategies=names), steps=3, double=True)
        assert difference(exact, after) < 1e-12, names


def test_the_policy_takes_it_where_the_step_does_not_fit() -> None:
    _, meter, _ = fit("Llama", "auto", steps=3)
    for share, names in ((0.6, ["logits"]), (0.3, ["logits", "replay"])):
        budget = int(share * meter.live.peak)
        _, metered, plan = fit("Llama", AMPStrategy(device_memory=budget), steps=3)
        assert [rule.strategy for rule in plan.rules] == names
        assert metered.live.peak <= budget


def test_the_policy_recomputes_no_more_blocks_beside_it_than_needed() -> None:
    with torch.device("meta"):
        module = LanguageModel(width=64, heads=2, depth=6, words=4000, positions=64)
    batch = torch.zeros(8, 65, dtype=torch.int64)
    plain = lightning_amp.plan(module, batch, strategies="S1").profile.peak_bytes
    found = lightning_amp.plan(module, batch, device_memory=int(0.45 * plain), rates="H100").plan
    assert [rule.strategy for rule in found.rules] == ["recompute"] * 3 + ["logits"]
    assert 0.4 * plain < found.predicted_peak_bytes <= 0.45 * plain
    assert found.candidates[0].step_seconds == min(
        one.step_seconds for one in found.candidates if one.peak_bytes <= 0.45 * plain
    )


def test_a_step_without_such_a_loss_is_refused_and_says_so() -> None:
    with pytest.raises(PlanError, match="no cross-entropy of a linear layer"):
        fit("points", AMPStrategy(strategies="logits"), steps=1)


class Keeps(Llama):
    """Returns logits, keeps them, and reads them after the step, when the parameters are others."""

    def __init__(self) -> None:
        super().__init__()
        self.read = list[Tensor]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = self.embed(batch[:, :-1]), batch[:, 1:]
        self.logits = self.head(self.norm(x))
        loss = F.cross_entropy(self.logits.flatten(0, 1), y.flatten())
        return {"loss": loss, "logits": self.logits.detach()[..., :3]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.read += [self.logits.detach().sum(), outputs["logits"].sum()]


def test_logits_that_outlive_the_step_and_steps_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = MODELS["Llama"][1]
    for kind in (Keeps, by_hand(Llama)):

        class InChunks(kind):  # type: ignore[misc, valid-type]
            # whatever a plan would say of it
            training_step = in_chunks(kind.training_step)

        monkeypatch.setitem(MODELS, "Llama", (kind, batches))
        before, _, _ = fit("Llama", "auto", steps=3, double=True)
        monkeypatch.setitem(MODELS, "Llama", (InChunks, batches))
        after, _, _ = fit("Llama", "auto", steps=3, double=True)
        assert difference(before, after) < 1e-12, kind
        if kind is Keeps:
            torch.testing.assert_close(after.read, before.read, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks
def test_ranks_average_gradients(tmp_path: Path) -> None:
    plain, chunked = (run_ranks(on_ranks, 2, tmp_path, "Llama", names, True) for names in ("S1", "S1,logits"))
    for (right, whole, _), (state, peak, rules) in zip(plain, chunked, strict=True):
        assert "logits" in rules
        assert peak < 0.6 * whole
        torch.testing.assert_close(state, right, rtol=1e-12, atol=1e-12)
