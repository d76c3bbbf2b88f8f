"""Logits in chunks: expressions have the values and gradients that they have without; language models train alike."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_amp
from benchmarks.gpu.language_model import LanguageModel
from lightning_amp import AMPStrategy
from lightning_amp.costs.device_rates import rates_for
from lightning_amp.errors import ModelError, PlanError
from lightning_amp.techniques.logits import loss, pending
from lightning_amp.techniques.logits.install import in_chunks
from tests.ranks import run_ranks
from tests.sharding.table.odd import twice
from tests.techniques.replay.models import MODELS, Llama, difference, fit, plain
from tests.techniques.replay.test_fit import by_hand, on_ranks

WORDS = 100
Step = Callable[[Any, Tensor, Tensor], Tensor]


def entropy(logits: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), **options)


def written(change: Callable[[Tensor, Tensor], Any]) -> Step:
    """Logits, or a view of them, are changed in place; the loss is of the other."""

    def step(head: Any, x: Tensor, y: Tensor) -> Tensor:
        logits = head(x)
        view = logits.flatten(0, 1)
        change(logits, view)
        return F.cross_entropy(view, y.flatten()) + entropy(logits, y)

    return step


def copied(take: Callable[[Tensor], Tensor], rows: int = 9) -> Step:
    """Logits are changed in place after something was taken of them; the loss is of that."""

    def step(head: Any, x: Tensor, y: Tensor) -> Tensor:
        logits = head(x)
        taken = take(logits)
        logits.mul_(0.5)
        return entropy(taken, y[:, :rows])

    return step


def penalty(loss: Tensor, *inputs: Tensor) -> Tensor:
    grads = torch.autograd.grad(loss, inputs, create_graph=True)
    return loss + sum(grad.square().sum() for grad in grads)


some = 50
weights = torch.linspace(0, 1, WORDS).double()
soft = torch.linspace(0, 1, 36 * WORDS).double()
IN_CHUNKS: dict[str, Step] = {
    "flatten": lambda h, x, y: entropy(h(x), y),
    "view": lambda h, x, y: F.cross_entropy(h(x).view(-1, WORDS), y.view(-1)),
    "next words": lambda h, x, y: entropy(h(x)[..., :-1, :].contiguous(), y[:, 1:]),
    "one place": lambda h, x, y: F.cross_entropy(h(x)[:, 3], y[:, 3]),
    "transposed": lambda h, x, y: F.cross_entropy(h(x).transpose(1, 2), y),
    "scaled": lambda h, x, y: entropy(h(x) / 0.7, y),
    "capped": lambda h, x, y: entropy(30 * torch.tanh(h(x) * (1 / 30)), y),
    "bias of words": lambda h, x, y: entropy(h(x) + weights[None], y),
    "float": lambda h, x, y: entropy(h(x).float().double(), y),
    "ignored": lambda h, x, y: entropy(h(x), torch.where(y > some, y, -100)),
    "smoothed": lambda h, x, y: entropy(h(x), torch.where(y > some, y, -100), label_smoothing=0.1),
    "weighted": lambda h, x, y: entropy(h(x), torch.where(y > some, y, -100), weight=weights),
    "loss of rows": lambda h, x,
        y: ((F.cross_entropy(h(x).mT.mT.transpose(1, 2), y) ** 2) + F.cross_entropy(h(x).transpose(1, 2), y,
        reduction="none").square().mean()),
    "sum": lambda h, x, y: entropy(h(x), y, reduction="sum"),
    "probabilities": lambda h, x, y: F.cross_entropy(h(x).flatten(0, 1), soft.view(36, WORDS)),
    "rows by a mask": lambda h, x, y: F.cross_entropy(h(x[y > 20]), y[y > 20]),
    "accuracy": lambda h, x, y: entropy(z := h(x), y) * (1 + (z.argmax(-1) == y).double().mean()),
    "two losses": lambda h, x, y: entropy(z := h(x), y) + entropy(z[:, 1:], y[:, :-1]),
    "and probabilities": lambda h, x, y: entropy(z := h(x), y) * (1 + z.detach().softmax(-1).max()),
    "of a teacher": lambda h, x,
        y: (entropy(h(x), y) * (1 + no_grad(lambda: h(x + 1)).detach().max() * 0) + entropy(no_grad(lambda: h(x + 1)),
        y)),
    "of a teacher in inference": lambda h, x, y: (entropy(h(x), y) + float(inferred(lambda: entropy(h(x + 1), y)))),
    "short integers": lambda h, x, y: entropy(h(x), y.to(torch.uint8), weight=weights),
    "its gradient is differentiated": lambda h, x, y: penalty(entropy(h(x), y, label_smoothing=0.1), x, h.weight),
    "metrics first": lambda h, x, y: (no_grad(lambda: h(x).sum()) + 1) * entropy(h(x), y),
}  # fmt: skip
WHOLE: dict[str, Step] = {
    "metrics of the same": lambda h, x, y: [z := h(x), no_grad(lambda: z.softmax(-1)), entropy(z, y)][-1],
    "another loss": lambda h, x, y: h(x).square().mean(),
    "log-probabilities": lambda h, x, y: F.nll_loss(h(x).log_softmax(-1).flatten(0, 1), y.flatten()),
    "masked": lambda h, x, y: F.cross_entropy(h(x)[y > some], y[y > some]),
    "sample by sample": lambda h, x, y: sum(F.cross_entropy(r, t) for r, t in zip(h(x), y, strict=True)),
    "joined": lambda h, x, y: entropy(torch.cat([h(x), h(x) * 2]), torch.cat([y, y])),
    "some words": lambda h, x, y: entropy(h(x)[..., :some], y % some),
    "trained bias of words": lambda h, x, y: entropy(h(x) + h.bias, y),
    "bias of places": lambda h, x, y: entropy(h(x) + x[..., :1], y),
    "numbers": lambda h, x, y: h(x).to(torch.int64).sum() * 0 + h(x).square().mean(),
    # copies have the values of before, and views those of after
    "changed after a copy": copied(lambda z: z / 0.7),
    "changed after a slice and a shape": copied(lambda z: z[:, :-1].reshape(4, 8, WORDS), rows=8),
    "changed": written(lambda z, v: z.mul_(0.5)),
    "changed view": written(lambda z, v: v.mul_(0.5)),
    "words left out": written(lambda z, v: z.__setitem__((..., 0), -9.0)),
    "gradient hook": lambda h, x, y: [z := h(x), z.register_hook(lambda g: 2 * g), entropy(z, y)][-1],
    "own Function by name": lambda h, x, y: twice(h(x)).square().mean(),
    "a transform": lambda h, x, y: torch.vmap(lambda a, b: F.cross_entropy(h(a), b))(x, y).square().sum(),
    "checkpointed": lambda h, x, y: checkpoint(lambda x: entropy(h(x), y), x, use_reentrant=False),
}


def inferred(call: Callable[[], Tensor]) -> Tensor:
    with torch.inference_mode():
        return call()


def no_grad(call: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        return call()


def trained(
    step: Step,
    *,
    put_off: bool,
    dtype: torch.dtype = torch.float64,
    of_head: torch.dtype | None = None,
    autocast: bool = False,
) -> list[Tensor]:
    torch.manual_seed(0)
    embed, head = nn.Embedding(WORDS, 6).to(dtype), nn.Linear(6, WORDS).to(of_head or dtype)
    x = torch.randint(WORDS, (4, 9))

    def run(module: Any) -> Tensor:
        return step(head, embed(x), x)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = (in_chunks(run) if put_off else run)(None)
    found.backward()
    grads = [p.grad for p in (*head.parameters(), *embed.parameters())]
    return [found.detach(), *(torch.zeros(()) if g is None else g for g in grads)]


def test_expressions_are_exact_and_those_of_cross_entropy_run_in_chunks() -> None:
    for kinds, chunked in ((IN_CHUNKS, True), (WHOLE, False)):
        for name, step in kinds.items():
            with patch.object(pending, "cross_entropy", side_effect=loss.cross_entropy) as called:
                for right, found in zip(trained(step, put_off=False), trained(step, put_off=True), strict=True):
                    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12, msg=name)
            assert bool(called.call_count) is chunked, name


def test_mixed_precision_is_as_near_as_without() -> None:
    for name in ("flatten", "next words", "smoothed", "ignored", "capped"):
        right = trained(IN_CHUNKS[name], put_off=False, dtype=torch.float32)
        for of_head in (torch.float32, torch.bfloat16):
            # a head in half precision after a norm in single is cast by autocast only
            given = {"dtype": torch.float32, "of_head": of_head, "autocast": True}
            plain, found = (trained(IN_CHUNKS[name], put_off=put_off, **given) for put_off in (False, True))  # type: ignore[arg-type]
            for r, p, f in zip(right, plain, found, strict=True):
                assert f.dtype == p.dtype, name
                assert (f - r).norm() <= 1.2 * (p - r).norm() + 4e-3 * r.norm(), name


class Signs(torch.autograd.Function):
    """A linear layer by the signs of its weight, with a gradient by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight.sign())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.sign(), grad.flatten(0, -2).T @ x.flatten(0, -2)


