"""S4 returns the same inner products and gradients, and never makes a product with all anchors."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.models.decoders.stratified import Decode
from lightning_amp.techniques.hic.scores.s4_key_first import KeyFirst, key_first
from tests.techniques.hic.attention.test_fused import results

NODES = {
    "all": torch.arange(50),
    "run": torch.arange(7, 31),
    "gaps": torch.tensor([3, 4, 7, 49, 0]),
    "descending": torch.arange(20).flip(0),
    "repeated": torch.tensor([5, 5, 6, 6]),
    "one": torch.tensor([49]),
    "none": torch.arange(0),
}


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    u, key = (torch.randn(n, 8, dtype=torch.float64, generator=generator) for n in (6, 50))
    return u.requires_grad_(), key.requires_grad_()


@pytest.mark.parametrize("name", NODES)
def test_equals_the_full_product(name: str) -> None:
    expected, found = (
        results(lambda *t, d=d: d(*t, NODES[name]), [*inputs()]) for d in (Decode(), key_first(Decode()))
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_makes_no_product_with_all_anchors() -> None:
    cells, anchors, dim = 16, 5000, 4
    nodes = torch.arange(0, 50, 2)
    u, key = torch.ones(cells, dim, requires_grad=True), torch.ones(anchors, dim, requires_grad=True)

    def peak(decode: nn.Module) -> int:
        with LiveBytes() as live:
            decode(u, key, nodes).sum().backward()
        u.grad = key.grad = None
        return live.peak

    assert peak(Decode()) >= 4 * cells * anchors
    # All that is made besides the gradient of the keys [N, D] is of the size of the stratum.
    assert peak(key_first(Decode())) <= 4 * (anchors * dim + 3 * len(nodes) * (cells + dim) + 2 * cells * dim)


def test_nodes_without_values_and_of_inference_mode() -> None:
    with FakeTensorMode():
        assert key_first_shape(torch.arange(3, 9)) == (6, 6)
    assert key_first_shape(torch.arange(3, 9, device="meta"), device="meta") == (6, 6)
    with torch.inference_mode():
        assert key_first_shape(torch.arange(3, 9)) == (6, 6)


def key_first_shape(nodes: Tensor, *, device: str = "cpu") -> tuple[int, ...]:
    out: Tensor = KeyFirst()(torch.ones(6, 8, device=device), torch.ones(50, 8, device=device), nodes)
    return tuple(out.shape)
