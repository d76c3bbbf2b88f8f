"""Claim: a captured block computes what the block computes, or stays as it is for a reason that is named."""

import copy
import random
import re
import threading
import weakref
from collections import deque
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_amp._torch import FakeTensorMode
from lightning_amp.footprint.copies.quick_fakes import QuickFakes
from lightning_amp.footprint.find_blocks import find_blocks
from lightning_amp.graph.guards import signature
from tests.any_module import NAMES, make
from tests.graph.calls import Captures, calls_of, difference
from tests.odd_modules.collection import forwards
from tests.odd_modules.collection.blocks import DIM
from tests.odd_modules.collection.hooks import Compiled, Custom, Hooked
from tests.odd_modules.collection.state import Counter, InPlaceInput, OtherBuffer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Settings:
    """An object that is no module: what HuggingFace's blocks hold as `config`, or get as a cache."""

    def __init__(self) -> None:
        self.scale, self.inner, self.seen = 2.0, {"deep": [self]}, np.zeros(2)


def x_of(rows: int = 3) -> Tensor:
    return torch.randn(rows, DIM, generator=torch.Generator().manual_seed(0)).requires_grad_()


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


@pytest.mark.parametrize(
    "kind", [forwards.Base, forwards.Flag, InPlaceInput, forwards.Buffer, forwards.Nested, forwards.Shared]
)
def test_nasty_blocks_are_captured_exactly(kind: type[forwards.Base]) -> None:
    """Gradients that are None included: `unused` has none."""
    found = Captures().of(kind(), (x_of().detach(),), {})
    assert found.reason == ""
    assert difference(kind(), by_graph, (x_of(),)) == ""
    assert found.changed == {InPlaceInput: ("input 0",), forwards.Buffer: ("count",)}.get(kind, ())


@pytest.mark.parametrize(("kind", "reason"), [
    (forwards.ByValue, "its forward cannot run on fake tensors: .*DataDependent|GuardOnDataDependent"),
    (Counter, "its forward changes the attribute 'calls'"),
    (forwards.Chance, "its forward draws from Python's or NumPy's random numbers"),
    (Custom, "the autograd Function 'Scale', whose backward is its own"),
    (forwards.Outside, "uses a tensor that is neither an argument nor a parameter nor a buffer"),
    (Hooked, r"its submodule 'a' has hooks \(forward_hooks\)"),
    (forwards.TensorHook, "its forward calls 'register_hook' of a tensor, which is Python"),
    (Compiled, "its submodule 'a' is compiled"),
    (OtherBuffer, "its forward replaces its parameter or buffer 'mean'; write to it in place"),
    (forwards.Makes, "its forward replaces its parameter or buffer 'mask'"),
    (forwards.Seeded, "its forward sets the seed of torch's random numbers"),
    (forwards.GoesBack, "its forward calls 'backward' of a tensor, which is Python"),
    (forwards.Checkpointed, r"runs under torch.utils.checkpoint by itself; switch that off"),
    (forwards.Leaf, "its forward calls 'requires_grad_' of a tensor, which is Python"),
])  # fmt: skip
def test_what_a_graph_would_get_wrong_stays_as_it_is(kind: type[forwards.Base], reason: str) -> None:
    block = kind()
    twin = copy.deepcopy(block)
    found = Captures().of(block, (x_of(),), {})
    assert found.graph is None
    assert re.search(reason, found.reason), found.reason
    random.seed(0)
    right = twin(x_of())
    random.seed(0)
    assert torch.equal(Captures().run(block, x_of()), right)


def test_a_tensor_that_is_told_what_it_knows_is_no_reason() -> None:
    def forward(block: Any, x: Tensor) -> Tensor:
        mask = torch.zeros_like(x)
        mask.requires_grad = False
        return block.layer(x + block.count.requires_grad_(False)) + mask

    captures, block = Captures(), forwards.of("Told", forward)()
    assert torch.equal(captures.run(block, x_of()), block(x_of()))
    assert [found.reason for found in captures.all] == [""]


def test_what_functions_remember_of_a_capture_is_forgotten() -> None:
    """A mask without values would be what the block itself finds from then on."""
    block = forwards.Masked()
    # a full cache does not grow
    forwards.cached_mask(3)
    found = Captures()
    assert found.of(block, (x_of(),), {}).reason == ""
    assert type(forwards.cached_mask(DIM)) is Tensor
    assert torch.equal(found.run(block, x_of()), block(x_of()))


