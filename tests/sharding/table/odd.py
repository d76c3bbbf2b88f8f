"""Odd expressions and what training steps do with tensors: reads, writes, gradients, loops and bypasses of handlers."""

import copy
import pickle
from io import BytesIO

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import grad as imported_grad
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.sharding.table.case import bools, case, ints

X = (2, 9, 6)
ROW = (6,)
W = (6, 6)

ODD = [
    # --- writes ---
    case("augmented slice", lambda x: _set(x * 1, "x[:, 1:8] *= 2"), X, refused="?"),
    case("augmented feature", lambda x: _set(x * 1, "x[..., 2] += 1"), X),
    case("set a row to zero", lambda x: _set(x * 1, "x[:, 0] = 0"), X),
    case("set the last row", lambda x, y: _set(x * 1, "x[:, -1] = y", y=y), X, (2, 6)),
    case("set with an ellipsis", lambda x: _set(x * 1, "x[..., 0] = x[..., 1]"), X),
    case("set a row from another", lambda x: _set(x * 1, "x[:, 0] = x[:, 3]"), X),
    case("set all", lambda x, y: _set(x * 1, "x[:] = y", y=y), X, X),
    case("set all of a sample", lambda x, y: _set(x * 1, "x[0] = y", y=y), X, (9, 6)),
    case("set with a new dim", lambda x, y: _set(x * 1, "x[None, :, 2:5] = y", y=y), X, (1, 2, 3, 6)),
    case("set by a mask of rows", lambda x, m: _set(x * 1, "x[m] = 0.5", m=m), X, bools(2, 9)),
    case("set by a mask of rows to a tensor", lambda x, m, y: _set(x * 1, "x[m] = y", m=m, y=y), X, bools(2, 9), ROW, refused="mask"),
    case("set through a plain index", lambda x, i: _set(x * 1, "x[:, i] = 0.0", i=i), X, ints(9, 3)),
    case("set beyond the end", lambda x: _raises(lambda: _set(x * 1, "x[:, 9] = 0"), IndexError), X),
    case("narrow too far", lambda x: _raises(lambda: x.narrow(1, 5, 5), (IndexError, RuntimeError)), X),
    case("write sharded into whole", lambda x: _set(torch.zeros(X).double(), "x[:, :, :] = y", y=x), X, refused="__setitem__"),
    case("copy sharded into whole", lambda x: torch.zeros(X).double().copy_(x), X, refused="copy_"),
    case("add a mean to a buffer", lambda x: torch.zeros(6).double().mul_(0.9).add_(x.mean((0, 1))), X),
    case("in-place activations", lambda x: F.relu(x * 2, inplace=True) + F.elu_(x * 1) + (x * 1).tanh_(), X),
    case("in-place clamp", lambda x: (x * 1).clamp_(-0.5, 0.5) + (x * 1).sub_(1).div_(2).neg_(), X),
    case("in-place copy", lambda x, y: torch.empty_like(x).copy_(y), X, X),
    case("in-place fill and zero", lambda x: (x * 1).fill_(2.0) + (x * 1).zero_() + x, X),
    case("in-place cumsum", lambda x: (x * 1).cumsum_(1), X),
    case("in-place scatter", lambda x, i: (x * 1).scatter_add_(1, i, x * 2), X, ints(9, 2, 9, 6)),
    case("in-place index_add", lambda x, s: (x * 1).index_add_(1, torch.tensor([0, 8]), s), X, (2, 2, 6)),
    case("in-place triu", lambda x: (x * 1).triu_(), (2, 9, 9)),
    case("in-place shape", lambda x: (x * 1).unsqueeze_(0), X, refused="unsqueeze_"),
    case("in-place transpose", lambda x: (x * 1).transpose_(1, 2), X, refused="transpose_"),
    case("resize_", lambda x: (x * 1).detach().resize_(3), X, refused="resize_"),
    case("set_", lambda x: (x * 1).detach().set_(torch.zeros(3).double()), X, refused="set_"),
    case("as_strided", lambda x: x.as_strided((2, 2), (1, 1)), X, refused="as_strided"),
    case("out= of a sum", lambda x: torch.sum(x.detach(), 1, out=torch.empty(2, 6).double()), X, refused="out="),
    case("in-place by a larger type", lambda x: _raises(lambda: (x * 5).long().add_(x), RuntimeError), X),
    case("write to an index", lambda x, y: _set(x.detach() * 1, "x[1, None, 3] = y", y=y), X, ROW, at=0),
    case("write with leading dims", lambda x: _set(x * 1, "x[:, 3] = y", y=torch.ones(1, 1, 6).double()), X),
    case("write by a boolean", lambda x: _set(x * 1, "x[True] = 0"), X, at=0, refused="mask"),
    case("set data", lambda x: setattr(x * 1, "data", x.detach()), X, refused="__set__"),
    case("apply_", lambda x: (x * 1).detach().apply_(lambda v: v + 1), X, refused="apply_"),
    # --- random numbers ---
    case("normal_ ends gradients", lambda x: _grad((x * 2).normal_().sum(), x) + x, X),
    case("bernoulli_ by a tensor", lambda x, p: (x * 1).bernoulli_((p > 0).double()), X, X[1:]),
    case("random numbers with a gradient", lambda x: _times_zeros(x, torch.rand_like), X),
    # --- gradients ---
    case("gradient by an imported name", lambda x: imported_grad((x**3).sum(), x, create_graph=True)[0], X),
    case("gradient of a sharded output", lambda x, s: torch.autograd.grad(x**2, x, s, create_graph=True)[0], X, X, at={0: 1, 1: 1}),
    case("gradient penalty", lambda x, w: _grad((x @ w).tanh().sum(), x).norm(dim=-1).sub(1).pow(2).mean(), X, W),
    case("gradient of what is not used", lambda x, w: torch.autograd.grad(x.sum(), w, allow_unused=True)[0] is None, X, W),
    case("materialised gradient", lambda x, w: torch.autograd.grad(x.sum(), [x, w], allow_unused=True, materialize_grads=True, create_graph=True)[0], X, W),
    case("backward of a sharded tensor", lambda x: (x * 2).backward(torch.ones(X).double()), X, refused="backward"),
    case("autograd Function", lambda x: _Twice.apply(x), X, refused="autograd Functions"),
    case("autograd Function of whole values", lambda x, w: x * _Twice.apply(w), X, ROW),
    case("autograd Function of whole values by another name", lambda x, w: x * twice(w), X, ROW, refused="call _Twice.apply itself"),
    case("reentrant checkpoint", lambda x, w: checkpoint(lambda x: (x @ w).tanh(), x, use_reentrant=True), X, W, refused="use_reentrant"),
    case("checkpointed sequence", lambda x: checkpoint_sequential([torch.tanh, torch.exp], 2, x, use_reentrant=False), X),
    case("hook that clamps", lambda x: _then(x * 1, lambda y: y.register_hook(_clamped)) * 3, X),
    case("hook of whole values that clamps", lambda x, w: x * _then(w * 1, lambda y: y.register_hook(_clamped)), X, ROW),
    case("hook of a module that clamps", lambda x, w: x * _hooked()(w * 1), X, ROW),
    case("hook that changes nothing", lambda x: _then(x * 1, lambda y: y.register_hook(lambda g: None)) * 3, X),
    case("retain_grad", lambda x: _then(x * 1, lambda y: y.retain_grad()).exp(), X),
    case("gradient of an intermediate", lambda x: _grad_of(x * 1), X),
    case("detach", lambda x: x * x.detach() + x.clone().detach().requires_grad_().detach(), X),
    case("inference_mode", lambda x: _under(torch.inference_mode(), lambda: F.linear(x, torch.eye(6).double()).softmax(1)).sum(), X),
    case("parameter in several places", lambda x, w: (x @ w + w[0]).mul(w.sum()) @ w.T, X, W),
    # --- values and control flow ---
    case("item", lambda x: x.item(), X, refused="item"),
    case("truth", lambda x: bool(x > 0), X, refused="__bool__"),
    case("numpy", lambda x: x.detach().numpy(), X, refused="numpy"),
    case("tolist", lambda x: x.tolist(), X, refused="tolist"),
    case("data_ptr", lambda x: x.data_ptr(), X, refused="data_ptr"),
    case("number of a mean", lambda x: [x.mean().item() * 2, float(x.sum()), int(x.argmax())], X),
    case("metadata", lambda x: [x.shape, x.size(), x.size(-2), x.dim(), x.ndim, x.numel(), len(x), x.dtype, x.device, x.is_floating_point(), x.nelement()], X),
    case("metadata of autograd", lambda x: [x.requires_grad, (x * 2).requires_grad, (x * 2).grad_fn is not None, x.detach().requires_grad], X),
    case("is a tensor", lambda x: [torch.is_tensor(x), isinstance(x, torch.Tensor), torch.is_floating_point(x), torch.numel(x)], X),
    case("scripting", lambda x: x if torch.jit.is_scripting() or torch.jit.is_tracing() else x * 2, X),
    case("printing", lambda x: len(f"{x} {x!r}") > 0, X),
    case("deep copy", lambda x: copy.deepcopy(x.detach()) * x, X),
    case("copy", lambda x: copy.copy(x) * 2, X),
    case("pickle", lambda x: pickle.dumps(x.detach()), X, refused="full_tensor"),
    case("save", lambda x: torch.save({"x": x.detach()}, BytesIO()), X, refused="full_tensor"),
    case("hash and identity", lambda x: [x is x, len({x: 1}), hash(x) == hash(x)], X),
    case("equality", lambda x, y: [torch.equal(x, y), torch.allclose(x, x), torch.equal(x, x)], X, X),
    case("to another type and device", lambda x: x.to("cpu", torch.float32).to(dtype=torch.float64, copy=True).detach(), X),
    case("map over leaves", lambda x: torch.utils._pytree.tree_map(lambda t: t * 2, {"a": [x, (x,)]}), X),
    case("attributes of the user", lambda x: _then(x * 1, lambda y: setattr(y, "mine", 3)).mine, X),
    case("memory format", lambda x: x.to(memory_format=torch.channels_last).contiguous(memory_format=torch.channels_last) * 2, (2, 4, 9, 6), at=2),
    case("sparse", lambda x: x.to_sparse(), X, refused="sparse"),
    case("renormalised embedding", lambda i, w: F.embedding(i, w.clone(), max_norm=1.0), ints(5, 2, 9), (5, 3), refused="embedding_renorm_"),
    case("random integers like", lambda x: torch.randint_like(x, 5), X, refused="randint_like"),
    case("multinomial", lambda x: torch.multinomial(x.softmax(-1)[0], 1), X, refused="multinomial"),
    case("random numbers of a generator", lambda x: (x * 1).detach().normal_(generator=torch.Generator()), X, refused="generator"),
    case("random numbers like, of a generator", lambda x: torch.rand_like(x, generator=torch.Generator()), X, refused="generator"),
    case("dropout in evaluation", lambda x: F.dropout(x, 0.5, False) + F.alpha_dropout(x, 0.5, False) + nn.Dropout1d()(x).mean() * 0, X),
    # --- transforms ---
    case("vmap", lambda x: torch.vmap(torch.sin)(x), X, refused="torch.func"),
    case("func.grad", lambda x: torch.func.grad(lambda x: x.sin().sum())(x), X, refused="torch.func"),
    case("jacrev", lambda x: torch.func.jacrev(torch.sin)(x), X, refused="torch.func"),
    case("forward-mode gradients", lambda x: torch.func.jvp(torch.sin, (x,), (x,)), X, refused="torch.func"),
    case("functional_call", lambda x, w: torch.func.functional_call(nn.Linear(6, 6, bias=False), {"weight": w}, x), X, W),
    case("jacobian", lambda x: torch.autograd.functional.jacobian(lambda x: x.sum(), x), X),
]  # fmt: skip


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


