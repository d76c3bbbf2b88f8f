"""Tables by hand and random ones, whose dims follow the library's rules; the rules of regions without a search."""

import random
from collections.abc import Collection, Iterator, Sequence
from math import gcd, prod
from typing import Any

from lightning_amp.graph import flow_rules
from lightning_amp.graph.flow import OperatorCall, Ref, dims_of, sums_of
from lightning_amp.graph.table import INPUT, OPERATOR, PARAMETER, OperatorRow, Table
from lightning_amp.techniques.chunk.regions.find_regions import RegionSearch
from lightning_amp.techniques.chunk.regions.region import GETITEM, Region, reach_of, written_from

assert flow_rules


def find_regions(
    table: Table, *, around: Collection[int] | None = None, held: Sequence[int] | None = None
) -> tuple[Region, ...]:
    """All regions of a table, or those that have one of some rows."""
    return tuple(RegionSearch(table, held=held).around(range(len(table.rows)) if around is None else around))


class Rows:
    """A table in the making; every method returns the new row."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def given(self, *shape: int, kind: str = INPUT) -> int:
        return self._put(kind=kind, shape=shape, name=f"arg{len(self.rows)}", needs_grad=True)

    def weight(self, *shape: int) -> int:
        return self.given(*shape, kind=PARAMETER)

    def op(self, op: str, inputs: list[int], shape: tuple[int, ...], **given: Any) -> int:
        """An operator; `given` are its other arguments, and fields of the row that begin with `_`."""
        fields = {key[1:]: value for key, value in given.items() if key.startswith("_")}
        arguments = {key: value for key, value in given.items() if not key.startswith("_")}
        refs = {f"tensor{k}": Ref(k) for k in range(len(inputs))}
        shapes = tuple(self.rows[k]["shape"] for k in inputs)
        if op == "getitem":
            shapes = (shape,)
        call = OperatorCall(op=op, shapes=shapes, result=shape, arguments=refs | arguments)
        n_bytes = 4 * prod(shape)
        view = fields.pop("view", False)
        i, moved = len(self.rows), op in ("add", "t", "getitem", "chunk", "view", "sum")
        kept = tuple(inputs) if op in ("matmul", "linear") else () if moved else (i,)
        fields = {
            "needs_grad": True,
            "saved": tuple(sorted({self.rows[k]["storage"] if k != i else i for k in kept})),
            "grad_bytes": tuple(0 if moved else self._bytes(k) for k in inputs),
            **fields,
        }
        return self._put(
            kind=OPERATOR,
            name=f"{op}_{len(self.rows)}",
            op="getitem" if op == "getitem" else f"aten.{op}.default",
            inputs=tuple(inputs),
            shape=shape,
            n_bytes=0 if view else n_bytes,
            dims=dims_of(call),
            sums=sums_of(call),
            **({"storage": self.rows[inputs[0]]["storage"]} if view else {}),
            **fields,
        )

    def linear(self, x: int, outside: int, *, bias: bool = False) -> int:
        shape = self.rows[x]["shape"]
        weights = [self.weight(outside, shape[-1]), *([self.weight(outside)] if bias else [])]
        return self.op("linear", [x, *weights], (*shape[:-1], outside), _flops=2 * outside * prod(shape))

    def pointwise(self, *inputs: int, op: str = "add", **given: Any) -> int:
        shapes = [self.rows[k]["shape"] for k in inputs]
        return self.op(op, list(inputs), max(shapes, key=lambda s: (len(s), s)), **given)

    def table(self, *outputs: int) -> Table:
        last = list(range(len(self.rows)))
        for i, row in enumerate(self.rows):
            for k in row["inputs"]:
                last[k] = i
        for k in outputs:
            last[k] = len(self.rows)
        rows = (OperatorRow(last_use=end, **row) for row, end in zip(self.rows, last, strict=True))
        return Table(block="Hand", rows=tuple(rows), outputs=outputs)

    def _bytes(self, i: int) -> int:
        return 4 * prod(self.rows[i]["shape"])

    def _put(self, **row: Any) -> int:
        n = len(self.rows)
        self.rows.append({"inputs": (), "dtype": "float32", "storage": n, **row})
        return n


def random_table(seed: int, n_ops: int, *, odd: bool = False) -> Table:
    """Operators on tensors [4, 6], [6, 4], [4], ...: pointwise, products, sums, transposed views, norms.

    With `odd` also random rows, rows that change memory in place, and results of several tensors.
    """
    draw = random.Random(seed)
    new = Rows()
    made = [new.given(4, 6), new.given(6, 4)]
    weights = [new.weight(6, 6), new.weight(4, 4)]

    def shape(i: int) -> tuple[int, ...]:
        return new.rows[i]["shape"]

    for _ in range(n_ops):
        x = draw.choice(made[-4:])
        kind = draw.choice(["exp", "add", "t", "matmul", "linear", "softmax", "sum", "flip", "linear", "exp"])
        same = [y for y in made if shape(y) == shape(x)]
        fitting = [y for y in made if len(shape(x)) == len(shape(y)) == 2 and shape(x)[1] == shape(y)[0]]
        chance = draw.random() if odd else 1.0
        if chance < 0.08:
            made.append(new.pointwise(x, op="dropout", _random=True))
        elif chance < 0.14:
            made.append(new.op("add_", [x], shape(x), _view=True, _writes=(x,)))
        elif chance < 0.34 and len(shape(x)) == 2 and shape(x)[1] > 2:
            half = (shape(x)[0], shape(x)[1] // 2)
            parts = new.op("chunk", [x], half, chunks=2, dim=-1, _view=True)
            made += [new.op("getitem", [parts], half, _view=True) for _ in range(2)]
        elif kind == "add":
            made.append(new.pointwise(x, draw.choice(same)))
        elif kind == "t" and len(shape(x)) == 2:
            made.append(new.op("t", [x], shape(x)[::-1], _view=True))
        elif kind == "matmul" and fitting:
            y = draw.choice(fitting)
            made.append(new.op("matmul", [x, y], (shape(x)[0], shape(y)[1]), _flops=100))
        elif kind == "linear" and len(shape(x)) == 2:
            weight = next((w for w in weights if shape(w)[1] == shape(x)[1]), None)
            if weight is not None:
                made.append(new.op("linear", [x, weight], shape(x), _flops=200))
        elif kind == "softmax" and shape(x):
            made.append(new.op("softmax", [x], shape(x), dim=-1))
        elif kind == "sum" and len(shape(x)) == 2:
            made.append(new.op("sum", [x], shape(x)[1:], dim=[0]))
        elif kind == "flip" and draw.random() < 0.3:
            made.append(new.op("flip", [x], shape(x)))
        else:
            made.append(new.pointwise(x, op="exp"))
    read = {k for row in new.rows for k in row["inputs"]}
    ends = [i for i in made if i not in read and new.rows[i]["kind"] == OPERATOR]
    return new.table(*ends)


def broken(table: Table, region: Region) -> list[str]:
    """The rules that a region breaks."""
    return list(_broken(table, region))


def _broken(table: Table, region: Region) -> Iterator[str]:
    rows, own, dims = table.rows, set(region.inside(table)), region.dims
    if any(not 0 <= d < len(rows[i].shape) for i, d in dims.items()):
        yield "a dim that is not there"
        return
    if not own or not region.outputs(table):
        yield "nothing is computed, or nothing of it is read later"
    if any((i in region.sums) + (i in dims) != 1 for i in own):
        yield "unique setting"
    if any(own.intersection(rows[i].inputs) for i in region.before):
        yield "what is computed before the pieces reads none of them"
    for i in own:
        row = rows[i]
        ways = row.sums if i in region.sums else [row.dims[dims[i]]] if row.dims else []
        follows = (
            dict(pairs)
            for pairs in ways
            if pairs and all(dict(pairs)[k] == d for k, d in pairs)  # of one argument one dim
        )
        if row.random or not any(
            all(dims.get(j) == way[k] if k in way else j not in dims and j not in own for k, j in enumerate(row.inputs))
            for way in follows
        ):
            yield f"flow of {row.name}"
        if row.op == GETITEM and any(j not in own and j in dims for j in row.inputs):
            yield "one of several results is cut outside"
    if any(row.op == GETITEM and i not in own and own.intersection(row.inputs) for i, row in enumerate(rows)):
        yield "several results are put together"
    changed = written_from(table)[region.first]
    for row in rows[region.first : region.last + 1]:
        used = {rows[k].storage for k in row.inputs} | {row.storage}
        if row.writes or (row.kind == OPERATOR and used & changed):
            yield f"memory of {row.name}"
    units = gcd(*(rows[i].shape[d] for i, d in dims.items()))
    if units < 2 or units != region.units or not 2 <= region.n_chunks <= units:
        yield "sizes"
    elif region.reach != reach_of(rows, region) or (region.reach and region.sums):
        yield "reach"
    if dims.keys() - own - {k for i in own for k in rows[i].inputs}:
        yield "cut and not read"
