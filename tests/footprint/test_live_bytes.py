"""LiveBytes is exact: by hand, against torch's own tracker, and nothing leaks."""

import gc
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import lightning_amp
from lightning_amp.footprint.live_bytes import LiveBytes
from tests.optimised import Optimised
from tests.techniques.sharded_cases import fake_mesh

LOSSES = ("mse_loss", "binary_cross_entropy", "soft_margin_loss")


def small_graph() -> tuple[nn.Linear, Tensor]:
    return nn.Linear(4, 6), torch.randn(3, 4)


def training_steps(*, steps: int = 2, checkpointed: bool = False) -> None:
    model = nn.Sequential(nn.Linear(40, 60), nn.GELU(), nn.Linear(60, 7))
    x = torch.ones(300, 40)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for _ in range(steps):
        y = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def measure(body: Callable[[], Any]) -> LiveBytes:
    with LiveBytes() as live:
        body()
    return live


def test_linear_gelu_sum_by_hand() -> None:
    linear, x = small_graph()
    hidden, loss_bytes, weight, bias = 3 * 6 * 4, 4, 6 * 4 * 4, 6 * 4
    with LiveBytes() as live:
        loss = nn.functional.gelu(linear(x)).sum()
        assert live.current == hidden + loss_bytes, "gelu keeps its input, sum keeps nothing"
        assert live.peak == 2 * hidden + loss_bytes, "gelu's output was alive until sum returned"
        live.reset_peak()
        assert live.peak == live.current
        loss.backward()
        assert live.current == loss_bytes + weight + bias
        # gelu's input is dropped before the Linear's gradients are made, so it is not part of the second sum.
        at_gelu = 2 * loss_bytes + 2 * hidden
        at_linear = 2 * loss_bytes + hidden + weight + bias
        assert live.peak == max(at_gelu, at_linear)
        del loss
        linear.zero_grad(set_to_none=True)
        assert live.current == 0


def test_views_in_place_and_out_are_free_and_a_storage_counts_once() -> None:
    with LiveBytes() as live:
        x = torch.empty(10)
        views = [x.view(2, 5), x[3:], x.t(), x.detach(), x.expand(7, 10)]
        x.add_(1)
        torch.mul(x, 2, out=x)
        x.unbind()
        assert live.current == 40
        del x
        assert live.current == 40, "the views keep the storage"
        views.clear()
        assert live.current == 0
        assert live.peak == 40


def test_what_was_there_before_is_free_until_watched() -> None:
    x = torch.empty(10)
    with LiveBytes() as live:
        x.add_(1)
        view = x[1:]
        assert live.current == 0
        live.watch({"batch": [x, (view,)]})
        assert live.current == live.peak == 40
        del x, view
        assert live.current == 0


def test_resized_storages() -> None:
    with LiveBytes() as live:
        x = torch.empty(0)
        torch.add(torch.ones(6), 1, out=x)
        assert live.current == 24
        x.resize_(12)
        assert live.current == 48
        x.untyped_storage().resize_(0)
        assert live.current == 0, "although resizing a storage is no operator"
        x.untyped_storage().resize_(48)
        assert (live.current, live.peak) == (48, 48)
    assert "resize_" not in vars(torch.UntypedStorage), "nothing of the mode is left"


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors_count_their_parts(layout: torch.layout) -> None:
    dense = torch.eye(5)
    made: list[Tensor] = []
    live = measure(lambda: made.append(dense.to_sparse(layout=layout)))
    # The compressed layouts keep one of two rows of coordinates, in a storage of both.
    indices = 2 * 5 * 8 if layout is torch.sparse_coo else 6 * 8 + 2 * 5 * 8
    assert live.current == indices + 5 * 4


def test_nothing_is_kept_alive_and_counting_down_goes_on_outside() -> None:
    with LiveBytes() as live:
        x = torch.ones(1000)
        storage = weakref.ref(x.untyped_storage())
        y = x * 2
    del x
    assert storage() is None, "LiveBytes holds no reference"
    assert live.current == 4000
    del y
    assert live.current == 0
    ref = weakref.ref(live)
    del live
    gc.collect()
    assert ref() is None


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("order", ["inside fake", "outside fake", "meta"])
def test_fake_and_meta_tensors_count_as_real_ones(order: str, checkpointed: bool) -> None:
    real = measure(lambda: training_steps(checkpointed=checkpointed))
    live = LiveBytes()
    if order == "inside fake":
        with FakeTensorMode(), live:
            training_steps(checkpointed=checkpointed)
    elif order == "outside fake":
        with live, FakeTensorMode():
            training_steps(checkpointed=checkpointed)
    else:
        with torch.device("meta"), live:
            training_steps(checkpointed=checkpointed)
    assert live.peak == real.peak > 0
    assert live.current == real.current == 0


