"""Claim: a captured block computes what the block computes, or stays as it is for a reason that is named."""

import copy
import random
import re
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_amp._torch import FakeTensorMode
from lightning_amp.footprint.find_blocks import find_blocks
from lightning_amp.graph.guards import signature
from tests.any_module import NAMES, make
from tests.graph.calls import Captures, calls_of, difference
from tests.graph.nasty_blocks import (
    Base,
    Buffer,
    ByValue,
    Chance,
    Compiled,
    Counting,
    Custom,
    Flag,
    GoesBack,
    HasTo,
    Hooked,
    InPlace,
    Leaf,
    Makes,
    Masked,
    Nested,
    Outside,
    Replaces,
    Seeded,
    Settings,
    Shared,
    TensorHook,
    Twice,
    cached_mask,
    of,
    x_of,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def by_graph(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return Captures().run(block, *args, **kwargs)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_the_blocks_of_eight_modules_are_captured_and_exact(name: str) -> None:
    """In float64, dropout on: results, loss, all gradients and buffers, to 1e-10."""
    calls = calls_of(name)
    assert calls
    for call in calls:
        found = Captures().of(call.block, call.args, call.kwargs)
        assert found.reason == "", call.fqn
        assert difference(call.block, by_graph, call.args, call.kwargs) == ""


def test_blocks_of_one_class_with_unlike_children_are_captured_apart() -> None:
    """Children without settings, and a hook on one of them: each has its own numbers, or its own reason."""
    captures, x = Captures(), torch.randn(3, 4)
    blocks = [nn.Sequential(nn.Linear(4, 4), last) for last in (nn.Sigmoid(), nn.Tanh(), nn.Tanh(), nn.Tanh())]
    blocks[2][0].register_forward_hook(lambda module, args, result: result + 1)
    for block in (*blocks, *blocks[::-1]):
        assert torch.equal(captures.run(block, x), block(x))
    reasons = [captures.of(block, (x,), {}).reason for block in blocks]
    assert [bool(reason) for reason in reasons] == [False, False, True, False]
    assert "its submodule '0' has hooks" in reasons[2]
    assert len(captures.all) == 3


def test_blocks_are_captured_once_per_class_and_signature() -> None:
    module, _ = make("evoformer")
    assert sorted(find_blocks(module)) == ["blocks.0", "blocks.1"]
    captures, (call, *_) = Captures(), calls_of("evoformer")
    twin = copy.deepcopy(call.block)
    assert captures.of(call.block, call.args, call.kwargs) is captures.of(twin, call.args, call.kwargs)
    captures.of(call.block.eval(), call.args, call.kwargs)
    assert len(captures.all) == 2


@pytest.mark.parametrize("kind", [Base, Flag, InPlace, Buffer, Nested, Shared])
def test_nasty_blocks_are_captured_exactly(kind: type[Base]) -> None:
    """Gradients that are None included: `unused` has none."""
    found = Captures().of(kind(), (x_of().detach(),), {})
    assert found.reason == ""
    assert difference(kind(), by_graph, (x_of(),)) == ""
    assert found.changed == {InPlace: ("input 0",), Buffer: ("count",)}.get(kind, ())


@pytest.mark.parametrize(("kind", "reason"), [
    (ByValue, "its forward cannot run on fake tensors: .*DataDependent|GuardOnDataDependent"),
    (Counting, "its forward changes the attribute 'calls'"),
    (Chance, "its forward draws from Python's or NumPy's random numbers"),
    (Custom, "the autograd Function 'Twice', whose backward is its own"),
    (Outside, "uses a tensor that is neither an argument nor a parameter nor a buffer"),
    (Hooked, r"its submodule 'layer' has hooks \(forward_hooks\)"),
    (TensorHook, "its forward calls 'register_hook' of a tensor, which is Python"),
    (Compiled, "its submodule 'inner' is compiled"),
    (Replaces, "its forward replaces its parameter or buffer 'count'; write to it in place"),
    (Makes, "its forward replaces its parameter or buffer 'mask'"),
    (Seeded, "its forward sets the seed of torch's random numbers"),
    (GoesBack, "its forward calls 'backward' of a tensor, which is Python"),
    (Leaf, "its forward calls 'requires_grad_' of a tensor, which is Python"),
])  # fmt: skip
def test_what_a_graph_would_get_wrong_stays_as_it_is(kind: type[Base], reason: str) -> None:
    block = kind()
    found = Captures().of(block, (x_of(),), {})
    assert found.graph is None
    assert re.search(reason, found.reason), found.reason
    random.seed(0)
    right = kind.forward(block, x_of()) if kind is Hooked else block(x_of())
    if kind is Counting:
        block.calls -= 1
    block.count.zero_()
    random.seed(0)
    assert torch.equal(Captures().run(block, x_of()), right)


def test_a_tensor_that_is_told_what_it_knows_is_no_reason() -> None:
    def forward(block: Any, x: Tensor) -> Tensor:
        mask = torch.zeros_like(x)
        mask.requires_grad = False
        return block.layer(x + block.count.requires_grad_(False)) + mask

    captures, block = Captures(), of("Told", forward)()
    assert torch.equal(captures.run(block, x_of()), block(x_of()))
    assert [found.reason for found in captures.all] == [""]


def test_what_functions_remember_of_a_capture_is_forgotten() -> None:
    """A mask without values would be what the block itself finds from then on."""
    block = Masked()
    # a full cache does not grow
    cached_mask(3)
    found = Captures()
    assert found.of(block, (x_of(),), {}).reason == ""
    assert type(cached_mask(4)) is Tensor
    assert torch.equal(found.run(block, x_of()), block(x_of()))


def test_an_attribute_named_to_is_a_reason() -> None:
    found = Captures().of(HasTo(), (x_of(),), {})
    assert found.reason == "it has an attribute 'to', which hides the method of that name"


def test_a_branch_that_changes_is_captured_again() -> None:
    captures, block = Captures(), Flag()
    for flag in (True, False, True):
        block.flag = flag
        assert torch.equal(captures.run(block, x_of()), block(x_of()))
    assert len(captures.all) == 2


@pytest.mark.parametrize("change", [
    lambda block: (block.eval(), x_of()),
    lambda block: (block, x_of(5)),
    lambda block: (block.double(), x_of().double()),
    lambda block: (block, x_of().detach()),
    lambda block: (block, x_of(4).t()),
    lambda block: (block.requires_grad_(False), x_of()),
])  # fmt: skip
def test_every_guard_asks_for_another_graph(change: Any) -> None:
    captures, block = Captures(), Base()
    captures.of(block, (x_of(),), {})
    block, x = change(block)
    assert torch.equal(captures.run(block, x), block(x))
    assert captures.run(block, x).requires_grad == block(x).requires_grad
    assert len(captures.all) == 2


def test_the_gradient_mode_and_autocast_are_guards() -> None:
    captures, block = Captures(), Base()
    captures.of(block, (x_of(),), {})
    with torch.no_grad():
        captures.of(block, (x_of(),), {})
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(captures.run(block, x_of()), block(x_of()))
    assert len(captures.all) == 3


def test_devices_of_one_type_are_told_apart_and_sparse_arguments_are_a_reason() -> None:
    with FakeTensorMode():
        keys = [signature(Base(), (torch.empty(2, device=f"cuda:{k}"),), {}) for k in (0, 1)]
    assert keys[0] != keys[1]
    assert "not dense" in Captures().of(Base(), (torch.eye(4).to_sparse(),), {}).reason


def test_the_default_dtype_is_a_guard() -> None:
    """A number of float32 is another one than that of float64."""
    captures, block, x = Captures(), of("Tenth", lambda m, x: m.layer(x) * torch.tensor(0.1))().double(), x_of()
    captures.of(block, (x.double(),), {})
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(captures.run(block, x.double()), block(x.double()))
    finally:
        torch.set_default_dtype(torch.float32)


def test_one_and_true_have_graphs_of_their_own() -> None:
    class Named(Base):
        def forward(self, x: Tensor, times: Any) -> Tensor:
            return self.layer(x) * (2 if times is True else times)

    captures, block, x = Captures(), Named(), x_of()
    for times in (1, True, 1.0):
        assert torch.equal(captures.run(block, x, times), block(x, times))


def test_arguments_that_are_one_tensor_have_a_graph_of_their_own() -> None:
    class Two(Base):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.layer(x if x is y else x + y)

    captures, block, x = Captures(), Two(), x_of()
    assert torch.equal(captures.run(block, x, x), block(x, x))
    assert torch.equal(captures.run(block, x, x_of()), block(x, x_of()))


class Told(Base):
    """Reads an object of its own, and one that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()

    def forward(self, x: Tensor, more: Settings) -> Tensor:
        return self.layer(x) * self.settings.scale * more.scale + float(more.seen.sum())


class Writes(Base):
    def forward(self, x: Tensor, more: Any) -> Tensor:
        if isinstance(more, dict):
            more["older"] = x
        else:
            more.scale += 1
        return self.layer(x)


class Draws(Base):
    def forward(self, x: Tensor, more: Any) -> Tensor:
        return self.layer(x) * float(more.random())


class WritesOwn(Told):
    def forward(self, x: Tensor, more: Settings) -> Tensor:
        self.settings.seen += 1
        return self.layer(x)


def test_what_objects_hold_is_a_guard() -> None:
    captures, block, more = Captures(), Told(), Settings()

    def as_it_is() -> bool:
        return torch.equal(captures.run(block, x_of(), more), block(x_of(), more))

    assert as_it_is()
    assert as_it_is()
    assert len(captures.all) == 1
    block.settings.scale = 3.0
    assert as_it_is()
    more.scale = 5.0
    assert as_it_is()
    more.seen[0] = 7.0
    assert as_it_is()
    assert len(captures.all) == 4


@pytest.mark.parametrize(("block", "more", "reason"), [
    (Writes(), Settings(), "its forward changes what an argument of type 'Settings' holds"),
    (Writes(), {"x": 1}, "its forward changes a list or a dictionary that it is called with"),
    (WritesOwn(), Settings(), "its forward changes the attribute 'settings'"),
    (Draws(), np.random.default_rng(0), "its forward changes what an argument of type 'Generator' holds"),
    (Base(), threading.Lock(), "it is called with a 'lock', which cannot be copied"),
])  # fmt: skip
def test_what_a_forward_writes_into_objects_is_a_reason_and_a_capture_writes_nothing(
    block: Any, more: Any, reason: str
) -> None:
    found = Captures().of(block, (x_of(), more), {})
    assert found.graph is None
    assert found.reason == reason
    if isinstance(more, Settings):
        assert more.scale == 2.0
        assert not more.seen.any()
    elif isinstance(more, dict):
        assert more == {"x": 1}


@pytest.mark.parametrize(("kind", "form", "where"), [
    (Base, lambda b, x: b(x) * (1 + 1e-9), "result 0"),
    (Base, lambda b, x: b(Twice.apply(x)), "gradient of input 0"),
    (Buffer, lambda b, x: b.layer(x) * (b.count + 1), "buffer count"),
    (Base, lambda b, x: b(x) + 0 * b.unused.weight.sum(), "gradient of unused.weight"),
    (Base, lambda b, x: b(x)[:, :3], "result 0 of the shape"),
])  # fmt: skip
def test_a_wrong_form_is_seen(kind: type[Base], form: Any, where: str) -> None:
    """The check itself: results, gradients, buffers."""
    assert difference(kind(), form, (x_of(),)).startswith(where)