def test_an_attribute_named_to_is_a_reason() -> None:
    found = Captures().of(forwards.HasTo(), (x_of(),), {})
    assert found.reason == "it has an attribute 'to', which hides the method of that name"


def test_a_branch_that_changes_is_captured_again() -> None:
    captures, block = Captures(), forwards.Flag()
    for flag in (True, False, True):
        block.flag = flag
        assert torch.equal(captures.run(block, x_of()), block(x_of()))
    assert len(captures.all) == 2


@pytest.mark.parametrize("change", [
    lambda block: (block.eval(), x_of()),
    lambda block: (block, x_of(5)),
    lambda block: (block.double(), x_of().double()),
    lambda block: (block, x_of().detach()),
    lambda block: (block, x_of(DIM).t()),
    lambda block: (block.requires_grad_(False), x_of()),
])  # fmt: skip
def test_every_guard_asks_for_another_graph(change: Any) -> None:
    captures, block = Captures(), forwards.Base()
    captures.of(block, (x_of(),), {})
    block, x = change(block)
    assert torch.equal(captures.run(block, x), block(x))
    assert captures.run(block, x).requires_grad == block(x).requires_grad
    assert len(captures.all) == 2


def test_the_gradient_mode_and_autocast_are_guards() -> None:
    captures, block = Captures(), forwards.Base()
    captures.of(block, (x_of(),), {})
    with torch.no_grad():
        captures.of(block, (x_of(),), {})
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(captures.run(block, x_of()), block(x_of()))
    assert len(captures.all) == 3


def test_devices_of_one_type_are_told_apart_and_sparse_arguments_are_a_reason() -> None:
    with FakeTensorMode():
        keys = [signature(forwards.Base(), (torch.empty(2, device=f"cuda:{k}"),), {}) for k in (0, 1)]
    assert keys[0] != keys[1]
    assert "not dense" in Captures().of(forwards.Base(), (torch.eye(DIM).to_sparse(),), {}).reason


def test_the_default_dtype_is_a_guard() -> None:
    """A number of float32 is another one than that of float64."""
    captures, block, x = (
        Captures(),
        forwards.of("Tenth", lambda m, x: m.layer(x) * torch.tensor(0.1))().double(),
        x_of(),
    )
    captures.of(block, (x.double(),), {})
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(captures.run(block, x.double()), block(x.double()))
    finally:
        torch.set_default_dtype(torch.float32)


def test_one_and_true_have_graphs_of_their_own() -> None:
    class Named(forwards.Base):
        def forward(self, x: Tensor, times: Any) -> Tensor:
            return self.layer(x) * (2 if times is True else times)

    captures, block, x = Captures(), Named(), x_of()
    for times in (1, True, 1.0):
        assert torch.equal(captures.run(block, x, times), block(x, times))


def test_arguments_that_are_one_tensor_have_a_graph_of_their_own() -> None:
    class Two(forwards.Base):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.layer(x if x is y else x + y)

    captures, block, x = Captures(), Two(), x_of()
    assert torch.equal(captures.run(block, x, x), block(x, x))
    assert torch.equal(captures.run(block, x, x_of()), block(x, x_of()))


