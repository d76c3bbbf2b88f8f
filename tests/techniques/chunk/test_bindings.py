"""Claim: a function of torch in generated code starts the operator in whose place it stands."""

from typing import Any

import pytest
import torch

from lightning_amp._torch import make_fx
from lightning_amp.techniques.chunk.run.lower import BINDINGS, binding

X, IMAGE = torch.rand(4, 4), torch.rand(1, 4, 6, 6)
ARGS: dict[str, tuple[Any, ...]] = {
    "add": (X, 2), "addcmul": (X, X, X), "avg_pool2d": (IMAGE, [2, 2]), "bmm": (IMAGE[0], IMAGE[0]),
    "cat": ([X, X], 1), "conv2d": (IMAGE, torch.rand(2, 4, 3, 3), None, [1, 1], [1, 1]),
    "elu": (X, 1.0), "expand": (X, [2, 4, 4]), "flatten": (IMAGE, 2), "group_norm": (IMAGE, 2, X[0], X[1], 1e-5),
    "layer_norm": (X, [4], X[0], X[1], 1e-5), "linear": (X, X, X[0]), "matmul": (X, X), "mean": (X, [-1], True),
    "mul": (X, 0.5), "permute": (IMAGE, [0, 2, 3, 1]), "reshape": (X, [2, -1]),
    "scaled_dot_product_attention": (IMAGE, IMAGE, IMAGE), "select": (X, 0, 1), "softmax": (X, -1), "sub": (X, X),
    "transpose": (X, 0, 1), "unflatten": (X, -1, [2, 2]), "unsqueeze": (X, 0),
    "upsample_nearest2d": (IMAGE, None, [2.0, 2.0]), "view": (X, [2, -1]),
}  # fmt: skip


@pytest.mark.parametrize("name", BINDINGS)
def test_a_binding_starts_the_same_operator(name: str) -> None:
    op, _, overload = name.partition(".")
    target = getattr(getattr(torch.ops.aten, op), overload)
    args, source = ARGS.get(op, (X,)), binding(target)
    assert source
    out = {"out": torch.empty(4, 4)} if overload == "out" else {}
    function = eval(source)
    traced = make_fx(lambda *given: function(*given, **out), pre_dispatch=True)(*args)
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [target]
    assert torch.equal(function(*args, **out), target(*args, **out))
