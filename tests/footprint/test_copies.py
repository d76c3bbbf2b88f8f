"""Claim: a profile runs on copies, whatever a module holds: nothing of the module that trains is changed by it."""

import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from queue import Queue
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_amp
from lightning_amp._torch import FakeTensorMode
from lightning_amp.errors import ModelError
from lightning_amp.footprint.chain.chain_of import count_step
from lightning_amp.footprint.copies.fake_copy import copy_of, copy_of_data
from lightning_amp.footprint.copies.restore_state import copied_state
from lightning_amp.footprint.profile_module import profile_module
from lightning_amp.footprint.run.run_settings import RunSettings
from lightning_amp.techniques.sharded_step import tensors
from tests.footprint.test_profile_module import Small, measured
from tests.odd_modules.collection.holding import (
    ByGradients,
    FoundByName,
    KeepsGraphs,
    Locked,
    Loss,
    ObjectWithFunction,
    OfPairs,
    OfRows,
    Options,
    OtherState,
    Pair,
    PartialWithKeyword,
    Patched,
    Plain,
    Rows,
    Waits,
    WeakReference,
    X,
)


def seen(graph: Any, inputs: Any) -> Any:
    raise AssertionError("nothing is compiled for a profile")


@torch.compile(backend=seen)
def doubled(x: Tensor) -> Tensor:
    return 2 * x