class Told(forwards.Base):
    """Reads an object of its own, and one that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()

    def forward(self, x: Tensor, more: Settings) -> Tensor:
        return self.layer(x) * self.settings.scale * more.scale + float(more.seen.sum())


class Writes(forwards.Base):
    def forward(self, x: Tensor, more: Any) -> Tensor:
        if isinstance(more, dict):
            more["older"] = x
        else:
            more.scale += 1
        return self.layer(x)


class KeysCache(Settings):
    """An object as language models return it."""


class Returns(forwards.Base):
    def forward(self, x: Tensor, more: Any) -> Any:
        return self.layer(x), more


class Draws(forwards.Base):
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


class Kinds(Enum):
    A = 1


def test_a_result_may_hold_a_constant() -> None:
    captures, block, x = Captures(), Returns(), x_of()
    assert captures.of(block, (x, Kinds.A), {}).reason == ""
    found, kind = captures.run(block, x, Kinds.A)
    assert kind is Kinds.A
    assert torch.equal(found, block.layer(x))


@pytest.mark.parametrize(("block", "more", "reason"), [
    (Writes(), Settings(), "its forward changes what an argument of type 'Settings' holds"),
    (Writes(), {"x": 1}, "its forward changes a list or a dictionary that it is called with"),
    (WritesOwn(), Settings(), "its forward changes the attribute 'settings'"),
    (Returns(), KeysCache(), "its result holds an object of type 'KeysCache' (use_cache=False leaves it out)"),
    (Draws(), np.random.default_rng(0), "its forward changes what an argument of type 'Generator' holds"),
    (forwards.Base(), threading.Lock(), "it is called with a 'lock', which cannot be copied"),
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


class Doubled(torch.autograd.Function):
    """A gradient that is wrong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@pytest.mark.parametrize(("kind", "form", "where"), [
    (forwards.Base, lambda b, x: b(x) * (1 + 1e-9), "result 0"),
    (forwards.Base, lambda b, x: b(Doubled.apply(x)), "gradient of input 0"),
    (forwards.Buffer, lambda b, x: b.layer(x) * (b.count + 1), "buffer count"),
    (forwards.Base, lambda b, x: b(x) + 0 * b.unused.weight.sum(), "gradient of unused.weight"),
    (forwards.Base, lambda b, x: b(x)[:, :3], "result 0 of the shape"),
])  # fmt: skip
def test_a_wrong_form_is_seen(kind: type[forwards.Base], form: Any, where: str) -> None:
    assert difference(kind(), form, (x_of(),)).startswith(where)


# Claim: what a graph depends on besides tensors is a part of its key, or a reason for none.


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: float = 2.0) -> None:
        self.scale = scale


class Private(forwards.Base):
    """Multiplies by a number that it reads of something that it holds under a private name."""

    def __init__(self, held: Any, read: Any) -> None:
        super().__init__()
        self._held, self._read = held, read

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self._read(self._held)


def closed(numbers: list[float]) -> Any:
    return lambda: numbers[0]


def test_a_call_of_a_partial_changes_no_attribute() -> None:
    """CPython writes an address into a `partial` with keywords when it is called."""
    captures, seen = Captures(), []
    block = forwards.of("Act", lambda m, x: m.act(m.layer(x)))()
    block.act = partial(nn.functional.leaky_relu, negative_slope=0.2)
    for _ in range(2):
        seen.append(captures.of(block, (x_of(),), {}))
        block(x_of())
    assert [one.reason for one in seen] == ["", ""]
    assert seen[0] is seen[1]


LATER = Settings()


@pytest.mark.parametrize(("held", "read", "change"), [
    (Settings(), lambda o: o.scale, lambda o: setattr(o, "scale", 3.0)),
    (Slotted(), lambda o: o.scale, lambda o: setattr(o, "scale", 3.0)),
    ([nn.Dropout(0.2)], lambda o: o[0].p, lambda o: setattr(o[0], "p", 0.4)),
    ([nn.Sequential(nn.Dropout(0.2))], lambda o: 2 + o[0][0].training, lambda o: o[0].eval()),
    (deque([2.0]), lambda o: o[0], lambda o: o.append(o.popleft() + 1)),
    (bytearray([2]), lambda o: o[0], lambda o: o.append(o.pop() + 1)),
    (partial(max, Slotted()), lambda o: o.args[0].scale, lambda o: setattr(o.args[0], "scale", 3.0)),
    (LATER.__eq__, lambda o: o.__self__.scale, lambda o: setattr(LATER, "scale", 3.0)),
    (weakref.ref(LATER), lambda o: o().scale, lambda o: setattr(LATER, "scale", 5.0)),
    (closed(later := [2.0]), lambda o: o(), lambda o: later.append(later.pop() + 1)),
    ({1: 2.0}, lambda o: 3.0 if "1" in o else 2.0, lambda o: o.update({"1": o.pop(1)})),
])  # fmt: skip
def test_what_a_block_holds_under_a_private_name_is_a_guard(held: Any, read: Any, change: Any) -> None:
    """Changed in place, or replaced by another one."""
    captures, block = Captures(), Private(held, read)

    def as_it_is() -> bool:
        return torch.equal(captures.run(block, x_of()), block(x_of()))

    assert as_it_is()
    assert as_it_is()
    assert len(captures.all) == 1
    change(held)
    assert as_it_is()
    block._held, block._read = [7.0], lambda o: o[0]
    assert as_it_is()
    assert [found.reason for found in captures.all] == [""] * 3


