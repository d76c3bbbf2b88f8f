"""Attacks by how weights are read, shared, changed and made: the part of a module that tensor3d splits."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from benchmarks.tensor3d.small import attack
from tests.odd_modules.collection.row import features, lin, par, words

X = features(6)


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


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


def _symmetric() -> nn.Module:
    made = lin(6, 6)()
    parametrize.register_parametrization(made, "weight", Symmetric())
    return made


WEIGHTS = [
    attack("two layers", X, lambda m, x: m.net(x), net=lambda: nn.Sequential(lin(6, 8)(), nn.ReLU(), lin(8, 3)())),
    attack("a weight used twice", X, lambda m, x: m.net(m.net(x).tanh()), net=lin(6, 6)),
    attack("tied weights", X, lambda m, x: m.pair[1](m.pair[0](x).tanh()), pair=_tied),
    attack(
        "tied table",
        words(5),
        lambda m, x: F.cross_entropy(m.pair["head"](m.pair["embed"](x[:, :-1])).mT, x[:, 1:]),
        pair=_tied_table,
    ),
    attack(
        "tied transposed",
        X,
        lambda m, x: F.linear(m.net(x).relu(), m.net.weight.t(), m.back),
        net=lin(6, 9),
        back=par(6),
    ),
    attack(
        "a transposed parameter",
        X,
        lambda m, x: x @ m.w.T + m.b,
        w=lambda: nn.Parameter(torch.randn(6, 8).t()),
        b=par(8),
    ),
    attack("slices of a weight", X, lambda m, x: F.linear(F.linear(x, m.w[:4, :6]), m.w[4:, :4]), w=par(9, 6)),
    attack("strided slices of a weight", X, lambda m, x: F.linear(x, m.w[::2], m.b[1::2]), w=par(10, 6), b=par(10)),
    attack("a weight of chosen rows", X, lambda m, x: F.linear(x, m.w[torch.tensor([3, 0, 3])]), w=par(5, 6)),
    attack(
        "weights in a row",
        X,
        lambda m, x: F.linear(x, torch.cat([m.q.weight, m.k.weight]), torch.cat([m.q.bias, m.k.bias])),
        q=lin(6, 3),
        k=lin(6, 4),
    ),
    attack("stacked weights", X, _stacked, many=lambda: nn.ModuleList([lin(6, 4, bias=False)() for _ in range(3)])),
    attack(
        "split weight",
        X,
        lambda m, x: torch.cat([F.linear(x, w) ** (i + 1) for i, w in enumerate(m.w.chunk(3))], 1),
        w=par(9, 6),
    ),
    attack(
        "a viewed weight", X, lambda m, x: torch.einsum("bi,hoi->bho", x, m.net.weight.view(2, 4, 6)), net=lin(6, 8)
    ),
    attack(
        "a weight in other units",
        X,
        lambda m, x: m.b(F.linear(x, F.normalize(m.a.weight, dim=1))),
        a=lin(6, 8),
        b=lin(8, 3),
    ),
    attack("standardised weight", X, lambda m, x: F.linear(x, _standard(m.net.weight), m.net.bias), net=lin(6, 8)),
    attack(
        "masked weight",
        X,
        lambda m, x: m.b(F.linear(x, m.a.weight * m.mask)),
        a=lin(6, 8),
        b=lin(8, 2),
        mask=lambda: nn.Buffer((torch.rand(8, 6) > 0.5).double()),
    ),
    attack(
        "rounded weight, straight through",
        X,
        lambda m, x: F.linear(x, m.w + ((m.w * 4).round() / 4 - m.w).detach()),
        w=par(5, 6),
    ),
    attack("scaled by its own norm", X, lambda m, x: F.linear(x, m.w / m.w.norm()), w=par(5, 6)),
    attack(
        "weight norm",
        X,
        lambda m, x: m.net(x),
        net=lambda: nn.Sequential(
            parametrizations.weight_norm(lin(6, 8)()), nn.ReLU(), parametrizations.weight_norm(lin(8, 3)(), dim=1)
        ),
    ),
    attack("weight norm by hooks", X, lambda m, x: m.net(x), net=lambda: nn.utils.weight_norm(lin(6, 8)())),
    attack(
        "spectral norm",
        X,
        lambda m, x: m.net(x),
        net=lambda: nn.Sequential(parametrizations.spectral_norm(lin(6, 8)()), lin(8, 3)()),
    ),
    attack("spectral norm by hooks", X, lambda m, x: m.net(x), net=lambda: nn.utils.spectral_norm(lin(6, 8)())),
    attack("orthogonal weight", X, lambda m, x: m.net(x), net=lambda: parametrizations.orthogonal(lin(6, 6)())),
    attack("symmetric weight", X, lambda m, x: m.net(x), net=lambda: _symmetric()),
    attack(
        "pruned weight",
        X,
        lambda m, x: m.b(m.a(x)),
        a=lambda: prune.random_unstructured(lin(6, 8)(), "weight", 0.4),
        b=lin(8, 2),
    ),
    attack(
        "LoRA",
        X,
        lambda m, x: m.head(_lora(m, x)),
        base=lambda: _frozen(lin(6, 8)()),
        a=par(2, 6),
        b=par(8, 2),
        head=lin(8, 3),
    ),
    attack(
        "merged LoRA",
        X,
        lambda m, x: F.linear(x, m.base.weight + m.b @ m.a),
        base=lambda: _frozen(lin(6, 8)()),
        a=par(2, 6),
        b=par(8, 2),
    ),
    attack("weights made by a net", X, _hyper, True, maker=lin(6, 48), bias=par(8)),
    attack("functional call", X, _functional, net=lambda: nn.Sequential(lin(6, 8)(), nn.ReLU(), lin(8, 3)())),
    attack(
        "parameters by name", X, _parameters_by_name, net=lambda: nn.Sequential(lin(6, 8)(), nn.ReLU(), lin(8, 3)())
    ),
    attack("parameters by kind", X, _isinstance, net=lin(6, 8)),
    attack(
        "parameters by object",
        X,
        _by_object,
        net=lambda: nn.Sequential(lin(6, 8)(), lin(8, 3)()),
        factors=dict,
        hooks={"on_fit_start": lambda m: m.factors.update(_own_of(m))},
    ),
    attack("decay of weights in the loss", X, _named_decay, net=lambda: nn.Sequential(lin(6, 8)(), lin(8, 3)())),
    attack("decay with a tied weight", X, _tied_decay, pair=_tied),
    attack(
        "all parameters as a vector",
        X,
        lambda m, x: (m.net(x) - 1).square().mean() + nn.utils.parameters_to_vector(m.parameters()).norm(),
        net=lin(6, 8),
    ),
    attack(
        "number of parameters", X, lambda m, x: m.net(x) / sum(p.numel() for p in m.parameters()) ** 0.5, net=lin(6, 8)
    ),
    attack(
        "a sparse mixture of experts",
        X,
        _experts,
        router=lin(6, 3),
        experts=lambda: nn.ModuleList([nn.Sequential(lin(6, 8)(), nn.GELU(), lin(8, 6)()) for _ in range(3)]),
    ),
    attack("a dense mixture of experts", X, _dense_experts, router=lin(6, 3), up=par(3, 6, 8), down=par(3, 8, 6)),
    attack(
        "a batch of weights",
        features(3, 6),
        lambda m, x: torch.bmm(x.transpose(0, 1), m.w).transpose(0, 1) + m.b,
        w=par(3, 6, 5),
        b=par(3, 5),
    ),
]
