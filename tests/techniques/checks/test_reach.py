"""Claim: a decoder's shape says whether attention is local or full, and whether that was declared or detected."""

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_amp.installing.describe_module import describe
from lightning_amp.models.decoders.stratum_keys import FullAttention, LocalAttention
from lightning_amp.techniques.checks.key import reach_of
from lightning_amp.techniques.hic.attention.install import FusedLocalAttention, chunk_attention
from tests.techniques.sharded_cases import Case, Model


class Undeclared(nn.Module):
    """Full attention written elsewhere."""

    def forward(self, q: Tensor, k: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, values)


class Causal(nn.Module):
    def forward(self, q: Tensor, k: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, values, is_causal=True)


def test_reach_of_attention() -> None:
    for attention, full, known_from in (
        (LocalAttention(4, 3), False, "declared by LocalAttention"),
        (FullAttention(), True, "declared by FullAttention"),
        (chunk_attention(LocalAttention(4, 3), buckets=1), False, "declared by LocalAttention"),
        (FusedLocalAttention(4, 3), False, "detected: FusedLocalAttention has buckets of anchors"),
        (Undeclared(), True, "detected: Undeclared computes softmax(q k^T D^-0.5) values on an example"),
        (Causal(), False, "taken as local: Causal declares no `reach`, has no buckets and is no full attention"),
    ):
        assert reach_of(attention) == (full, known_from)


def test_the_shape_of_a_decoder_says_it() -> None:
    model = Model(Case(key="full_attention"))
    shape = describe(model, batch_size=4).decoder
    assert shape is not None
    assert (shape.attention, shape.full, shape.window) == (True, True, 1)
    assert shape.known_from == "declared by FullAttention"
    # one key that is local needs the techniques of local attention
    model.decoder.strata[1].key.attention = LocalAttention(12, 5)  # type: ignore[union-attr]
    mixed = describe(model, batch_size=4).decoder
    assert mixed is not None
    assert (mixed.full, mixed.known_from) == (False, "declared by LocalAttention")