def caught(read: Any, of: Any) -> float:
    try:
        return float(read(of))
    except Exception:
        return 3.0


@pytest.mark.parametrize(("held", "read", "reason"), [
    ([torch.tensor(2.0)], lambda o: o[0].item(), "reads a number of a tensor that is no argument"),
    (torch.tensor(2.0), float, "reads a number of a tensor that is no argument"),
    ([torch.ones(2), torch.ones(2)], lambda o: 2.0 if torch.equal(*o) else 3.0, "reads a number of a tensor"),
    (torch.tensor(2.0), lambda o: caught(float, o), "reads a number of a tensor that is no argument"),
    (torch.tensor(2), lambda o: torch.ones(4, 4)[1, :o].sum(), "reads a number of a tensor that is no argument"),
    (torch.tensor(2), lambda o: torch.ones(4, 4).select(1, o).sum(), "reads a number of a tensor that is no argument"),
    (torch.tensor(2.0), lambda o: torch.full((DIM,), o), "reads a number of a tensor that is no argument"),
    (torch.tensor(2.0), lambda o: torch.add(torch.ones(DIM), 1.0, alpha=o), "reads a number of a tensor"),
    (random.Random(0), lambda o: o.random(), "changes the attribute '_held'"),
    (np.random.default_rng(0), lambda o: o.random(), "changes the attribute '_held'"),
    (np.random.RandomState(0), lambda o: o.rand(), "changes the attribute '_held'"),
    ([1.0], lambda o: o.append(2.0) or 2.0, "changes the attribute '_held'"),
])  # fmt: skip
def test_what_it_holds_that_may_change_unseen_is_a_reason(held: Any, read: Any, reason: str) -> None:
    found = Captures().of(Private(held, read), (x_of(),), {})
    assert found.graph is None
    assert re.search(reason, found.reason), found.reason


@pytest.mark.parametrize("held", [np.random.default_rng(0), random.choice, np.random.uniform, random.SystemRandom()])
def test_what_is_drawn_elsewhere_is_no_guard(held: Any) -> None:
    captures, block = Captures(), Private(held, lambda o: 2.0)
    for _ in range(3):
        assert torch.equal(captures.run(block, x_of()), block(x_of()))
        random.random(), np.random.rand(), getattr(held, "random", random.random)()
    assert len(captures.all) == 1


def test_a_list_may_hold_itself() -> None:
    held: list[Any] = [2.0, {}]
    held[1]["all"] = held
    blocks, captures = [Private(held, lambda o: o[1]["all"][0]) for _ in range(2)], Captures()
    for block in blocks:
        assert torch.equal(captures.run(block, x_of()), block(x_of()))
    held[0] = 3.0
    assert torch.equal(captures.run(blocks[0], x_of()), blocks[0](x_of()))


def test_blocks_that_hold_their_own_parts_in_lists_share_a_graph() -> None:
    class Listed(forwards.Base):
        def __init__(self) -> None:
            super().__init__()
            self._parts = [self.layer, self.layer.weight]
            self.rnn = nn.LSTM(DIM, DIM)

        def forward(self, x: Tensor) -> Any:
            return self.rnn(self._parts[0](x))[0]  # type: ignore[operator]

    captures = Captures()
    for block in (Listed(), Listed()):
        assert torch.equal(captures.run(block, x_of()), block(x_of()))
    assert len(captures.all) == 1


class Cache:
    """What a model passes from block to block, with tensors in it."""

    def __init__(self, kept: Tensor) -> None:
        self.kept = kept


def test_an_object_with_tensors_is_copied_without_their_mode(monkeypatch: Any) -> None:
    """A copied mode would have copies of torch's references to storages, and release their memory twice."""
    block = forwards.of("Kept", lambda m, x, cache: m.layer(x) + cache.kept)()

    def refuse(*_: Any) -> None:
        raise AssertionError("a reference to a storage was copied")

    monkeypatch.setattr(StorageWeakRef, "__deepcopy__", refuse, raising=False)
    mode = QuickFakes()
    cache = Cache(mode.from_tensor(torch.ones(DIM)))
    found = Captures().of(block, (mode.from_tensor(x_of()), cache), {})
    assert "cannot be copied" not in found.reason
    assert copy.deepcopy(cache).kept.fake_mode is mode  # type: ignore[attr-defined]
