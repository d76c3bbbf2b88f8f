"""S3 computes what eager local attention computes and keeps nothing of size [N, 3w] for the backward pass."""

import pytest
import torch
from torch import nn

from lightning_amp.errors import InstallError
from lightning_amp.models.decoders.stratum_keys import LocalAttention
from lightning_amp.techniques.hic.attention.install import ChunkedLocalAttention, chunk_attention
from tests.techniques.hic.attention.test_fused import DOUBLE, distance, draw, measure, results


@pytest.mark.parametrize(
    ("n", "buckets", "retain"), [(50, 1, False), (43, 2, True), (43, 5, False), (7, 3, False), (50, 100, True)]
)
def test_equals_eager(n: int, buckets: int, retain: bool) -> None:
    eager = LocalAttention(8, 10)
    out, *grads = results(eager, draw(n))
    chunked, *chunked_grads = results(chunk_attention(eager, buckets=buckets, retain=retain), draw(n))
    assert torch.equal(chunked, out)
    assert torch.equal(chunked_grads[0], grads[0]), "every query lies in one chunk"
    assert distance(chunked_grads[1:], grads[1:]) <= 1e-14, "only the order of the sums differs"


def test_keeps_no_probabilities_and_lowers_the_peak() -> None:
    n, dim, w = 1200, 8, 100
    probabilities, whole = n * 3 * w * DOUBLE, n * dim * DOUBLE

    def kept_and_peak(attention: nn.Module) -> tuple[int, int]:
        kept, forward, backward = measure(attention, draw(n), torch.ones(n, dim, dtype=torch.float64))
        return kept, max(forward, backward)

    eager = LocalAttention(dim, w)
    kept, peak = kept_and_peak(eager)
    assert kept > probabilities, "eager attention keeps them"
    kept_retain, peak_retain = kept_and_peak(chunk_attention(eager, buckets=1, retain=True))
    assert kept_retain > probabilities, "so do chunks without recomputation"
    assert peak_retain < peak, "but their transients are those of one chunk"
    kept_chunked, peak_chunked = kept_and_peak(chunk_attention(eager, buckets=1))
    state_and_out = 4 * whole + 3 * w * dim * DOUBLE
    assert kept_chunked <= state_and_out + 2 * n * DOUBLE, "with the norms"
    # one of twelve buckets: its scores, probabilities and their gradients, with the tensors [N, D]
    assert peak_chunked < state_and_out + 6 * whole + 6 * probabilities // 12
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
