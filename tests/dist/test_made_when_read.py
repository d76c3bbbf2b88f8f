"""A sharded tensor whose part is made when it is read, as a parameter that is gathered for its layer."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_amp.dist.ops import ShardedTensor
from lightning_amp.dist.owners import Owners
from lightning_amp.dist.splits import MeshAxis, Split, Splits

USES: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, w: F.linear(x, w),
    lambda x, w: x @ w.t(),
    lambda x, w: F.embedding(torch.tensor([1, 3]), w),
    lambda x, w: F.linear(x, w.view(2, 2, 6).flatten(0, 1)),
    lambda x, w: w.contiguous() + 1,
    lambda x, w: F.layer_norm(x, (6,), weight=w[0]),
]


def test_a_part_is_made_once_for_each_operator() -> None:
    axis = MeshAxis("x", 2, 0, None, "gather")
    whole, made = torch.randn(4, 6, requires_grad=True), list[Tensor]()

    def make() -> Tensor:
        made.append(whole[:2] * 1)
        return made[-1]

    w = ShardedTensor.made_when_read(make, whole, (4, 6), Splits.of([Split(axis, 0, Owners.even(4, 2))]))
    assert w.requires_grad
    assert (w.dtype, tuple(w.shape), made) == (whole.dtype, (4, 6), [])
    # the second time by its plan
    for use in [*USES, *USES]:
        made.clear()
        assert isinstance(use(torch.ones(3, 6), w), Tensor)
        assert len(made) == 1, f"use {USES.index(use)} read it {len(made)} times"
