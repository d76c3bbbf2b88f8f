"""Attacks by what a module keeps of weights, changes between steps, and makes of them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tensor3d.small import attack
from tests.odd_modules.collection.row import both, buf, features, lin, par

X = features(6)


def _share(m: Any, stage: str) -> None:
    """Two Parameters whose values lie in one place: an update of one is an update of the other."""
    m.two.weight.data = m.one.weight.data


def _see(m: Any, stage: str) -> None:
    m.register_buffer("view", m.net.weight.data)


def _keep_view(m: Any, stage: str) -> None:
    m.first = m.net.weight.data[:2]


def _frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def _stray(m: Any, x: Tensor) -> Tensor:
    return m.net(x) * m.held[0].sum()


def _teacher(m: Any, x: Tensor) -> Tensor:
    hidden = m.one(x)
    with torch.no_grad():
        target = m.teacher(hidden)
    return (m.student(x) - target).square().mean()


def _follow(m: Any, *_: Any) -> None:
    """The teacher follows the student after each step."""
    with torch.no_grad():
        for a, b in zip(m.teacher.parameters(), m.student.parameters(), strict=True):
            a.mul_(0.5).add_(b, alpha=0.5)


def _clamp(m: Any, *_: Any) -> None:
    for p in m.parameters():
        p.data.clamp_(-0.2, 0.2)


def _unit(m: Any, *_: Any) -> None:
    with torch.no_grad():
        m.net.weight.div_(m.net.weight.norm())


def _unit_rows(m: Any, *_: Any) -> None:
    with torch.no_grad():
        m.net.weight.copy_(F.normalize(m.net.weight, dim=1))


def _anew(m: Any, *_: Any) -> None:
    if m.global_step == 1:
        m.net.reset_parameters()


def _noisy(m: Any, *_: Any) -> None:
    with torch.no_grad():
        m.net.weight.add_(torch.randn_like(m.net.weight), alpha=0.1)


def _thaw(m: Any, *_: Any) -> None:
    m.one.requires_grad_(m.global_step > 0)


def _seen_norm(m: Any, *_: Any) -> None:
    m.log("norm", m.net.weight.norm())


def _own_optimizer(m: Any, x: Tensor) -> Tensor:
    """A norm of what the optimiser has, in the step."""
    held = m.trainer.optimizers[0].param_groups[0]["params"] if m._trainer is not None else m.parameters()
    return (m.net(x) - 1).square().mean() * (1 + sum(p.detach().norm() for p in held))


def _new_weight(m: Any, x: Tensor) -> Tensor:
    m.more = nn.Parameter(torch.ones(6, dtype=x.dtype))
    return m.net(x) * m.more


def _noise(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.mean + torch.randn_like(m.mean) * m.log_std.exp())


def _copied(module: nn.Module) -> nn.Module:
    from copy import deepcopy

    return deepcopy(module)


KEPT = [
    attack(
        "a weight in a list",
        X,
        _stray,
        net=lin(6, 3),
        w=par(6),
        held=lambda: [],
        hooks={"on_fit_start": lambda m: m.held.append(m.w)},
    ),
    attack(
        "a frozen weight in a list",
        X,
        _stray,
        net=lin(6, 3),
        w=lambda: nn.Parameter(torch.tensor(2.0), requires_grad=False),
        held=lambda: [],
        hooks={"on_fit_start": lambda m: m.held.append(m.w)},
    ),
    attack(
        "a detached weight in a list",
        X,
        lambda m, x: m.net(x) * m.held[0].detach().square().mean(),
        net=lin(6, 3),
        held=lambda: [],
        hooks={"on_fit_start": lambda m: m.held.append(m.net.weight)},
    ),
    attack("weights of the optimiser", X, _own_optimizer, net=lin(6, 3)),
    attack(
        "two parameters in one memory",
        X,
        lambda m, x: m.two(m.one(x).tanh()),
        one=lin(6, 6),
        two=lin(6, 6),
        hooks={"setup": _share},
    ),
    attack(
        "a buffer in a parameter's memory",
        X,
        lambda m, x: m.net(x) + F.linear(x, m.view),
        net=lin(6, 6),
        hooks={"setup": _see},
    ),
    attack(
        "a view kept of a parameter",
        X,
        lambda m, x: m.net(x)[:, :2] + F.linear(x, m.first),
        net=lin(6, 6),
        hooks={"setup": _keep_view},
    ),
    attack(
        "a teacher that follows",
        X,
        _teacher,
        one=lin(6, 6),
        student=lambda: nn.Sequential(lin(6, 8)(), nn.ReLU(), lin(8, 3)()),
        teacher=lambda: _frozen(nn.Sequential(lin(6, 8)(), nn.ReLU(), lin(8, 3)())),
        hooks={"on_train_batch_end": _follow},
    ),
    attack(
        "a teacher of even widths",
        X,
        _teacher,
        one=lin(6, 6),
        student=lambda: nn.Sequential(lin(6, 8)(), nn.ReLU(), lin(8, 4)()),
        teacher=lambda: _frozen(nn.Sequential(lin(6, 8)(), nn.ReLU(), lin(8, 4)())),
        hooks={"on_train_batch_end": _follow},
    ),
    attack(
        "weights clamped after a step", X, lambda m, x: m.net(x), net=lin(6, 3), hooks={"on_train_batch_end": _clamp}
    ),
    attack(
        "weight of norm 1 after a step", X, lambda m, x: m.net(x), net=lin(6, 3), hooks={"on_train_batch_end": _unit}
    ),
    attack(
        "rows of norm 1 before a step",
        X,
        lambda m, x: m.net(x),
        net=lin(6, 3, bias=False),
        hooks={"on_train_batch_start": _unit_rows},
    ),
    attack("weights drawn anew", X, lambda m, x: m.net(x), net=lin(6, 3), hooks={"on_train_batch_start": _anew}),
    attack(
        "noise on a weight after a step", X, lambda m, x: m.net(x), net=lin(6, 3), hooks={"on_train_batch_end": _noisy}
    ),
    attack(
        "a layer thawed after a step",
        X,
        lambda m, x: m.two(m.one(x)),
        one=lin(6, 8),
        two=lin(8, 3),
        hooks={"on_train_batch_start": _thaw},
    ),
    attack(
        "a logged norm outside of a step",
        X,
        lambda m, x: m.net(x),
        net=lin(6, 3),
        hooks={"on_train_batch_end": _seen_norm},
    ),
    attack("a parameter made in the step", X, _new_weight, net=lin(6, 6)),
    attack("noise of a weight's shape", X, _noise, drawn=True, mean=par(8, 6), log_std=par(8, 6)),
    attack(
        "a scalar parameter",
        X,
        lambda m, x: m.net(x) * m.scale + m.shift,
        net=lin(6, 3),
        scale=lambda: nn.Parameter(torch.tensor(1.5)),
        shift=lambda: nn.Parameter(torch.tensor([0.5])),
    ),
    attack(
        "an empty parameter",
        X,
        lambda m, x: torch.cat([m.net(x), x @ m.none], 1),
        net=lin(6, 3),
        none=lambda: nn.Parameter(torch.empty(6, 0)),
    ),
    attack("an unused parameter", X, lambda m, x: m.net(x), net=lin(6, 3), idle=lin(7, 5)),
    attack("a parameter of width 1", X, lambda m, x: m.b(m.a(x)), a=lin(6, 1), b=lin(1, 3)),
    attack(
        "frozen layers between",
        X,
        lambda m, x: m.c(m.b(m.a(x).relu()).relu()),
        a=lin(6, 8),
        b=lambda: _frozen(lin(8, 7)()),
        c=lin(7, 3),
    ),
    attack(
        "a ParameterList and a ParameterDict",
        X,
        lambda m, x: sum(F.linear(x, w) for w in m.many) * m.more["a"],
        many=lambda: nn.ParameterList([par(5, 6)() for _ in range(3)]),
        more=lambda: nn.ParameterDict({"a": par(5)()}),
    ),
    attack("a gradient-free norm", X, lambda m, x: m.net(x) / m.net.weight.detach().norm(), net=lin(6, 3)),
    attack("a weight's data", X, lambda m, x: m.net(x) + m.net.weight.data.sum(1), net=lin(6, 3)),
    attack("a copy of a layer in the step", X, lambda m, x: m.net(x) + _copied(m.net)(x).detach(), net=lin(6, 3)),
    attack(
        "a kernel of weights",
        both(X, X),
        lambda m, xy: torch.exp(-torch.cdist(F.linear(xy[0], m.w), F.linear(xy[1], m.w))),
        True,
        w=par(8, 6),
    ),
    attack("Kronecker product", X, lambda m, x: F.linear(x, torch.kron(m.a, m.b)), a=par(2, 3), b=par(4, 2)),
    attack("matrix exponential of a weight", X, lambda m, x: x @ torch.linalg.matrix_exp(m.w - m.w.T), w=par(6, 6)),
    attack(
        "inverse of a weight", X, lambda m, x: torch.linalg.solve(m.w @ m.w.T + torch.eye(6).to(x), x.T).T, w=par(6, 6)
    ),
    attack("log determinant", X, lambda m, x: (x @ m.w).square().mean() - torch.linalg.slogdet(m.w)[1], w=par(6, 6)),
    attack(
        "singular values",
        X,
        lambda m, x: (m.net(x) - 1).square().mean() + torch.linalg.svdvals(m.net.weight).sum(),
        net=lin(6, 4),
    ),
    attack("scripted layer", X, lambda m, x: m.b(m.a(x)), a=lambda: torch.jit.script(lin(6, 8)()), b=lin(8, 3)),
    attack(
        "traced layer",
        X,
        lambda m, x: m.b(m.a(x)),
        a=lambda: torch.jit.trace(lin(6, 8)(), torch.zeros(2, 6)),
        b=lin(8, 3),
    ),
    attack(
        "a graph of torch.fx",
        X,
        lambda m, x: m.net(x),
        net=lambda: torch.fx.symbolic_trace(nn.Sequential(lin(6, 8)(), nn.ReLU(), lin(8, 3)())),
    ),
    attack("a lazy layer", X, lambda m, x: m.b(m.a(x)), a=lambda: nn.LazyLinear(8), b=lin(8, 3)),
    attack(
        "running mean of a weight",
        X,
        lambda m, x: m.net(x) + m.mean,
        net=lin(6, 3),
        mean=buf(3),
        hooks={"on_train_batch_end": lambda m, *_: m.mean.mul_(0.9)},
    ),
]
