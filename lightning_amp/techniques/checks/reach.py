"""Determine whether a key attends to neighbouring buckets of anchors or to all anchors.

    declared     the attention, or a module inside it, has `reach`, "local" or "full"
    detected     it has the methods of bucketed attention; or, tried on an example, it is full attention

Legend: anchor (N), dim (D).
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_amp.techniques.checks.same_function import mismatch
from lightning_amp.techniques.contract.change import hooks_within
from lightning_amp.techniques.contract.protocol import BucketedAttention

EXAMPLE = (7, 4)
CLOSE = 1e-10


class Reach(NamedTuple):
    """How far attention reaches.

    Attributes:
        full: Whether to all anchors; else to the neighbouring buckets.
        known_from: What says so, as part of a sentence.
    """

    full: bool
    known_from: str


def reach_of(attention: nn.Module) -> Reach:
    """The reach of a key's attention."""
    for part in attention.modules():
        kind, declared = type(part).__name__, getattr(part, "reach", None)
        if declared in ("local", "full"):
            return Reach(declared == "full", f"declared by {kind}")
        if isinstance(part, BucketedAttention):
            return Reach(False, f"detected: {kind} has buckets of anchors")
    kind = type(attention).__name__
    if not full_problem(attention):
        return Reach(True, f"detected: {kind} computes softmax(q k^T D^-0.5) values on an example")
    return Reach(False, f"taken as local: {kind} declares no `reach`, has no buckets and is no full attention")


def full_problem(attention: nn.Module) -> str:
    """Why a module is not full attention by torch's definition, with one head and no mask; "" if it is."""
    hooks = hooks_within(attention)
    if hooks:
        return f"has {hooks!r}, which would not run"
    return mismatch(attention, _Full(), _results, rtol=CLOSE)


class _Full(nn.Module):
    def forward(self, q: Tensor, k: Tensor, values: Tensor) -> Tensor:
        weights: Tensor = (q @ k.T / q.shape[1] ** 0.5).softmax(-1)
        return weights @ values


def _results(attention: nn.Module) -> dict[str, Tensor]:
    """Output and gradients in float64 for random anchors, always the same."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn((4, *EXAMPLE), dtype=torch.float64, generator=generator, device="cpu")
    inputs = [draw.clone().requires_grad_() for draw in draws[:3]]
    with torch.enable_grad():
        out = attention(*inputs)
        q, k, values = torch.autograd.grad(out, inputs, draws[3])
    return {"output": out.detach(), "gradient of q": q, "gradient of k": k, "gradient of values": values}
