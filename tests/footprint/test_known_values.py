"""Claim: a step is counted without values though its code reads masks that no data and no parameter enter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_amp import profile
from lightning_amp.footprint.copies import quick_fakes
from lightning_amp.footprint.copies.fake_copy import copy_of

N = 12
CAUSAL = nn.Transformer.generate_square_subsequent_mask(N)


class Step(LightningModule):
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

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


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


def with_values(module: LightningModule, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(quick_fakes, "computed", lambda *_: None)
    measured = profile(module, torch.randn(N, N))
    assert measured.reason
    return measured


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
    module = Layers(mask, layers)
    counted = profile(module, torch.randn(N, N))
    assert counted.reason == ""
    measured = with_values(module, monkeypatch)
    assert (counted.peak_bytes, counted.by_kind) == (measured.peak_bytes, measured.by_kind)


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
    module = Step(BRANCHES[name])
    counted = profile(module, torch.randn(N, N))
    assert counted.reason == ""
    measured = with_values(module, monkeypatch)
    assert (counted.peak_bytes, counted.by_kind) == (measured.peak_bytes, measured.by_kind)


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
    "a buffer that the step changes": counts,
    "a counter that is read after it has counted": lambda step, batch: step.calls.add_(1) > 3,
    "a counter of a layer": lambda step, batch: (step.normed(batch), step.normed.num_batches_tracked > 0)[1],
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_depends_on_data_is_said(name: str) -> None:
    assert "reads the value of a tensor" in profile(Step(UNKNOWN[name]), torch.randn(N, N)).reason


def test_a_captured_graph_has_no_branch_on_a_buffer() -> None:
    module = Step(BRANCHES["a buffer"])
    with quick_fakes.QuickFakes() as fake, pytest.raises(Exception, match="_local_scalar_dense"):
        bool(copy_of(module, fake).mask[0, 1] < 0)  # type: ignore[index]
