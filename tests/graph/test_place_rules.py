"""Claim: further operators compute in chunks what they compute whole, along the dims that their rules name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lightning_amp.graph.build_table import build_table
from lightning_amp.graph.capture import Captures
from lightning_amp.graph.table import OPERATOR
from tests.graph.test_flow import Op
from tests.techniques.chunk.case import Case
from tests.techniques.chunk.small_blocks import x_of

X, PLACES, FEW = x_of(4, 6, 8), torch.randint(8, (4, 6, 3)), torch.tensor([3, 0, 3, 1])
IMAGE, WINDOWS, MATRICES = x_of(4, 6, 8, 8), x_of(6, 4, 2, 2), x_of(4, 6, 3, 3)


@pytest.mark.parametrize(("function", "args", "flowing"), [
    (lambda x: F.glu(x, 1), (X,), {0, 2}),
    (lambda x: F.glu(x), (X,), {0, 1}),
    (lambda x: x.topk(2, 1).values, (X,), {0, 2}),
    (lambda x: x.sort(-1, descending=True)[0], (X,), {0, 1}),
    (lambda x: torch.sort(x, dim=1, stable=True)[0], (X,), {0, 2}),
    (lambda x: x.max(1).values, (X,), {0, 1}),
    (lambda x: x.min(-1, keepdim=True).values, (X,), {0, 1}),
    (lambda x: torch.maximum(x, x.cos()).median(0).values, (X,), {0, 1}),
    (lambda x: torch.max(x, x.cos()), (X,), {0, 1, 2}),
    (lambda x: x.max(), (X,), set()),
    (lambda x: x.cumsum(1), (X,), {0, 2}),
    (lambda x: x.cumprod(-1), (X,), {0, 1}),
    (lambda x: x.logcumsumexp(0), (X,), {1, 2}),
    (lambda x: x.roll(1, 2), (X,), {0, 1}),
    (lambda x: x.roll(3), (X,), set()),
    (lambda x: x.tril(), (X,), {0}),
    (lambda x: F.pad(x, (0, 0, 1, 2)), (X,), {0, 2}),
    (lambda x: F.pad(x, (1, 1), mode="reflect"), (X,), {0, 1}),
    (lambda x: torch.einsum("bij,bkj->bik", x, x.cos()), (X,), {0, 1, 2}),
    (lambda x: x.std((1, 2)), (X,), {0}),
    (lambda x: torch.linalg.vector_norm(x, dim=-1), (X,), {0, 1}),
    (lambda x, i: x.gather(-1, i), (X, PLACES), {0, 1}),
    (lambda x, i: x.gather(-1, i[:2]), (X, PLACES), {1}),
    (lambda x, i: x.index_select(1, i), (X, FEW), {0, 1, 2}),
    (lambda x: torch.renorm(x, 2, 1, 0.5), (X,), {1}),
    (lambda x: torch.cross(x[:, :3], x.cos()[:, :3], 1), (X,), {0, 2}),
    (lambda x: torch.cdist(x, x.cos(), 1), (X,), {0, 1, 2}),
    (lambda x: F.prelu(x, x[0, :, 0]), (X,), {0, 1, 2}),
    (lambda x: x.diagonal(1, 1, 2), (X,), {0}),
    (lambda x: torch.diag_embed(x), (X,), {0, 1}),
    (lambda x: torch.linalg.solve_triangular(x, x.cos(), upper=True), (MATRICES,), {0, 1}),
    (lambda x: torch.linalg.solve_triangular(x[:1], x.cos(), upper=True), (MATRICES,), set()),
    (lambda x: torch.linalg.matrix_exp(x), (MATRICES,), {0, 1}),
    (lambda x, w: F.conv_transpose2d(x, w, stride=2), (IMAGE, WINDOWS), {0, 1}),
    (lambda x: F.max_pool1d(x, 2), (X,), {0, 1}),
    (lambda x: F.avg_pool1d(x[0], 2), (X,), {0}),
    (lambda x: F.adaptive_max_pool2d(x, 3), (IMAGE,), {0, 1}),
    (lambda x: F.interpolate(x, scale_factor=2, mode="linear"), (X,), {0, 1}),
    (lambda x: F.max_pool2d(x, 2, return_indices=True)[0], (IMAGE,), {0, 1}),
    (lambda x: F.unfold(x, 2), (IMAGE,), {0}),
    (lambda x: F.unfold(x[0], 2), (IMAGE,), set()),
    (lambda x: F.fold(x, (3, 4), (2, 1)), (X[:, :6, :8],), {0}),
    (lambda x: F.grid_sample(x, x[:, :2].permute(0, 2, 3, 1), align_corners=False), (IMAGE,), {0, 1, 2, 3}),
    (lambda x: x.kthvalue(2, 1).values, (X,), {0, 1}),
    (lambda x: x.nansum(1), (X,), {0, 1}),
    (lambda x: F.logsigmoid(x).square().clamp_min(0.3).log1p(), (X,), {0, 1, 2}),
])  # fmt: skip
def test_a_rule(function: Callable[..., Any], args: Any, flowing: set[int]) -> None:
    found = Case(Op(lambda x, *more: function(x.sin(), *more)), args)
    assert found.table.unknown == ()
    (result,) = found.table.outputs
    own = next(r for r in reversed(found.table.rows[: result + 1]) if r.kind == OPERATOR and r.op != "getitem")
    assert {d for d, sources in enumerate(own.dims or ()) if sources} == flowing
    for region in {(r.last, r.dims.get(r.last)): r for r in found.regions}.values():
        assert found.error(replace(region, n_chunks=min(3, region.units))) == "", region


def test_bags_are_told_by_values() -> None:
    block = Op(lambda i, w, begin: F.embedding_bag(i, w, begin))
    given = (torch.arange(6), x_of(6, 4), torch.tensor([0, 2, 4]))
    assert build_table(Captures().of(block, given, {})).unknown == ("aten.embedding_bag.padding_idx",)