def of_a_teacher(head: Any, h: Tensor, x: Tensor) -> Tensor:
    """What was made in inference mode goes through the head outside of it."""
    with torch.inference_mode():
        features = h.sin()
    with torch.no_grad():
        aim = head(features)
    return entropy(head(h), x) + (head(h).mean() - aim.mean()).square()


def test_functions_with_their_own_gradients_and_tensors_of_inference_mode_are_as_without() -> None:
    steps: list[Step] = [lambda head, h, x: entropy(Signs.apply(h, head.weight), x) + h.square().mean(), of_a_teacher]
    for step in steps:
        for right, found in zip(trained(step, put_off=False), trained(step, put_off=True), strict=True):
            torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


def test_gradients_of_half_precision_are_summed_in_single() -> None:
    step = IN_CHUNKS["flatten"]
    right = trained(step, put_off=False)
    plain, found = (trained(step, put_off=put_off, dtype=torch.bfloat16) for put_off in (False, True))
    for r, p, f in zip(right, plain, found, strict=True):
        assert f.dtype is torch.bfloat16
        assert (f.double() - r).norm() <= 1.1 * (p.double() - r).norm() + 1e-3 * r.norm()


def test_types_that_torch_refuses_are_refused() -> None:
    for put_off in (False, True):
        with pytest.raises(RuntimeError, match="same dtype"):
            trained(IN_CHUNKS["flatten"], put_off=put_off, dtype=torch.float32, of_head=torch.bfloat16)


