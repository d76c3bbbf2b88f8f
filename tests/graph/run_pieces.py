"""A captured block run with regions piece by piece, written as plainly as can be; inference only."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from lightning_amp.graph.table import OPERATOR, Table
from lightning_amp.techniques.chunk.regions.region import Region

RESHAPES = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "expand")


class Runner:
    """Values of rows, let go of after their last reader."""

    def __init__(self, graph: GraphModule, table: Table, regions: Sequence[Region]) -> None:
        self.table, self.nodes = table, [n for n in graph.graph.nodes if n.op != "output"]
        self.graph, self.of = graph, {node: i for i, node in enumerate(self.nodes)}
        self.starts = {region.first: region for region in regions}
        assert len(self.nodes) == len(table.rows)

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        values: dict[int, Any] = {}
        given = iter(tensors)
        i = 0
        while i < len(self.nodes):
            node, row = self.nodes[i], self.table.rows[i]
            if i in self.starts:
                region = self.starts[i]
                self.region(region, values)
                i = region.last
            elif row.kind == OPERATOR:
                values[i] = self.compute(node, values)
            else:
                values[i] = next(given) if node.op == "placeholder" else getattr(self.graph, str(node.target))
            self.forget(values, i, self.table)
            i += 1
        return [values[k] for k in self.table.outputs]

    def forget(self, values: dict[int, Any], i: int, table: Table) -> None:
        for k in [k for k in values if table.rows[k].last_use <= i]:
            del values[k]

    def compute(self, node: Node, values: dict[int, Any]) -> Any:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: values[self.of[n]])
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def region(self, region: Region, values: dict[int, Any]) -> None:
        rows = self.table.rows
        for n, i in enumerate(region.before):
            values[i] = self.compute(self.nodes[i], values)
            later = {k for j in (*region.before[n + 1 :], *region.inside(self.table)) for k in rows[j].inputs}
            for k in [k for k in values if k not in later and rows[k].last_use <= region.last]:
                del values[k]
        device = next(iter(values.values())).device
        wholes = {
            o: torch.zeros(rows[o].shape, dtype=getattr(torch, rows[o].dtype), device=device)
            for o in region.outputs(self.table)
        }
        for start, length in region.pieces():
            self.piece(region, values, wholes, start, length)
        values |= wholes

    def piece(
        self, region: Region, values: dict[int, Any], wholes: dict[int, Tensor], start: int, length: int
    ) -> None:
        def narrow(tensor: Tensor, dim: int) -> Tensor:
            unit = tensor.shape[dim] // region.units
            return tensor.narrow(dim, start * unit, length * unit)

        inside = region.inside(self.table)
        own: dict[int, Any] = {}
        for k in region.inputs(self.table):
            own[k] = narrow(values[k], region.dims[k]) if k in region.dims else values[k]
        for n, i in enumerate(inside):
            own[i] = self.small(i, own, region, length)
            if i in wholes and i in region.sums:
                wholes[i] += own[i]
            elif i in wholes:
                narrow(wholes[i], region.dims[i]).copy_(own[i])
            later = {k for j in inside[n + 1 :] for k in self.table.rows[j].inputs}
            for k in [k for k in own if k not in later]:
                del own[k]

    def small(self, i: int, own: dict[int, Any], region: Region, length: int) -> Any:
        """One operator of one piece; where a shape is written down, with that of the piece."""
        node, row = self.nodes[i], self.table.rows[i]
        name = str(node.target).split(".")[-2] if "." in str(node.target) else ""
        if name not in RESHAPES:
            return self.compute(node, own)
        shape = list(row.shape)
        shape[region.dims[i]] = shape[region.dims[i]] // region.units * length
        value = own[row.inputs[0]]
        return value.expand(shape) if name == "expand" else value.reshape(shape)
