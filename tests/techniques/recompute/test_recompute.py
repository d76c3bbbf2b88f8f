"""Claim: a module whose blocks are recomputed trains to the same numbers, and its forward passes leave the same traces;
a block for which that cannot be is refused.
"""

import copy
import pickle
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_amp.costs.rule import Rule
from lightning_amp.errors import InstallError
from lightning_amp.footprint.find_blocks import find_blocks
from lightning_amp.installing.install import Installed, install_rules
from lightning_amp.techniques.chunk.run.chunk_module import chunk
from lightning_amp.techniques.data.batch_norm import share_batch_statistics
from lightning_amp.techniques.recompute.row import RecomputeBlock
from tests.any_module import NAMES, QUIET, make
from tests.odd_modules.collection.blocks import DIM, Plain
from tests.odd_modules.collection.hooks import Hooked
from tests.odd_modules.collection.outputs import LOGGED, Logging, LogsForAnother
from tests.odd_modules.collection.random_numbers import Dropout
from tests.odd_modules.collection.state import BatchNorm, Counter, Memory, OtherBuffer, Remembers
from tests.ranks import CountCollectives, run_ranks

Loss = Callable[[nn.Module, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x + 0)
        return x


def recompute(module: nn.Module, names: Sequence[str] = ("blocks.*",)) -> Installed:
    return install_rules(
        module, [Rule(fqn=name, spec=RecomputeBlock(), strategy="recompute", why="") for name in names]
    )


def mean(net: nn.Module, x: Tensor) -> Tensor:
    return (net(x) ** 2).mean()


def train(net: nn.Module, loss_of: Loss, steps: int = 3) -> list[Tensor]:
    """Losses, gradients, and all that the module holds afterwards, of steps that always draw the same numbers."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(5, DIM, dtype=torch.float64, requires_grad=True)
        loss = loss_of(net, x)
        loss.backward()
        found += [loss.detach(), x.grad, *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        optimizer.step()
    found += [torch.rand(1), torch.tensor(random.random()), torch.tensor(np.random.rand())]
    return [*found, *(t.detach().clone() for t in net.state_dict().values())]


def same(net: nn.Module, loss_of: Loss = mean, names: Sequence[str] = ("blocks.*",)) -> None:
    """To the last bit, because it is the same computation."""
    net = net.double()
    eager = copy.deepcopy(net)
    recompute(net, names)
    expected, found = train(eager, loss_of), train(net, loss_of)
    assert len(expected) == len(found)
    assert all(map(torch.equal, found, expected))


def kept(net: nn.Module, x: Tensor) -> int:
    """Tensors that autograd saves; torch 2.11 saves an empty one for a checkpoint besides."""
    found: list[Tensor] = []
    with saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        net(x).sum()
    return sum(t.numel() > 0 for t in found)


@pytest.mark.parametrize("at_first", [True, False])
def test_a_block_is_frozen_or_unfrozen_between_the_passes(at_first: bool) -> None:
    """As by a callback between forward and backward pass: torch refused that the second pass kept less, or more."""

    def loss_of(net: nn.Module, x: Tensor) -> Tensor:
        net.blocks[0].requires_grad_(at_first)
        loss = mean(net, x)
        net.blocks[0].requires_grad_(not at_first)
        return loss

    torch.manual_seed(0)
    same(Net(Plain(), Plain()), loss_of)


def test_hooks_on_saved_tensors_may_hand_back_copies() -> None:
    """As of save_on_cpu: an argument that was written into before the block had seemed to be changed since."""

    def loss_of(net: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().add_(1)
        with saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            return mean(net.blocks[0], x)

    torch.manual_seed(0)
    net, x = Net(Plain()).double(), torch.randn(5, DIM, dtype=torch.float64)
    eager = copy.deepcopy(net)
    recompute(net)
    for one in (net, eager):
        loss_of(one, x).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(net.parameters(), eager.parameters(), strict=True))  # type: ignore[arg-type]


def test_nothing_is_kept_but_inputs() -> None:
    net, x = Net(Plain(), Plain()), torch.randn(5, DIM, requires_grad=True)
    before = kept(net, x)
    installed = recompute(net, ["blocks.0"])
    # checkpoint saves one input, and lets hooks of its own see the block's tensors
    assert kept(net, x) == before // 2 + 1
    with torch.no_grad():
        assert kept(net, x) == 0
    installed.undo()
    assert kept(net, x) == before
    assert "forward" not in vars(net.blocks[0])


def test_without_gradients_a_block_runs_as_it_is() -> None:
    """Then a block may do what cannot be done twice."""
    net, x = Net(Remembers()), torch.randn(5, DIM)
    recompute(net)
    with torch.no_grad():
        net(x)
    with torch.inference_mode():
        net(x)
    assert len(net.blocks[0].seen) == 2


def test_attributes_counters_and_logs_are_as_after_one_pass() -> None:
    net = Net(Counter(), Logging(), LogsForAnother()).double()
    recompute(net)
    LOGGED.clear()
    train(net, mean)
    assert net.blocks[0].calls == 3
    assert len(LOGGED) == 2 * 3
    assert "log" not in vars(net.blocks[1])


def test_a_hook_on_the_block_runs_once() -> None:
    net, seen = Net(Plain()).double(), list[str]()
    net.blocks[0].register_forward_pre_hook(lambda *_: seen.append("before"))
    net.blocks[0].register_forward_hook(lambda *_: seen.append("after"))
    net.blocks[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    recompute(net)
    train(net, mean, steps=1)
    assert seen == ["before", "after", "backward"]


@pytest.mark.parametrize("kind", [Plain, BatchNorm, Counter, OtherBuffer])
def test_one_block_is_called_twice_in_a_step(kind: type[nn.Module]) -> None:
    shared = kind()
    same(Net(shared, Plain(), shared), names=["blocks.0", "blocks.1"])


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Plain()

    def forward(self, x: Tensor, *, both: dict[str, Any], on: bool, none: None = None) -> Any:
        y = self.inner(x) * both["pair"][0] if on else x
        short = y.detach().to(torch.float8_e4m3fn)
        return {"y": (y, [both["pair"][1] * 2, none]), "index": both["index"] + 1, "text": "a", "short": short}


class OfNested(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = x
        for block in self.blocks:
            both = {"pair": (y, x.detach()), "index": torch.arange(5)}
            found = block(y, both=both, on=True)
            assert found["text"] == "a"
            assert found["y"][1][1] is None
            y = found["y"][0] + found["y"][1][0] + found["index"].unsqueeze(1)
        return y


def test_arguments_by_name_and_nested_results() -> None:
    same(OfNested(Nested(), Nested()))
    # a number that is none is the same number
    net = Net(Plain()).double()
    recompute(net)
    loss = mean(net, torch.full((5, DIM), float("nan"), dtype=torch.float64))
    loss.backward()
    assert net.blocks[0].a.weight.grad.isnan().all()


def penalty(net: nn.Module, x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return (slope**2).mean() + net(x).mean()


def twice(net: nn.Module, x: Tensor) -> Tensor:
    loss = mean(net, x)
    loss.backward(retain_graph=True)
    return loss * 2


def in_parts(net: nn.Module, x: Tensor) -> Tensor:
    for part in x.split(3):
        mean(net, part).backward()
    return mean(net, x)


def in_bfloat16(net: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net(x).float().mean()


def another_mode_afterwards(net: nn.Module, x: Tensor) -> Tensor:
    loss = mean(net.train(), x)
    net.eval()
    return loss


WAYS: dict[str, Loss] = {
    **{way.__name__: way for way in (penalty, twice, in_parts, in_bfloat16, another_mode_afterwards)},
    "in_eval": lambda net, x: mean(net.eval(), x),
    "not_all_of_it": lambda net, x: (net(x), mean(net.get_submodule("blocks.0"), x))[1],
    "without_gradient": lambda net, x: (net(x.detach()) ** 2).mean() + x.sum(),
}


@pytest.mark.parametrize("loss", WAYS.values(), ids=WAYS)
def test_every_way_to_differentiate(loss: Loss) -> None:
    torch.manual_seed(0)
    same(Net(Dropout(), BatchNorm(), Dropout()), loss)


def test_copies_and_pickles_are_blocks_of_their_own() -> None:
    net, x = Net(BatchNorm(), Plain()).double(), torch.randn(5, DIM, dtype=torch.float64)
    recompute(net)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        with torch.no_grad():
            twin.blocks[0].norm.weight.zero_()
        mean(twin, x).backward()
        assert not torch.equal(twin.blocks[0].norm.weight.grad, torch.zeros(DIM))
        assert all(p.grad is None for p in net.parameters())


def test_nothing_is_installed_where_a_block_is_refused() -> None:
    net = Net(Plain(), Hooked())
    with pytest.raises(InstallError, match="recompute does not support Hooked, which cannot be computed a second time"):
        recompute(net)
    assert "forward" not in vars(net.blocks[0])


def test_an_argument_that_a_block_changes_is_refused() -> None:
    class Caching(nn.Module):
        def forward(self, x: Tensor, cache: Memory.Store) -> Tensor:
            cache.n += 1
            return torch.tanh(x)

    class WordsCache(Memory.Store):
        """By its name what language models keep of earlier words."""

    net, x = Net(Caching()), torch.randn(5, DIM, requires_grad=True)
    recompute(net)
    with pytest.raises(InstallError, match="it changes what its argument 1, a Store, holds"):
        net.blocks[0](x, Memory.Store())
    with pytest.raises(InstallError, match=r"its argument 'cache', a WordsCache, holds.*use_cache = False"):
        net.blocks[0](x, cache=WordsCache())


@pytest.mark.parametrize("cache", [{}, {"older": torch.zeros(5, DIM)}])
def test_a_dictionary_that_a_block_writes_into_is_refused(cache: dict[str, Tensor]) -> None:
    class Caching(nn.Module):
        def forward(self, x: Tensor, given: tuple[dict[str, Tensor], int]) -> Tensor:
            cache, k = given
            cache["older"] = torch.tanh(x)
            return cache["older"] * k

    net = Net(Caching())
    recompute(net)
    with pytest.raises(InstallError, match="it changes a list or a dictionary that it is called with"):
        net.blocks[0](torch.randn(5, DIM, requires_grad=True), (cache, 2))
    assert len(cache) == 1, "the caller's own"


def test_what_is_changed_between_the_passes_is_refused() -> None:
    net = Net(Plain()).double()
    recompute(net)
    x = torch.randn(5, DIM, dtype=torch.float64, requires_grad=True)
    loss = mean(net, x)
    with torch.no_grad():
        net.blocks[0].a.bias.add_(1)
    with pytest.raises(InstallError, match=r"blocks.0 \(Plain\) cannot be computed again .*'a.bias' has"):
        loss.backward()
    y = x + 0
    loss = (net.blocks[0](y) ** 2).mean()
    y.add_(1)
    with pytest.raises((RuntimeError, InstallError), match="inplace operation|argument 0 has been changed"):
        loss.backward()


class Configured(Plain):
    """Holds an object that all blocks share, and reads one thing in it."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(scale=1.0, kind=None)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.config.scale


def test_what_the_first_step_writes_into_an_object_is_judged_by_the_results() -> None:
    def classify(net: nn.Module, x: Tensor) -> Tensor:
        loss = mean(net, x)
        net.blocks[0].config.kind = "one label"
        return loss

    def rescale(net: nn.Module, x: Tensor) -> Tensor:
        loss = mean(net, x)
        net.blocks[0].config.scale *= 2
        return loss

    same(Net(Configured(), Plain()), classify)
    net = Net(Configured(), Plain()).double()
    recompute(net)
    with pytest.raises(InstallError, match=r"support blocks.0 \(Configured\), which cannot .*: its second"):
        train(net, rescale)
    # what a later step writes into an object is refused
    net = Net(Configured(), Plain()).double()
    recompute(net)
    x = torch.randn(5, DIM, dtype=torch.float64)
    mean(net, x).backward()
    loss = mean(net, x)
    net.blocks[0].config.scale = 2.0
    with pytest.raises(InstallError, match="'config' has been changed in place since the forward pass"):
        loss.backward()


# Claim: blocks whose parameters `fully_shard` has split over ranks are recomputed with the parameters they had, and
# blocks that share batch statistics with those that their first pass has received.


def differences(rank: int, world: int) -> list[float]:
    """The largest difference from one process, for every order and way to shard."""
    mesh, found = init_device_mesh("cpu", (world,)), []
    for reshard in (True, False):
        for before in (True, False):
            torch.manual_seed(0)
            net = Net(Dropout(), BatchNorm(), Dropout()).double()
            eager = copy.deepcopy(net)
            if before:
                recompute(net)
            for block in (*net.blocks, net):
                fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
            if not before:
                recompute(net)
            pairs = zip(train(net, mean), train(eager, mean), strict=True)
            found.append(max(float((_whole(a) - b).abs().max()) for a, b in pairs))
    return found


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shared_statistics(rank: int, world: int, by_hand: bool) -> tuple[bool, list[int]]:
    """Whether every bit is that of blocks that do not run again, and the collectives of a forward pass, of a backward
    pass, and of another backward pass through the same graph; `by_hand` a block was given to `lightning_amp.chunk`."""
    torch.manual_seed(rank)
    last = BatchNorm()
    if by_hand:
        last = chunk(nn.Sequential(Plain(), last), torch.zeros(5, DIM), budget="1MiB")
    net = Net(BatchNorm(), Plain(), last).double()
    share_batch_statistics(net, init_device_mesh("cpu", (world,)))
    kept = copy.deepcopy(net)
    recompute(net)
    same = all(map(torch.equal, train(net, mean), train(kept, mean)))
    counts = []
    with CountCollectives() as mode:
        loss = mean(net, torch.randn(4, DIM, dtype=torch.float64))
    counts.append(mode.total)
    for retain in (True, False):
        with CountCollectives() as mode:
            loss.backward(retain_graph=retain)
        counts.append(mode.total)
    return same, counts


def on_ranks(rank: int, world: int) -> tuple[list[float], list[tuple[bool, list[int]]]]:
    return differences(rank, world), [shared_statistics(rank, world, by_hand) for by_hand in (False, True)]


@pytest.mark.ranks
def test_blocks_of_sharded_parameters_and_statistics_that_are_sent_once(tmp_path: Any) -> None:
    for found, shared in run_ranks(on_ranks, 2, tmp_path, timeout=120):
        assert max(found) < 1e-12
        assert shared == [(True, [2, 2, 2])] * 2


STEPS = 3


class Seen(pl.Callback):
    """Gradients of every step, and what was logged."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.found += [p.grad.clone() for p in module.parameters() if p.grad is not None]

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(trainer.callback_metrics["loss"].clone())


def as_double(batch: Any) -> Any:
    return torch.utils._pytree.tree_map(
        lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, batch
    )


def trained(name: str, names: Any) -> list[Tensor]:
    module, batch = make(name)
    module.double()
    recompute(module, [fqn for fqn in find_blocks(module) if names(fqn)])
    seen = Seen()
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, **QUIET, callbacks=[seen])
    pl.seed_everything(3)
    trainer.fit(module, torch.utils.data.DataLoader([as_double(batch)] * STEPS, batch_size=None))
    return [*seen.found, *module.state_dict().values()]


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_eight_modules_train_to_the_same_numbers(name: str) -> None:
    draw = random.Random(0)
    expected = trained(name, lambda fqn: False)
    for chosen in (lambda fqn: True, lambda fqn: draw.random() < 0.5):
        found = trained(name, chosen)
        assert len(found) == len(expected) > 3 * STEPS
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
