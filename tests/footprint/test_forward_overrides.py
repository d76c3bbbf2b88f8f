"""Claim: techniques override a module's forward in one order whatever the order in which they come, one in each
position; copies run their own parameters, and the module is in the end what it was.
"""

import copy
import io
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.errors import InstallError
from lightning_amp.footprint.forward_overrides import (
    Override,
    Position,
    add_override,
    overrides_of,
    remove_override,
    set_overrides,
)

X = torch.ones(1, 3)


class Keeps(nn.Linear):
    """Lets nobody set an attribute by setattr."""

    def __setattr__(self, name: str, value: Any) -> None:
        assert name != "forward"
        super().__setattr__(name, value)


def instead(module: nn.Module, x: Tensor) -> Tensor:
    return -type(module).forward(module, x)


def around(factor: int, inside: Any, module: nn.Module, x: Tensor) -> Tensor:
    return factor * inside(module, x) + 1


OVERRIDES = [
    Override("S6", instead),
    Override("recompute", partial(around, 2), Position.TWICE),
    Override("pipeline", partial(around, 3), Position.STAGE),
]


def test_overrides_run_in_their_order_and_leave_nothing() -> None:
    for order in permutations(OVERRIDES):
        layer = Keeps(3, 2)
        plain, before = layer(X), dict(vars(layer))
        for one in order:
            add_override("layer", layer, one)
        assert torch.equal(layer(X), 3 * (2 * -plain + 1) + 1)
        remove_override(layer, OVERRIDES[1])
        assert torch.equal(layer(X), 3 * -plain + 1)
        for one in order:
            remove_override(layer, one)
        assert [*vars(layer).items()] == [*before.items()]


def test_two_techniques_that_compute_one_module_are_refused_by_name() -> None:
    layer = nn.Linear(3, 2)
    add_override("net.0", layer, OVERRIDES[0])
    with pytest.raises(InstallError, match=r"S6 and S7 are both to compute 'net\.0' \(Linear\)"):
        add_override("net.0", layer, Override("S7", instead))
    assert overrides_of(layer) == (OVERRIDES[0],)


def test_a_forward_that_something_else_has_set_is_refused_and_kept() -> None:
    layer = nn.Linear(3, 2)
    layer.forward = theirs = partial(instead, layer)  # type: ignore[method-assign]
    assert overrides_of(layer) is None
    with pytest.raises(InstallError, match="S6 cannot change how 'a' runs, whose `forward` is set on the"):
        add_override("a", layer, OVERRIDES[0])
    assert layer.forward is theirs


def test_copies_run_their_own_parameters() -> None:
    layer = nn.Linear(3, 2)
    for one in OVERRIDES:
        add_override("", layer, one)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    shallow = copy.copy(layer)
    shallow._parameters = {name: nn.Parameter(p.detach().clone()) for name, p in layer.named_parameters()}
    set_overrides(shallow, OVERRIDES)
    for twin in (copy.deepcopy(layer), torch.load(file, weights_only=False), shallow):
        assert torch.equal(twin(X), layer(X))
        with torch.no_grad():
            twin.weight.zero_()
        assert not torch.equal(twin(X), layer(X))
