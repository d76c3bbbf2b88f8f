"""Odd expressions: reads, writes, gradients and bypasses of which an operator's handler knows nothing."""

import copy
import pickle
from io import BytesIO

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import grad as imported_grad
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.dist.table.case import bools, case, ints

X = (2, 9, 6)
ROW = (6,)
W = (6, 6)

ODD = [
    # --- writes ---
    case(
        "write into a view with other borders",
        lambda x: _then(x * 1, lambda y: y.reshape(2, 3, 3, 6).add_(1)),
        X,
        refused="?",
    ),
    case("write into a view of features", lambda x: _then(x * 1, lambda y: y[..., :3].mul_(2)), X),
    case("write into a transposed view", lambda x: _then(x * 1, lambda y: y.mT[:, 2:4].zero_()), X),
    case("write into a flattened view", lambda x: _then(x * 1, lambda y: y.view(18, 6).add_(1)), X),
    case("write into a view of a view", lambda x: _then(x * 1, lambda y: y[..., 1:].unsqueeze(0).mul_(3)), X),
    case("write into an expanded copy", lambda x: x[:, None].expand(2, 3, 9, 6).contiguous().add_(1), X),
    case("write into a reshaped copy", lambda x: x.transpose(1, 2).reshape(2, 54).add_(1), X),
    case("write into a selected row", lambda x: _then(x * 1, lambda y: y[:, 0].add_(1)), X, refused="copy"),
    case(
        "write into an unbound row",
        lambda x: _then(x * 1, lambda y: y.select(1, 2).zero_()),
        X,
        refused="copy",
    ),
    case("write into a short slice", lambda x: _then(x * 1, lambda y: y[:, :1].add_(1)), X, refused="?"),
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
    case(
        "set by a mask of rows to a tensor",
        lambda x, m, y: _set(x * 1, "x[m] = y", m=m, y=y),
        X,
        bools(2, 9),
        ROW,
        refused="mask",
    ),
    case("set through a plain index", lambda x, i: _set(x * 1, "x[:, i] = 0.0", i=i), X, ints(9, 3)),
    case("set beyond the end", lambda x: _raises(lambda: _set(x * 1, "x[:, 9] = 0"), IndexError), X),
    case("select beyond the end", lambda x: _raises(lambda: x[:, 9], IndexError), X),
    case("select beyond the first", lambda x: _raises(lambda: x[:, -10], IndexError), X),
    case("a dim that is not there", lambda x: _raises(lambda: x.softmax(3), IndexError), X),
    case("narrow too far", lambda x: _raises(lambda: x.narrow(1, 5, 5), (IndexError, RuntimeError)), X),
    case(
        "write sharded into whole",
        lambda x: _set(torch.zeros(X).double(), "x[:, :, :] = y", y=x),
        X,
        refused="__setitem__",
    ),
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
    case(
        "out= of a sum", lambda x: torch.sum(x.detach(), 1, out=torch.empty(2, 6).double()), X, refused="out="
    ),
    case("in-place by a larger type", lambda x: _raises(lambda: (x * 5).long().add_(x), RuntimeError), X),
    case(
        "write to a diagonal",
        lambda x: _then(x * 1, lambda y: y.diagonal(0, 1, 2).zero_()),
        (2, 9, 9),
        refused="copy",
    ),
    case("write to an index", lambda x, y: _set(x.detach() * 1, "x[1, None, 3] = y", y=y), X, ROW, at=0),
    case("write with leading dims", lambda x: _set(x * 1, "x[:, 3] = y", y=torch.ones(1, 1, 6).double()), X),
    case("write by a boolean", lambda x: _set(x * 1, "x[True] = 0"), X, at=0, refused="mask"),
    case("set data", lambda x: setattr(x * 1, "data", x.detach()), X, refused="__set__"),
    case("apply_", lambda x: (x * 1).detach().apply_(lambda v: v + 1), X, refused="apply_"),
    case("write to what is rolled by nothing", lambda x: _then(x * 1, lambda y: y.roll(9, 1).zero_()), X),
    case("write to what is padded by nothing", lambda x: _then(x * 1, lambda y: F.pad(y, (0, 0)).zero_()), X),
    case(
        "write to what is cut by padding",
        lambda x: _then(x * 1, lambda y: F.pad(y, (0, 0, -1, 0)).zero_()),
        X,
    ),
    case("write to one index flipped", lambda x: _then(x * 1, lambda y: y[..., :1].flip(2).zero_()), X),
    # --- random numbers ---
    case("normal_ ends gradients", lambda x: _grad((x * 2).normal_().sum(), x) + x, X),
    case("bernoulli_ by a tensor", lambda x, p: (x * 1).bernoulli_((p > 0).double()), X, X[1:]),
    case("zeros with a gradient", lambda x: _times_zeros(x, torch.zeros_like), X),
    case("random numbers with a gradient", lambda x: _times_zeros(x, torch.rand_like), X),
    # --- gradients ---
    case("gradient by hand", lambda x: _grad((x**3).sum(), x), X),
    case("gradient by an imported name", lambda x: imported_grad((x**3).sum(), x, create_graph=True)[0], X),
    case(
        "gradient of a mean of a parameter",
        lambda x, w: torch.autograd.grad((x @ w).pow(2).mean(), w, create_graph=True)[0] * 2,
        X,
        W,
    ),
    case("gradient of gradient", lambda x: _grad(_grad(x.sin().sum(), x).pow(2).sum(), x), X),
    case(
        "gradient of a sharded output",
        lambda x, s: torch.autograd.grad(x**2, x, s, create_graph=True)[0],
        X,
        X,
        at={0: 1, 1: 1},
    ),
    case(
        "gradient penalty",
        lambda x, w: _grad((x @ w).tanh().sum(), x).norm(dim=-1).sub(1).pow(2).mean(),
        X,
        W,
    ),
    case(
        "gradient of what is not used",
        lambda x, w: torch.autograd.grad(x.sum(), w, allow_unused=True)[0] is None,
        X,
        W,
    ),
    case(
        "materialised gradient",
        lambda x, w: torch.autograd.grad(
            x.sum(), [x, w], allow_unused=True, materialize_grads=True, create_graph=True
        )[0],
        X,
        W,
    ),
    case(
        "gradient of whole by whole",
        lambda x, w: torch.autograd.grad((w**2).sum(), w, create_graph=True)[0] + x,
        X,
        W[:1],
    ),
    case(
        "backward of a sharded tensor",
        lambda x: (x * 2).backward(torch.ones(X).double()),
        X,
        refused="backward",
    ),
    case("autograd Function", lambda x: _Twice.apply(x), X, refused="autograd Functions"),
    case("autograd Function of whole values", lambda x, w: x * _Twice.apply(w), X, ROW),
    case("checkpoint", lambda x, w: checkpoint(lambda x: (x @ w).tanh() @ w, x, use_reentrant=False), X, W),
    case(
        "checkpoint of attention",
        lambda x: checkpoint(lambda x: F.scaled_dot_product_attention(x, x, x), x, use_reentrant=False),
        X,
    ),
    case(
        "reentrant checkpoint",
        lambda x, w: checkpoint(lambda x: (x @ w).tanh(), x, use_reentrant=True),
        X,
        W,
        refused="use_reentrant",
    ),
    case(
        "checkpointed sequence",
        lambda x: checkpoint_sequential([torch.tanh, torch.exp], 2, x, use_reentrant=False),
        X,
    ),
    case("hook", lambda x: _then(x * 1, lambda y: y.register_hook(lambda g: g * 2)) * 3, X),
    case(
        "hook that changes by position",
        lambda x, s: _then(x * 1, lambda y: y.register_hook(lambda g: g * s)) * 3,
        X,
        X,
    ),
    case("retain_grad", lambda x: _then(x * 1, lambda y: y.retain_grad()).exp(), X),
    case("gradient of an intermediate", lambda x: _grad_of(x * 1), X),
    case("detach", lambda x: x * x.detach() + x.clone().detach().requires_grad_().detach(), X),
    case("no_grad", lambda x: _under(torch.no_grad(), lambda: (x * 2).softmax(1)) + x, X),
    case("no_grad in place", lambda x: _under(torch.no_grad(), lambda: (x * 2).add_(x)) + x, X),
    case(
        "inference_mode",
        lambda x: _under(torch.inference_mode(), lambda: F.linear(x, torch.eye(6).double()).softmax(1)).sum(),
        X,
    ),
    case("parameter in several places", lambda x, w: (x @ w + w[0]).mul(w.sum()) @ w.T, X, W),
    case("parameter of positions", lambda x, p: x + p[:, : x.shape[1]], X, (1, 16, 6)),
    case(
        "parameter broadcast to rows",
        lambda x, p: torch.cat([p.expand(2, -1, -1), x], 1) * x.mean(),
        X,
        (1, 2, 6),
    ),
    case(
        "parameter beside an empty cat",
        lambda x, p: torch.cat([x[:, :0], x, p.expand(2, 1, 6)], 1),
        X,
        (1, 1, 6),
    ),
    case("parameter looked up by split values", lambda i, w: w[i].sum(1) * w.mean(), ints(5, 2, 9), (5, 3)),
    case(
        "only a class token is used",
        lambda x, c: torch.cat([c.expand(2, 1, 6), x], 1)[:, 0] * 2,
        X,
        (1, 1, 6),
    ),
    case("whole values beside", lambda x, w: (w.softmax(0) * 2).sum() + x.sum() * w.sum(), X, ROW),
    # --- values and control flow ---
    case("item", lambda x: x.item(), X, refused="item"),
    case("truth", lambda x: bool(x > 0), X, refused="__bool__"),
    case("numpy", lambda x: x.detach().numpy(), X, refused="numpy"),
    case("tolist", lambda x: x.tolist(), X, refused="tolist"),
    case("data_ptr", lambda x: x.data_ptr(), X, refused="data_ptr"),
    case("number of a mean", lambda x: [x.mean().item() * 2, float(x.sum()), int(x.argmax())], X),
    case("branch on a sum", lambda x: x * 2 if x.sum() > 0 and not (x > 100).any() else x * 3, X),
    case("membership", lambda x: [1e9 in x, bool((x == x).all())], X),
    case(
        "metadata",
        lambda x: [
            x.shape,
            x.size(),
            x.size(-2),
            x.dim(),
            x.ndim,
            x.numel(),
            len(x),
            x.dtype,
            x.device,
            x.is_floating_point(),
            x.nelement(),
        ],
        X,
    ),
    case(
        "metadata of autograd",
        lambda x: [
            x.requires_grad,
            (x * 2).requires_grad,
            (x * 2).grad_fn is not None,
            x.detach().requires_grad,
        ],
        X,
    ),
    case(
        "is a tensor",
        lambda x: [
            torch.is_tensor(x),
            isinstance(x, torch.Tensor),
            torch.is_floating_point(x),
            torch.numel(x),
        ],
        X,
    ),
    case("scripting", lambda x: x if torch.jit.is_scripting() or torch.jit.is_tracing() else x * 2, X),
    case(
        "sizes from the shape",
        lambda x: x + torch.arange(x.shape[1], dtype=x.dtype).view(1, -1, 1) / x.shape[1],
        X,
    ),
    case(
        "whole of the shape",
        lambda x: x + torch.zeros(x.shape, dtype=x.dtype) + torch.ones(x.size(1), 1).to(x),
        X,
    ),
    case("printing", lambda x: len(f"{x} {x!r}") > 0, X),
    case("deep copy", lambda x: copy.deepcopy(x.detach()) * x, X),
    case("copy", lambda x: copy.copy(x) * 2, X),
    case("pickle", lambda x: pickle.dumps(x.detach()), X, refused="full_tensor"),
    case("save", lambda x: torch.save({"x": x.detach()}, BytesIO()), X, refused="full_tensor"),
    case("hash and identity", lambda x: [x is x, len({x: 1}), hash(x) == hash(x)], X),
    case("equality", lambda x, y: [torch.equal(x, y), torch.allclose(x, x), torch.equal(x, x)], X, X),
    case("conversions", lambda x: x.cpu() + x.to("cpu") + x.to(torch.float64) + x.to(x) + x.double(), X),
    case(
        "to another type and device",
        lambda x: x.to("cpu", torch.float32).to(dtype=torch.float64, copy=True).detach(),
        X,
    ),
    case("map over leaves", lambda x: torch.utils._pytree.tree_map(lambda t: t * 2, {"a": [x, (x,)]}), X),
    case(
        "reversed operands",
        lambda x, w: 1 - x + 2 / (x.abs() + 1) + 2**x + w @ x + (3 // (x.abs() + 1)).detach(),
        X,
        (9, 9),
    ),
    case("attributes of the user", lambda x: _then(x * 1, lambda y: setattr(y, "mine", 3)).mine, X),
    case(
        "memory format",
        lambda x: x.to(memory_format=torch.channels_last).contiguous(memory_format=torch.channels_last) * 2,
        (2, 4, 9, 6),
        at=2,
    ),
    case("sparse", lambda x: x.to_sparse(), X, refused="sparse"),
    case(
        "renormalised embedding",
        lambda i, w: F.embedding(i, w.clone(), max_norm=1.0),
        ints(5, 2, 9),
        (5, 3),
        refused="embedding_renorm_",
    ),
    case("random integers like", lambda x: torch.randint_like(x, 5), X, refused="randint_like"),
    case("multinomial", lambda x: torch.multinomial(x.softmax(-1)[0], 1), X, refused="multinomial"),
    case(
        "random numbers of a generator",
        lambda x: (x * 1).detach().normal_(generator=torch.Generator()),
        X,
        refused="generator",
    ),
    case(
        "dropout in evaluation",
        lambda x: F.dropout(x, 0.5, False) + F.alpha_dropout(x, 0.5, False) + nn.Dropout1d()(x).mean() * 0,
        X,
    ),
    # --- transforms ---
    case("vmap", lambda x: torch.vmap(torch.sin)(x), X, refused="torch.func"),
    case("func.grad", lambda x: torch.func.grad(lambda x: x.sin().sum())(x), X, refused="torch.func"),
    case("jacrev", lambda x: torch.func.jacrev(torch.sin)(x), X, refused="torch.func"),
    case("forward-mode gradients", lambda x: torch.func.jvp(torch.sin, (x,), (x,)), X, refused="torch.func"),
    case(
        "functional_call",
        lambda x, w: torch.func.functional_call(nn.Linear(6, 6, bias=False), {"weight": w}, x),
        X,
        W,
    ),
    case("compiled", lambda x: torch.compile(torch.sin, backend="eager")(x), X),
    case("jacobian", lambda x: torch.autograd.functional.jacobian(lambda x: x.sum(), x), X),
]
ODD += [
    # --- more of what training steps do ---
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
    case("reversed", lambda x: list(reversed(x))[0], X),
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
    case("write to a split of rows", lambda x: _then(x.detach() * 1, lambda y: y.split(3, 1)[1].zero_()), X),
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


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


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
