"""Attacks by what is computed of features, and by losses."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tensor3d.small import Attack, attack
from tests.odd_modules.collection.losses import penalty
from tests.odd_modules.collection.networks import fixed_point, vae
from tests.odd_modules.collection.row import both, features, lin

X, SEQ = features(6), features(5, 8)


def _of_features(name: str, call: Any, by_rows: bool = False) -> Attack:
    """An operator on features that a layer has split."""
    return attack(name, X, lambda m, x: m.b(call(m.a(x))), by_rows, a=lin(6, 8), b=lin(8, 3))


def _to(n: int, name: str, call: Any, by_rows: bool = False) -> Attack:
    """The same where n features are left."""
    return attack(name, X, lambda m, x: m.b(call(m.a(x))), by_rows, a=lin(6, 8), b=lin(n, 3))


def _coupling(m: Any, x: Tensor) -> Tensor:
    """Two steps of a normalising flow; the negative likelihood."""
    found = x.new_zeros(len(x))
    for net in m.nets:
        a, b = x.chunk(2, -1)
        shift, scale = net(a).chunk(2, -1)
        x, found = torch.cat([b * scale.tanh().exp() + shift, a], -1), found + scale.tanh().sum(-1)
    return (0.5 * x.square().sum(-1) - found).mean()


def _vq(m: Any, x: Tensor) -> Tensor:
    z = m.a(x)
    near = torch.cdist(z, m.book.weight).argmin(-1)
    q = m.book(near)
    loss = (q - z.detach()).square().mean() + 0.25 * (q.detach() - z).square().mean()
    return (m.b(z + (q - z).detach()) - x).square().mean() + loss


def _adversarial(m: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(m.b(m.a(x).tanh()).square().sum(), x)
    return m.b(m.a(x.detach() + 0.1 * grad.sign()).tanh())


def _hidden_gradient(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    (grad,) = torch.autograd.grad(m.b(h).square().sum(), h, retain_graph=True)
    return m.b(h + 0.1 * grad.detach())


def _jacobian(m: Any, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.jacrev(lambda row: m.b(m.a(row).tanh())))(x)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -0.5 * grad


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.02, 0.02)


def _hooked(change: Any) -> Any:
    def call(m: Any, x: Tensor) -> Tensor:
        x = m.a(x)
        x.register_hook(change)
        return m.c(m.b(x.tanh()).tanh() + x)

    return call


def _limited(m: Any, x: Tensor) -> Tensor:
    x = Clamped.apply(m.a(x))
    return m.c(m.b(x.tanh()).tanh() + x)


VALUES = [
    _of_features("softmax over features", lambda h: h.softmax(-1)),
    _of_features("running sums over features", lambda h: h.cumsum(-1)),
    _of_features("running products and greatest", lambda h: h.cumprod(-1) + h.cummax(-1).values + h.logcumsumexp(-1)),
    _of_features("sorted features", lambda h: h.sort(-1).values),
    _of_features("features by order", lambda h: h.gather(-1, h.argsort(-1, descending=True))),
    _of_features("rolled, flipped and shifted", lambda h: h.roll(3, -1) + h.flip(-1) + F.pad(h, (1, -1))),
    _of_features(
        "chosen features", lambda h: h[:, [1, 0, 3, 2, 7, 6, 5, 4]] + h.index_select(-1, torch.arange(7, -1, -1))
    ),
    _of_features(
        "features above their median",
        lambda h: torch.where(h > h.median(-1, keepdim=True).values, h, h.quantile(0.25, -1, keepdim=True)),
    ),
    _of_features(
        "standardised features", lambda h: (h - h.mean(-1, keepdim=True)) / h.var(-1, keepdim=True).add(1).sqrt()
    ),
    _of_features("features of norm 1", lambda h: F.normalize(h, dim=-1) + h / h.norm(p=1, dim=-1, keepdim=True)),
    _of_features(
        "features by their maximum", lambda h: h / h.abs().amax(-1, keepdim=True) + h.logsumexp(-1, keepdim=True)
    ),
    _of_features("features as images", lambda h: F.avg_pool2d(h.view(-1, 1, 2, 4), 3, 1, 1).flatten(1)),
    _of_features("pairs of features", lambda h: h.view(-1, 4, 2).flip(-1).flatten(1)),
    _of_features("interleaved features", lambda h: h.view(-1, 2, 4).mT.flatten(1)),
    _of_features("stacked and unbound", lambda h: torch.stack(h.unbind(-1)[::-1], -1)),
    _of_features("repeated features", lambda h: h[:, :4].repeat(1, 2) + h[:, 4:].repeat_interleave(2, -1)),
    _of_features("masked features", lambda h: h.masked_fill(h < 0, -1.0).clamp(max=2.0)),
    _of_features("Fourier transform over features", lambda h: torch.fft.fft(h).real + torch.fft.ifft(h).imag),
    _of_features("centred over rows", lambda h: h - h.mean(0), True),
    _of_features(
        "activations of all kinds",
        lambda h: F.gelu(h) + F.mish(h) + F.hardswish(h) + F.celu(h) + F.softplus(h) + F.logsigmoid(h),
    ),
    _of_features("sines", lambda h: torch.sin(3 * h) + torch.sinc(h) + torch.erf(h)),
    _of_features("unfolded features", lambda h: F.pad(h, (0, 2)).unfold(-1, 3, 1).sum(-1)),
    _of_features(
        "features in steps", lambda h: torch.diff(h, dim=-1, prepend=h[:, :1]) + torch.trapezoid(h, dim=-1)[:, None]
    ),
    _of_features("straight through", lambda h: h + (h.round() - h).detach()),
    _of_features("gradient reversed", Reverse.apply),
    _of_features("a list and back", lambda h: h * float(h.detach().mean()) + h.detach().max().item(), True),
    _to(3, "greatest features", lambda h: h.topk(3, -1).values),
    _to(5, "outer half", lambda h: h[:, ::2].repeat(1, 2)[:, :5]),
    _to(64, "outer product of features", lambda h: torch.einsum("bi,bj->bij", h, h).flatten(1)),
    _to(28, "pairs by combination", lambda h: (h[:, :, None] * h[:, None])[:, *torch.triu_indices(8, 8, 1)]),
    _to(4, "products of halves", lambda h: torch.mul(*h.tensor_split(2, -1))),
    _to(1, "one number of all features", lambda h: h.prod(-1, keepdim=True) + h.std(-1, keepdim=True)),
    attack(
        "distances of features",
        both(X, X),
        lambda m, xy: torch.cdist(m.a(xy[0])[:, None], m.a(xy[1])[:, None]).squeeze(-1),
        a=lin(6, 8),
    ),
    attack("a fixed point", X, fixed_point, True, a=lin(6, 6), b=lin(6, 3)),
    attack(
        "a normalising flow",
        X,
        _coupling,
        nets=lambda: nn.ModuleList([nn.Sequential(lin(3, 8)(), nn.Tanh(), lin(8, 6)()) for _ in range(2)]),
    ),
    attack("a variational autoencoder", X, vae, drawn=True, encoder=lin(6, 10), decoder=lin(5, 6)),
    attack("vector quantisation", X, _vq, a=lin(6, 4), b=lin(4, 6), book=lambda: nn.Embedding(7, 4)),
    attack("a gradient penalty", X, penalty, a=lin(6, 8), b=lin(8, 3)),
    attack("an adversarial input", X, _adversarial, a=lin(6, 8), b=lin(8, 3)),
    attack("a gradient of hidden features", X, _hidden_gradient, a=lin(6, 8), b=lin(8, 3)),
    attack("a Jacobian by torch.func", X, _jacobian, a=lin(6, 8), b=lin(8, 3)),
    attack("a hook that scales a gradient", X, _hooked(lambda g: 2 * g), a=lin(6, 8), b=lin(8, 8), c=lin(8, 3)),
    attack(
        "a hook that clamps a gradient",
        X,
        _hooked(lambda g: g.clamp(-0.02, 0.02)),
        True,
        a=lin(6, 8),
        b=lin(8, 8),
        c=lin(8, 3),
    ),
    attack(
        "a hook that normalises a gradient",
        X,
        _hooked(lambda g: g / (g.norm() + 1)),
        True,
        a=lin(6, 8),
        b=lin(8, 8),
        c=lin(8, 3),
    ),
    attack("a Function that clamps a gradient", X, _limited, True, a=lin(6, 8), b=lin(8, 8), c=lin(8, 3)),
    attack(
        "a Function that clamps a gradient of whole features",
        X,
        lambda m, x: m.c(Clamped.apply(m.b(m.a(x).tanh())).tanh()),
        True,
        a=lin(6, 8),
        b=lin(8, 8),
        c=lin(8, 3),
    ),
    attack(
        "a Function that scales a gradient of whole features",
        X,
        lambda m, x: m.c(Reverse.apply(m.b(m.a(x).tanh())).tanh()),
        a=lin(6, 8),
        b=lin(8, 8),
        c=lin(8, 3),
    ),
]
