"""A small copy of a foreign decoder, on which it is compared with ours.

    the copy    the same class and settings, all parameters drawn anew in float64, tables and lists of a few anchors,
                buckets of 3 anchors, no hooks; every stratum is there
    values      near 1; or larger, as training may make them
    anchors     the last bucket is full, or cut short by one or two
    real        the same with the real lists and buckets, which real_size.py runs

Where values are large, softmax has one winner, and gradients of most parameters are what rounding leaves of them; those
of u, v and l are not. So u and v are not large in one copy: a likelihood without a least mean would not be finite.

Legend: cell (B), anchor (N), dim (D), stratum (K), feature (F).
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_amp.adapters.forms.column_layout import LISTS, Layout, columns_list, layout_of
from lightning_amp.adapters.forms.higlue import TABLES, dim_of
from lightning_amp.parallel.contract.hooks import KINDS

WINDOW = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How many there are, what values are multiplied with, and what is added to two of the tables.

    Attributes:
        where: In words, for a message; "" where all is near 1.
        cells: B.
        more: Anchors beyond the number of strata, at least.
        short: Anchors that the last bucket lacks.
    """

    where: str = ""
    cells: int = 3
    more: int = 11
    short: int = 1
    u: float = 1.0
    v: float = 1.0
    counts: float = 1.0
    layers: float = 1.0
    log_theta: float = 0.0
    zi_logits: float = 0.0


NEAR_ONE = Sizes()
MORE = Sizes(where=" for more cells and anchors", cells=24, more=40, short=2)
PAIR = Sizes(cells=2)
LARGE = (
    Sizes(where=" where u is large", short=0, u=30, counts=30),
    # additional zeros are so rare here that another small number in their place shows
    Sizes(where=" where v and weights are large", v=30, counts=30, layers=5, log_theta=2, zi_logits=-30),
)


@dataclass(frozen=True, eq=False, slots=True)
class Small:
    """A small copy and what it is run on."""

    module: nn.Module
    layout: Layout
    inputs: tuple[Tensor, Tensor, Tensor]
    b: Tensor
    counts: Tensor

    def run(self) -> Any:
        """What the copy returns."""
        u, v, l = self.inputs  # noqa: E741
        return self.module(u, v, self.b, l)

    def x(self, *, binarized: bool) -> Tensor:
        """Data that the copy may have been made for."""
        return (self.counts > 0).double() if binarized else self.counts


def small_copy(module: nn.Module, layout: Layout, sizes: Sizes = NEAR_ONE) -> Small:
    """A small copy of a module, which is left as it is.

    Args:
        module: The foreign decoder.
        layout: Of the decoder.
        sizes: Of the copy.

    Raises:
        NotRecognised: The decoder has no layers.
    """
    n_strata = len(layout.nodes)
    n_anchors = n_strata + sizes.more
    n_anchors += -(n_anchors + sizes.short) % WINDOW
    # three or four of the anchors that have a pair at this distance, up to the last one
    nodes = [torch.arange(k % 2, n_anchors - k, 4) for k in range(n_strata)]
    nodes[0] = torch.arange(n_anchors)
    small = drawn_copy(module, layout_of(nodes), sizes)
    for layer in getattr(small.module, "attn_layers", ()):
        layer.window_size = WINDOW
    return small


def drawn_copy(module: nn.Module, layout: Layout, sizes: Sizes = NEAR_ONE) -> Small:
    """A copy of a module with these anchors and columns, whose parameters are drawn anew.

    Args:
        module: The foreign decoder, which is left as it is.
        layout: Of the copy.
        sizes: Of the values and the cells.

    Raises:
        NotRecognised: The decoder has no layers.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, size: float = 1.0) -> Tensor:
        return size * torch.randn(shape, dtype=torch.float64, generator=generator)

    copied = copy.deepcopy(module, _substitutes(module, layout, draw, sizes))
    n_batches, dim = cast(Any, module).scale_lin.shape[0], dim_of(module)
    u = draw(sizes.cells, dim, size=sizes.u * dim**-0.5).requires_grad_()
    v = draw(layout.n_anchors, dim, size=sizes.v).requires_grad_()
    counts = sizes.counts * torch.poisson(draw(sizes.cells, layout.n_features).square(), generator=generator)
    l = (counts.sum(1, keepdim=True) + 1).requires_grad_()  # noqa: E741
    return Small(copied, layout, (u, v, l), torch.arange(sizes.cells) % n_batches, counts)


def no_hooks(module: nn.Module) -> dict[int, Any]:
    """What deepcopy is to take in place of a module's hooks."""
    return {id(getattr(child, kind)): OrderedDict() for child in module.modules() for kind in KINDS}


def _substitutes(module: nn.Module, layout: Layout, draw: Any, sizes: Sizes) -> dict[int, Any]:
    """What deepcopy is to take in place of parameters, buffers, lists and hooks."""
    memo = no_hooks(module)
    for name, parameter in module.named_parameters():
        shape = (len(parameter), layout.n_features) if name in TABLES else parameter.shape
        memo[id(parameter)] = nn.Parameter(parameter_values(name, shape, draw, sizes))
    for buffer in module.buffers():
        memo[id(buffer)] = (
            buffer.detach().cpu().to(torch.float64 if buffer.is_floating_point() else buffer.dtype, copy=True)
        )
    columns = [torch.arange(*run) for run in layout.columns]
    for name in LISTS:
        value = getattr(module, name)
        lists = columns if name == columns_list(module) else layout.nodes
        memo[id(value)] = [_like(rows, one) for rows, one in zip(lists, value, strict=True)]
    return memo


def parameter_values(name: str, shape: Sequence[int], draw: Callable[..., Tensor], sizes: Sizes) -> Tensor:
    """Values of the size that keeps products near 1, and LayerNorm's weights apart from 0.

    Args:
        name: Of the parameter.
        shape: Of the values.
        draw: Of a shape and a size.
        sizes: What they are multiplied with.
    """
    if name in TABLES:
        added = {"log_theta": sizes.log_theta, "zi_logits": sizes.zi_logits}.get(name, 0.0)
        return draw(*shape, size=0.5) + added
    if len(shape) < 2:
        return draw(*shape, size=0.5) + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return draw(*shape, size=sizes.layers * shape[-1] ** -0.5)


def _like(rows: Tensor, example: Any) -> Any:
    """Indices of the type that the decoder has them in."""
    if isinstance(example, Tensor):
        return rows
    return rows.tolist() if isinstance(example, list | tuple) else rows.numpy()
