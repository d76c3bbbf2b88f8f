"""Claim: functions whose backward pass is written by hand refuse a second derivative, which would lack what depends on
saved tensors; torch's own decorator says nothing where the gradient that comes in is a constant.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_amp.derivatives import first_only
from lightning_amp.errors import ModelError
from lightning_amp.sharding.attention.ring import _Ring
from lightning_amp.sharding.ops.attention import _SplitColumns
from lightning_amp.sharding.ops.products import _GatheredProduct
from lightning_amp.techniques.hic.attention.banded_softmax import _BandedSoftmax
from lightning_amp.techniques.hic.attention.sdpa import _Sdpa
from lightning_amp.techniques.hic.features import _LogSoftmax
from lightning_amp.techniques.hic.strata.streamed_stratum import _Gate, _Project


def squared(decorator: Any) -> Any:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        @decorator
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad * ctx.saved_tensors[0]

    return Square.apply


def test_a_constant_gradient_is_refused_too() -> None:
    x = torch.ones(3, requires_grad=True)
    (lost,) = torch.autograd.grad(squared(once_differentiable)(x).sum(), x, create_graph=True)
    assert not lost.requires_grad
    with pytest.raises(ModelError, match=r"create_graph=True\) through a square"):
        torch.autograd.grad(squared(first_only("a square"))(x).sum(), x, create_graph=True)
    (found,) = torch.autograd.grad(squared(first_only("a square"))(x).sum(), x)
    assert torch.equal(found, 2 * x)


@pytest.mark.parametrize("function", [_SplitColumns, _Ring, _BandedSoftmax, _Sdpa, _LogSoftmax, _Gate, _Project])
def test_functions_that_are_not_linear_refuse(function: Any) -> None:
    with pytest.raises(ModelError, match="leave"):
        function.backward(None, torch.ones(1))


def test_a_product_with_a_view_of_a_larger_tensor_refuses() -> None:
    # of the view it has kept a copy
    with pytest.raises(ModelError, match="clone"):
        _GatheredProduct.backward(SimpleNamespace(part=True), torch.ones(1))
