"""Claim: operators for which torch has no rule on fake tensors give results of the layout that its kernels give."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_amp.footprint.copies import kernel_sizes, quick_fakes
from lightning_amp.footprint.profile_module import profile_module
from lightning_amp.footprint.target_device import settings_of
from tests.optimised import Optimised


def test_weights_and_bins_give_the_type_and_length_of_a_count() -> None:
    for weights in (None, torch.ones(3), torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.int32)):
        real = torch.bincount(torch.tensor([0, 1, 1]), weights, minlength=7)
        with quick_fakes.QuickFakes(valid=True) as fake:
            given = None if weights is None else fake.from_tensor(weights)
            made = torch.bincount(fake.from_tensor(torch.tensor([0, 1, 1])), given, minlength=7)
        assert (made.shape, made.dtype) == (real.shape, real.dtype)
        with quick_fakes.QuickFakes(valid=True) as fake, pytest.raises(Exception, match="bincount"):
            torch.bincount(fake.from_tensor(torch.tensor([0, 1, 1])))


@pytest.mark.parametrize("columns", [8, 6])
def test_products_of_groups_have_the_layout_of_the_kernels(columns: int) -> None:
    rows, ends = torch.randn(12, 16), torch.tensor([4, 8, 12], dtype=torch.int32)
    # by columns, whose lengths are multiples of 16 bytes
    experts = torch.randn(3, columns, 16).transpose(1, 2)
    found = []
    for fake in (None, quick_fakes.QuickFakes(valid=True)):
        with fake or nullcontext():
            one, other, at = (x if fake is None else fake.from_tensor(x) for x in (rows, experts, ends))
            made = [torch.nn.functional.grouped_mm(one, other, offs=at)]
            if columns == 8:
                # the gradients of both
                made.append(torch.nn.functional.grouped_mm(made[0], other.transpose(1, 2), offs=at))
                made.append(torch.nn.functional.grouped_mm(one.T, made[0], offs=at))
            found.append([(x.shape, x.stride(), x.dtype, x.untyped_storage().nbytes()) for x in made])
    assert found[0] == found[1]


def plain_operators(x: Tensor, y: Tensor, n: Tensor) -> list[Tensor]:
    """Results of [4, 6], [6, 4] and integers [4, 6]: element-wise, of products and of views, in place and given."""
    out, wide = torch.empty_like(x), x.expand(3, 4, 6)
    made = [x * y.T, x + 1, n / 2, n * x, x > n, torch.where(x > 0, x, y.T), wide.exp(), x.T.sigmoid(), x @ y]
    made += [F.softplus(x), x[1:, 2:] * 2, torch.complex(x, y.T), torch.addmm(x[:, :4], x, y), torch.bmm(wide, wide.mT)]
    made += [torch.mul(x, y.T, out=out), x[1:][1:, 3], x[2:].as_strided((2,), (3,)), x.as_strided((2, 2), (1, 5), 7)]
    made += [x.clone().mul_(y.T), torch.mm(x, y, out=x.new_empty(4, 4)), x.view(2, 12)[1], F.logsigmoid(x[:, ::2])]
    # memory that grows
    return [*made, torch.neg(x, out=x.new_empty(0))]


def test_results_by_an_operators_own_rule_are_those_of_the_kernels() -> None:
    given = torch.randn(4, 6), torch.randn(6, 4), torch.ones(4, 6, dtype=torch.int64)

    def layouts(values: list[Tensor]) -> list[Any]:
        return [(v.shape, v.stride(), v.dtype, v.storage_offset(), v.untyped_storage().nbytes()) for v in values]

    with torch.no_grad():
        real = layouts(plain_operators(*given))
    # the second mode finds what the first one has kept
    for _ in range(2):
        with quick_fakes.QuickFakes(valid=True) as fake, torch.no_grad():
            assert layouts(plain_operators(*map(fake.from_tensor, given))) == real


class Speech(Optimised, by=torch.optim.SGD, lr=0.1):
    """Letters of sounds; a path goes through the padded targets."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(12, 16, batch_first=True), nn.Linear(16, 9)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        sounds, steps, letters, lengths = batch
        scores = self.head(self.rnn(sounds)[0]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, letters, steps, lengths)


def test_a_loss_of_paths_is_counted_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    # the step runs on copies, and is counted with values where an operator fails
    batch: Any = (
        torch.randn(3, 40, 12),
        torch.tensor([40, 35, 30]),
        torch.randint(1, 9, (3, 7)),
        torch.tensor([7, 5, 6]),
    )
    counted = profile_module(Speech(), batch)
    assert counted.reason == ""
    monkeypatch.setattr(quick_fakes, "CTC_LOSS", None)
    measured = profile_module(Speech(), batch)
    assert "ctc_loss" in measured.reason
    assert counted.peak_bytes == measured.peak_bytes
    assert counted.by_kind == measured.by_kind


def test_targets_end_to_end_have_no_known_longest_path() -> None:
    real = torch.randn(40, 3, 9), torch.ones(18, dtype=torch.long), torch.tensor([40] * 3), torch.tensor([7, 5, 6])
    with quick_fakes.QuickFakes(valid=True) as fake:
        given = [fake.from_tensor(x) for x in real]
        with pytest.raises(Exception, match="ctc_loss"):
            F.ctc_loss(*given)


class Recurrent(Speech):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.rnn = nn.LSTM(12, hidden, batch_first=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.rnn(batch)[0].mean()


def test_a_kernel_that_leaves_much_is_run_for_few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(most: int) -> tuple[int, int]:
        monkeypatch.setattr(kernel_sizes, "MOST_LEFT", most)
        monkeypatch.setattr(kernel_sizes, "_left", {})
        ran.clear()
        return profile_module(Recurrent(128), torch.randn(70, 40, 12)).peak_bytes, max(ran)

    def run(args: Any, samples: int) -> int:
        ran.append(samples)
        return usual(args, samples)

    ran: list[int] = []
    usual = kernel_sizes._run_rnn
    monkeypatch.setattr(kernel_sizes, "_run_rnn", run)
    exact, samples = counted(2**26)
    assert samples == 70
    near, samples = counted(2**22)
    assert samples < 70
    assert near == pytest.approx(exact, rel=0.01)
    with settings_of("cuda"):
        assert profile_module(Recurrent(128), torch.randn(70, 40, 12)).peak_bytes < exact


def test_the_driver_is_asked_once_for_all_operators_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[bool]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(asked.append(True)))
    with quick_fakes.QuickFakes(valid=True):
        for n in range(3, 6):
            torch.sort(torch.empty(n))
    assert asked == [True]


def test_results_in_given_memory_are_made_once_unless_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_fakes._known.clear()
    made, compute = list[Any](), quick_fakes.QuickFakes._computed
    monkeypatch.setattr(
        quick_fakes.QuickFakes, "_computed", lambda self, func, *args: made.append(func) or compute(self, func, *args)
    )
    with quick_fakes.QuickFakes(valid=True) as fake:
        x = fake.from_tensor(torch.randn(4, 6))
        for length, times in ((4, 1), (0, 3)):
            counts = []
            for _ in range(times + 1):
                out = torch.empty(length, 6)
                assert torch.softmax(x, 1, out=out) is out
                assert out.shape == (4, 6)
                counts.append(sum("softmax" in str(func) for func in made))
                made.clear()
            assert counts == ([1, 0] if length else [1] * 4)
