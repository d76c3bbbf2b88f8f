"""Claim: a region that would change a result is refused, by one rule each; pieces cover every dim once."""

from dataclasses import replace
from typing import Any

import pytest

from lightning_amp.errors import PlanError
from lightning_amp.graph.table import Table
from lightning_amp.techniques.chunk.regions.region import Region, check_region, problem
from tests.techniques.chunk.regions.tables import Rows


def region(first: int, last: int, dims: dict[int, int], **given: Any) -> Region:
    return Region(first=first, last=last, dims=dims, **{"units": 4, "n_chunks": 4, **given})


def attention() -> tuple[Table, dict[str, int]]:
    """x -> q, k; softmax(q k') -> y = x + mixed; [4, 6] tensors."""
    new = Rows()
    x = new.given(4, 6)
    q, k = new.linear(x, 6, bias=True), new.linear(x, 6)
    t = new.op("t", [k], (6, 4), _view=True)
    scores = new.op("matmul", [q, t], (4, 4))
    weight = new.op("softmax", [scores], (4, 4), dim=-1)
    mixed = new.op("matmul", [weight, k], (4, 6))
    y = new.pointwise(x, mixed)
    names = {"x": x, "q": q, "k": k, "t": t, "scores": scores, "weight": weight, "mixed": mixed, "y": y}
    return new.table(y), names


def test_queries_are_cut_keys_are_whole() -> None:
    table, at = attention()
    q, k, t, y = (at[name] for name in ("q", "k", "t", "y"))
    rows = {at[name]: 0 for name in ("x", "q", "scores", "weight", "mixed", "y")}
    good = region(q, y, rows, before=(k, t))
    assert problem(table, good) == ""
    check_region(table, good)
    assert good.inside(table) == (q, at["scores"], at["weight"], at["mixed"], y)
    assert good.outputs(table) == (y,)
    assert set(good.inputs(table)) == {at["x"], k, t, *table.rows[q].inputs[1:]}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        # unique setting: a row is read cut or whole, not both, and along one dim
        (lambda at, r: {"dims": {**r.dims, at["k"]: 0, at["t"]: 1}, "before": ()}, "does not follow what is cut"),
        (lambda at, r: {"dims": {**r.dims, at["scores"]: 1}}, "does not follow what is cut of its arguments"),
        (lambda at, r: {"dims": {i: d for i, d in r.dims.items() if i != at["x"]}}, "does not follow"),
        # flow traceability
        (lambda at, r: {"dims": {**r.dims, at["weight"]: 1}}, "dim 1 of .* follows none of its arguments"),
        (lambda at, r: {"dims": {**r.dims, at["weight"]: 2}}, "has no rule for dim 2"),
        # kinds
        (lambda at, r: {"before": (at["k"],)}, "must be one of cut, summed and before"),
        (lambda at, r: {"before": (at["k"], at["t"], at["x"])}, "is no operator of the run"),
        (lambda at, r: {"sums": (at["q"],)}, "must be one of cut, summed and before"),
        (lambda at, r: {"before": (at["k"], at["t"], at["q"])}, "'matmul_.*' does not|''"),
        # sizes
        (lambda at, r: {"units": 2, "n_chunks": 2}, "in 4 units"),
        (lambda at, r: {"n_chunks": 5}, "5 pieces of 4 units"),
        (lambda at, r: {"n_chunks": 1}, "1 pieces of 4 units"),
        (lambda at, r: {"first": -1}, "the block has rows 0 to"),
        (lambda at, r: {"dims": {**r.dims, at["t"]: 0}}, "does not follow what is cut"),
    ],
)
def test_every_rule(change: Any, says: str) -> None:
    table, at = attention()
    rows = {at[name]: 0 for name in ("x", "q", "scores", "weight", "mixed", "y")}
    good = region(at["q"], at["y"], rows, before=(at["k"], at["t"]))
    bad = replace(good, **change(at, good))
    if "''" in says:
        # a row computed before the pieces may be read cut
        assert problem(table, bad) == ""
        return
    with pytest.raises(PlanError, match=f"rows .* of 'Hand' were to be computed in . pieces: .*{says}"):
        check_region(table, bad)


def test_what_is_computed_before_reads_nothing_cut() -> None:
    table, at = attention()
    bad = region(at["q"], at["t"], {at["x"]: 0, at["q"]: 0, at["k"]: 0}, before=(at["t"],))
    assert "computed before the pieces and reads" in problem(table, bad)
    assert "nothing is cut" in problem(table, region(at["t"], at["t"], {}, before=(at["t"],)))


