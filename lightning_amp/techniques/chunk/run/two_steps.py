"""Support images cut by rows: group norm in two steps, and the neighbours that a convolution reads.

mean[n, c, row], var[n, c, row]     of every row of the image by itself, which chunks of rows compute exactly
var of a group = mean of var + variance of mean, because all rows are as long (law of total variance)
y = shift[n, c] + x * scale[n, c]   by entry
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Interpreter, Node

from lightning_amp._torch import OpOverload, make_fx
from lightning_amp.footprint.copies.quick_fakes import QuickFakes
from lightning_amp.graph.capture import Capture
from lightning_amp.graph.rewrites import WIDE

CONVOLUTIONS = (torch.ops.aten.conv1d.default, torch.ops.aten.conv2d.default, torch.ops.aten.conv3d.default)
CHEAP = (torch.ops.aten.cat.default, torch.ops.aten.upsample_nearest2d.vec)


def neighbours(node: Node) -> tuple[tuple[int, int], ...]:
    """(dim, positions) that a convolution reads on either side of a piece; its result must be as large as its input."""
    if node.target not in CONVOLUTIONS or not isinstance(node.target, OpOverload):
        return ()
    names = [a.name for a in node.target._schema.arguments]
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    x, weight = given["input"].meta["val"], given["weight"].meta["val"]
    result, found = node.meta["val"], []
    for d in range(2, x.dim() if x.dim() == weight.dim() else 0):
        stride, padding, dilation = (
            _of(given.get(name, default), d - 2)
            for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
        )
        reach = dilation * (weight.shape[d] - 1)
        if stride == 1 and reach and reach == 2 * padding and x.shape[d] == result.shape[d]:
            found.append((d, padding))
    return tuple(found)


def _of(value: Any, k: int) -> int:
    if isinstance(value, int):
        return value
    return int(value[k] if len(value) > 1 else value[0])


def in_two_steps(capture: Capture) -> Capture | None:
    """The capture with group norm of images in two steps; None if it has none."""
    graph = capture.graph
    assert graph is not None, "what is planned has a graph"
    values = {node: node.meta.get("val") for node in graph.graph.nodes}
    if not any(node.args and _is_norm(node.target, values.get(node.args[0])) for node in values):
        return None
    arguments = [value for node, value in values.items() if node.op == "placeholder"]
    with QuickFakes():
        given = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in arguments]
    run = _TwoSteps(graph).run
    split = make_fx(run, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(*given)
    _for_every_reader(split.graph)
    split.recompile()
    return replace(capture, graph=split)


def _for_every_reader(graph: Graph) -> None:
    """What costs nothing to compute is computed for each of its readers, and need not be kept for the last of them."""
    for node in reversed(list(graph.nodes)):
        for reader in list(node.users)[1:] if node.target in CHEAP else ():
            with graph.inserting_before(reader):
                reader.replace_input_with(node, graph.node_copy(node))


def _is_norm(target: Any, x: Any) -> bool:
    return (
        target is torch.ops.aten.group_norm.default
        and isinstance(x, Tensor)
        and x.dim() > 3
        and x.dtype in WIDE
    )


class _TwoSteps(Interpreter):
    """Runs a graph with another group norm."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if args and _is_norm(target, args[0]):
            return group_norm(*args, **kwargs)
        return super().call_function(target, args, kwargs)


def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """The same as torch's, of x [sample, channel, row, ...]."""
    along = list(range(3, x.dim()))
    rows = x.mean(along, keepdim=True)
    # not x.var: its kernel for a CPU takes 20 times as long
    squares = (x - rows).square().mean(along)
    mean, var = (part.reshape(len(x), groups, -1) for part in (rows, squares))
    scale = (var.mean(-1, keepdim=True) + mean.var(-1, correction=0, keepdim=True) + eps).rsqrt()
    shift = -mean.mean(-1, keepdim=True) * scale
    each = (-1, -1, x.shape[1] // groups)
    scale, shift = scale.expand(each).flatten(1), shift.expand(each).flatten(1)
    if weight is not None:
        scale, shift = scale * weight, shift * weight
    if bias is not None:
        shift = shift + bias
    one = (..., *(None for _ in range(2, x.dim())))
    return torch.addcmul(shift[one], x, scale[one])
