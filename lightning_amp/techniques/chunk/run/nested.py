"""Nest chunks in inference: run a block sample by sample, and regions within each sample.

If all rows of a block can be cut along one dim, one piece is a separate block: it is captured with the sizes of a
piece. Its chunks are planned for the budget that remains after the full results.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from lightning_amp._torch import make_fx
from lightning_amp.footprint.copies.quick_fakes import QuickFakes
from lightning_amp.graph.capture import Capture, fresh
from lightning_amp.graph.table import OPERATOR, PARAMETER, Table
from lightning_amp.techniques.chunk.regions.find_regions import RegionSearch
from lightning_amp.techniques.chunk.regions.region import Region
from lightning_amp.techniques.chunk.run.function import ChunkedRegion, Put
from lightning_amp.techniques.chunk.run.lower import Lowered, lower

Found = TypeVar("Found")
Plan = Callable[[Capture], tuple[Lowered, Found]]


def outermost(table: Table) -> Region | None:
    """Return the region of all rows of a block, in the most pieces; None if not all can be cut along one dim.

    Pieces with neighbours are excluded, because their sizes differ at the ends, while a piece is captured in one size.
    """
    own = [i for i, row in enumerate(table.rows) if row.kind == OPERATOR]
    all_of_it = (r for r in RegionSearch(table).around(own[-1:]) if r.first == own[0] and not (r.before or r.reach))
    return next((r for r in all_of_it if r.last == own[-1]), None)


def lower_nested(capture: Capture, table: Table, region: Region, plan: Plan[Found]) -> tuple[Lowered, Found]:
    """Return the forward that runs a region of all rows in equal pieces, and its own regions in each piece.

    Args:
        table: Table of the capture, for inference.
        plan: Function that returns the forward of a captured piece, and a value that is returned as well.
    """
    # rows run inside a piece, whose own capture determines what is overwritten
    rows = tuple(replace(row, over=-1) for row in table.rows)
    lowered = lower(capture, replace(table, rows=rows), (region,))
    ((name, chunked),) = lowered.regions.items()
    piece, found = plan(_of_piece(capture, table, region, chunked))

    def compute(put: Put, size: int, *pieces: Tensor) -> None:
        for k, value in enumerate(piece.forward(*pieces)):
            put(k, value)

    nested = replace(chunked, compute=compute)
    # generated code looks the region up by name in each call
    lowered.forward.__globals__[name] = nested
    outer = lowered.code[lowered.code.index("\ndef forward(") :]
    code = f"# one chunk of {name}\n{piece.code}\n\n{outer}"
    return replace(lowered, code=code, regions={name: nested}, inner=piece), found


def _of_piece(capture: Capture, table: Table, region: Region, chunked: ChunkedRegion) -> Capture:
    """Return the capture of one piece, as a block whose arguments are the region's inputs."""
    inputs = region.inputs(table)
    # all pieces have equal length: `outermost` returns the most pieces, of one unit each
    ((start, size), *_) = chunked.bounds

    def run(*tensors: Tensor) -> list[Any]:
        found: dict[int, Any] = {}
        chunked.compute(found.__setitem__, size, *tensors)
        return [found[k] for k in range(len(chunked.outputs))]

    nodes = capture.nodes
    with QuickFakes():
        given = []
        for i, dim in zip(inputs, chunked.input_dims, strict=True):
            node = nodes[i]
            whole = getattr(capture.graph, str(node.target)) if node.op == "get_attr" else node.meta["val"]
            given.append(chunked.piece(fresh(whole), dim, start, size))
    graph = make_fx(run, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(*given)
    names = tuple(table.rows[i].name for i in inputs if table.rows[i].kind == PARAMETER)
    return Capture(kind=capture.kind, key=None, names=names, graph=graph, needs_grad=(False,) * len(given))
