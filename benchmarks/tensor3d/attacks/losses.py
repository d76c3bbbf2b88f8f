"""Attacks by losses, and by models whose loss is computed step by step."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tensor3d.small import Attack, attack
from tests.odd_modules.collection.networks import written
from tests.odd_modules.collection.row import both, features, lin, par, words

X, SEQ = features(6), features(5, 8)


def _loss(name: str, call: Any, n: int = 5, target: Any = None, by_rows: bool = False) -> Attack:
    """A loss of features that a layer has split; of the batch's second tensor."""
    batch = both(X, target or features(n))
    return attack(name, batch, lambda m, xy: call(m.b(m.a(xy[0]).tanh()), xy[1]), by_rows, a=lin(6, 8), b=lin(8, n))


def _crf(m: Any, x: Tensor) -> Tensor:
    emit = m.a(x)
    alpha = emit[:, 0]
    for t in range(1, x.shape[1]):
        alpha = torch.logsumexp(alpha[:, :, None] + m.move, 1) + emit[:, t]
    gold = emit[..., 0].sum(1) + 4 * m.move[0, 0]
    return (torch.logsumexp(alpha, -1) - gold).mean()


def _factors(m: Any, x: Tensor) -> Tensor:
    """A factorisation machine."""
    return x @ m.w + 0.5 * ((x @ m.v).square() - x.square() @ m.v.square()).sum(1, keepdim=True)


def _mixture(m: Any, x: Tensor) -> Tensor:
    share, mean, log = m.a(x).chunk(3, -1)
    found = torch.distributions.Normal(mean, log.exp()).log_prob(x[:, :1])
    return -torch.logsumexp(share.log_softmax(-1) + found, -1).mean()


def _gumbel(m: Any, x: Tensor) -> Tensor:
    return m.b(F.gumbel_softmax(m.a(x), hard=True))


def _in_place(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).mul_(2).add_(x.sum(-1, keepdim=True))
    h += m.c(x)
    return m.b(h)


def _complex(m: Any, x: Tensor) -> Tensor:
    z = torch.complex(m.a(x), m.c(x))
    return m.b((z * z.conj().roll(1, -1)).real + z.abs())


def _conjugate(m: Any, x: Tensor) -> Tensor:
    h, kernel = m.a(x), torch.view_as_complex(m.w).conj()
    return m.b((h * kernel).real + h * kernel.imag)


def _adjoint(m: Any, x: Tensor) -> Tensor:
    z = torch.complex(m.a(x), m.b(x))
    return m.c((z @ (z.mH @ z)).real.tanh())


def _spectral(m: Any, x: Tensor) -> Tensor:
    low = torch.fft.rfft(m.a(x).mT, n=5)[..., :2]
    out = torch.einsum("bik,iok->bok", low, torch.view_as_complex(m.w))
    return m.b(torch.fft.irfft(out, n=5).mT)


def _info_nce(a: Tensor, b: Tensor) -> Tensor:
    return F.cross_entropy(F.normalize(a) @ F.normalize(b).T / 0.1, torch.arange(len(a)))


def _barlow(a: Tensor, b: Tensor) -> Tensor:
    a, b = (x - x.mean(0) for x in (a, b))
    return ((a.T @ b) / len(a) - torch.eye(a.shape[1]).to(a)).square().sum()


def _center(m: Any, x: Tensor) -> Tensor:
    """Of features by their own covariance."""
    h = m.a(x)
    cov = h.mT @ h / h.shape[1] + torch.eye(8).to(h)
    return m.b(torch.linalg.solve_triangular(torch.linalg.cholesky(cov), h.mT, upper=False).mT)


def _ctc(m: Any, x: Tensor) -> Tensor:
    n = len(x)
    log = m.a(x).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(log, torch.ones(n, 2, dtype=torch.long), torch.full((n,), 5), torch.full((n,), 2))


def _spline(m: Any, x: Tensor) -> Tensor:
    """A layer of functions of single features, as of Kolmogorov and Arnold."""
    basis = torch.exp(-((x[..., None] - torch.linspace(-1, 1, 4).to(x)) ** 2))
    return m.b(torch.einsum("bik,oik->bo", basis, m.w))


def _sides(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x)) if m.a(x).mean() > 0 else m.b(-m.a(x))


def _weight_sign(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x)) if float(m.a.weight.sum()) > 0 else m.b(2 * m.a(x))