class CallsCompiled(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(doubled(batch), batch_idx)


class Average(nn.Module):
    """Made with a model, which its class requires."""

    def __new__(cls, model: nn.Module) -> "Average":
        return super().__new__(cls)

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner, self.others = model, [model]


class HoldsAverage(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.average = Average(nn.Linear(2, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.average.others[0] is self.average.inner
        return super().training_step(batch, batch_idx) + self.average.inner.weight.sum()


KINDS = [Patched, Options, WeakReference, ObjectWithFunction, PartialWithKeyword, KeepsGraphs, Locked]


@pytest.mark.parametrize("kind", [*KINDS, CallsCompiled, FoundByName, HoldsAverage])
def test_whatever_a_module_holds_the_step_is_of_the_copy(kind: type[Plain]) -> None:
    module = kind()
    kept = dict(vars(module))
    found = lightning_amp.profile(module, X)
    assert found.measured == "fake tensors", found.reason
    assert all(p.grad is None for p in module.parameters())
    assert all(vars(module)[name] is value for name, value in kept.items())
    if kind in KINDS:
        assert found.peak_bytes == measured(module, X)


class TiedLate(Small):
    """Its embedding is its head too; both are made in a hook."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def configure_model(self) -> None:
        if not hasattr(self, "embedding"):
            self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
            self.head.weight = self.embedding.weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.embedding(batch)), batch)


def test_parameters_that_hooks_have_tied_stay_tied() -> None:
    found = lightning_amp.profile(TiedLate(), torch.arange(40))
    assert found.by_kind["parameters"] == 4 * 50 * 8
    assert found.peak_bytes == measured(TiedLate(), torch.arange(40))


def test_what_hooks_make_has_its_names() -> None:
    found = lightning_amp.profile(TiedLate(), torch.arange(40))
    assert {"embedding.weight", "embedding.weight.exp_avg"} <= {t.name for t in found.tensors}


def test_a_batch_may_be_any_dataclass() -> None:
    found = lightning_amp.profile(OfPairs(), Pair(X, 2), batch_size=12)
    assert found.measured == "fake tensors", found.reason
    assert found.peak_bytes == lightning_amp.profile(OfPairs(), Pair(torch.cat([X, X]), 2)).peak_bytes


def test_tensors_of_any_dataclass_have_paths() -> None:
    """As a technique that splits samples names them; one with an InitVar was an error."""
    assert dict(tensors({"pair": Pair(X, 2)})).keys() == {"pair.x", "pair.y"}


def test_what_a_dataclass_derives_of_its_rows_is_derived_of_the_new_ones() -> None:
    found = lightning_amp.profile(OfRows(), Rows(X), batch_size=600)
    assert found.peak_bytes == lightning_amp.profile(OfRows(), Rows(torch.cat([X] * 100))).peak_bytes


def test_a_queue_is_refused_for_nothing_is_at_the_other_end_of_a_copy() -> None:
    with pytest.raises(ModelError, match="cannot be copied"):
        lightning_amp.profile(Waits(), X)


def test_a_copied_condition_has_a_lock_of_its_own() -> None:
    module = Locked()
    module.shared = threading.Condition(module.lock)
    twin = copy_of(module, None)
    with module.condition, module.shared:
        assert not twin.lock.locked()
        assert twin.shared.acquire(blocking=False)
        assert twin.lock.locked()
        with twin.condition:
            assert vars(twin.condition)["_lock"] is not vars(module.condition)["_lock"]


class Record:
    looked_at = 0

    def __getattribute__(self, name: str) -> Any:
        Record.looked_at += name == "__dict__"
        return super().__getattribute__(name)


def test_long_lists_and_sparse_tensors_of_a_data_module_are_shared() -> None:
    data = pl.LightningDataModule()
    data.records, data.edges = [Record() for _ in range(1000)], torch.eye(6).to_sparse()  # type: ignore[attr-defined]
    Record.looked_at = 0
    module = Plain()
    twin: Any = copy_of_data(data, module, copy_of(module, None), None)
    assert Record.looked_at == 0
    assert twin.records is not data.records  # type: ignore[attr-defined]
    assert twin.edges is data.edges  # type: ignore[attr-defined]


def returns(value: Any) -> Callable[[], Any]:
    return lambda: value


def test_a_function_that_holds_what_cannot_be_copied_shares_it_whole() -> None:
    held: list[Any] = [1, Queue(), 2]
    module = Plain()
    module.one, module.two = returns(held), returns(held)
    twin = copy_of(module, None)
    assert twin.one() is held
    assert twin.two() is held


def test_a_module_may_have_other_state_than_tensors() -> None:
    assert lightning_amp.profile(OtherState(), X).noted


class Counting(pl.LightningDataModule):
    """Remembers what its hooks have seen, in containers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.set, self.deque, self.counter = {0}, deque([0], maxlen=3), Counter("a")
        self.by_default: dict[str, list[int]] = defaultdict(list)
        self.ordered, self.long = OrderedDict(a=[1]), [0] * 100

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.set.add(1)
        self.deque.append(1)
        self.counter["a"] += 1
        self.by_default["a"].append(1)
        self.ordered["a"].append(2)
        self.long.append(1)
        return batch


def test_what_a_data_module_remembers_stays() -> None:
    data = Counting()
    profile_module(Plain(), X, run_settings=RunSettings(datamodule=data))
    assert (data.set, data.deque, data.counter, data.by_default) == ({0}, deque([0]), Counter("a"), {})
    assert (data.ordered, data.long) == (OrderedDict(a=[1]), [0] * 100)


def test_containers_that_hold_themselves_and_objects_that_cannot_be_copied() -> None:
    class Refuses(nn.Module):
        def __reduce_ex__(self, _: Any) -> Any:
            raise TypeError

    class One:
        def __init__(self) -> None:
            self.refuses, self.names, self.method = Refuses(), ["a"], Refuses().forward

    key = Loss(torch.sum)
    assert key in copied_state({key}, {})
    assert key in copied_state([key, {key}], {})[1]
    held: list[Any] = [1]
    held += [held, {"held": held}]
    copied = copied_state(held, {})
    assert copied is not held
    assert copied[1] is copied
    assert copied[2]["held"] is copied
    one = One()
    both = copied_state([one, one.names], {})
    assert both[0] is not one
    assert both[0].names is both[1]
    assert both[0].names is not one.names
    assert both[0].method == one.method


def test_a_copy_of_what_is_compiled_in_place_counts_as_compiled() -> None:
    module = Small(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)))
    module.net[1].compile(backend=seen)  # type: ignore[index]
    chain = count_step(module, (torch.randn(4, 5), torch.arange(4) % 3), []).chain
    assert [("compiled" in block.fixed, block.fqn) for block in chain.blocks] == [
        (False, "net.0"), (True, "net.1"), (False, "net.2")
    ]  # fmt: skip


class Graph(Plain):
    def __init__(self, layout: torch.layout, held: bool) -> None:
        super().__init__()
        self.register_buffer("edges", torch.eye(6).to_sparse(layout=layout) if held else None)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        edges, x = batch if self.edges is None else (self.edges, batch)
        return super().training_step(edges @ x, batch_idx)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_have_their_entries(layout: torch.layout) -> None:
    held = Graph(layout, True)
    assert lightning_amp.profile(held, X).peak_bytes == measured(copy_of(held, None), X)
    given = (torch.eye(6).to_sparse(layout=layout).clone(), X)
    found = lightning_amp.profile(Graph(layout, False), given)
    assert "no entries without values" in found.reason
    assert found.peak_bytes == measured(Graph(layout, False), given)


class OwnCopy(nn.Module):
    """Says by itself what a copy of it is."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.shared, self.net = shared, nn.Linear(8, 8)
        weight = [2.0]
        self.net.forward = MethodType(lambda layer, x: F.linear(x, layer.weight) * weight[0], self.net)  # type: ignore[method-assign]
        self.net.compile(backend=seen)
        object.__setattr__(self.net, "parent", weakref.ref(self))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def __deepcopy__(self, memo: Any) -> "OwnCopy":
        return self if self.shared else OwnCopy(False)


@pytest.mark.parametrize("shared", [True, False])
def test_a_module_that_copies_itself_stays_as_it_is(shared: bool) -> None:
    module = Plain()
    module.net = OwnCopy(shared)  # type: ignore[assignment]
    before = [dict(vars(child)) for child in module.modules()]
    tensors = [*module.parameters()]
    lightning_amp.profile(module, X)
    for child, kept in zip(module.modules(), before, strict=True):
        assert all(vars(child)[name] is value for name, value in kept.items())
    assert all(a is b for a, b in zip(module.parameters(), tensors, strict=True))


def test_a_part_that_a_copy_shares_is_not_trained_by_a_profile() -> None:
    module = OtherState()
    module.net = OwnCopy(True)  # type: ignore[assignment]
    before = module.net.net.weight.clone()  # type: ignore[operator, union-attr]
    with pytest.raises(ModelError, match="'net.net' itself"):
        lightning_amp.profile(module, X)
    assert torch.equal(module.net.net.weight, before)  # type: ignore[arg-type, union-attr]
    module.net.requires_grad_(False)
    assert lightning_amp.profile(module, X).noted


class OwnParameters(Plain):
    def parameters(self) -> Any:  # type: ignore[override]
        return super().parameters()


class OwnBuffers(Plain):
    def buffers(self, kind: str) -> Any:  # type: ignore[override]
        return []


def test_a_module_may_have_a_method_of_its_parameters() -> None:
    assert lightning_amp.profile(OwnParameters(), X).measured == "fake tensors"
    with pytest.raises(ModelError, match="missing 1 required"):
        lightning_amp.profile(OwnBuffers(), X)


class ByNameWithValues(FoundByName, ByGradients):
    pass


def test_gradients_keep_their_values() -> None:
    module = ByNameWithValues()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    kept = [parameter.grad for parameter in module.parameters()]
    assert lightning_amp.profile(module, X).noted
    for parameter, gradient in zip(module.parameters(), kept, strict=True):
        assert parameter.grad is gradient
        assert gradient.eq(1).all()


def test_an_optimizer_that_a_method_is_bound_to_has_the_parameters_of_the_copy() -> None:
    module = pl.LightningModule()
    module.layer = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(module.parameters())
    # as LightningCLI sets `configure_optimizers` of the command line's optimizer
    module.configure_optimizers = MethodType(partial(lambda self, made: made, made=optimizer), module)  # type: ignore[method-assign]
    twin = copy_of(module, FakeTensorMode())
    found: Any = twin.configure_optimizers()
    assert [*map(id, found.param_groups[0]["params"])] == [*map(id, twin.parameters())]
    assert [*map(id, optimizer.param_groups[0]["params"])] == [*map(id, module.parameters())]