twice = _Twice.apply
"""Under a name that was taken before the step."""


def _clamped(grad):
    return grad.clamp(-0.1, 0.1)


def _hooked():
    module = nn.Identity()
    module.register_full_backward_hook(lambda module, given, found: (_clamped(given[0]),))
    return module


def _then(x, do):
    do(x)
    return x


def _set(x, statement, **names):
    exec(statement, {"x": x, **names}, scope := {"x": x, **names})
    return scope["x"] * 2


def _raises(do, error):
    try:
        do()
    except error:
        return True
    return False


def _under(context, do):
    with context:
        return do()


def _grad(y, x):
    return torch.autograd.grad(y, x, create_graph=True)[0]


def _times_zeros(x, like):
    z = like(x, requires_grad=True)
    return _grad((z * x).sum(), z)


def _grad_of(y):
    y.retain_grad()
    torch.autograd.backward(y.pow(3).sum() / 3, inputs=[y], create_graph=True)
    return [y.grad is not None, y.is_leaf]


STEPS = [
    case("data of a tensor", lambda x: x.data * 2 + x, X),
    case("gradient of an input after two backwards", lambda x: _leaf(x, lambda y: [(y**3).sum().backward(), (y @ y.mT).mean().backward()]), X),
    case("hook after a gradient is added up", lambda x: _leaf(x, lambda y: [y.register_post_accumulate_grad_hook(lambda t: None), (y**3).sum().backward()]), X, refused="?"),
    case("gradient of a whole tensor after backward", lambda x: _of_whole(x), X, refused="is not a parameter"),
    case("gradient of a whole input of backward", lambda x: _of_whole(x, True), X, refused="is not a parameter"),
    case("gradient kept of a whole intermediate", lambda x: _kept_of_whole(x), X),
    case("gradients of zeros twice", lambda x: [_of_zeros(x), _of_zeros(x)], X),
    case("write in reverse", lambda x: _raises(lambda: _set(x * 1, "x[:, ::-1] = 0"), ValueError), X),
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


def _of_whole(x, named=False):
    w = torch.ones(6, dtype=x.dtype, requires_grad=True)
    (x.detach() * w).sin().mean().backward(inputs=[w] if named else None)
    return w.grad


def _kept_of_whole(x):
    w = nn.Parameter(torch.ones(6, dtype=x.dtype)) * 2
    w.retain_grad()
    (x.detach() * w).sin().mean().backward()
    return w.grad


def _of_zeros(x):
    z = torch.zeros_like(x, requires_grad=True)
    (z.exp() * x.detach()).sum().backward()
    return z.grad


def _kept(x):
    y = x.detach().clone().requires_grad_() * 2
    y.retain_grad()
    y.pow(3).mean().backward()
    return y.grad
