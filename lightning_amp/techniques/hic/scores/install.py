"""Install key-first decode (S4) and the sparse likelihood in the strata of a decoder."""

from typing import Any

from torch import nn

from lightning_amp.techniques.hic.scores.s4_key_first import key_first
from lightning_amp.techniques.hic.scores.sparse_likelihood import sparse_likelihood


def decode_key_first(module: nn.Module, spec: Any, mesh: Any) -> nn.Module:
    """S4: select the keys of a stratum's anchors before the product with the cells."""
    return key_first(module)


def likelihood_of_nonzeros(module: nn.Module, spec: Any, mesh: Any) -> nn.Module:
    """The likelihood of all counts as if they were zero, with terms of those that are not."""
    return sparse_likelihood(module)
