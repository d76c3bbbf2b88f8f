"""Claim: LocalAttention is the local-attention package's computation, of which test_s3_chunked.py has the pieces;
FullAttention is softmax(q k^T D^-0.5) values, and never holds the scores of all anchors.
"""

import warnings

import pytest
import torch
from local_attention import LocalAttention as PackageAttention

from lightning_amp.errors import ModelError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.models.decoders.stratified import StratifiedDecoder
from lightning_amp.models.decoders.stratum_keys import FullAttention, LocalAttention
from lightning_amp.techniques.hic.attention.install import FusedLocalAttention

SHAPES = [(20, 5, 8), (37, 5, 6), (3, 5, 6), (41, 20, 16)]
IDS = ["whole buckets", "filled last bucket", "one bucket", "two and a bit"]


def inputs(n: int, dim: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, dim, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]


def package(dim, window):
    return PackageAttention(
        dim=dim,
        window_size=window,
        causal=False,
        autopad=True,
        shared_qk=True,
        exact_windowsize=False,
        look_backward=1,
        look_forward=1,
        use_rotary_pos_emb=True,
    ).double()


@pytest.mark.parametrize(("n", "window", "dim"), SHAPES, ids=IDS)
def test_values_and_gradients_are_the_packages(n, window, dim):
    q, k, values = inputs(n, dim)
    expected = package(dim, window)(q[None], k[None], values[None])[0]
    found = LocalAttention(dim, window)(q, k, values)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view_as(found)
    for a, b in zip(
        torch.autograd.grad(found, (q, k, values), upstream),
        torch.autograd.grad(expected, (q, k, values), upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [LocalAttention, FusedLocalAttention])
def test_refusals_of_local_attention(kind: type) -> None:
    for dim in (3, 0, -2, "4", 4.0, True, None):
        with pytest.raises(ModelError, match=rf"{kind.__name__}\(dim={dim!r}\): rotary needs an even dim"):
            kind(dim, 4)
    for window in (0, -1, 2.5, True, "4", None):
        with pytest.raises(ModelError, match=rf"window={window!r}\): a bucket needs at least one anchor"):
            kind(4, window)
    q, k, values = inputs(7, 4)
    for wrong in ((q[:5], k, values), (q, k[:5], values), (q, k, values[:5])):
        for call in (kind(4, 3), kind(4, 3).prepare):
            with pytest.raises(ModelError, match=r"called with \d queries, \d keys and \d values; allowed"):
                call(*wrong)


def test_values_and_gradients_are_those_of_the_definition() -> None:
    for n, dim in ((1, 1), (7, 3), (130, 8)):
        q, k, values = given = inputs(n, dim)
        expected = (q @ k.T / dim**0.5).softmax(-1) @ values
        upstream = torch.linspace(-1, 1, n * dim, dtype=torch.float64).view(n, dim)
        right = torch.autograd.grad(expected, given, upstream)
        # rows whose channels are not side by side too
        for rows in (given, [x.T.contiguous().T for x in given]):
            found = FullAttention()(*rows)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
            for a, b in zip(torch.autograd.grad(found, given, upstream), right, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_no_scores_of_all_anchors_are_held() -> None:
    n, dim = 1500, 8
    tensor = 4 * n * dim
    for device in ("cpu", "meta"):
        rows = [x.detach().to(device).requires_grad_() for x in inputs(n, dim, torch.float32)]
        with LiveBytes() as live:
            FullAttention()(*rows).sum().backward()
        # the output and its gradient, of every input one, sums of weights; scores would be 187 tensors
        assert live.peak < 7 * tensor, device


def test_what_has_no_kernel_or_no_window_is_refused() -> None:
    q, k, values = inputs(6, 2)
    with pytest.raises(ModelError, match="attention was called with 5 queries, 6 keys and 6 values"):
        FullAttention()(q[:5], k, values)
    with (
        warnings.catch_warnings(action="ignore"),
        pytest.raises(ModelError, match=r"2 channels of torch.complex128 on 'cpu', for which torch has no fused"),
    ):
        FullAttention()(*(x.detach().cdouble() for x in (q, k, values)))
    arguments = {"stratum_index": [0, 1], "n_anchors": 6, "n_batches": 1, "key": "full_attention"}
    with pytest.raises(ModelError, match=r"window=3\): full attention has no window"):
        StratifiedDecoder(2, [range(6), range(5)], window=3, **arguments)
