"""Weights that are shared, derived, sliced, made late, or not there."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.odd_modules.collection.row import LAZY, NO_LIST, TECHNIQUES, TOKENS, X, lin, odd, par, two


def _tied(first: nn.Module, second: nn.Module) -> nn.ModuleList:
    second.weight = first.weight
    return nn.ModuleList([first, second])


def _experts(m: Any, x: Tensor) -> Tensor:
    best, which = m.router(x).softmax(-1).topk(2, -1)
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        rows, slot = (which == e).nonzero(as_tuple=True)
        out = out.index_add(0, rows, best[rows, slot, None] * expert(x[rows]))
    return out


WEIGHTS = {
    "two layers": odd(X, lambda m, x: m.net(x), net=two()),
    "tied table": odd(TOKENS, lambda m, x: F.cross_entropy(m.pair[1](m.pair[0](x[:, :-1])).mT, x[:, 1:]),
        pair=lambda: _tied(nn.Embedding(9, 6), lin(6, 9, bias=False)())),
    "slices of a weight": odd(X, lambda m, x: F.linear(F.linear(x, m.w[:4, :6]), m.w[4:, :4]), w=par(9, 6)),
    "weight norm": odd(X, lambda m, x: m.net(x), says={"pipeline": NO_LIST},
        net=lambda: parametrizations.weight_norm(lin(6, 8)())),
    "spectral norm": odd(X, lambda m, x: m.net(x), says={"pipeline": NO_LIST},
        net=lambda: parametrizations.spectral_norm(lin(6, 8)())),
    "merged LoRA": odd(X, lambda m, x: F.linear(x, m.base.weight + m.b @ m.a),
        base=lambda: lin(6, 8)().requires_grad_(False), a=par(2, 6), b=par(8, 2)),
    "weights made by a net": odd(X, lambda m, x: F.linear(x, m.maker(x.mean(0)).view(8, 6), m.bias), True,
        maker=lin(6, 48), bias=par(8)),
    "a sparse mixture of experts": odd(X, _experts, says={"pipeline": "reads, outside the blocks of"}, router=lin(6, 3),
        experts=lambda: nn.ModuleList([two(6, 8, 6)() for _ in range(3)])),
    "a scripted layer": odd(X, lambda m, x: m.b(m.a(x)), says={
        "fsdp": "not supported on ScriptModules", **dict.fromkeys(("sequence", "tensor3d"), "is a ScriptModule")},
        a=lambda: torch.jit.script(lin(6, 8)()), b=lin(8, 3)),
    "a lazy layer": odd(X, lambda m, x: m.b(m.a(x)), says=dict.fromkeys(TECHNIQUES, LAZY),
        a=lambda: nn.LazyLinear(8), b=lin(8, 3)),
}  # fmt: skip
