"""What a rule says flows, flows: a piece of the result is what the operator makes of a piece of the arguments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_amp
from lightning_amp.errors import ModelError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.graph.build_table import build_table
from lightning_amp.graph.flow import RULES, OperatorCall, dims_of
from lightning_amp.graph.peak import block_bytes
from lightning_amp.graph.table import OPERATOR, PARAMETER, Table
from lightning_amp.techniques.chunk.regions.choose_chunks import OverBudget, choose_chunks
from tests.any_module import NAMES
from tests.graph.calls import Called, Captures, calls_of, difference
from tests.techniques.chunk.small_blocks import x_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

RESHAPES = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze")


class Op(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def halves(n: int) -> list[tuple[int, int]]:
    return [(0, n // 2), (n // 2, n - n // 2)]


def check(block: nn.Module, args: Any, kwargs: Any | None = None) -> tuple[Table, int]:
    """Compare every flow of every operator; returns the table and how many flows there were."""
    captures = Captures()
    capture = captures.of(block, args, kwargs or {})
    table, checked = build_table(capture), 0
    assert capture.graph is not None
    values: dict[Any, Any] = {}
    state = [*block.parameters(), *block.buffers()]
    given = iter([*state, *(v for v in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor))])
    for node, row in zip(capture.graph.graph.nodes, (*table.rows, None), strict=True):
        if node.op == "placeholder":
            values[node] = next(given).detach()
        elif row is not None:
            values[node] = node.target(
                *torch.fx.map_arg((node.args), values.get), **torch.fx.map_arg(node.kwargs, values.get)
            )
            for d, sources in enumerate(row.dims or ()):
                if sources and row.shape[d] % 2 == 0 and row.op != "getitem":
                    checked += 1
                    compare(node, values, d, sources)
    return table, checked


def compare(node: Any, values: dict[Any, Any], d: int, sources: Any) -> None:
    whole = values[node][0] if isinstance(values[node], list | tuple) else values[node]
    op = node.target._schema.name.removeprefix("aten::")
    for lo, n in halves(whole.shape[d]):
        count = -1

        def piece(given: Any, lo: int = lo, n: int = n) -> Any:
            nonlocal count
            value = values[given]
            if isinstance(value, Tensor):
                count += 1
                for k, dim in sources:
                    if k == count:
                        size = value.shape[dim]
                        value = value.narrow(dim, lo * size // whole.shape[d], n * size // whole.shape[d])
            return value

        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), piece)
        right = whole.narrow(d, lo, n)
        if op in RESHAPES:
            assert torch.equal(args[0].reshape(-1), right.reshape(-1)), node
            continue
        if op == "expand":
            args = (args[0], [n if i == d else size for i, size in enumerate(args[1])])
        found = node.target(*args, **kwargs)
        found = found[0] if isinstance(found, list | tuple) else found
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5, msg=f"{node.format_node()} dim {d}")


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_flow_of_the_eight_modules(name: str) -> None:
    for call in calls_of(name):
        table, checked = check(call.block.eval(), call.args, call.kwargs)
        assert table.unknown == ()
        assert checked > 0


@pytest.mark.parametrize(("function", "args", "groups"), [
    (lambda x: x.sum(1), (0,), 1),
    (lambda x: x.sum(), (0,), 3),
    (lambda x, y: torch.bmm(x, y), (0, 1), 1),
    (lambda x, w: F.linear(x, w), (0, 3), 1),
    (lambda x, w, b: F.linear(x, w, b), (0, 3, 4), 0),
    (lambda x, y: torch.einsum("bij,bjk->ik", x, y), (0, 1), 2),
    (lambda x, w: F.conv1d(x, w), (0, 5), 1),
    (lambda x, z: F.l1_loss(x, z, reduction="sum"), (0, 0), 3),
    (lambda x, z: F.mse_loss(x, z), (0, 0), 0),
    (lambda x, t: F.cross_entropy(x, t, reduction="sum"), (0, 6), 2),
    (lambda x, t: F.cross_entropy(x, t), (0, 6), 0),
])  # fmt: skip
def test_results_of_pieces_add_up_where_a_rule_says_so(function: Any, args: Any, groups: int) -> None:
    given = [
        [X, Y, S, torch.randn(2, 8), torch.randn(2), torch.randn(2, 6, 3), torch.randint(6, (4, 8))][k] for k in args
    ]
    row = build_table(Captures().of(Op(function), given, {})).rows[-1]
    assert len(row.sums) == groups
    for group in row.sums:
        parts = []
        for half in range(2):
            pieces = list(given)
            for k, d in group:
                pieces[k] = pieces[k].chunk(2, d)[half]
            parts.append(function(*pieces))
        torch.testing.assert_close(sum(parts), function(*given), rtol=1e-4, atol=1e-4)


X, Y, S = torch.randn(4, 6, 8), torch.randn(4, 8, 2), torch.randn(4, 4)


@pytest.mark.parametrize(("function", "args", "dims"), [
    (lambda x: torch.cat([x, x * 2], 1), (X,), (((0, 0), (1, 0)), (), ((0, 2), (1, 2)))),
    (lambda x: torch.stack([x, x * 2], 1), (X,), (((0, 0), (1, 0)), (), ((0, 1), (1, 1)), ((0, 2), (1, 2)))),
    (lambda x: x.select(1, 2), (X,), (((0, 0),), ((0, 2),))),
    (lambda x: x.sum(1), (X,), (((0, 0),), ((0, 2),))),
    (lambda x: x.mean((0, -1), keepdim=True), (X,), ((), ((0, 1),), ())),
    (lambda x: x.sum(), (X,), ()),
    (lambda x: x.softmax(-1), (X,), (((0, 0),), ((0, 1),), ())),
    (lambda x: x.cumsum(1), (X,), (((0, 0),), (), ((0, 2),))),
    (lambda x, y: torch.bmm(x, y), (X, Y), (((0, 0), (1, 0)), ((0, 1),), ((1, 2),))),
    (lambda x, y: torch.matmul(x, y), (X, Y[0]), (((0, 0),), ((0, 1),), ((1, 1),))),
    (lambda x, y: torch.matmul(x, y), (X, Y[0, :, 0]), (((0, 0),), ((0, 1),))),
    (lambda x, y: torch.einsum("bij,bjk->kbi", x, y), (X, Y), (((1, 2),), ((0, 0), (1, 0)), ((0, 1),))),
    (lambda x: x + torch.ones_like(x)[:, :1], (X,), (((0, 0), (1, 0)), ((0, 1),), ((0, 2), (1, 2)))),
    (lambda x: x.reshape(4, 6, 2, 4), (X,), (((0, 0),), ((0, 1),), ((0, 2),), ())),
    (lambda x: x.flatten(1), (X,), (((0, 0),), ((0, 1),))),
    (lambda x: x.reshape(8, 24), (X,), (((0, 0),), ())),
    (lambda x: x.permute(2, 0, 1), (X,), (((0, 2),), ((0, 0),), ((0, 1),))),
    (lambda x: x.unsqueeze(1).expand(4, 2, 6, 8), (X,), (((0, 0),), (), ((0, 2),), ((0, 3),))),
    (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), (X,), None),
    (lambda x: F.max_pool1d(x, 2), (X,), (((0, 0),), ((0, 1),), ())),
    (lambda x: F.batch_norm(x, None, None, training=True), (X,), ((), ((0, 1),), ())),
    (lambda x, w: F.conv1d(x, w, padding=1), (X, torch.randn(4, 6, 3)), (((0, 0),), ((1, 0),), ())),
    (lambda x, w: F.conv1d(x, w, groups=2), (X, torch.randn(4, 3, 3)), (((0, 0),), (), ())),
    (lambda w, i: F.embedding(i, w), (S, torch.zeros(6, 2, dtype=torch.long)), (((1, 0),), ((1, 1),), ((0, 1),))),
    (lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), (S, torch.arange(2)), ((), ((0, 1),))),
    (lambda a, x: torch.cat([a, x]), (torch.ones(0), S), ((), ((1, 1),))),
    (lambda x, y: x.view_as(y), (S, torch.ones(4, 2, 2)), (((0, 0), (1, 0)), ((0, 1), (1, 1)), ())),
    (lambda x: x.flatten(), (torch.ones(4, 0),), ((),)),
    (lambda x: torch.any(x > 0, dim=()), (S,), (((0, 0),), ((0, 1),))),
    (lambda x: F.interpolate(x, scale_factor=1.4), (torch.randn(2, 2, 2, 2),), (((0, 0),), ((0, 1),), (), ())),
    (lambda x: F.interpolate(x, scale_factor=2.0), (X[None],), (((0, 0),), ((0, 1),), ((0, 2),), ((0, 3),))),
])  # fmt: skip
def test_rules_by_hand(function: Any, args: Any, dims: Any) -> None:
    table, _ = check(Op(function), args)
    last = [row for row in table.rows if row.kind == OPERATOR][-1]
    if dims is None:
        dims = (((0, 0), (1, 0), (2, 0)), (), ((2, 2),))
    assert last.dims == dims


@pytest.mark.parametrize("keys", [1, 2, 4, 8])
def test_a_piece_of_the_heads_has_the_keys_that_they_share(keys: int) -> None:
    """Of grouped heads: with all keys a piece of the heads would share others."""
    x, y = torch.randn(2, 8, 6, 4), torch.randn(2, keys, 6, 4)
    table, _ = check(Op(lambda x, y: F.scaled_dot_product_attention(x, y, y.sin(), enable_gqa=True)), (x, y))
    assert table.rows[-1].dims[1] == ((0, 1), *(((1, 1), (2, 1)) if keys > 1 else ()))  # type: ignore[index]


def test_an_unknown_operator_ends_the_flow_and_is_named() -> None:
    table, _ = check(Op(lambda x: torch.flip(x, [0]) * 2), (X,))
    assert table.unknown == ("aten.flip.default",)


def test_an_operator_of_another_library_gets_a_flow() -> None:
    """The example of its docstring."""

    @torch.library.custom_op("amp_test::sorted_rows", mutates_args=())
    def sorted_rows(x: Tensor) -> Tensor:
        return x.sort(1).values

    sorted_rows.register_fake(torch.empty_like)
    block = Op(lambda x: torch.ops.amp_test.sorted_rows(x) * 2)
    unknown, _ = check(block, (X[0],))
    assert unknown.unknown == ("amp_test.sorted_rows.default",)
    lightning_amp.register_flow("amp_test::sorted_rows")(lambda call: [[(0, 0)], []])
    try:
        known, flows = check(block, (X[0],))
    finally:
        del RULES["amp_test::sorted_rows"]
    assert known.unknown == ()
    assert known.rows[1].dims == (((0, 0),), ())
    assert flows > 0
    with pytest.raises(ModelError, match="registered for 'softmax', which has one"):
        lightning_amp.register_flow("softmax")(lambda call: [])


def test_a_rule_of_dims_that_are_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "flip", lambda call: [[(0, 7)]])
    with pytest.raises(ModelError, match="the flow rule of 'flip' says"):
        dims_of(OperatorCall(op="flip", shapes=((2,),), result=(2,)))


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
        found = block_bytes(table.rows, table.outputs)
        if not table.rows[table.outputs[0]].needs_grad:
            continue
        forward, saved, backward = measured(call, captures)
        assert max(found.forward) == forward, call.fqn
        assert found.saved_bytes == saved, call.fqn
        assert max(found.backward) == pytest.approx(backward, rel=0.05), call.fqn
        assert found.peak_bytes >= max(found.forward)


class Chain(nn.Module):
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
    found = block_bytes(table.rows, table.outputs)
    assert found.forward[-1] == 4 * 32 + 4 * 16 + 4 * 16


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