def test_a_write_before_the_product_is_refused() -> None:
    head, embed, x = nn.Linear(6, WORDS), nn.Embedding(WORDS, 6), torch.randint(WORDS, (4, 9))
    head.requires_grad_(False)

    def written_inputs(module: Any) -> Tensor:
        # without `logits` the step is right: the layer has read the inputs, and nothing keeps them
        inputs = embed(x) * 1
        logits = head(inputs)
        inputs.add_(1)
        return entropy(logits, x)

    def written_weight(module: Any) -> Tensor:
        logits = head(embed(x))
        with torch.no_grad():
            head.weight.mul_(0.5)
        return logits.sum()

    for step in (written_inputs, written_weight):
        with pytest.raises(ModelError, match="had been changed in place"):
            in_chunks(step)(None)

    # a constant that was added, written between forward and backward pass: the gradients are there already, unless
    # they are those of rows
    for reduction in ("mean", "none"):
        bias, layer = torch.zeros(WORDS), nn.Linear(6, WORDS)
        loss = in_chunks(lambda module: entropy(layer(embed(x)) + bias, x, reduction=reduction).mean())(None)  # noqa: B023
        right = torch.autograd.grad(entropy(layer(embed(x)) + bias, x), layer.weight)
        bias.add_(1)
        if reduction == "mean":
            loss.backward()
            torch.testing.assert_close(layer.weight.grad, *right)
        else:
            with pytest.raises(ModelError, match="had been changed in place"):
                loss.backward()

    # no version counts what is written by `data`: the product comes before it, as without `logits`
    def written_data(module: Any) -> Tensor:
        logits = head(embed(x))
        head.weight.data.mul_(0.5)
        return entropy(logits, x)

    def looked_at(module: Any) -> Tensor:
        logits = head(embed(x))
        with torch.inference_mode():
            head.weight.data.norm()
        return entropy(logits, x)

    assert in_chunks(looked_at)(None).requires_grad
    weight = head.weight.detach().clone()
    plain = written_data(None)
    head.weight.data = weight
    assert torch.equal(in_chunks(written_data)(None), plain)
    # a gradient of logits that were not computed is refused
    head, embed, x = nn.Linear(6, WORDS), nn.Embedding(WORDS, 6), torch.randint(WORDS, (4, 9))

    def step(module: Any) -> Tensor:
        logits = head(embed(x))
        loss = entropy(logits, x)
        (grad,) = torch.autograd.grad(loss, logits, create_graph=True, allow_unused=True)
        return loss if grad is None else loss + grad.square().sum()

    with pytest.raises(ModelError, match=r"as by torch\.autograd\.grad"):
        in_chunks(step)(None)


@pytest.mark.long
def test_logits_are_never_whole_and_the_peak_is_the_predicted_one() -> None:
    """By name, and where the policy takes it because the step does not fit."""
    exact, peak = plain("Llama", double=True)
    for share, names, by_name in (
        (0.5, ["logits"], True), (0.25, ["logits", "replay"], True),
        (0.6, ["logits"], False), (0.3, ["logits", "replay"], False),
    ):  # fmt: skip
        options: Any = {"strategies": names} if by_name else {"device_memory": int(share * peak)}
        after, metered, plan = fit("Llama", AMPStrategy(**options), steps=2, double=True)
        assert [rule.strategy for rule in plan.rules if rule.strategy != "S1"] == names
        assert metered.live.peak <= int(share * peak), names
        assert metered.live.peak == pytest.approx(plan.predicted_peak_bytes, rel=0.01), names
        assert difference(exact, after) < 1e-12, names


