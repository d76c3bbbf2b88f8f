"""Claim: blocks of a ring are the same by products, some rows at a time, as in the kernel for CPUs."""

import pytest
import torch

from lightning_amp.dist import ring_attention as ring
from lightning_amp.footprint.live_bytes import LiveBytes


def test_products_of_some_rows_are_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = torch.randn(4, 2, 3, 7, 4, generator=generator, dtype=torch.float64)
    added = torch.randn(1, 3, 7, 7, generator=generator, dtype=torch.float64)
    # the third row sees nothing, and nobody sees the first column
    seen = added > -0.5
    seen[:, :, 2], seen[..., 0] = False, False
    for mask, causal in ((None, False), (None, True), (added, False), (seen, False), (seen[:, :, :1], False)):
        results = []
        for on_cpu, most in ((("cpu",), 1), ((), 2**24), ((), 6 * 7 * 2), ((), 1)):
            monkeypatch.setattr(ring, "ON_CPU", on_cpu)
            monkeypatch.setattr(ring, "MOST_SCORES", most)
            out, sums = ring.block_forward(q, k, v, mask, causal, 0.4)
            back = ring.block_backward(grad, q, k, v, out, sums.nan_to_num(0, neginf=0), mask, causal, 0.4)
            results.append((out, sums, *back))
        for found in results[1:]:
            torch.testing.assert_close(found, results[0], rtol=1e-11, atol=1e-12)


def test_products_hold_the_scores_of_some_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "ON_CPU", ())
    monkeypatch.setattr(ring, "MOST_SCORES", 800 * 20)
    q, k, v, grad = torch.randn(4, 1, 1, 800, 4)
    with LiveBytes() as live:
        out, sums = ring.block_forward(q, k, v, None, False, 0.5)
        ring.block_backward(grad, q, k, v, out, sums, None, False, 0.5)
    assert live.peak < 4 * 800 * 800 / 4
