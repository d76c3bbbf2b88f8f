"""Determine which elementwise operators may overwrite an argument in inference.

An elementwise operator (tagged `pointwise` in torch) reads only the entry of each argument that it writes, so its
result may overwrite an argument. It does so through its `out=` variant, if that has its own kernel; otherwise the
variant would make a copy.

The overwritten memory must be the block's own. Operators such as `reshape`, `contiguous`, and `dropout` in evaluation
mode may return their argument or a view of it, depending on its strides, which chunks change. Therefore a result counts
as new memory only if torch guarantees it (a non-composite operator never returns an argument), or if the operator is in
`NEW`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from lightning_amp._torch import OpOverload, has_kernel
from lightning_amp.graph.table import OPERATOR, Table
from lightning_amp.techniques.chunk.regions.region import may_write

NEW = {
    *("linear", "matmul", "conv1d", "conv2d", "conv3d", "layer_norm", "group_norm", "rms_norm", "batch_norm"),
    *("softmax", "log_softmax", "upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d"),
}
"""Composite operators that always return new memory."""


def with_memory(table: Table, nodes: Sequence[Node]) -> Table:
    """Return a table for inference, with the memory that results may lie in, and the arguments they overwrite."""
    values, new = [node.meta.get("val") for node in nodes], list(map(_is_new, nodes))
    # a non-contiguous result is never overwritten, because its bytes are not those of the new result
    whole = [isinstance(value, Tensor) and value.is_contiguous() for value in values]
    never, memory, free = len(table.rows), list[tuple[int, ...]](), list[int]()
    for i, row in enumerate(table.rows):
        views = () if new[i] else (m for k in row.inputs for m in memory[k])
        memory.append(tuple(sorted({i, *views})))
        free.append(row.last_use if row.kind == OPERATOR and whole[i] else never)
        for m in memory[i]:
            free[m] = max(free[m], row.last_use)
    rows = [replace(row, memory=memory[i], free=free[i]) for i, row in enumerate(table.rows)]
    for i, row in enumerate(rows):
        if new[i] and whole[i] and writing(nodes[i].target) is not None:
            alike = (k for k in row.inputs if rows[k].shape == row.shape and may_write(rows, i, k, row.inputs))
            rows[i] = replace(row, over=next(alike, -1))
    return replace(table, rows=tuple(rows))


@cache
def writing(target: Any) -> Any:
    """Return the variant of an elementwise operator that writes into an argument `out`; None if there is none."""
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags:
        return None
    needed = [(a.name, str(a.type)) for a in target._schema.arguments]
    packet, composite = target.overloadpacket, ("CompositeExplicitAutograd", "CompositeImplicitAutograd")
    for other in (getattr(packet, name) for name in packet.overloads()):
        *given, last = other._schema.arguments or [None]
        alone = last is not None and last.name == "out" and str(last.type) == "Tensor"
        same = alone and [(a.name, str(a.type)) for a in given] == needed
        if same and not any(has_kernel(other, key) for key in composite):
            return other
    return None


def _is_new(node: Node) -> bool:
    """Return whether a result is new memory, for any arguments."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    if has_kernel(target, "CompositeImplicitAutograd"):
        return target.namespace == "aten" and target._opname in NEW
    schema = target._schema
    alone = not schema.is_mutable and all(result.alias_info is None for result in schema.returns)
    return target.namespace == "aten" and alone
