"""Losses that are no sum over the rows of a batch, or have gradients of their own."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.odd_modules.collection.row import X, around, lin, odd, two


def _vq(m: Any, x: Tensor) -> Tensor:
    z = m.a(x)
    q = m.book(torch.cdist(z, m.book.weight).argmin(-1))
    loss = (q - z.detach()).square().mean() + 0.25 * (q.detach() - z).square().mean()
    return (m.b(z + (q - z).detach()) - x).square().mean() + loss


def _info_nce(m: Any, x: Tensor) -> Tensor:
    """A loss over pairs of rows."""
    return F.cross_entropy(F.normalize(m.net(x)) @ F.normalize(m.net(-x)).T / 0.1, torch.arange(len(x)))


def penalty(m: Any, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    (grad,) = torch.autograd.grad(m.b(m.a(x).tanh()).sum(), x, create_graph=True)
    return (grad.norm(dim=-1) - 1).square().mean()


def _adversary(m: Any, x: Tensor) -> Tensor:
    """The discriminator's weights are held fixed by functional_call."""
    fixed = {name: value.detach() for name, value in m.judge.named_parameters()}
    fooled = torch.func.functional_call(m.judge, fixed, m.net(x)).mean()
    return fooled + m.judge(m.net(x).detach()).square().mean()


LOSSES = {
    "a gradient penalty": odd(X, penalty, says={"tensor3d": "started a backward pass"}, a=lin(6, 8), b=lin(8, 3)),
    "a branch on values": odd(X, lambda m, x: m.b(m.a(x)) if m.a(x).mean() > 0 else m.b(-m.a(x)), True, a=lin(6, 8),
        b=lin(8, 3)),
    "pairs of rows": odd(X, _info_nce, True, says={"pipeline": "walk the blocks .* once"}, net=two(6, 8, 5)),
    "vector quantisation": odd(X, _vq, a=lin(6, 4), b=lin(4, 6), book=lambda: nn.Embedding(7, 4)),
    "an adversary held fixed": around({}, _adversary, {"pipeline": "walk the blocks .* once",
        "early_update": "needs a parameter again after its update"}, judge=lin(3, 1)),
}  # fmt: skip
