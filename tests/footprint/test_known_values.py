"""Claim: a step is counted without values though its code reads masks that no data and no parameter enter, or logs
numbers of `.item()`; one that decides by data is not.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Dirichlet, Distribution, Normal, Poisson, kl_divergence
from torchmetrics import Accuracy, ConfusionMatrix, F1Score, MeanMetric, MetricCollection
from torchmetrics.aggregation import BaseAggregator
from torchmetrics.nominal import CramersV

from lightning_amp import AMPStrategy, profile
from lightning_amp._torch import FakeTensorMode
from lightning_amp.footprint.copies import fake_copy, quick_fakes
from lightning_amp.footprint.copies.fake_copy import copy_of
from lightning_amp.footprint.copies.known_values import DataDependent
from lightning_amp.footprint.copies.quick_fakes import QuickFakes
from tests.any_module import QUIET
from tests.optimised import Optimised

N = 12
CAUSAL = nn.Transformer.generate_square_subsequent_mask(N)


class Step(Optimised, by=torch.optim.Adam):
    """A step of two layers; `read` gets the module and the batch, and says whether the second one runs."""

    def __init__(self, read: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.read = nn.Linear(N, N), nn.Linear(N, N), read
        self.register_buffer("mask", CAUSAL.clone())
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.normed = nn.BatchNorm1d(N)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        found = self.first(batch)
        if self.read(self, batch):
            found = self.second(found.exp()).exp()
        return found.square().mean()


class Unowned(Step):
    """Has tensors that are no buffers."""

    def __init__(self, read: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(read)
        self.own = [torch.zeros(()), torch.zeros(3)]


class Layers(Step):
    """torch's own layers, with a mask of the step or a buffer."""

    def __init__(self, mask: Callable[[Any], Tensor], layers: str) -> None:
        super().__init__(mask)  # type: ignore[arg-type]
        options = {"d_model": N, "nhead": 2, "dim_feedforward": 8, "dropout": 0.0, "batch_first": True}
        if layers == "decoder":
            self.layers: nn.Module = nn.TransformerDecoder(nn.TransformerDecoderLayer(**options), 2)
        else:
            self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(**options), 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.first(batch).unsqueeze(0)
        given = (x, x) if isinstance(self.layers, nn.TransformerDecoder) else (x,)
        return self.layers(*given, self.read(self)).square().mean()  # type: ignore[no-any-return, call-arg]


