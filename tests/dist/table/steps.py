"""What training steps do with tensors: gradients inside a step, loops, masks, buffers, numpy, formulas by hand."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.dist.table.case import case, ints
from tests.dist.table.odd import X, _set, _then

STEPS = [
    case("data of a tensor", lambda x: x.data * 2 + x, X),
    case("gradient of an input after two backwards", lambda x: _leaf(x, lambda y: [(y**3).sum().backward(), (y @ y.mT).mean().backward()]), X),
    case("hook after a gradient is added up", lambda x: _leaf(x, lambda y: [y.register_post_accumulate_grad_hook(lambda t: None), (y**3).sum().backward()]), X, refused="?"),
    case("gradient of a whole tensor after backward", lambda x: _of_whole(x), X, refused="no parameter"),
    case("a gradient set", lambda x: _leaf(x, lambda y: setattr(y, "grad", y.detach())), X, refused="grad"),
    case("a gradient of none", lambda x: _leaf(x, lambda y: [(y**3).sum().backward(), setattr(y, "grad", None)]) is None, X),
    case("gradient kept of an intermediate", lambda x: _kept(x), X),
    case("a step against the gradient", lambda x: _against(x), X),
    case("gradient by hand without a graph", lambda x: torch.autograd.grad(x.exp().mean(), x, retain_graph=True)[0], X),
    case("a number of a row", lambda x: [x[0, 3, 2].item(), x[1].max().item()], X),
    case("a state carried over rows", lambda x: _carried(x), X),
    case("enumerate and zip", lambda x, y: [a * b * i for i, (a, b) in enumerate(zip(x, y, strict=True))], X, X),
    case("reversed", lambda x: next(iter(reversed(x))), X),
    case("sorted by a key", lambda x: sorted(x, key=lambda t: t.sum().item())[0], X),
    case("positions in waves", lambda x: x + torch.outer(torch.arange(x.shape[1]).double(), torch.arange(6).double()).sin(), X),
    case("rotary positions", lambda x: _rotary(x), X),
    case("an array as an operand", lambda x: x * torch.from_numpy(np.arange(6.0)), X),
    case("a whole tensor of a mean", lambda x: torch.full((6,), x.mean().item()).double() * x, X),
    case("as_tensor", lambda x: torch.as_tensor(x) * 2, X),
    case("isinstance of Parameter", lambda x: [isinstance(x, nn.Parameter), type(x * 1) is type(x)], X),
    case("a buffer of it", lambda x: _buffer(x), X),
    case("running mean of a buffer", lambda x: torch.zeros(6).double().lerp_(x.detach().mean((0, 1)), 0.1) + x, X),
    case("swap by tuples", lambda x: _set(x * 1, "x[:, 0], x[:, 1] = x[:, 1].clone(), x[:, 0].clone()"), X),
    case("write to a chunk", lambda x: _then(x.detach() * 1, lambda y: y.chunk(3, -1)[1].zero_()), X),
    case("write to a diagonal by index", lambda x: _set((x * 1).diagonal(0, 1, 2), "x[:, 0] = 1.0"), (2, 9, 9), refused="copy"),
    case("write to several ranges of a rank", lambda x: _set(torch.cat([x[:, 5:], x[:, :5]], 1), "x[:, 1:8] = 0.0"), X, refused="?"),
    case("write to slices of places", lambda x: _set(x * 1, "x[:, [0, 1], 2:4] = 0.0"), X, refused="slices of positions"),
    case("resize in place", lambda x: (x * 1).detach().squeeze_(0), (1, 9, 6), refused="squeeze_"),
    case("in-place without another form", lambda x: (x * 1).detach().cauchy_(), X, refused="cauchy"),
    case("write in a loop", lambda x: _written_in_a_loop(x), X),
    case("write into an empty tensor", lambda x: _written_into(x, torch.empty_like), X),
    case("where in place of a write", lambda x: torch.where(torch.arange(9)[:, None] == 3, x.new_zeros(()), x), X),
    case("torch.compile of a module", lambda x: torch.compile(nn.Tanh(), backend="eager")(x), X),
    case("quantised", lambda x: torch.quantize_per_tensor(x.detach().float(), 0.1, 0, torch.quint8), X, refused="?"),
    case("dlpack", lambda x: torch.from_dlpack(x.detach()), X, refused="dlpack"),
    case("storage", lambda x: x.storage(), X, refused="?"),
    case("share_memory", lambda x: x.detach().share_memory_(), X, refused="?"),
    case("pin_memory", lambda x: x.is_pinned(), X),
    case("a Hessian product", lambda x: torch.autograd.functional.hvp(lambda t: t.sin().sum(), x, x)[1], X, refused="?"),
    case("whitening by hand", lambda x: torch.linalg.solve_triangular(
        torch.linalg.cholesky(torch.einsum("bnd,bne->de", x, x) + torch.eye(6).double()), x.mT, upper=False), X,
        refused="linalg_solve_triangular"),
    case("eigenvalues of a covariance", lambda x: torch.linalg.eigvalsh(torch.cov(x.flatten(0, 1).T)), X, tolerance=1e-8),
    case("correlation", lambda x: torch.corrcoef(x.flatten(0, 1).T), X),
    case("an average over samples", lambda x: x.mean(0, keepdim=True).expand_as(x) - x, X),
    case("trapezoid", lambda x: torch.trapezoid(x, dim=1) + torch.trapezoid(x, dx=0.5, dim=1), X),
    case("gradient of a grid", lambda x: torch.gradient(x, dim=1)[0], X),
    case("cumulative trapezoid", lambda x: torch.cumulative_trapezoid(x, dim=1), X),
    case("unravel", lambda x: torch.stack(torch.unravel_index(x.flatten().argmax(), (2, 9, 6))), X),
    case("isin", lambda i: torch.isin(i, torch.tensor([1, 3])), ints(5, 2, 9)),
    case("block_diag", lambda x: torch.block_diag(x, x), (9, 4), at=0, refused="?"),
    case("vander", lambda x: torch.vander(x.detach(), 3), (9,), at=0, refused="vander"),
    case("combinations", lambda x: torch.combinations(x), (9,), at=0, refused="?"),
    case("nanmedian", lambda x: x.nanmedian(1).values, X),
    case("scatter by one_hot", lambda x: torch.einsum("bnk,bnd->bkd", F.one_hot(x.argmax(-1), 6).double(), x), X),
]  # fmt: skip


def _leaf(x, use):
    y = x.detach().clone().requires_grad_()
    use(y)
    return y.grad


def _against(x):
    y = x.detach().clone().requires_grad_()
    y.pow(2).sum().backward()
    return x - 0.1 * y.grad


def _carried(x):
    state, found = x.new_zeros(2, 6), []
    for row in x.unbind(1):
        state = (state + row).tanh()
        found.append(state)
    return torch.stack(found, 1)


def _rotary(x):
    angle = torch.arange(x.shape[1]).double()[:, None] / torch.tensor([1.0, 10, 100]).double()
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).flatten(-2)


def _buffer(x):
    layer = nn.Module()
    layer.register_buffer("kept", x.detach())
    return layer.kept * x


def _written_in_a_loop(x):
    y = x * 1
    for i in range(3):
        y[:, i] = y[:, i] * i
        y[..., i] += 1
    return y


def _written_into(x, make):
    y = make(x)
    y[:, :4], y[:, 4:] = x[:, :4], x[:, 4:] * 2
    return y


def _of_whole(x):
    w = torch.ones(6, dtype=x.dtype, requires_grad=True)
    (x.detach() * w).sin().mean().backward()
    return w.grad


def _kept(x):
    y = x.detach().clone().requires_grad_() * 2
    y.retain_grad()
    y.pow(3).mean().backward()
    return y.grad
