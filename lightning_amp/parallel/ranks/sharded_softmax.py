"""Softmax over features that are sharded over a mesh axis.

    log_softmax(x)_f = x_f - log sum over ranks s of exp(L_s)       L_s = logsumexp of rank s's own x, -inf without any
    backward         g_f - softmax(x)_f * (sum over ranks of sum over own f of g_f)

Exact up to the order of the sums. Kept for the backward pass: the result [B, own F] and nothing else.
Collectives: one all-gather of [B] forward, one all-reduce of [B] backward. Normalisers are gathered, not reduced as a
maximum and then a sum: that would be two collectives, and [B, R] is small.

Legend: cell (B), own_feature (those of this rank; may be none), R ranks.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.parallel.ranks import collectives
from lightning_amp.shapes import OwnCounts


def log_softmax(logits: OwnCounts, mesh: DeviceMesh) -> OwnCounts:
    """Logarithm of the softmax over all ranks' features, for the own ones; every rank must call it."""
    return cast(Tensor, _LogSoftmax.apply(logits, mesh))  # type: ignore[no-untyped-call]


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, mesh: DeviceMesh) -> Tensor:
        own = logits.to(_at_least_float32(logits)).logsumexp(dim=1)
        normaliser = collectives.all_gather(mesh, own).logsumexp(dim=0)
        result = (logits - normaliser[:, None]).to(logits.dtype)
        ctx.mesh = mesh
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (result,) = ctx.saved_tensors
        # grad is that of the own columns; the normaliser was made of all ranks' columns, so their sum is needed
        total = collectives.all_reduce(ctx.mesh, grad.sum(dim=1, dtype=_at_least_float32(grad)))
        return (grad - result.exp() * total[:, None]).to(grad.dtype), None


def _at_least_float32(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)