@pytest.mark.full
@pytest.mark.long
def test_the_policy_recomputes_no_more_blocks_beside_it_than_needed() -> None:
    with torch.device("meta"):
        module = LanguageModel(width=64, heads=2, depth=6, words=4000, positions=64)
    batch = torch.zeros(8, 65, dtype=torch.int64)
    plain = lightning_amp.plan(module, batch, strategies="S1").profile.peak_bytes
    # the context of a GPU alone is larger than this step
    of_tensors = replace(rates_for("H100"), memory=None)
    found = lightning_amp.plan(module, batch, device_memory=int(0.45 * plain), rates=of_tensors).plan
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
        before, _, _ = fit("Llama", "auto", steps=2, double=True)
        monkeypatch.setitem(MODELS, "Llama", (InChunks, batches))
        after, _, _ = fit("Llama", "auto", steps=2, double=True)
        assert difference(before, after) < 1e-12, kind
        if kind is Keeps:
            torch.testing.assert_close(after.read, before.read, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks
def test_ranks_average_gradients(tmp_path: Path) -> None:
    for (right, whole, _), (state, peak, rules) in run_ranks(on_ranks, 2, tmp_path, "Llama", "logits", True):
        assert "logits" in rules
        assert peak < 0.6 * whole
        torch.testing.assert_close(state, right, rtol=1e-12, atol=1e-12)


def products_of(step: Step, head: nn.Linear, x: Tensor, y: Tensor) -> list[int]:
    """Rows of each product of the layer that a step and its backward pass compute."""
    found, plain = list[int](), loss.linear

    def noted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found.append(len(x))
        return plain(x, weight, bias)

    with patch.object(loss, "linear", noted):
        in_chunks(lambda module: step(head, x, y))(None).backward()
    return found


def test_ignored_rows_are_in_no_chunk_and_a_mean_computes_logits_once() -> None:
    torch.manual_seed(0)
    head, x = nn.Linear(6, WORDS).double(), torch.randn(4, 50, 6).double()
    y = torch.where(torch.rand(4, 50) < 0.15, torch.randint(0, WORDS, (4, 50)), -100)
    n = int((y != -100).sum())
    assert sum(products_of(entropy_of, head, x, y)) == n < 50
    # the losses of rows get their gradients later
    assert sum(products_of(lambda h, x, y: entropy(h(x), y, reduction="none").sum(), head, x, y)) == 2 * n
    # no row counts: the mean is nan and its gradients are zeros, as without
    x.requires_grad_()
    found = in_chunks(lambda module: entropy_of(head, x, torch.full_like(y, -100)))(None)
    assert found.isnan()
    found.backward()
    assert x.grad is not None
    assert not x.grad.any()


def entropy_of(head: Any, x: Tensor, y: Tensor) -> Tensor:
    return entropy(head(x), y)


def test_a_graph_that_is_kept_gives_the_same_gradients_again() -> None:
    torch.manual_seed(0)
    head, x, y = nn.Linear(6, WORDS).double(), torch.randn(4, 9, 6).double(), torch.randint(0, WORDS, (4, 9))
    right = torch.autograd.grad(3 * entropy_of(head, x, y), head.weight)[0]
    found = in_chunks(lambda module: 3 * entropy_of(head, x, y))(None)
    for _ in range(2):
        torch.testing.assert_close(
            *torch.autograd.grad(found, head.weight, retain_graph=True), right, rtol=1e-12, atol=1e-15
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_16_bits_are_those_of_a_plain_step(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    head, x, y = nn.Linear(16, 200).to(dtype), torch.randn(4, 9, 16).to(dtype), torch.randint(0, 200, (4, 9))
    x.requires_grad_()
    right = torch.autograd.grad(1024 * entropy_of(head, x, y), [x, head.weight])
    found = torch.autograd.grad(in_chunks(lambda module: 1024 * entropy_of(head, x, y))(None), [x, head.weight])
    exact = torch.autograd.grad(1024 * entropy_of(head.double(), x.double(), y), [x, head.weight])
    for one, plain_one, other in zip(found, right, exact, strict=True):
        assert (one - other).abs().max() <= 1.5 * (plain_one - other).abs().max()
