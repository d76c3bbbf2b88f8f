"""Claim: a block's table says what each operator holds, saves and needs; its bytes are those of LiveBytes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.graph.build_table import build_table
from lightning_amp.graph.capture import Captures
from lightning_amp.graph.peak import block_bytes
from lightning_amp.graph.table import OPERATOR, PARAMETER, Table
from tests.any_module import NAMES
from tests.graph.calls import Called, calls_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def table_of(block: nn.Module, *args: Any, **kwargs: Any) -> Table:
    found = Captures().of(block, args, kwargs)
    assert found.reason == ""
    return build_table(found)


def measured(call: Called, captures: Captures) -> tuple[int, int, int]:
    """Peak of the forward pass, bytes between the passes, peak of the backward pass."""
    args = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in call.args]
    live = LiveBytes()
    with live:
        result = captures.run(call.block, *args, **call.kwargs)
        forward, saved = live.peak, live.current
        live.reset_peak()
    result = result[0] if isinstance(result, tuple) else result
    seed = torch.ones_like(result)
    call.block.zero_grad(set_to_none=True)
    with live:
        result.backward(seed)
    return forward, saved, live.peak


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_the_blocks_of_eight_modules(name: str) -> None:
    """Forward and what is saved to the byte, backward within 5 %; no operator is unknown."""
    for call in calls_of(name):
        captures = Captures()
        table = build_table(captures.of(call.block, call.args, call.kwargs))
        assert table.unknown == ()
        found = block_bytes(table)
        if not table.rows[table.outputs[0]].needs_grad:
            continue
        forward, saved, backward = measured(call, captures)
        assert max(found.forward) == forward, call.fqn
        assert found.saved_bytes == saved, call.fqn
        assert max(found.backward) == pytest.approx(backward, rel=0.05), call.fqn
        assert found.peak_bytes >= max(found.forward)


class Chain(nn.Module):
    """Linear, rectifier, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.layer(x)), 0.5, self.training)


def test_rows_by_hand() -> None:
    table = table_of(Chain(), torch.randn(4, 8))
    by_op = {row.op: row for row in table.rows if row.kind == OPERATOR}
    assert [row.name for row in table.rows if row.kind == PARAMETER] != []
    linear, tanh = by_op["aten.linear.default"], by_op["aten.tanh.default"]
    assert linear.n_bytes == tanh.n_bytes == 4 * 4 * 16
    assert linear.flops == table.flops == 2 * 4 * 8 * 16
    assert linear.shape == (4, 16)
    assert tanh.saved == (table.rows.index(tanh),)
    assert linear.last_use == table.rows.index(tanh)
    dropout = by_op["aten.dropout.default"]
    assert dropout.hidden_bytes > 0
    assert dropout.last_use == len(table.rows)
    assert table.outputs == (table.rows.index(dropout),)


def test_views_cost_nothing_and_point_at_their_memory() -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a, b = (x * 2).transpose(0, 1).chunk(2, dim=1)
            return a.exp() + b

    table = table_of(Views(), torch.randn(4, 8, requires_grad=True))
    ops = {row.op.split(".")[1] if "." in row.op else row.op: row for row in table.rows}
    assert ops["mul"].n_bytes == 4 * 32
    assert ops["transpose"].n_bytes == ops["chunk"].n_bytes == ops["getitem"].n_bytes == 0
    assert {table.rows[ops[op].storage].op for op in ("transpose", "chunk", "getitem")} == {"aten.mul.Tensor"}
    # the memory lives until the last view of it is read
    found = block_bytes(table)
    assert found.forward[-1] == 4 * 32 + 4 * 16 + 4 * 16