def test_shapes_that_a_wrapper_looks_for_on_fake_tensors_take_no_memory() -> None:
    mesh = fake_mesh(rank=0, ranks=2)
    x, y = (distribute_tensor(torch.ones(1000), mesh["model"], [Shard(0)]) for _ in range(2))
    with LiveBytes() as live, LiveBytes():
        # torch looks for the shape of an operator with other numbers anew
        x.addcdiv_(y, y, value=0.1234)
        assert live.peak == 0, "in place"
        z = x * y
        assert live.peak == live.current == 2000, "this rank's rows"
        del z


def test_a_tensor_that_is_still_being_sent_counts_once() -> None:
    mesh = fake_mesh(rank=0, ranks=2)
    with LiveBytes() as live:
        sum_ = functional.all_reduce(torch.ones(1000), "sum", mesh["model"])
        assert isinstance(sum_, functional.AsyncCollectiveTensor)
        assert live.peak == 8000, "the operand and the sum, and nothing for what waits for the sum"
        assert sum_.wait().nbytes == live.current == 4000


def test_one_devices_memory_counts() -> None:
    there, here = torch.ones(3, device="meta"), torch.ones(5)
    with LiveBytes(device_type="meta") as live:
        live.watch([there, here])
        made = (there + 1, here + 1)
    assert live.current == 4 * 3 + made[0].nbytes


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_without_values_takes_what_one_with_values_does(name: str, reduction: str) -> None:
    """Of some the sum lies in the memory of all losses, for as long as it is there."""

    def bytes_of_loss() -> tuple[int, int]:
        x, target = torch.rand(30, 7, requires_grad=True), torch.rand(30, 7)
        with LiveBytes() as live:
            loss = getattr(nn.functional, name)(x, target, reduction=reduction)
            kept = live.current
            loss.sum().backward()
        return kept, live.peak

    with FakeTensorMode():
        found = bytes_of_loss()
    assert found == bytes_of_loss()


FEATURES: list[Tensor] = []
TABLES: dict[int, Tensor] = {}


@cache
def table(n: int) -> Tensor:
    return torch.linspace(0.0, 1.0, n)


class Closing(Optimised, by=torch.optim.SGD, lr=0.1):
    """Functions of every kind that know the module, or something that it holds."""

    n_steps = 0
    newest: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        self.scale, self.calls = nn.Parameter(torch.ones(2)), 0
        self.twice = 2 * self.scale
        self.seen: list[Tensor] = []
        hidden: list[Tensor] = []
        count = 0

        def keep(module: nn.Module, given: Any, got: Tensor) -> None:
            nonlocal count
            count += 1
            self.calls += 1
            self.seen.append(got)
            hidden.append(got)
            FEATURES.append(got)

        def taken() -> Tensor:
            parts = [part.square().mean() / count for part in (*hidden, *self.seen)]
            hidden.clear()
            return self.scale.sum() * torch.stack(parts).sum()

        plain = self.net[2].forward
        self.net[0].register_forward_hook(keep)
        self.taken = taken
        self.net[2].forward = lambda x, plain=plain, scale=self.scale: plain(x) * scale  # type: ignore[method-assign]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        kind = type(self)
        kind.n_steps += 1
        TABLES.setdefault(2, torch.ones(2))
        kind.newest = self.net(batch) * table(2) * TABLES[2]
        loss = kind.newest.square().mean() + self.taken() / kind.n_steps
        self.seen.clear()
        return loss


class NeedsValues(Closing):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > 0 else -loss


def fitted(kind: type[Closing], look: Callable[[Closing, Tensor], Any]) -> list[Any]:
    """Three steps by hand after a look at the module: losses, parameters, and what is kept beside them."""
    torch.manual_seed(0)
    module, batch = kind(), torch.randn(5, 4)
    look(module, batch)
    assert all(p.grad is None for p in module.parameters())
    optimizer, losses = module.configure_optimizers(), []
    for k in range(3):
        optimizer.zero_grad()
        loss = module.training_step(batch, k)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    kept = [kind.n_steps, module.calls, len(FEATURES), len(module.seen), *map(type, [*FEATURES, *TABLES.values()])]
    FEATURES.clear()
    TABLES.clear()
    table.cache_clear()
    kind.n_steps, kind.newest = 0, None
    return [losses, [p.tolist() for p in module.parameters()], kept]


@pytest.mark.parametrize("kind", [Closing, NeedsValues])
def test_a_profile_leaves_no_trace(kind: type[Closing]) -> None:
    assert fitted(kind, lightning_amp.profile) == fitted(kind, lambda *_: None)
