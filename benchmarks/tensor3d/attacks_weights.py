"""Attacks by how weights are read, shared, changed and made: the part of a module that tensor3d splits."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from benchmarks.tensor3d.small import attack, both, buf, features, lin, par, words

X = features(6)


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


def _share(m: Any, stage: str) -> None:
    """Two Parameters whose values lie in one place: an update of one is an update of the other."""
    m.two.weight.data = m.one.weight.data


def _see(m: Any, stage: str) -> None:
    m.register_buffer("view", m.net.weight.data)


def _keep_view(m: Any, stage: str) -> None:
    m.first = m.net.weight.data[:2]


def _tied() -> nn.Module:
    pair = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
    pair[1].weight = pair[0].weight
    return pair


def _tied_table() -> nn.Module:
    pair = nn.ModuleDict({"embed": nn.Embedding(9, 6), "head": nn.Linear(6, 9, bias=False)})
    pair["head"].weight = pair["embed"].weight
    return pair


def _frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def _standard(w: Tensor) -> Tensor:
    return (w - w.mean(1, keepdim=True)) / (w.std(1, keepdim=True) + 1e-5)


def _lora(m: Any, x: Tensor) -> Tensor:
    return m.base(x) + F.linear(F.linear(x, m.a), m.b) * 0.5


def _hyper(m: Any, x: Tensor) -> Tensor:
    made = m.maker(x.mean(0)).view(8, 6)
    return F.linear(x, made, m.bias)


def _functional(m: Any, x: Tensor) -> Tensor:
    weights = {name: value * 1.5 for name, value in m.net.named_parameters()}
    return torch.func.functional_call(m.net, weights, (x,))


def _stacked(m: Any, x: Tensor) -> Tensor:
    weights = torch.stack([one.weight for one in m.many])
    return torch.einsum("bi,eoi->beo", x, weights)


def _parameters_by_name(m: Any, x: Tensor) -> Tensor:
    own = dict(m.named_parameters())
    return F.linear(F.linear(x, own["net.0.weight"]), m.get_parameter("net.2.weight"), own["net.2.bias"])


def _isinstance(m: Any, x: Tensor) -> Tensor:
    decay = sum((p.square().sum() for p in m.parameters() if isinstance(p, nn.Parameter)), x.new_zeros(()))
    return (m.net(x) - 1).square().mean() + 0.1 * decay


def _own_of(m: Any) -> dict[Any, float]:
    return {p: 0.1 * i for i, p in enumerate(m.parameters())}


def _by_object(m: Any, x: Tensor) -> Tensor:
    """Factors that were chosen when the module was made, by parameter."""
    return (m.net(x) - 1).square().mean() + sum(m.factors.get(p, 0.0) * p.abs().sum() for p in m.parameters())


def _named_decay(m: Any, x: Tensor) -> Tensor:
    decay = sum(p.square().sum() for name, p in m.named_parameters() if name.endswith("weight") and p.ndim > 1)
    return (m.net(x) - 1).square().mean() + 0.1 * decay


def _tied_decay(m: Any, x: Tensor) -> Tensor:
    """A tied weight counts once in `parameters()`."""
    return (m.pair[1](m.pair[0](x)) - 1).square().mean() + 0.1 * sum(p.square().sum() for p in m.parameters())


def _experts(m: Any, x: Tensor) -> Tensor:
    score = m.router(x).softmax(-1)
    best, which = score.topk(2, -1)
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        rows, slot = (which == e).nonzero(as_tuple=True)
        out = out.index_add(0, rows, best[rows, slot, None] * expert(x[rows]))
    return out


def _dense_experts(m: Any, x: Tensor) -> Tensor:
    score = m.router(x).softmax(-1)
    hidden = torch.einsum("bi,eih->beh", x, m.up).relu()
    return torch.einsum("beh,ehi,be->bi", hidden, m.down, score)


def _stray(m: Any, x: Tensor) -> Tensor:
    return m.net(x) * m.held[0].sum()


def _held(value: nn.Parameter) -> list[nn.Parameter]:
    return [value]


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


WEIGHTS = [
    attack("two layers", X, lambda m, x: m.net(x), net=lambda: nn.Sequential(lin(6, 8)(), nn.ReLU(), lin(8, 3)())),
    attack("a weight used twice", X, lambda m, x: m.net(m.net(x).tanh()), net=lin(6, 6)),
    attack("tied weights", X, lambda m, x: m.pair[1](m.pair[0](x).tanh()), pair=_tied),
    attack("tied table", words(5), lambda m, x: F.cross_entropy(m.pair["head"](m.pair["embed"](x[:, :-1])).mT, x[:, 1:]), pair=_tied_table),
    attack("tied transposed", X, lambda m, x: F.linear(m.net(x).relu(), m.net.weight.t(), m.back), net=lin(6, 9), back=par(6)),
    attack("a transposed parameter", X, lambda m, x: x @ m.w.T + m.b, w=lambda: nn.Parameter(torch.randn(6, 8).t()), b=par(8)),
    attack("slices of a weight", X, lambda m, x: F.linear(F.linear(x, m.w[:4, :6]), m.w[4:, :4]), w=par(9, 6)),
    attack("strided slices of a weight", X, lambda m, x: F.linear(x, m.w[::2], m.b[1::2]), w=par(10, 6), b=par(10)),
    attack("a weight of chosen rows", X, lambda m, x: F.linear(x, m.w[torch.tensor([3, 0, 3])]), w=par(5, 6)),
    attack("weights in a row", X, lambda m, x: F.linear(x, torch.cat([m.q.weight, m.k.weight]), torch.cat([m.q.bias, m.k.bias])), q=lin(6, 3), k=lin(6, 4)),
    attack("stacked weights", X, _stacked, many=lambda: nn.ModuleList([lin(6, 4, bias=False)() for _ in range(3)])),
    attack("split weight", X, lambda m, x: torch.cat([F.linear(x, w) ** (i + 1) for i, w in enumerate(m.w.chunk(3))], 1), w=par(9, 6)),
    attack("a viewed weight", X, lambda m, x: torch.einsum("bi,hoi->bho", x, m.net.weight.view(2, 4, 6)), net=lin(6, 8)),
    attack("a weight in other units", X, lambda m, x: m.b(F.linear(x, F.normalize(m.a.weight, dim=1))), a=lin(6, 8), b=lin(8, 3)),
    attack("standardised weight", X, lambda m, x: F.linear(x, _standard(m.net.weight), m.net.bias), net=lin(6, 8)),
    attack("masked weight", X, lambda m, x: m.b(F.linear(x, m.a.weight * m.mask)), a=lin(6, 8), b=lin(8, 2), mask=lambda: nn.Buffer((torch.rand(8, 6) > 0.5).double())),
    attack("rounded weight, straight through", X, lambda m, x: F.linear(x, m.w + ((m.w * 4).round() / 4 - m.w).detach()), w=par(5, 6)),
    attack("scaled by its own norm", X, lambda m, x: F.linear(x, m.w / m.w.norm()), w=par(5, 6)),
    attack("weight norm", X, lambda m, x: m.net(x), net=lambda: nn.Sequential(parametrizations.weight_norm(lin(6, 8)()), nn.ReLU(), parametrizations.weight_norm(lin(8, 3)(), dim=1))),
    attack("weight norm by hooks", X, lambda m, x: m.net(x), net=lambda: nn.utils.weight_norm(lin(6, 8)())),
    attack("spectral norm", X, lambda m, x: m.net(x), net=lambda: nn.Sequential(parametrizations.spectral_norm(lin(6, 8)()), lin(8, 3)())),
    attack("spectral norm by hooks", X, lambda m, x: m.net(x), net=lambda: nn.utils.spectral_norm(lin(6, 8)())),
    attack("orthogonal weight", X, lambda m, x: m.net(x), net=lambda: parametrizations.orthogonal(lin(6, 6)())),
    attack("symmetric weight", X, lambda m, x: m.net(x), net=lambda: _symmetric()),
    attack("pruned weight", X, lambda m, x: m.b(m.a(x)), a=lambda: prune.random_unstructured(lin(6, 8)(), "weight", 0.4), b=lin(8, 2)),
    attack("LoRA", X, lambda m, x: m.head(_lora(m, x)), base=lambda: _frozen(lin(6, 8)()), a=par(2, 6), b=par(8, 2), head=lin(8, 3)),
    attack("merged LoRA", X, lambda m, x: F.linear(x, m.base.weight + m.b @ m.a), base=lambda: _frozen(lin(6, 8)()), a=par(2, 6), b=par(8, 2)),
    attack("weights made by a net", X, _hyper, True, maker=lin(6, 48), bias=par(8)),
    attack("functional call", X, _functional, net=lambda: nn.Sequential(lin(6, 8)(), nn.ReLU(), lin(8, 3)())),
    attack("parameters by name", X, _parameters_by_name, net=lambda: nn.Sequential(lin(6, 8)(), nn.ReLU(), lin(8, 3)())),
    attack("parameters by kind", X, _isinstance, net=lin(6, 8)),
    attack("parameters by object", X, _by_object, net=lambda: nn.Sequential(lin(6, 8)(), lin(8, 3)()), factors=dict, hooks={"on_fit_start": lambda m: m.factors.update(_own_of(m))}),
    attack("decay of weights in the loss", X, _named_decay, net=lambda: nn.Sequential(lin(6, 8)(), lin(8, 3)())),
    attack("decay with a tied weight", X, _tied_decay, pair=_tied),
    attack("all parameters as a vector", X, lambda m, x: (m.net(x) - 1).square().mean() + nn.utils.parameters_to_vector(m.parameters()).norm(), net=lin(6, 8)),
    attack("number of parameters", X, lambda m, x: m.net(x) / sum(p.numel() for p in m.parameters()) ** 0.5, net=lin(6, 8)),
    attack("a sparse mixture of experts", X, _experts, router=lin(6, 3), experts=lambda: nn.ModuleList([nn.Sequential(lin(6, 8)(), nn.GELU(), lin(8, 6)()) for _ in range(3)])),
    attack("a dense mixture of experts", X, _dense_experts, router=lin(6, 3), up=par(3, 6, 8), down=par(3, 8, 6)),
    attack("a batch of weights", features(3, 6), lambda m, x: torch.bmm(x.transpose(0, 1), m.w).transpose(0, 1) + m.b, w=par(3, 6, 5), b=par(3, 5)),
    attack("a weight in a list", X, _stray, net=lin(6, 3), w=par(6), held=lambda: [], hooks={"on_fit_start": lambda m: m.held.append(m.w)}),
    attack("a frozen weight in a list", X, _stray, net=lin(6, 3), w=lambda: nn.Parameter(torch.tensor(2.0), requires_grad=False), held=lambda: [], hooks={"on_fit_start": lambda m: m.held.append(m.w)}),
    attack("a detached weight in a list", X, lambda m, x: m.net(x) * m.held[0].detach().square().mean(), net=lin(6, 3), held=lambda: [], hooks={"on_fit_start": lambda m: m.held.append(m.net.weight)}),
    attack("weights of the optimiser", X, _own_optimizer, net=lin(6, 3)),
    attack("two parameters in one memory", X, lambda m, x: m.two(m.one(x).tanh()), one=lin(6, 6), two=lin(6, 6), hooks={"setup": _share}),
    attack("a buffer in a parameter's memory", X, lambda m, x: m.net(x) + F.linear(x, m.view), net=lin(6, 6), hooks={"setup": _see}),
    attack("a view kept of a parameter", X, lambda m, x: m.net(x)[:, :2] + F.linear(x, m.first), net=lin(6, 6), hooks={"setup": _keep_view}),
    attack("a teacher that follows", X, _teacher, one=lin(6, 6), student=lambda: nn.Sequential(lin(6, 8)(), nn.ReLU(), lin(8, 3)()), teacher=lambda: _frozen(nn.Sequential(lin(6, 8)(), nn.ReLU(), lin(8, 3)())), hooks={"on_train_batch_end": _follow}),
    attack("weights clamped after a step", X, lambda m, x: m.net(x), net=lin(6, 3), hooks={"on_train_batch_end": _clamp}),
    attack("weight of norm 1 after a step", X, lambda m, x: m.net(x), net=lin(6, 3), hooks={"on_train_batch_end": _unit}),
    attack("rows of norm 1 before a step", X, lambda m, x: m.net(x), net=lin(6, 3, bias=False), hooks={"on_train_batch_start": _unit_rows}),
    attack("weights drawn anew", X, lambda m, x: m.net(x), net=lin(6, 3), hooks={"on_train_batch_start": _anew}),
    attack("noise on a weight after a step", X, lambda m, x: m.net(x), net=lin(6, 3), hooks={"on_train_batch_end": _noisy}),
    attack("a layer thawed after a step", X, lambda m, x: m.two(m.one(x)), one=lin(6, 8), two=lin(8, 3), hooks={"on_train_batch_start": _thaw}),
    attack("a logged norm outside of a step", X, lambda m, x: m.net(x), net=lin(6, 3), hooks={"on_train_batch_end": _seen_norm}),
    attack("a parameter made in the step", X, _new_weight, net=lin(6, 6)),
    attack("noise of a weight's shape", X, _noise, drawn=True, mean=par(8, 6), log_std=par(8, 6)),
    attack("a scalar parameter", X, lambda m, x: m.net(x) * m.scale + m.shift, net=lin(6, 3), scale=lambda: nn.Parameter(torch.tensor(1.5)), shift=lambda: nn.Parameter(torch.tensor([0.5]))),
    attack("an empty parameter", X, lambda m, x: torch.cat([m.net(x), x @ m.none], 1), net=lin(6, 3), none=lambda: nn.Parameter(torch.empty(6, 0))),
    attack("an unused parameter", X, lambda m, x: m.net(x), net=lin(6, 3), idle=lin(7, 5)),
    attack("a parameter of width 1", X, lambda m, x: m.b(m.a(x)), a=lin(6, 1), b=lin(1, 3)),
    attack("frozen layers between", X, lambda m, x: m.c(m.b(m.a(x).relu()).relu()), a=lin(6, 8), b=lambda: _frozen(lin(8, 7)()), c=lin(7, 3)),
    attack("a ParameterList and a ParameterDict", X, lambda m, x: sum(F.linear(x, w) for w in m.many) * m.more["a"], many=lambda: nn.ParameterList([par(5, 6)() for _ in range(3)]), more=lambda: nn.ParameterDict({"a": par(5)()})),
    attack("a gradient-free norm", X, lambda m, x: m.net(x) / m.net.weight.detach().norm(), net=lin(6, 3)),
    attack("a weight's data", X, lambda m, x: m.net(x) + m.net.weight.data.sum(1), net=lin(6, 3)),
    attack("a copy of a layer in the step", X, lambda m, x: m.net(x) + _copied(m.net)(x).detach(), net=lin(6, 3)),
    attack("a kernel of weights", both(X, X), lambda m, xy: torch.exp(-torch.cdist(F.linear(xy[0], m.w), F.linear(xy[1], m.w))), True, w=par(8, 6)),
    attack("Kronecker product", X, lambda m, x: F.linear(x, torch.kron(m.a, m.b)), a=par(2, 3), b=par(4, 2)),
    attack("matrix exponential of a weight", X, lambda m, x: x @ torch.linalg.matrix_exp(m.w - m.w.T), w=par(6, 6)),
    attack("inverse of a weight", X, lambda m, x: torch.linalg.solve(m.w @ m.w.T + torch.eye(6).to(x), x.T).T, w=par(6, 6)),
    attack("log determinant", X, lambda m, x: (x @ m.w).square().mean() - torch.linalg.slogdet(m.w)[1], w=par(6, 6)),
    attack("singular values", X, lambda m, x: (m.net(x) - 1).square().mean() + torch.linalg.svdvals(m.net.weight).sum(), net=lin(6, 4)),
    attack("scripted layer", X, lambda m, x: m.b(m.a(x)), a=lambda: torch.jit.script(lin(6, 8)()), b=lin(8, 3)),
    attack("traced layer", X, lambda m, x: m.b(m.a(x)), a=lambda: torch.jit.trace(lin(6, 8)(), torch.zeros(2, 6)), b=lin(8, 3)),
    attack("a graph of torch.fx", X, lambda m, x: m.net(x), net=lambda: torch.fx.symbolic_trace(nn.Sequential(lin(6, 8)(), nn.ReLU(), lin(8, 3)()))),
    attack("two types of numbers", X, lambda m, x: m.b(m.a(x.float()).double()), a=lin(6, 8), b=lin(8, 3), hooks={"setup": lambda m, stage: m.a.float() and None}),
    attack("a lazy layer", X, lambda m, x: m.b(m.a(x)), a=lambda: nn.LazyLinear(8), b=lin(8, 3)),
    attack("running mean of a weight", X, lambda m, x: m.net(x) + m.mean, net=lin(6, 3), mean=buf(3), hooks={"on_train_batch_end": lambda m, *_: m.mean.mul_(0.9)}),
]


def _symmetric() -> nn.Module:
    made = lin(6, 6)()
    parametrize.register_parametrization(made, "weight", Symmetric())
    return made


def _copied(module: nn.Module) -> nn.Module:
    from copy import deepcopy

    return deepcopy(module)
