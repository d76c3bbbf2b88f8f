"""Replace elementwise operators that write into a block's own tensors by those that return a new one.

    y = conv(x); z = silu_(y); ... y ...     becomes     y = conv(x); z = silu(y); ... z ...

A table takes an operator that writes as the end of every region (graph/table.py), while autograd sees no difference:
what an operator needs of the old values it has copied. Kept are writes to arguments, parameters, buffers and constants,
and writes to memory that is read afterwards through another tensor, such as the base of a view.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from lightning_amp._torch import OpOverload, tree_leaves, tree_map, unseen

POINTWISE = {torch.ops.aten.leaky_relu.default}
"""Elementwise operators that torch 2.11 does not tag as such."""


def without_writes(graph: Graph) -> None:
    """Replace the operators of a graph whose nodes have the values of a capture."""
    at = {node: k for k, node in enumerate(graph.nodes)}
    sharing: dict[int, list[Node]] = {}
    for node in at:
        if isinstance(node.meta.get("val"), Tensor):
            sharing.setdefault(_memory(node.meta["val"]), []).append(node)
        elif node.op == "call_function":
            # several results may be views
            for part in tree_leaves(node.meta.get("val")):
                if isinstance(part, Tensor):
                    sharing.setdefault(_memory(part), []).append(node)
    for node in list(graph.nodes):
        target, written = node.target, node.args[0] if node.args else None
        new = _returning(target)
        if new is None or not isinstance(written, Node) or not _alike(new, node):
            continue
        others = sharing[_memory(node.meta["val"])]
        if any(other.op != "call_function" for other in others):
            continue
        later = [user for user in written.users if at[user] > at[node]]
        if any(other not in (written, node) and _read_after(other, at[node], at) for other in others):
            continue
        with graph.inserting_before(node):
            found = graph.call_function(new, node.args, dict(node.kwargs))
        found.meta, at[found] = dict(node.meta), at[node]
        others.append(found)
        for user in later:
            user.replace_input_with(written, found)
        node.replace_all_uses_with(found)
        others.remove(node)
        graph.erase_node(node)


def _read_after(node: Node, place: int, at: dict[Node, int]) -> bool:
    return at[node] < place and any(at[user] > place for user in node.users)


def _memory(tensor: Tensor) -> int:
    """Return the address of a tensor's storage object; the tensor keeps it alive."""
    return int(tensor.untyped_storage()._cdata)


def _returning(target: Any) -> OpOverload | None:
    """Return the elementwise operator that returns what another writes into its first argument; None if there is none.

    Operators that draw random numbers may draw others.
    """
    if not isinstance(target, OpOverload) or target.namespace != "aten" or not target._opname.endswith("_"):
        return None
    packet = getattr(torch.ops.aten, target._opname[:-1], None)
    if packet is None or target._overloadname not in packet.overloads():
        return None
    new: OpOverload = getattr(packet, target._overloadname)
    same = [[(a.name, str(a.type)) for a in one._schema.arguments] for one in (new, target)]
    draws = torch.Tag.nondeterministic_seeded in new.tags
    pointwise = torch.Tag.pointwise in new.tags or new in POINTWISE
    return new if pointwise and not draws and same[0] == same[1] else None


def _alike(new: OpOverload, node: Node) -> bool:
    """Whether the new result has the dtype and strides of the memory that would be written."""
    written = node.meta["val"]
    args, kwargs = tree_map(lambda a: a.meta["val"] if isinstance(a, Node) else a, (node.args, dict(node.kwargs)))
    with unseen(), written.fake_mode, torch.no_grad():
        found = new(*args, **kwargs)
    return (found.dtype, found.shape, found.stride()) == (written.dtype, written.shape, written.stride())