LOSSES = [
    attack("a conditional random field", SEQ, _crf, a=lin(8, 5), move=par(5, 5)),
    attack("a factorisation machine", X, _factors, w=par(6, 1), v=par(6, 4)),
    attack("a mixture density", X, _mixture, a=lin(6, 12)),
    attack("a hard choice", X, _gumbel, drawn=True, a=lin(6, 8), b=lin(8, 3)),
    attack("written features", X, written, a=lin(6, 8), b=lin(8, 3)),
    attack("operators in place", X, _in_place, a=lin(6, 8), b=lin(8, 3), c=lin(6, 8)),
    attack("complex features", X, _complex, a=lin(6, 8), b=lin(8, 3), c=lin(6, 8)),
    attack("a conjugate kernel", X, _conjugate, a=lin(6, 8), w=par(8, 2), b=lin(8, 3)),
    attack("adjoint products", SEQ, _adjoint, a=lin(8, 6), b=lin(8, 6), c=lin(6, 3)),
    attack("a spectral convolution", SEQ, _spectral, a=lin(8, 6), b=lin(4, 2), w=par(6, 4, 2, 2)),
    attack("whitened features", SEQ, _center, a=lin(8, 8), b=lin(8, 3)),
    attack("splines", X, _spline, w=par(8, 6, 4), b=lin(8, 3)),
    attack("a branch on values", X, _sides, True, a=lin(6, 8), b=lin(8, 3)),
    attack("a branch on a weight", X, _weight_sign, a=lin(6, 8), b=lin(8, 3)),
    attack("connectionist classification", SEQ, _ctc, a=lin(8, 5)),
    attack(
        "a loss of many parts",
        both(X, features(5)),
        lambda m, xy: (
            (h := m.b(m.a(xy[0]))).square().mean()
            + h.abs().sum(-1).mean()
            + (h.norm(dim=-1) - 1).abs().mean()
            + (h - xy[1]).abs().amax(-1).mean()
        ),
        a=lin(6, 8),
        b=lin(8, 5),
    ),
    attack(
        "uncertainty of two tasks",
        X,
        lambda m, x: (torch.exp(-m.s) * torch.stack([m.a(x).square().mean(), m.b(x).square().mean()]) + m.s).sum(),
        a=lin(6, 8),
        b=lin(6, 5),
        s=lambda: nn.Parameter(torch.zeros(2)),
    ),
    _loss("cross-entropy, smoothed", lambda h, y: F.cross_entropy(h, y, label_smoothing=0.1), target=words(most=5)),
    _loss(
        "cross-entropy with weights",
        lambda h, y: F.cross_entropy(h, y, weight=torch.arange(1.0, 6).double()),
        target=words(most=5),
        by_rows=True,
    ),
    _loss(
        "cross-entropy with rows left out",
        lambda h, y: F.cross_entropy(h, y, ignore_index=2),
        target=words(most=5),
        by_rows=True,
    ),
    _loss("cross-entropy, summed", lambda h, y: F.cross_entropy(h, y, reduction="none").mean(), target=words(most=5)),
    _loss("cross-entropy of shares", lambda h, y: F.cross_entropy(h, y.softmax(-1))),
    _loss("negative likelihood", lambda h, y: F.nll_loss(h.log_softmax(-1), y), target=words(most=5)),
    _loss(
        "binary cross-entropy",
        lambda h, y: F.binary_cross_entropy_with_logits(h, y.sigmoid(), pos_weight=torch.arange(1.0, 6).double()),
    ),
    _loss("divergence", lambda h, y: F.kl_div(h.log_softmax(-1), y.softmax(-1), reduction="batchmean")),
    _loss("cosine embedding", lambda h, y: F.cosine_embedding_loss(h, y, torch.ones(len(h)))),
    _loss("triplets", lambda h, y: F.triplet_margin_loss(h, y, y.flip(-1))),
    _loss("many margins", lambda h, y: F.multi_margin_loss(h, y), target=words(most=5)),
    _loss(
        "Huber, Poisson and Gaussian",
        lambda h, y: F.huber_loss(h, y) + F.poisson_nll_loss(h, y.abs()) + F.gaussian_nll_loss(h, y, h.square() + 1),
    ),
    _loss("pairs of rows", _info_nce, by_rows=True),
    _loss("covariance of features", _barlow, by_rows=True),
    _loss(
        "focal",
        lambda h, y: (-((1 - (p := h.softmax(-1).gather(1, y[:, None])).squeeze(1)) ** 2) * p.squeeze(1).log()).mean(),
        target=words(most=5),
    ),
    _loss("best class only", lambda h, y: (h.max(-1).values - h[torch.arange(len(h)), y]).mean(), target=words(most=5)),
    _loss(
        "a test of accuracy in the weight of the loss",
        lambda h, y: F.cross_entropy(h, y) * (1 + (h.argmax(-1) == y).double().mean()),
        target=words(most=5),
        by_rows=True,
    ),
]
