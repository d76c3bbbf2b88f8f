"""LocalAttention is the local-attention package's computation; pieces of it are in test_s3_chunked.py."""

import pytest
import torch
from local_attention import LocalAttention as PackageAttention

from lightning_amp.errors import ModelError
from lightning_amp.models.decoders.stratum_keys import LocalAttention
from lightning_amp.techniques.hic.attention.install import FusedLocalAttention

SHAPES = [(20, 5, 8), (37, 5, 6), (3, 5, 6), (41, 20, 16)]
IDS = ["whole buckets", "filled last bucket", "one bucket", "two and a bit"]


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


def inputs(n, dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, dim, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)]


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
def test_refusals(kind: type) -> None:
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