def test_sums_are_read_after_the_last_piece_only() -> None:
    new = Rows()
    a, b = new.given(4, 6), new.given(6, 4)
    x = new.pointwise(a, op="exp")
    s = new.op("matmul", [b, x], (6, 6))
    total = new.op("sum", [x], (6,), dim=[0])
    y = new.pointwise(s, op="exp")
    table = new.table(y, total)
    good = region(x, total, {a: 0, b: 1, x: 0}, sums=(s, total))
    assert problem(table, good) == ""
    assert good.outputs(table) == (s, total)
    # neither cut nor whole: not all pieces are added up yet
    for dims in ({a: 0, b: 1, x: 0, y: 0}, {a: 0, b: 1, x: 0, y: 0, s: 0}):
        assert problem(table, region(x, y, dims, sums=(s, total))) != ""
    assert "does not sum over what is cut" in problem(table, replace(good, dims={a: 1, b: 1, x: 1}))
    new = Rows()
    a, w = new.given(4, 6), new.given(6, 6)
    s = new.op("matmul", [new.op("t", [a], (6, 4), _view=True), a], (6, 6))
    y = new.op("matmul", [a, s], (4, 6))
    both = region(s - 1, y, {a: 0, s - 1: 1, y: 0}, sums=(s,))
    assert "does not follow" in problem(new.table(y), both)
    # a bias would be added with every piece
    new = Rows()
    a = new.given(4, 6)
    y = new.linear(a, 6, bias=True)
    w = new.rows[y]["inputs"][1]
    assert "does not sum over" in problem(new.table(y), region(y, y, {a: 1, w: 1}, sums=(y,), units=6, n_chunks=6))


def test_a_weight_is_cut_along_the_features_that_are_cut() -> None:
    new = Rows()
    a = new.given(4, 6)
    up = new.linear(a, 8)
    act = new.pointwise(up, op="gelu")
    down = new.linear(act, 6)
    table = new.table(down)
    w_up, w_down = new.rows[up]["inputs"][1], new.rows[down]["inputs"][1]
    good = region(up, down, {w_up: 0, up: 1, act: 1, w_down: 1}, sums=(down,), units=8, n_chunks=2)
    assert problem(table, good) == ""
    assert "does not follow" in problem(table, replace(good, dims={w_up: 1, up: 1, act: 1, w_down: 1}))
    assert "does not sum" in problem(table, replace(good, dims={w_up: 0, up: 1, act: 1}))


def chain(**fields: Any) -> Table:
    new = Rows()
    a = new.given(4, 6)
    x = new.pointwise(a, op="exp")
    y = new.pointwise(x, op="exp", **fields)
    return new.table(new.pointwise(y, op="exp"))


def test_random_rows_and_rows_that_change_memory_are_no_part_of_a_region() -> None:
    cut = region(1, 3, dict.fromkeys(range(4), 0))
    assert problem(chain(), cut) == ""
    assert "draws random numbers" in problem(chain(_random=True), cut)
    assert "changes memory in place" in problem(chain(_writes=(2,)), region(2, 3, {1: 0, 2: 0, 3: 0}))
    # also where the memory is changed later
    early = region(1, 1, {0: 0, 1: 0})
    assert problem(chain(), early) == ""
    assert "is changed in place" in problem(chain(_writes=(1,)), early)
    assert "is changed in place" in problem(chain(_writes=(0,)), early)
    assert problem(chain(_writes=(0,)), region(3, 3, {2: 0, 3: 0})) == ""


def test_an_operator_without_a_rule_ends_the_flow() -> None:
    new = Rows()
    a = new.given(4, 6)
    x = new.op("flip", [a], (4, 6))
    assert "has no rule" in problem(new.table(x), region(x, x, {a: 0, x: 0}))


def test_results_of_several_tensors_stay_inside() -> None:
    new = Rows()
    a = new.given(4, 6)
    parts = new.op("chunk", [a], (4, 3), chunks=2, dim=-1)
    one, two = (new.op("getitem", [parts], (4, 3), _view=True) for _ in range(2))
    y = new.pointwise(one, two)
    table = new.table(y)
    whole = {a: 0, parts: 0, one: 0, two: 0, y: 0}
    assert problem(table, region(parts, y, whole)) == ""
    assert "cannot be put together" in problem(table, region(parts, one, {a: 0, parts: 0, one: 0}))
    assert "cannot be cut" in problem(table, region(one, y, {parts: 0, one: 0, two: 0, y: 0}))


def test_merged_dims_are_cut_in_whole_units() -> None:
    new = Rows()
    a = new.given(4, 6, 5)
    merged = new.op("view", [a], (24, 5), _view=True)
    y = new.pointwise(merged, op="exp")
    table = new.table(y)
    assert problem(table, region(merged, y, {a: 0, merged: 0, y: 0})) == ""
    assert "in 4 units" in problem(table, region(merged, y, {a: 0, merged: 0, y: 0}, units=24, n_chunks=24))
    assert "follows none" in problem(table, region(merged, y, {a: 1, merged: 1, y: 1})) or problem(
        table, region(merged, y, {a: 1, merged: 0, y: 0}, units=6)
    )


def test_a_dim_of_size_1_is_broadcast_and_read_whole() -> None:
    new = Rows()
    a, b = new.given(4, 6), new.given(1, 6)
    y = new.op("add", [a, b], (4, 6))
    table = new.table(y)
    assert problem(table, region(y, y, {a: 0, y: 0})) == ""
    assert "does not follow" in problem(table, region(y, y, {a: 0, b: 0, y: 0}))
