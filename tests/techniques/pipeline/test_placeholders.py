"""Claim: no operator takes a parameter that another rank holds for a number, and a module with it is a module."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_amp._torch import has_no_values
from lightning_amp.errors import InstallError
from lightning_amp.techniques.ranks.placeholders import Absent, AbsentParameter, Placeholders, absent_parameter

SQUARE = torch.randn(3, 3)


def added_in_place(p: Tensor) -> Tensor:
    loss = SQUARE.clone()
    loss += p
    return loss


OPERATORS: dict[str, Callable[[Tensor], object]] = {
    "product": lambda p: SQUARE @ p,
    "layer": lambda p: F.linear(SQUARE, p),
    "table": lambda p: F.embedding(torch.tensor([0, 2]), p),
    "added in place": added_in_place,
    "a sum of it": lambda p: SQUARE.sum().add_(p.square().sum()),
    "list": lambda p: torch._foreach_add_([SQUARE.clone()], [p]),
    "copy": lambda p: SQUARE.clone().copy_(p),
    "cat": lambda p: torch.cat([SQUARE, p]),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_no_operator_reads_it_beside_values(name: str) -> None:
    absent = absent_parameter(nn.Parameter(SQUARE))
    with pytest.raises(InstallError, match="a parameter that another rank holds"):
        OPERATORS[name](absent)


def test_what_is_computed_from_it_alone_is_absent_too() -> None:
    absent = absent_parameter(nn.Parameter(SQUARE))
    penalty = absent.square().sum() * 2
    assert isinstance(penalty, Absent)
    assert has_no_values(penalty)
    assert isinstance(absent.shape, torch.Size)
    with pytest.raises(InstallError, match="another rank holds"):
        SQUARE.sum() + penalty
    with Placeholders(torch.device("cpu")):
        assert has_no_values(SQUARE @ absent)


def test_what_stands_for_a_sparse_tensor_of_inference_mode_has_a_version() -> None:
    with torch.inference_mode(), Placeholders(torch.device("cpu")) as mode:
        stand = mode.of(SQUARE.to_sparse())
        assert stand.is_sparse
        assert not stand.is_inference()


def test_a_module_with_it_is_a_module() -> None:
    layer = nn.Linear(3, 3)
    layer._parameters["weight"] = absent = absent_parameter(layer.weight)
    assert isinstance(absent, nn.Parameter)
    assert absent.is_meta
    assert absent.requires_grad
    layer.load_state_dict({"weight": absent, "bias": SQUARE[0]})
    nn.init.normal_(layer.weight)
    layer.requires_grad_(False).requires_grad_(True)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer.bias.sum().backward()
    optimizer.step()
    assert list(optimizer.state_dict()["state"]) == [1]
    assert isinstance(layer.double().weight, AbsentParameter)
    assert has_no_values(copy.deepcopy(layer).weight)
    assert torch.empty_like(absent, device="cpu", requires_grad=False).sum().device.type == "cpu"
