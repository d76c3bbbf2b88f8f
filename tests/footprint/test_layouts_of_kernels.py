"""Claim: norms of transposed inputs, or under autocast, are counted with the strides and dtypes of the CPU kernels."""

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import permutations

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.footprint.copies.quick_fakes import QuickFakes
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.footprint.profile_module import profile_module
from tests.optimised import Optimised

ATEN = torch.ops.aten


def layouts(*sizes: int) -> Iterator[Tensor]:
    """Yield tensors of these sizes in every order of their strides."""
    for order in permutations(range(len(sizes))):
        yield torch.randn([sizes[i] for i in order]).permute([order.index(i) for i in range(len(sizes))])


@pytest.mark.parametrize("sizes", [(4, 6, 5), (4, 6, 5, 3)])
def test_results_have_the_strides_of_the_kernels(sizes: tuple[int, ...]) -> None:
    ones, zeros = torch.ones(6), torch.zeros(6)

    def made(x: Tensor, grad: Tensor, fake: QuickFakes | None) -> list[tuple[int, ...]]:
        own = [t if fake is None else fake.from_tensor(t) for t in (x, grad, ones, zeros)]
        x, grad, one, zero = own
        with fake or nullcontext():
            normed = ATEN.native_batch_norm.default(x, one, zero, zero.clone(), one.clone(), True, 0.1, 1e-5)
            back = ATEN.native_batch_norm_backward.default(
                grad, x, one, zero, one, zero, one, True, 1e-5, [True, True, True]
            )
            return [t.stride() for t in (*normed, *back, ATEN.roll.default(x, [1], [1]))]

    for x in layouts(*sizes):
        for grad in (torch.randn(sizes), torch.empty_like(x)):
            assert made(x, grad, QuickFakes(valid=True)) == made(x, grad, None)


def test_a_group_norm_and_its_gradient_have_the_layout_of_its_input() -> None:
    # torch makes the input of a group norm contiguous or channels last, but not the gradient that arrives
    plain = torch.randn(4, 6, 5, 3), torch.randn(4, 6, 5, 3).to(memory_format=torch.channels_last)

    def made(fake: QuickFakes | None) -> list[tuple[int, ...]]:
        xs, one = [t if fake is None else fake.from_tensor(t) for t in plain], torch.ones(6)
        one, needed = one if fake is None else fake.from_tensor(one), [True, True, True]
        with fake or nullcontext():
            normed = [ATEN.native_group_norm.default(x, one, one, 4, 6, 15, 2, 1e-5) for x in xs]
            back = [
                ATEN.native_group_norm_backward.default(grad, x, *of_x[1:], one, 4, 6, 15, 2, needed)
                for x, of_x in zip(xs, normed, strict=True)
                for grad in xs
            ]
            return [found[0].stride() for found in (*normed, *back)]

    assert made(QuickFakes(valid=True)) == made(None)


def test_norms_of_bfloat16_with_weights_of_float32_have_the_dtypes_of_the_kernels() -> None:
    real = torch.ones(4, 6, 8, dtype=torch.bfloat16), torch.ones(6), torch.ones(8)

    def made(fake: QuickFakes | None) -> list[tuple[torch.dtype, int]]:
        x, of_channels, of_rows = real if fake is None else map(fake.from_tensor, real)
        with fake or nullcontext():
            rows = ATEN.native_layer_norm.default(x, [8], of_rows, of_rows, 1e-5)
            groups = ATEN.native_group_norm.default(x, of_channels, of_channels, 4, 6, 8, 2, 1e-5)
            channels = ATEN.native_batch_norm.default(x, of_channels, of_channels, None, None, True, 0.1, 1e-5)
            needed = [True, True, True]
            back = [
                ATEN.native_layer_norm_backward.default(x, x, [8], *rows[1:], of_rows, of_rows, needed),
                ATEN.native_group_norm_backward.default(x, x, *groups[1:], of_channels, 4, 6, 8, 2, needed),
                ATEN.native_batch_norm_backward.default(
                    x, x, of_channels, None, None, *channels[1:], True, 1e-5, needed
                ),
            ]
            return [(t.dtype, t.untyped_storage().nbytes()) for t in (*rows, *groups, *channels, *sum(back, ()))]

    assert made(QuickFakes(valid=True)) == made(None)


def test_norms_of_bfloat16_with_statistics_or_a_bias_alone_have_the_dtypes_of_the_kernels() -> None:
    real = torch.ones(4, 6, 8, dtype=torch.bfloat16), torch.ones(6), torch.ones(8)

    def made(fake: QuickFakes | None) -> list[torch.dtype]:
        x, of_channels, of_rows = real if fake is None else map(fake.from_tensor, real)
        with fake or nullcontext():
            norms = [
                ATEN.native_layer_norm.default(x, [8], None, of_rows, 1e-5),
                ATEN.native_group_norm.default(x, None, of_channels, 4, 6, 8, 2, 1e-5),
                ATEN.native_batch_norm.default(x, None, None, of_channels, of_channels.clone(), True, 0.1, 1e-5),
                ATEN.native_batch_norm.default(x, None, of_channels, None, None, True, 0.1, 1e-5),
            ]
            return [t.dtype for t in sum(norms, ())]

    assert made(QuickFakes(valid=True)) == made(None)


class Series(Optimised, by=torch.optim.Adam):
    """Blocks that norm over transposed features, as PatchTST does, and then read them contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(32) for _ in range(4))
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.gates = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for norm, layer, gate in zip(self.norms, self.layers, self.gates, strict=True):
            normed = norm(x.transpose(1, 2)).transpose(1, 2)
            x = x + layer(normed) * gate(normed).sigmoid()
        return x.square().mean()


def test_a_step_of_transposed_norms_takes_what_is_counted() -> None:
    batch, module = torch.randn(16, 20, 32), Series()
    counted = profile_module(module, batch)
    assert counted.reason == ""
    optimizer = torch.optim.Adam(module.parameters())
    for _ in range(2):
        meter = LiveBytes()
        meter.watch([*module.parameters(), *module.buffers(), *[p.grad for p in module.parameters()]])
        meter.watch([batch, *(list(state.values()) for state in optimizer.state.values())])
        with meter:
            loss = module.training_step(batch, 0)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    assert meter.peak == pytest.approx(counted.peak_bytes, rel=0.002)
