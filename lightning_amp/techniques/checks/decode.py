"""Check that a module decodes as techniques require: S4 and S5 replace or split what it computes.

It is probed on a few scores of both signs, from 1e-6 to 1e5. Known limit: what it does with others is not seen.
"""

import torch
from torch import Tensor, nn

from lightning_amp.techniques.checks.same_function import mismatch

SCALES = (1.0, 2.0**-20, 2.0**13)
"""Of the examples; powers of two keep products exact."""


def decode_problem(decode: nn.Module) -> str:
    """Why a module is not (u key^T)[:, feature_anchor], of all channels or summed over parts of them; "" if it is."""
    return next(filter(None, (_problem(decode, scale) for scale in SCALES)), "")


def _problem(decode: nn.Module, scale: float) -> str:
    # small integers are exact in any order of summation: a difference is a different function
    u, key = scale * torch.tensor([[1.0, -2.0], [-3.0, 5.0]]), torch.arange(10.0).view(5, 2)
    feature_anchor = torch.tensor([3, 0, 3, 1])
    expected = (u @ key.T)[:, feature_anchor]

    def run(decode: nn.Module) -> dict[str, Tensor]:
        parts = [decode(u[:, part], key[:, part], feature_anchor) for part in (slice(0, 1), slice(1, 2))]
        return {"": decode(u, key, feature_anchor), "the sum over channels": parts[0] + parts[1]}

    with torch.no_grad():
        return mismatch(decode, {"": expected, "the sum over channels": expected}, run)
