"""Copies and views: whether a write is seen in another tensor depends on the strides of the whole, not on a part's."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.sharding.table.case import case

X = (2, 9, 6)
ROWS = (3, 6)
MAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda y: y.contiguous(),
    "reshape": lambda y: y.reshape(-1),
    "flatten": lambda y: y.flatten(),
    "flatten of the last dims": lambda y: y.flatten(-2),
    "reshape_as": lambda y: y.reshape_as(torch.empty(y.numel())),
    "reshape to two rows": lambda y: y.reshape(2, -1),
    "reshape to the same": lambda y: y.reshape(y.shape),
    "to": lambda y: y.to(torch.float64),
    "to another type": lambda y: y.to(torch.float32),
    "to a copy": lambda y: y.to(torch.float64, copy=True),
    "type_as": lambda y: y.type_as(torch.ones(1, dtype=torch.float64)),
    "channels last": lambda y: y[(None,) * (4 - y.dim())].contiguous(memory_format=torch.channels_last),
}
BASES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], int]] = {
    "all": (lambda y: y, X, 1),
    "first rows": (lambda y: y[:, :8], X, 1),
    "first samples": (lambda y: y[:1], X, 1),
    "one sample": (lambda y: y[0], X, 1),
    "some features": (lambda y: y[..., :4], X, 1),
    "features of a sample": (lambda y: y[0, :, 1:3], X, 1),
    "transposed rows": (lambda y: y.transpose(0, 1), ROWS, 0),
    "transposed samples": (lambda y: y.transpose(0, 1), X, 1),
    "twice transposed": (lambda y: y.mT.mT, ROWS, 0),
    "transposed and new": (lambda y: y.mT * 2, ROWS, 0),
    "transposed and summed": (lambda y: y.detach().permute(2, 1, 0).softmax(0), X, 1),
    "transposed and averaged": (lambda y: y.detach().permute(2, 1, 0).mean(1), X, 1),
    "one row": (lambda y: y[:, None, :4], ROWS, 0),
    "heads": (lambda y: y.view(2, 9, 3, 2).transpose(1, 2), X, 1),
    "attention": (lambda y: F.scaled_dot_product_attention(*[y.detach()[None]] * 3).transpose(1, 2), X, 1),
    "expanded": (lambda y: y[:, None].expand(3, 2, 6), ROWS, 0),
    "cloned": (lambda y: y.mT.clone(), ROWS, 0),
    "like another": (lambda y: torch.zeros_like(y.mT), ROWS, 0),
}


def _written(base: Callable[[Tensor], Tensor], make: Callable[[Tensor], Tensor], x: Tensor) -> list[Any]:
    """What a write to the result does to the tensor it is made of."""
    y = base(x * 1)
    z = make(y)
    z.zero_()
    return [y + 1, z + 1]


def _read(base: Callable[[Tensor], Tensor], make: Callable[[Tensor], Tensor], x: Tensor) -> list[Any]:
    """What a write to a tensor does to the result that was made of it before."""
    y = base(x.detach() * 1)
    z = make(y)
    y.zero_()
    return [y + 1, z + 1]


COPIES = [
    case(
        f"{what} {name} of {of}",
        lambda x, how=how, base=base, make=make: how(base, make, x),
        shape,
        at=dim,
        refused="?" if "two rows" in name else "",
    )
    for i, (name, make) in enumerate(MAKES.items())
    for j, (of, (base, shape, dim)) in enumerate(BASES.items())
    for what, how in [(("write to", _written), ("read after a write of", _read))[(i + j) % 2]]
    # values that lie in one place cannot be written to
    if of != "expanded" or (what == "write to" and name not in ("to", "type_as", "reshape to the same"))
]
COPIES += [
    # a copy on several ranks, a view in torch
    case(
        f"read {name} after a write", lambda x, base=base: _read(lambda y: y, base, x), X, refused="read after a write"
    )
    for name, base in {
        "a row": lambda y: y[:, 1],
        "a row that is selected": lambda y: y.select(1, 0),
        "a row of a sample": lambda y: y[0].select(0, 1),
        "an unbound row": lambda y: y.unbind(1)[2],
        "features of a row": lambda y: y[:, 1][:, 2:].t(),
        "the first rows": lambda y: y[:, :1],
        "a diagonal": lambda y: y.diagonal(0, 0, 1),
        "rows in groups": lambda y: y.view(2, 3, 3, 6)[:, 0],
    }.items()
]
COPIES += [
    case(f"strides of {of}", lambda x, base=base: list(base(x).stride()), shape, at=dim)
    for of, (base, shape, dim) in BASES.items()
]
