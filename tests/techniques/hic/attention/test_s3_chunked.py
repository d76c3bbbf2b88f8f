"""S3 computes what eager local attention computes and keeps nothing of size [N, 3w] for the backward pass."""

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.errors import InstallError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.models.decoders.stratum_keys import LocalAttention
from lightning_amp.techniques.hic.attention.install import ChunkedLocalAttention, chunk_attention

DOUBLE = 8


def inputs(n: int, dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (n, dim)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3)]


def forward_backward(attention: nn.Module, n: int, dim: int) -> tuple[Tensor, list[Tensor]]:
    leaves = inputs(n, dim)
    out = attention(*leaves)
    weight = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view_as(out)
    return out.detach(), list(torch.autograd.grad((out * weight).sum(), leaves))


@pytest.mark.parametrize(
    ("n", "buckets", "retain"), [(50, 1, False), (43, 2, True), (43, 5, False), (7, 3, False), (50, 100, True)]
)
def test_equals_eager(n: int, buckets: int, retain: bool) -> None:
    eager = LocalAttention(8, 10)
    out, grads = forward_backward(eager, n, 8)
    chunked, chunked_grads = forward_backward(chunk_attention(eager, buckets=buckets, retain=retain), n, 8)
    assert torch.equal(chunked, out)
    assert torch.equal(chunked_grads[0], grads[0]), "every query lies in one chunk"
    for found, expected in zip(chunked_grads[1:], grads[1:], strict=True):
        assert (found - expected).norm() <= 1e-14 * expected.norm(), "only the order of the sums differs"


def measure(attention: nn.Module, *, n: int, dim: int) -> tuple[int, int]:
    """Bytes kept after the forward pass, and the peak of forward and backward."""
    leaves = inputs(n, dim)
    with LiveBytes() as live:
        out = attention(*leaves)
        kept = live.current
        out.sum().backward()
        return kept, live.peak


def test_keeps_no_probabilities_and_lowers_the_peak() -> None:
    n, dim, w = 1200, 8, 100
    probabilities = n * 3 * w * DOUBLE
    eager = LocalAttention(dim, w)
    kept, peak = measure(eager, n=n, dim=dim)
    assert kept > probabilities, "eager attention keeps them"
    kept_retain, peak_retain = measure(chunk_attention(eager, buckets=1, retain=True), n=n, dim=dim)
    assert kept_retain > probabilities, "so do chunks without recomputation"
    assert peak_retain < peak, "but their transients are those of one chunk"
    kept_chunked, peak_chunked = measure(chunk_attention(eager, buckets=1), n=n, dim=dim)
    state_and_out = 4 * n * dim + 3 * w * dim
    norms = 2 * n
    assert kept_chunked <= (state_and_out + norms) * DOUBLE
    # One of twelve buckets: its scores, probabilities and their gradients, beside the tensors [N, D].
    assert peak_chunked < state_and_out * DOUBLE + 6 * n * dim * DOUBLE + 6 * probabilities // 12
    assert peak_chunked < peak / 4


def with_state() -> LocalAttention:
    attention = LocalAttention(8, 10)
    attention.scale = nn.Parameter(torch.ones(1))
    return attention


@pytest.mark.parametrize(("attention", "message"), [
    (with_state(), r"has the state \['scale'\].*leave S3 out"),
    (nn.Linear(2, 2), r"S3 does not support 'Linear', which lacks \['n_buckets', 'prepare', 'attend'\]"),
    (ChunkedLocalAttention(nn.Identity(), buckets=1, retain=False), "S3 does not support 'ChunkedLocalAttention'"),
])  # fmt: skip
def test_refuses_other_modules(attention: nn.Module, message: str) -> None:
    with pytest.raises(InstallError, match=message):
        chunk_attention(attention, buckets=1)
