"""Compute the key of a streamed stratum in fewer operators: projections and gated layer, with manual backward.

    qk, val = p A^T, p B^T         dp = g + dqk A + dval B, the sums inside the products; g is that of attended p
    key' = [key +] a gelu(b)       da, db = dkey' gelu(b), dkey' a gelu'(b), the two halves of one tensor

Exact up to rounding. A key is run so where it is one of the forms of stratum_keys.py, which is found by trying; hooks
on a projection, a bias, another class of layer and autocast keep it as it is. No collectives.
What shrinks: two sums of gradients of p and a copy of that of ff's result. Second derivatives are refused by torch; a
streamed stratum has none.

Legend: anchor (N), dim (D).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_amp._torch import gelu_backward
from lightning_amp.techniques.checks.key import attention_form
from lightning_amp.techniques.contract.change import KINDS


def streamed_key(key: nn.Module | None) -> "StreamedKey | None":
    """What a key runs instead of its class's `forward`; None where that stays."""
    form = None if key is None or "forward" in vars(key) else attention_form(key)
    return None if form is None else StreamedKey(*form)


@dataclass(frozen=True)
class StreamedKey:
    """A key in fewer operators; made by `streamed_key`.

    Attributes:
        projected: Whether it attends to the projected anchors, and not to the normalised ones.
        residual: Whether the gated layer's result is added to its input.
    """

    projected: bool
    residual: bool

    def __call__(self, key: Any, v: Tensor) -> tuple[Tensor, Tensor]:
        """Key, and the projected anchors."""
        if not _plain(key, v):
            found: tuple[Tensor, Tensor] = type(key).forward(key, v)
            return found
        p = key.prenorm(v)
        qk, val, p = _Project.apply(p, key.qk.weight, key.value.weight)  # type: ignore[no-untyped-call]
        met = val + key.attention(qk, qk, val if self.projected else p)
        gated = _Gate.apply(key.ff(key.postnorm(met)), met if self.residual else None)  # type: ignore[no-untyped-call]
        return gated, val


def _plain(key: Any, v: Tensor) -> bool:
    """Whether the projections are products with their weights, and nothing else."""
    kind = v.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return False
    return all(
        type(layer) is nn.Linear
        and layer.bias is None
        and "forward" not in vars(layer)
        and not any(getattr(layer, hooks) for hooks in KINDS)
        for layer in (key.qk, key.value)
    )


class _Project(torch.autograd.Function):
    """Both projections of p, and p itself, whose gradients meet in p."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, of_qk: Tensor, of_value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(p, of_qk, of_value)
        return F.linear(p, of_qk), F.linear(p, of_value), p.view_as(p)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        p, *weights = ctx.saved_tensors
        *of_rows, found = grads
        pairs = [(g, w) for g, w in zip(of_rows, weights, strict=True) if g is not None]
        for i, (g, weight) in enumerate(pairs if ctx.needs_input_grad[0] else ()):
            if found is None:
                found = g @ weight
            else:
                # the gradient that came in may be used elsewhere too
                found = torch.addmm(found, g, weight) if i == 0 else found.addmm_(g, weight)
        needed = ctx.needs_input_grad[1:]
        of_weights = (
            g.T @ p if g is not None and need else None for g, need in zip(of_rows, needed, strict=True)
        )
        return found, *of_weights


class _Gate(torch.autograd.Function):
    """The first half of the channels, gated by the GELU of the second half, and added to the key where there is one."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, key: Tensor | None) -> Tensor:
        a, b = h.chunk(2, dim=-1)
        gate = F.gelu(b)
        ctx.save_for_backward(h, gate)
        return a * gate if key is None else torch.addcmul(key, a, gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        h, gate = ctx.saved_tensors
        a, b = h.chunk(2, dim=-1)
        of_h = torch.empty_like(h)
        of_a, of_b = of_h.chunk(2, dim=-1)
        torch.mul(grad, gate, out=of_a)
        torch.mul(grad, a, out=of_b)
        gelu_backward(of_b, b, grad_input=of_b)
        return of_h, grad if ctx.needs_input_grad[1] else None
