"""A step is counted with logits in chunks only where these can be what its peak consists of."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_amp
from lightning_amp.footprint.chain.chain_of import count_step
from lightning_amp.installing.install import install_rules
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.techniques.logits.install import read_step
from lightning_amp.techniques.logits.row import RULE
from tests.techniques.replay.models import Llama

IDS = torch.zeros(4, 33, dtype=torch.int64)
Step = Callable[[Any, Tensor, Tensor], Tensor]


def entropy(logits: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(0, 1), **options)


def test_a_step_is_not_counted_with_it_where_no_tensor_of_the_peak_is_as_wide_as_logits() -> None:
    """Each count takes seconds; where logits may save something, the step is counted with them."""

    class Classes(Llama):
        """The vocabulary is as wide as the model, so that nothing is put off."""

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(self.head.in_features, self.head.in_features)

        def loss(self, batch: Any) -> Tensor:
            return entropy(self.head(self.norm(self.embed(batch[:, :-1]))), batch[:, 1:])

    counted = list[str]()
    count = StepOfModule.step_with

    def noted(self: StepOfModule, rules: Any, rows: int | None = None) -> Any:
        counted.extend(rule.strategy for rule in rules)
        return count(self, rules, rows)

    class Squares(Llama):
        """No cross-entropy reads its wide outputs, so that nothing stays put off."""

        def loss(self, batch: Any) -> Tensor:
            x = self.norm(self.embed(batch[:, :-1]))
            return self.head(x).log_softmax(-1).exp().square().mean() + entropy(x, batch[:, 1:] % x.shape[-1])

    for module, expected in ((Classes(), []), (Squares(), []), (Llama(), ["logits"])):
        counted.clear()
        profile = lightning_amp.profile(module, IDS)
        with patch.object(StepOfModule, "step_with", noted):
            lightning_amp.plan(module, IDS, device_memory=int(0.7 * profile.peak_bytes))
        assert counted == expected, type(module)


def test_what_it_can_save_is_bounded_before_the_step_is_counted_with_it() -> None:
    def seen(step: Step) -> tuple[int, int]:
        class Model(Llama):
            def loss(self, batch: Any) -> Tensor:
                return step(self.head, self.norm(self.embed(batch[:, :-1])), batch[:, 1:])

        module = Model()
        whole = count_step(module, IDS, ())
        install_rules(module, [RULE])
        less = count_step(module, IDS, ())
        return read_step(module, whole), whole.profile.peak_bytes - less.profile.peak_bytes

    for step in (
        lambda h, x, y: entropy(h(x), y),
        lambda h, x, y: entropy(h(x).float(), y, label_smoothing=0.1),
        lambda h, x, y: F.cross_entropy(h(x).transpose(1, 2), y),
        lambda h, x, y: entropy(h(x), y) + entropy(h(2 * x), y),
        lambda h, x, y: entropy(F.linear(x, h.weight.square()), y),
        lambda h, x, y: entropy(h(x), h.weight.new_ones(1, 1, 1).expand(*y.shape, len(h.weight))),
        lambda h, x, y: x.sum() + h(x.detach()).argmax(-1).float().mean(),
    ):
        most, saved = seen(step)
        assert 0 < saved <= most
