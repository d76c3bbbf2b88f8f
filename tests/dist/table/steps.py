"""What training steps do with tensors: gradients inside a step, loops, masks, buffers, numpy, formulas by hand."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.dist.table.case import case, ints
from tests.dist.table.odd import ROW, W, X, _grad, _set, _then

STEPS = [
    case("data of a tensor", lambda x: x.data * 2 + x, X),
    case("write to data", lambda x: _then(x * 1, lambda y: y.data.add_(1)), X),
    case("gradient of an input after backward", lambda x: _leaf(x, lambda y: (y**3).sum().backward()), X),
    case("gradient of an input after two backwards",
         lambda x: _leaf(x, lambda y: [(y**3).sum().backward(), (y @ y.mT).mean().backward()]), X),
    case("hook after a gradient is added up",
         lambda x: _leaf(x, lambda y: [y.register_post_accumulate_grad_hook(lambda t: None), (y**3).sum().backward()]),
         X, refused="?"),
    case("gradient of a whole tensor after backward", lambda x: _of_whole(x), X, refused="no parameter"),
    case("a gradient written to", lambda x: _leaf(x, lambda y: [(y**3).sum().backward(), y.grad.zero_()]), X,
         refused="copy"),
    case("a gradient set", lambda x: _leaf(x, lambda y: setattr(y, "grad", y.detach())), X, refused="grad"),
    case("a gradient of none", lambda x: _leaf(x, lambda y: [(y**3).sum().backward(), setattr(y, "grad", None)]) is None, X),
    case("gradient kept of an intermediate", lambda x: _kept(x), X),
    case("a step against the gradient", lambda x: _against(x), X),
    case("gradient of a whole tensor by hand",
         lambda x, w: torch.autograd.grad((x * w).sin().mean(), w, create_graph=True)[0] * x, X, ROW),
    case("gradients of several by hand",
         lambda x, w: [g * 2 for g in torch.autograd.grad((x @ w).tanh().sum(), [x, w], create_graph=True)], X, W),
    case("gradient by hand without a graph", lambda x: torch.autograd.grad(x.exp().mean(), x, retain_graph=True)[0], X),
    case("Laplacian by hand", lambda x: _grad(_grad(x.sin().prod(-1).sum(), x).sum(), x), X),
    case("divergence by hand", lambda x, w: sum(_grad((x @ w).tanh()[..., i].sum(), x)[..., i] for i in range(3)), X, W),
    case("a number of a row", lambda x: [x[0, 3, 2].item(), x[1].max().item()], X),
    case("a comparison of numbers", lambda x: [x[0, 0, 0] > x[1, 8, 5], x.sum() == x.sum()], X),
    case("a loop over rows", lambda x: sum(x[:, i] * i for i in range(x.shape[1])), X),
    case("a state carried over rows", lambda x: _carried(x), X),
    case("enumerate and zip", lambda x, y: [a * b * i for i, (a, b) in enumerate(zip(x, y, strict=True))], X, X),
    case("unpacking", lambda x: (lambda a, b: a - b)(*x), X),
    case("unpacking rows", lambda x: (lambda a, *rest: a - rest[-1])(*x.unbind(1)), X),
    case("stack of a comprehension", lambda x: torch.stack([t.mean(0) for t in x]), X),
    case("reversed", lambda x: next(iter(reversed(x))), X),
    case("sorted by a key", lambda x: sorted(x, key=lambda t: t.sum().item())[0], X),
    case("sum of a list", lambda x: sum([x, x * 2, 3]), X),
    case("max of a list", lambda x: max(x.sum(), x.mean()), X),
    case("shape arithmetic", lambda x: x.reshape(x.shape[0] * x.size(1), -1) / x.shape.numel() / x.size()[-1], X),
    case("shape of a product", lambda x: torch.ones(x.shape[-2:]).double() + x[0], X),
    case("a mask of lengths", lambda x: x * (torch.arange(x.shape[1]) < torch.tensor([[9], [5]]))[..., None], X),
    case("a causal mask of the shape", lambda x: (x @ x.mT).masked_fill(
        torch.triu(torch.ones(x.shape[1], x.shape[1]), 1).bool(), -1e9).softmax(-1) @ x, X),
    case("positions in waves", lambda x: x + torch.outer(torch.arange(x.shape[1]).double(), torch.arange(6).double()).sin(), X),
    case("rotary positions", lambda x: _rotary(x), X),
    case("type of the default", lambda x: (x.float() * 2 + torch.tensor(1.0)).double(), X, tolerance=1e-6),
    case("a list as an operand", lambda x: x * torch.tensor([1.0, 2, 3, 4, 5, 6]), X),
    case("numpy as an operand", lambda x: x * np.float64(2), X),
    case("an array as an operand", lambda x: x * torch.from_numpy(np.arange(6.0)), X),
    case("a whole tensor of a mean", lambda x: torch.full((6,), x.mean().item()).double() * x, X),
    case("as_tensor", lambda x: torch.as_tensor(x) * 2, X),
    case("tensor of a tensor", lambda x: torch.tensor(x.detach()), X, refused="?"),
    case("tensor of numbers", lambda x: torch.tensor([x.sum(), x.mean()]), X),
    case("isinstance of Parameter", lambda x: [isinstance(x, nn.Parameter), type(x * 1) is type(x)], X),
    case("a Parameter of it", lambda x: nn.Parameter(x.detach()) * 2, X, refused="?"),
    case("a buffer of it", lambda x: _buffer(x), X),
    case("running mean of a buffer", lambda x: torch.zeros(6).double().lerp_(x.detach().mean((0, 1)), 0.1) + x, X),
    case("a clamp of a norm", lambda x: x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1), X),
    case("clip_grad of values", lambda x: x * (1.0 / max(1.0, float(x.norm()))), X),
    case("swap by tuples", lambda x: _set(x * 1, "x[:, 0], x[:, 1] = x[:, 1].clone(), x[:, 0].clone()"), X),
    case("write to a chunk", lambda x: _then(x.detach() * 1, lambda y: y.chunk(3, -1)[1].zero_()), X),
    case("write to a split of rows", lambda x: _then(x.detach() * 1, lambda y: y.split(3, 1)[1].zero_()), X,
         refused="?"),
    case("write to a diagonal by index", lambda x: _set((x * 1).diagonal(0, 1, 2), "x[:, 0] = 1.0"), (2, 9, 9), refused="copy"),
    case("write to several ranges of a rank", lambda x: _set(torch.cat([x[:, 5:], x[:, :5]], 1), "x[:, 1:8] = 0.0"), X,
         refused="?"),
    case("write to slices of places", lambda x: _set(x * 1, "x[:, [0, 1], 2:4] = 0.0"), X, refused="slices of positions"),
    case("resize in place", lambda x: (x * 1).detach().squeeze_(0), (1, 9, 6), refused="squeeze_"),
    case("in-place without another form", lambda x: (x * 1).detach().cauchy_(), X, refused="cauchy"),
    case("write in a loop", lambda x: _written_in_a_loop(x), X),
    case("write into an empty tensor", lambda x: _written_into(x, torch.empty_like), X),
    case("write into new_zeros", lambda x: _written_into(x, lambda t: t.new_zeros(t.shape)), X, refused="__setitem__"),
    case("where in place of a write", lambda x: torch.where(torch.arange(9)[:, None] == 3, x.new_zeros(()), x), X),
    case("torch.compile of a module", lambda x: torch.compile(nn.Tanh(), backend="eager")(x), X),
    case("quantised", lambda x: torch.quantize_per_tensor(x.detach().float(), 0.1, 0, torch.quint8), X, refused="?"),
    case("dlpack", lambda x: torch.from_dlpack(x.detach()), X, refused="dlpack"),
    case("storage", lambda x: x.storage(), X, refused="?"),
    case("share_memory", lambda x: x.detach().share_memory_(), X, refused="?"),
    case("pin_memory", lambda x: x.is_pinned(), X),
    case("split, then an operator in a transform", lambda x: torch.func.vmap(lambda t: t * 2)(x), X, refused="torch.func"),
    case("functional jacobian of rows", lambda x: torch.autograd.functional.jacobian(lambda t: (t**2).sum((1, 2)), x), X,
         refused="?"),
    case("a Hessian product", lambda x: torch.autograd.functional.hvp(lambda t: t.sin().sum(), x, x)[1], X, refused="?"),
    case("double where", lambda x: torch.where(x > 0, torch.where(x > 1, x, 1.0), x.exp()), X),
    case("log of softmax by hand", lambda x: (x - x.amax(1, True)).exp().sum(1).log() + x.amax(1), X),
    case("whitening by hand", lambda x: torch.linalg.solve_triangular(
        torch.linalg.cholesky(torch.einsum("bnd,bne->de", x, x) + torch.eye(6).double()), x.mT, upper=False), X,
        refused="linalg_solve_triangular"),
    case("eigenvalues of a covariance", lambda x: torch.linalg.eigvalsh(torch.cov(x.flatten(0, 1).T)), X, tolerance=1e-8),
    case("correlation", lambda x: torch.corrcoef(x.flatten(0, 1).T), X),
    case("an average over samples", lambda x: x.mean(0, keepdim=True).expand_as(x) - x, X),
    case("trapezoid", lambda x: torch.trapezoid(x, dim=1) + torch.trapezoid(x, dx=0.5, dim=1), X),
    case("gradient of a grid", lambda x: torch.gradient(x, dim=1)[0], X),
    case("finite differences by roll", lambda x: torch.roll(x, -1, 1) - 2 * x + torch.roll(x, 1, 1), X),
    case("flux through faces", lambda x: F.pad(x[:, 1:] - x[:, :-1], (0, 0, 1, 0)), X),
    case("cumulative trapezoid", lambda x: torch.cumulative_trapezoid(x, dim=1), X),
    case("unravel", lambda x: torch.stack(torch.unravel_index(x.flatten().argmax(), (2, 9, 6))), X),
    case("isin", lambda i: torch.isin(i, torch.tensor([1, 3])), ints(5, 2, 9)),
    case("block_diag", lambda x: torch.block_diag(x, x), (9, 4), at=0, refused="?"),
    case("vander", lambda x: torch.vander(x.detach(), 3), (9,), at=0, refused="vander"),
    case("combinations", lambda x: torch.combinations(x), (9,), at=0, refused="?"),
    case("nanmedian", lambda x: x.nanmedian(1).values, X),
    case("std of a mean over ranks", lambda x: x.mean(1).std() + x.std(1).mean(), X),
    case("scatter by one_hot", lambda x: torch.einsum("bnk,bnd->bkd", F.one_hot(x.argmax(-1), 6).double(), x), X),
    case("top-k mask", lambda x: x * (x >= x.topk(3, 1).values[:, -1:]), X),
    case("straight-through", lambda x: x + (x.round() - x).detach(), X),
    case("gumbel by hand", lambda x: (x + 0 * torch.rand_like(x)).softmax(1), X),
    case("cosine of all pairs", lambda x: F.normalize(x, dim=-1) @ F.normalize(x, dim=-1).mT, X),
    case("logits against a queue", lambda x, q: F.cross_entropy((x @ q.T).flatten(0, 1), torch.arange(18) % 7), X, (7, 6)),
    case("contrastive loss of rows", lambda x: F.cross_entropy(x[0] @ x[1].T, torch.arange(9)), X),
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
