"""Claim: S3 and the kernel "sdpa" compute what LocalAttention computes, output and gradients, keep what their
docstrings say, and refuse what they do not know."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp._torch import attend_on_cuda, attend_on_cuda_back
from lightning_amp.errors import InstallError
from lightning_amp.models.decoders.stratum_keys import LocalAttention
from lightning_amp.techniques.hic.attention import sdpa
from lightning_amp.techniques.hic.attention.install import ChunkedLocalAttention, FusedLocalAttention, chunk_attention
from tests.techniques.hic.attention.test_fused import DIM, WINDOW, distance, draw, measure, operators, results


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


FLOAT = 4


def fused(dim: int = DIM, window: int = WINDOW) -> FusedLocalAttention:
    return FusedLocalAttention(dim, window, kernel="sdpa")


@pytest.mark.parametrize(("length", "same"), [(4.8e4, True), (5.01e4, False)])
def test_scores_as_low_as_that_of_oneself(length: float, same: bool) -> None:
    leaves = [x.detach() for x in draw(2, 2)]
    # a turn by one position multiplies this inner product by cos(1)
    far = -length * 2**0.5 / torch.tensor(1.0, dtype=torch.float64).cos()
    leaves[0][0], leaves[1][1] = torch.tensor([far, 0.0]), torch.tensor([1.0, 0.0])
    leaves = [x.requires_grad_() for x in leaves]
    # a bucket of two: no row that fills it has the score 0
    found, expected = results(fused(2, 2), leaves), results(LocalAttention(2, 2), leaves)
    assert (distance(found[:1], expected[:1]) <= 1e-12) == same


@pytest.mark.parametrize("n", [600, 620])
def test_autocast_to_bfloat16(n: int) -> None:
    leaves, single = draw(n, 16), draw(n, 16, dtype=torch.float32)
    expected = results(LocalAttention(16, 40), leaves)
    with torch.autocast("cpu", torch.bfloat16):
        found, eager = (results(a, single) for a in (fused(16, 40), LocalAttention(16, 40)))
        names = operators(fused(16, 40), single)
    assert all(x.dtype == torch.float32 for x in found)
    errors = [(distance([a], [e]), distance([b], [e])) for a, b, e in zip(found, eager, expected, strict=True)]
    # gradients of a value are rounded in three parts before they are added, the reference's in one
    assert all(1e-5 < ours <= 1.5 * theirs for ours, theirs in errors), errors
    assert distance(found, expected) <= distance(eager, expected)
    assert not any("bmm" in name for name in names)
    with torch.autocast("cpu", torch.float16):
        assert distance(results(fused(16, 40), single), expected) <= 1e-6, "float16 is left alone"


def test_memory_is_as_documented() -> None:
    n, dim, w = 2350, 32, 100
    # torch 2.11 takes the logarithms of float64 without values for float32
    leaves, grad = draw(n, dim, dtype=torch.float32), torch.randn(n, dim)
    fused(dim, w)(*leaves)
    kept, forward, backward = measure(fused(dim, w), leaves, grad)
    whole, rows = 2400 * dim * FLOAT, 2400 * FLOAT
    # turned rows and keys, filled values, output in both forms; a logarithm and the norm of a row
    assert kept == 5 * whole + 2 * rows
    assert forward <= kept + 2 * rows
    # gradients: of three slots of keys and values, twice; of rows; of everything, one after the other
    assert abs(backward - kept - (6 + 6 + 1 + 3 + 1) * whole) <= 2 * whole
    meta = [x.detach().to("meta").requires_grad_() for x in leaves]
    fused(dim, w)(*meta)
    assert measure(fused(dim, w), meta, grad.to("meta")) == (kept, forward, backward)


@pytest.mark.parametrize("n", [58, 12, 5])
def test_cuda_s_kernels_are_called_as_they_are_declared(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU their shapes are all that can be tested."""
    called = []

    def there(q: Tensor, k: Tensor, values: Tensor, own: Tensor, *args: Any, **kwargs: Any) -> Any:
        assert own.stride()[:2] in ((0, 0), (sdpa._aligned(2 * WINDOW), 0)), "one mask for all buckets"
        assert all(stride * 4 % sdpa.ALIGNED_BYTES == 0 for stride in own.stride()[:3])
        assert own.storage_offset() * 4 % sdpa.ALIGNED_BYTES == 0
        called.append("there")
        return attend_on_cuda(q, k, values, own, *args, **kwargs)

    def back(*args: Any, **kwargs: Any) -> Any:
        called.append("back")
        return attend_on_cuda_back(*args, **kwargs)

    monkeypatch.setattr(sdpa, "attend_on_cuda", there)
    monkeypatch.setattr(sdpa, "attend_on_cuda_back", back)
    monkeypatch.setattr(sdpa, "_is_cuda", lambda x: True)
    leaves = [x.detach().to("meta").requires_grad_() for x in draw(n, dtype=torch.float32)]
    out = fused()(*leaves)
    grads = torch.autograd.grad(out, leaves, torch.empty_like(out))
    assert [x.shape for x in (out, *grads)] == [(n, DIM)] * 4
    assert called == ["there"] * (len(called) // 2) + ["back"] * (len(called) // 2)


@pytest.mark.parametrize(("kind", "dim", "dtype"), [
    ("cuda", 8, torch.float64),
    ("cuda", 6, torch.float32),
    ("cuda", 12, torch.bfloat16),
    ("mps", 8, torch.float32),
])  # fmt: skip
def test_refuses_what_has_no_kernel(kind: str, dim: int, dtype: torch.dtype) -> None:
    device: Any = SimpleNamespace(device=SimpleNamespace(type=kind), shape=(3, dim))
    with pytest.raises(InstallError, match=f"support {dim} channels .* on '{kind}'.*choose 'fused'"):
        sdpa._check(device, dtype)
    if kind == "cuda":
        sdpa._check(SimpleNamespace(device=device.device, shape=(3, 8)), torch.float32)  # type: ignore[arg-type]
