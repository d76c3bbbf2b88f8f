"""Operators value by value, reductions, scans, and what sorts."""

import torch
import torch.nn.functional as F

from tests.dist.table.case import bools, case, ints

X = (2, 9, 6)

VALUES = [
    case("add with alpha by name", lambda x, y: torch.add(x, y, alpha=2), X, X),
    case("in-place with a split row", lambda x, y: (x * 1).mul_(y), X, (9, 1), at={0: 1, 1: 0}),
    case("in-place of a whole tensor", lambda x, y: (y * 1).add_(x), X, X, refused="every rank has whole"),
    case("+= ", lambda x, y: _plus_equal(x * 1, y), X, X),
    case("out=", lambda x, y: torch.add(x.detach(), y.detach(), out=torch.empty(X)), X, X, refused="out"),
    case("functions", lambda x: x.sin() + x.cos().exp() + x.abs().sqrt() + x.tanh() + x.erf(), X),
    case("more functions", lambda x: x.sigmoid().log() + x.square().log1p() + x.expm1() + x.atan(), X),
    case("rare functions", lambda x: x.sinh() + x.asinh() + torch.special.erfcx(x) + x.frac() + x.trunc(), X),
    case("activations", lambda x: F.gelu(x) + F.silu(x) + F.elu(x) + F.leaky_relu(x) + F.softplus(x), X),
    case("more activations", lambda x: F.mish(x) + F.hardswish(x) + F.relu6(x) + F.selu(x) + F.celu(x), X),
    case("gelu by tanh", lambda x: F.gelu(x, approximate="tanh") + F.logsigmoid(x), X),
    case("rrelu in evaluation", lambda x: F.rrelu(x, training=False), X),
    case("clamp by names", lambda x: x.clamp(min=-0.5, max=0.7), X),
    case("clamp by tensors", lambda x, y: torch.clamp(x, min=y), X, (6,)),
    case("where of a condition", lambda x: torch.where(x > 0), X, refused="where"),
    case("masked_fill_ ", lambda x, m: (x * 1).masked_fill_(m, 3.0), X, bools(*X), at={0: 1, 1: 1}),
    case("masked_select", lambda x: x.masked_select(x > 0), X, refused="masked_select"),
    case("mask as an index", lambda x: x[x > 0], X, refused="mask"),
    case("nonzero", lambda x: (x > 0).nonzero(), X, refused="nonzero"),
    case("unique", lambda x: torch.unique(x.detach()), X, refused="unique"),
    case("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), X, X, (6,)),
    case("addcdiv", lambda x, y, z: torch.addcdiv(x, y, z.abs() + 1, value=0.5), X, X, (9, 1)),
    case("isnan", lambda x: (x / 0).isnan() | x.isfinite() | torch.isinf(x), X),
    case("isclose", lambda x, y: torch.isclose(x, y), X, X),
    case("type", lambda x: x.type(torch.float32).type_as(x) + x.float().half().double(), X, tolerance=0.001),
    case("bfloat16", lambda x: (x.bfloat16() * 2).double(), X, tolerance=0.01),
    case("complex from parts", lambda x, y: torch.complex(x, y).conj() * torch.polar(x.abs(), y), X, X),
    case("conjugate parts", lambda x, y: torch.complex(x, y).conj().imag + torch.complex(x, y).conj().real, X, X),
    case("conjugate products", lambda x, y: _adjoint_products(torch.complex(x, y), torch.complex(y, x)), X, X),
    case("view_as_complex", lambda x: torch.view_as_real(torch.view_as_complex(x) ** 2), (9, 4, 2), at=0),
    case("angle", lambda x: torch.complex(x, x + 1).angle(), X),
    case("nan_to_num", lambda x: (x.log()).nan_to_num(0.0), X),
    case("like", lambda x: torch.zeros_like(x) + torch.ones_like(x) * 2 + torch.full_like(x, 3) + x, X),
    case("new", lambda x: x.new_zeros(6) + x.new_ones((9, 6)) + x.new_tensor([1.0]) + x, X),
    case("bucketize", lambda x: torch.bucketize(x, torch.linspace(-1, 1, 5).double()), X),
    case("searchsorted", lambda x, b: torch.searchsorted(b.sort()[0], x), X, (7,)),
    case("detach", lambda x: x.detach() * x, X),
    case("clone", lambda x: x.clone() + x.contiguous() + torch.clone(x), X),
    # --- reductions ---
    case("nansum", lambda x: torch.where(x > 1, float("nan"), x).nansum(1), X),
    case("nanmean", lambda x: torch.where(x > 1, float("nan"), x).nanmean(1), X),
    case("var with correction", lambda x: x.var(1, correction=0) + torch.var(x, dim=1, unbiased=False), X),
    case("var_mean", lambda x: torch.var_mean(x, 1) + torch.std_mean(x, dim=1, keepdim=True), X),
    case("amax", lambda x: x.amax(1) + x.amin((1, 2))[:, None], X),
    case("max by name", lambda x: x.max(dim=-2, keepdim=True).values, X),
    case("argmin of what is not a number", lambda x: torch.where(x > 0.5, torch.nan, x).argmin(1), X),
    case("max of two", lambda x, y: torch.max(x, y) + torch.min(x, y), X, X),
    case("aminmax", lambda x: torch.aminmax(x, dim=1), X),
    case("any and all", lambda x: (x > 1).any(1) | (x > -1).all(1), X),
    case("count_nonzero", lambda x: torch.count_nonzero(x > 0, 1), X),
    case("prod", lambda x: x.prod(1), X),
    case("median of all", lambda x: x.median(), X, refused="median"),
    case("quantile", lambda x: x.quantile(0.3, dim=1), X),
    case("mode", lambda x: x.round().mode(1).values, X),
    case("kthvalue", lambda x: x.kthvalue(3, 1).values, X),
    case("norm over it", lambda x: x.norm(dim=1) + x.norm(p=1, dim=1) + x.norm(p=3, dim=1), X),
    case("norm by largest", lambda x: torch.linalg.vector_norm(x, float("inf"), dim=1), X),
    case("logsumexp", lambda x: x.logsumexp(1), X),
    case("dist", lambda x, y: torch.dist(x, y), X, X),
    case("histc", lambda x: torch.histc(x, 5, -2, 2), X),
    case("bincount", lambda i: torch.bincount(i, minlength=7), ints(7, 20), at=0),
    case("log_softmax over it", lambda x: F.log_softmax(x, 1) + F.softmin(x, 1), X),
    case("gumbel_softmax", lambda x: F.gumbel_softmax(x * 0, dim=-1).sum(-1), X),
    case("glu over it", lambda x: F.glu(x, 1), (2, 8, 6)),
    # --- scans and order ---
    case("cumsum along all", lambda x: x.cumsum(0), (9,), at=0, refused="cumsum"),
    case("cumprod", lambda x: x.cumprod(1), X),
    case("cummax", lambda x: x.cummax(1), X),
    case("logcumsumexp", lambda x: x.logcumsumexp(1), X),
    case("diff", lambda x: x.diff(dim=1), X),
    case("sort downwards", lambda x: x.sort(dim=1, descending=True).values, X),
    case("triu", lambda x: x.triu(1) + x.tril(-1), (2, 9, 9)),
    case("triu of columns", lambda x: x.triu() + torch.tril(x, 2), (2, 9, 9), at=2),
    case("diagonal", lambda x: torch.diagonal(x, 0, 0, 2), (6, 9, 6)),
    case("trace", torch.trace, (9, 9), at=0),
]  # fmt: skip


def _plus_equal(x, y):
    x += y
    x *= 2
    return x


def _adjoint_products(a, b):
    a, b = a.movedim(0, -1), b.movedim(0, -1)
    return [torch.view_as_real(x) for x in (a.mH @ b, a @ b.mH, a.conj().mT @ b)]
