"""Claim: what a capture writes down otherwise has the same values, and every view lies in the memory of an argument."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_amp.graph.build_table import build_table
from lightning_amp.graph.capture import Captures
from lightning_amp.techniques.chunk.regions.choose_chunks import OverBudget, choose_chunks
from tests.graph.same_outcome import difference
from tests.graph.test_flow import Op
from tests.techniques.chunk.small_blocks import x_of


@pytest.mark.parametrize("function", [
    lambda x, y: F.mse_loss(x.exp(), y.exp()),
    lambda x, y: [a.exp() for a in torch.broadcast_tensors(x.sin(), y[:1].sin())],
    lambda x, y: [a.exp() for a in torch.meshgrid(x[0].sin(), y[1].sin(), indexing="xy")],
])  # fmt: skip
def test_several_views_of_several_tensors_are_apart(function: Callable[..., Any]) -> None:
    """Their memory was looked for in an argument that has none of it."""
    block, given = Op(function), (x_of(4, 6), x_of(4, 6, seed=1))
    captures = Captures()
    assert difference(block, captures.run, given) == ""
    table = build_table(captures.of(block, given, {}))
    for i, row in enumerate(table.rows):
        assert row.storage == i or row.storage in {table.rows[k].storage for k in row.inputs}, row.name


def test_a_loss_of_what_is_computed_has_a_plan() -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(x.exp().sin().cos().exp(), y)

    table = build_table(Captures().of(Op(loss), (x_of(64, 64), x_of(64, 64, seed=1)), {}))
    with pytest.raises(OverBudget) as caught:
        choose_chunks(table, 1, train=True)
    assert choose_chunks(table, caught.value.least_bytes, train=True).regions