def counts_as_with_values(module: LightningModule, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = profile(module, torch.randn(N, N))
    assert counted.reason == ""
    monkeypatch.setattr(quick_fakes, "number_of", lambda *_: None)
    measured = profile(module, torch.randn(N, N))
    assert measured.reason
    assert (counted.peak_bytes, counted.by_kind) == (measured.peak_bytes, measured.by_kind)


@pytest.mark.parametrize("layers", ["encoder", "decoder"])
@pytest.mark.parametrize(
    "mask",
    [
        lambda step: step.mask,
        lambda step: CAUSAL,
        lambda step: torch.triu(torch.full((N, N), float("-inf")), diagonal=1),
        lambda step: nn.Transformer.generate_square_subsequent_mask(N),
        lambda step: torch.ones(N, N, dtype=torch.bool).triu_(1),
        lambda step: step.mask[:, :] + 0,
    ],
    ids=["buffer", "global", "triu", "torch's", "in place", "of a buffer"],
)
def test_masks_of_torchs_transformer(mask: Any, layers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts_as_with_values(Layers(mask, layers), monkeypatch)


def written(value: Any, *, view: bool = False) -> Any:
    mask = torch.zeros(4, 4)
    before, part = mask.sum(), mask[1:] if view else mask
    part.add_(value)
    return mask.sum() > before


BRANCHES = {
    "a number": lambda step, batch: torch.full((), 3.0) > 2,
    "close": lambda step, batch: torch.allclose(step.mask, CAUSAL),
    "not taken": lambda step, batch: torch.arange(5).sum() > 10,
    "of two": lambda step, batch: torch.equal(torch.ones(3), torch.ones(3)),
    "written": lambda step, batch: written(1),
    "a view was written": lambda step, batch: written(1, view=True),
    "written by itself": lambda step, batch: written(-1),
    "a number of a buffer": lambda step, batch: step.mask[0, 1].item() < 0,
    "a buffer": lambda step, batch: step.mask[0, 1] < 0,
    "a counter": lambda step, batch: step.calls == 0,
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_is_that_of_a_step_with_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts_as_with_values(Step(BRANCHES[name]), monkeypatch)


def counts(step: Any, batch: Tensor) -> Any:
    answer = bool(step.calls == 0)
    step.calls += 1
    return answer


UNKNOWN = {
    "data": lambda step, batch: batch.mean() > 0,
    "a parameter": lambda step, batch: step.first.weight.mean() > 0,
    "data were written into it": lambda step, batch: torch.zeros(N, N).add_(batch).sum() > 0,
    "data were written into a view": lambda step, batch: (z := torch.zeros(N, N), z[0].copy_(batch[0]), z.sum() > 0)[2],
    "data were written as an output": lambda step, batch: (
        z := torch.zeros(N, N),
        torch.neg(batch.detach(), out=z),
        z.sum() > 0,
    )[2],
    "data were written into a list": lambda step, batch: (
        z := torch.zeros(N, N),
        torch._foreach_add_([z], [batch]),
        z.sum() > 0,
    )[2],
    "data in a list": lambda step, batch: torch.cat([torch.zeros(N, N), batch]).sum() > 0,
    "random": lambda step, batch: torch.rand(3).sum() > 1,
    "random in place": lambda step, batch: torch.zeros(3).uniform_().sum() > 1,
    "nothing was written": lambda step, batch: torch.empty(3).isnan().any(),
    # could be known, and are not
    "by an output": lambda step, batch: torch.neg(torch.ones(2), out=torch.zeros(2)).sum() < 0,
    "a list was written": lambda step, batch: (z := torch.zeros(2), torch._foreach_add_([z], 1), z.sum() > 3)[2],
    "a conjugate": lambda step, batch: torch.full((2,), 1j).conj().imag.sum() < 0,
    "statistics": lambda step, batch: (step.normed(batch), step.normed.running_mean.sum() > 0)[1],
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_depends_on_data_is_said(name: str) -> None:
    assert "reads the value of a tensor" in profile(Step(UNKNOWN[name]), torch.randn(N, N)).reason


CHANGES = {
    "read before": (counts, "calls"),
    "read after": (lambda step, batch: step.calls.add_(1) > 1, "calls"),
    "another tensor": (lambda step, batch: (setattr(step, "calls", step.calls + 1), step.calls > 1)[1], "calls"),
    "through .data": (lambda step, batch: (step.calls.data.copy_(step.calls + 1), step.calls > 1)[1], "calls"),
    "no buffer": (lambda step, batch: (step.own[0].add_(1), step.own[0] > 1)[1], "a tensor [], which is no buffer"),
    "a view of no buffer": (
        lambda step, batch: (step.own[1][2].add_(1), step.own[1][2:].sum() > 1)[1],
        "a tensor [3], which is no buffer",
    ),
    "of a layer": (
        lambda step, batch: (step.normed(batch), step.normed.num_batches_tracked > 1)[1],
        "normed.num_batches_tracked",
    ),
}
"""A branch that the first step takes in another way than the second."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_buffer_that_the_step_changes_has_its_values_in_the_second_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, buffer = CHANGES[name]
    counted = profile(Unowned(read), torch.randn(N, N))
    assert counted.own_reads == (buffer,)
    counts_as_with_values(Unowned(read), monkeypatch)
    monkeypatch.undo()
    # the other way takes other bytes
    assert (
        counted.peak_bytes != profile(Unowned(lambda step, batch: not read(step, batch)), torch.randn(N, N)).peak_bytes
    )


class Collects(Optimised, by=torch.optim.Adam):
    """Compares its batch with those before, of which a queue holds five."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(N, N)
        self.register_buffer("queue", torch.zeros(5 * N, N))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        found, at = self.layer(batch), int(self.pointer)
        loss = (found @ self.queue[:at].clone().t()).exp().square().sum() + found.square().mean()
        rows = min(N, len(self.queue) - at)
        with torch.no_grad():
            self.queue[at : at + rows] = found[:rows]
            self.pointer += rows
        return loss


def test_a_queue_is_counted_when_it_is_full() -> None:
    empty, full = Collects(), Collects()
    full.pointer.fill_(len(full.queue))
    found = profile(empty, torch.randn(N, N))
    assert found.peak_bytes == profile(full, torch.randn(N, N)).peak_bytes
    assert (found.own_reads, empty.pointer) == (("pointer",), 0)


def test_a_captured_graph_has_no_branch_on_a_buffer() -> None:
    module = Step(BRANCHES["a buffer"])
    with quick_fakes.QuickFakes() as fake, pytest.raises(Exception, match="_local_scalar_dense"):
        bool(copy_of(module, fake).mask[0, 1] < 0)  # type: ignore[index]


class Taking(Step):
    """A step whose `read` gets the module, the loss and a whole number."""

    def __init__(self, take: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__(take)  # type: ignore[arg-type]
        self.second, self.losses = nn.Linear(N, 2), []
        self.total, self.correct = 0.0, 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        found = self.second(self.first(batch).relu())
        loss = found.square().mean()
        taken = self.read(self, loss, (found.argmax(-1) == 1).sum())
        return loss * taken if isinstance(taken, float | Tensor) else loss + (1 if taken else 0)


def adds(step: Any, loss: Tensor, correct: Tensor) -> None:
    step.total += loss.item() * 2 - 1
    step.correct += correct.item()
    step.accuracy = step.correct / N


COUNTED = {
    "collected": lambda step, loss, correct: step.losses.append(loss.item()),
    "added up": adds,
    "logged": lambda step, loss, correct: step.log("loss", loss.item()),
    "a share is logged": lambda step, loss, correct: step.log("share", correct.item() / N, prog_bar=True),
    "printed": lambda step, loss, correct: f"{loss.item():.3f} of {correct.item():d}" + str(loss.item()),
    "printed itself": lambda step, loss, correct: f"{loss:.3f} of {correct}, {loss[None]}",
    "a mean": lambda step, loss, correct: step.losses.append(sum([loss.item(), loss.detach().item()]) / 2),
    "a factor": lambda step, loss, correct: 1 / loss.item(),
    "finite": lambda step, loss, correct: None if math.isfinite(loss.item()) else 1 / 0,
    "a tensor of tensors": lambda step, loss, correct: torch.tensor([loss, 2 * loss]).norm(),
}
DECIDES = {
    "a branch": lambda step, loss, correct: loss.item() > 3,
    "equal": lambda step, loss, correct: correct.item() == 0,
    "the best": lambda step, loss, correct: min(1.0, loss.item()),
    "true": lambda step, loss, correct: bool(correct.item()),
    "a length": lambda step, loss, correct: torch.zeros(correct.item()).sum(),
    "a range": lambda step, loss, correct: [*range(correct.item())],
    "a slice": lambda step, loss, correct: step.first.weight[: correct.item()].sum(),
    "an int": lambda step, loss, correct: step.losses.append(int(loss.item())),
    "rounded": lambda step, loss, correct: step.losses.append(round(loss.item())),
    "a whole number for torch": lambda step, loss, correct: torch.ones(3, dtype=torch.int64).mul(correct.item()).sum(),
    "known to a set": lambda step, loss, correct: correct.item() in {1, 2},
    "in a name": lambda step, loss, correct: {f"expert_{k}": k for k in range(N + 1)}[f"expert_{correct}"],
    "float()": lambda step, loss, correct: float(loss) > 3,
    "sum of floats": lambda step, loss, correct: sum([loss.item(), 1.0]) / 2 > 1,
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_number_that_decides_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, item = Taking(COUNTED[name]), torch.Tensor.item
    counted = profile(module, torch.randn(N, N))
    assert counted.reason == ""
    assert (module.losses, module.total, module.correct) == ([], 0.0, 0)

    def refuses() -> Any:
        raise DataDependent("not to be taken")

    monkeypatch.setattr(fake_copy, "numbers_may_be_taken", refuses)
    measured = profile(module, torch.randn(N, N))
    assert measured.reason
    assert (counted.peak_bytes, counted.by_kind) == (measured.peak_bytes, measured.by_kind)
    assert torch.Tensor.item is item
    assert "item" not in vars(torch._subclasses.fake_tensor.FakeTensor)


@pytest.mark.parametrize("name", DECIDES)
def test_a_number_that_decides(name: str) -> None:
    reason = profile(Taking(DECIDES[name]), torch.randn(N, N)).reason
    assert "reads the value of a tensor" in reason or "fails on tensors without values" in reason
    assert "test_known_values.py" in reason


GENES = 30
COUNTS = torch.poisson(torch.ones(16, GENES), generator=torch.Generator().manual_seed(0))


class Vae(Optimised, by=torch.optim.Adam):
    """A variational autoencoder of counts, as those of single cells are written."""

    def __init__(self, likelihood: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(GENES, 8), nn.Linear(4, GENES)
        self.likelihood = likelihood

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        mean, log_scale = self.encoder(batch).chunk(2, -1)
        posterior = Normal(mean, log_scale.exp(), validate_args=True)
        prior = Normal(torch.zeros_like(mean), torch.ones_like(mean), validate_args=True)
        found = self.likelihood(self.decoder(posterior.rsample())).sum(-1)
        return (kl_divergence(posterior, prior).sum(-1) - found).mean()


def of(made: Callable[[Tensor], Distribution], value: Tensor = COUNTS) -> Callable[[Tensor], Tensor]:
    return lambda x: made(x).log_prob(value)


INSIDE = COUNTS.clamp(0.1, 0.9)
LIKELIHOODS = {
    "poisson": of(lambda x: Poisson(x.exp(), validate_args=True)),
    "bernoulli": of(lambda x: Bernoulli(logits=x, validate_args=True), (COUNTS > 0).float()),
    "categorical": of(lambda x: Categorical(logits=x, validate_args=True), COUNTS[:, 0]),
    "dirichlet": of(lambda x: Dirichlet(x.exp(), validate_args=True), INSIDE / INSIDE.sum(-1, keepdim=True)),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_bytes_are_those_of_a_step_with_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Vae(LIKELIHOODS[name])
    counted = profile(module, COUNTS)
    assert counted.reason == ""
    # a step that is not counted without values runs with them
    monkeypatch.setattr(quick_fakes, "IS_ALL_TRUE", None)
    measured = profile(module, COUNTS)
    assert "torch.distributions checks" in measured.reason
    assert counted.peak_bytes == measured.peak_bytes
    assert counted.by_kind == measured.by_kind


def test_a_value_that_is_not_allowed_ends_the_training() -> None:
    module = Vae(LIKELIHOODS["poisson"])
    strategy = AMPStrategy(device_memory="1GiB")
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=1, max_steps=2, **QUIET)
    wrong = [COUNTS, torch.full_like(COUNTS, torch.nan)]
    with pytest.raises(ValueError, match="Expected parameter loc"):
        trainer.fit(module, torch.utils.data.DataLoader(wrong, batch_size=None))  # type: ignore[arg-type]
    assert strategy.plan.fits


class Classifier(Optimised, by=torch.optim.Adam):
    def __init__(self, metric: nn.Module) -> None:
        super().__init__()
        self.layer, self.metric = nn.Linear(GENES, 5), metric

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        scores, types = self.layer(batch), batch[:, 0].long().clamp(max=4)
        self.metric(scores, types)
        self.log("metric", self.metric)
        return nn.functional.cross_entropy(scores, types)


@pytest.mark.parametrize("kind", [F1Score, ConfusionMatrix, Accuracy])
def test_metrics_with_as_many_bins_as_classes_are_counted(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Classifier(kind(task="multiclass", num_classes=5))
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    counted = profile(module, COUNTS)
    assert counted.reason == ""
    monkeypatch.setattr(quick_fakes.QuickFakes, "dispatch", fails)
    measured = profile(module, COUNTS)
    assert measured.reason
    assert counted.peak_bytes == measured.peak_bytes
    assert counted.by_kind == measured.by_kind


@pytest.mark.parametrize("name", ["mean", "collection", "nominal"])
def test_metrics_that_check_values_are_counted(name: str) -> None:
    kinds = [Accuracy(task="multiclass", num_classes=2), F1Score(task="multiclass", num_classes=2)]
    made = {"mean": MeanMetric, "collection": partial(MetricCollection, kinds), "nominal": partial(CramersV, 2)}
    metric: Any = made[name]()

    def read(step: Any, batch: Tensor) -> bool:
        step.metric.update(
            *(
                [batch.mean()]
                if name == "mean"
                else [(batch[:, 1] > 0).long() if name == "nominal" else batch[:, :2], (batch[:, 2] > 0).long()]
            )
        )
        return False

    module = Step(read)
    module.metric = metric

    def checks() -> list[Any]:
        keys = ("validate_args", "nan_strategy", "_enable_compute_groups")
        return [vars(child).get(key) for child in metric.modules() for key in keys]

    before = checks()
    reason = profile(module, torch.randn(N, N)).reason
    # means of an older torchmetrics look for nan whatever they are given
    assert reason == "" or (name == "mean" and "disable" not in str(BaseAggregator.__doc__))
    assert checks() == before


def fails(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("no operator runs without values")


def test_a_captured_graph_does_not_lose_the_check() -> None:
    with quick_fakes.QuickFakes(), pytest.raises(Exception, match="_local_scalar_dense"):
        Poisson(torch.ones(3), validate_args=True)


OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    "a list of views": lambda x: x.unbind(0),
    "pieces": lambda x: x.split(3, 1),
    "a slice": lambda x: x[1:, ::2],
    "from a real dtype to a complex one": lambda x: torch.view_as_complex(x.unflatten(1, (4, 2))),
    "another dtype": lambda x: x.view(torch.float64),
    "a place in the storage": lambda x: x.as_strided((2, 2), (2, 1), 5),
    "a place that is the tensor's": lambda x: x.as_strided((2, 2), (2, 1)),
    "in place": lambda x: x.add_(1),
    "several results": lambda x: torch.var_mean(x, 1),
    "without a result": lambda x: torch._foreach_add_([x], 1.0),
    "new memory": lambda x: x @ x.T,
}


def layouts(mode: FakeTensorMode, call: Callable[[Tensor], Any], offsets: Sequence[int]) -> list[Any]:
    """Of results for slices of one tensor, from several places on."""
    found = list[Any]()
    with mode:
        whole = torch.empty(20, 8)
        for offset in offsets:
            result = call(whole[offset : offset + 4])
            rows = result if isinstance(result, list | tuple) else [result]
            found.append(type(result))
            for row in (row for row in rows if row is not None):
                same = row.untyped_storage()._cdata == whole.untyped_storage()._cdata
                found.append((row.shape, row.stride(), row.storage_offset(), row.dtype, row.device, same))
    return found


def test_a_second_result_is_as_the_first_at_other_places_too() -> None:
    quick_fakes._known.clear()
    offsets = (0, 4, 4, 10, 2)
    for name, call in OPERATORS.items():
        assert layouts(QuickFakes(), call, offsets) == layouts(FakeTensorMode(), call, offsets), name
        before = len(quick_fakes._known)
        layouts(QuickFakes(), call, offsets)
        assert len(quick_fakes._known) == before, name
    assert None not in quick_fakes._known.values()
