"""Cut images by rows: compute group norm in two steps, and return the neighbouring rows that a convolution reads.

mean[n, c, row], var[n, c, row]     of every image row, which chunks of rows compute exactly
var of a group = mean of var + variance of mean, because all rows have equal length (law of total variance)
y = shift[n, c] + x * scale[n, c]   elementwise
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from lightning_amp._torch import OpOverload, make_fx
from lightning_amp.footprint.copies.quick_fakes import QuickFakes
from lightning_amp.footprint.live_bytes import named_arguments
from lightning_amp.graph.capture import Capture
from lightning_amp.graph.rewrites import WIDE

CONVOLUTIONS = (torch.ops.aten.conv1d.default, torch.ops.aten.conv2d.default, torch.ops.aten.conv3d.default)
CHEAP = (torch.ops.aten.cat.default, torch.ops.aten.upsample_nearest2d.vec)


def neighbours(node: Node) -> tuple[tuple[int, int], ...]:
    """Return (dim, positions) that a convolution reads on either side of a piece, for dims that keep their size."""
    if node.target not in CONVOLUTIONS or not isinstance(node.target, OpOverload):
        return ()
    given = named_arguments(node.target, node.args, node.kwargs)
    x, weight = given["input"].meta["val"], given["weight"].meta["val"]
    result, found = node.meta["val"], []
    for d in range(2, x.dim() if x.dim() == weight.dim() else 0):
        stride, padding, dilation = (_of(given[name], d - 2) for name in ("stride", "padding", "dilation"))
        reach = dilation * (weight.shape[d] - 1)
        # with so many neighbours, the middle of the result is exact: padding only affects the ends of the image
        if stride == 1 and reach and reach == 2 * padding and x.shape[d] == result.shape[d]:
            found.append((d, padding))
    return tuple(found)


def _of(value: Any, k: int) -> int:
    if isinstance(value, int):
        return value
    return int(value[k] if len(value) > 1 else value[0])


def norms_of(capture: Capture) -> list[Node]:
    """Return the group norms of images, which can be computed in two steps."""
    found = []
    for node in capture.nodes:
        if node.target is torch.ops.aten.group_norm.default and isinstance(node.args[0], Node):
            x = node.args[0].meta.get("val")
            if isinstance(x, Tensor) and x.dim() > 3 and x.dtype in WIDE:
                found.append(node)
    return found


def in_two_steps(capture: Capture, which: Collection[int]) -> Capture:
    """Return the capture with some group norms in two steps, given by their place in `norms_of`; unchanged if none."""
    if not which:
        return capture
    norms = norms_of(capture)
    with QuickFakes():
        given = capture.arguments()
    run = _TwoSteps(cast(GraphModule, capture.graph), {norms[k] for k in which}).run
    split = make_fx(run, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(*given)
    _for_every_reader(split.graph)
    split.recompile()
    return replace(capture, graph=split)


def _for_every_reader(graph: Graph) -> None:
    """Duplicate cheap operators for their readers, so that results need not be kept until the last reader.

    Consecutive readers share one copy, which is not kept in between.
    """
    # in reverse order: copies of a reader exist before the operator that they read is visited
    for node in reversed(list(graph.nodes)):
        own, before = node, None
        for reader in list(node.users) if node.target in CHEAP else ():
            if before is not None and reader.prev is not before:
                with graph.inserting_before(reader):
                    own = graph.node_copy(node)
            if own is not node:
                reader.replace_input_with(node, own)
            before = reader


class _TwoSteps(Interpreter):
    """Interpreter of a graph that computes group norm in two steps at the given nodes."""

    def __init__(self, module: GraphModule, norms: set[Node]) -> None:
        super().__init__(module)
        self._norms = norms

    def run_node(self, n: Node) -> Any:
        if n in self._norms:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return group_norm(*args, **kwargs)
        return super().run_node(n)


def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Compute `torch.group_norm` of x [sample, channel, row, ...] in two steps."""
    along, n, each = list(range(3, x.dim())), len(x), x.shape[1] // groups
    rows = x.mean(along, keepdim=True)
    # not x.var, whose CPU kernel takes 20 times as long; not square, which cannot overwrite its argument
    apart = x - rows
    mean, var = (part.reshape(n, groups, -1) for part in (rows, (apart * apart).mean(along)))
    scale = (var.mean(-1, keepdim=True) + mean.var(-1, correction=0, keepdim=True) + eps).rsqrt()
    mean = mean.mean(-1, keepdim=True)
    scale = scale.expand(-1, -1, each) if weight is None else scale * weight.reshape(groups, each)
    shift = -mean * scale if bias is None else torch.addcmul(bias.reshape(groups, each), mean, scale, value=-1)
    one = (n, -1, *(1 for _ in range(2, x.dim())))
    return torch.addcmul(shift.reshape(one), x, scale.reshape(one))
