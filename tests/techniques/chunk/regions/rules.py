"""The rules of `region.py`, written down without a search: whether results of a block stay the same."""

from collections.abc import Iterator
from math import gcd

from lightning_amp.graph.table import OPERATOR, Table
from lightning_amp.techniques.chunk.regions.region import GETITEM, Region, reach_of, written_from


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
