"""Claim: blocks whose parameters `fully_shard` has split over ranks are recomputed with the parameters they had, and
blocks that share batch statistics with those that their first pass has received."""

import copy
import random
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_amp.footprint.find_blocks import find_blocks
from lightning_amp.techniques.chunk.run.chunk_module import chunk
from lightning_amp.techniques.data.batch_norm import share_batch_statistics
from tests.any_module import NAMES, QUIET, make
from tests.ranks import CountCollectives, run_ranks
from tests.techniques.recompute import nasty
from tests.techniques.recompute.test_recompute import Net, mean, recompute, train


def differences(rank: int, world: int) -> list[float]:
    """The largest difference from one process, for every order and way to shard."""
    mesh, found = init_device_mesh("cpu", (world,)), []
    for reshard in (True, False):
        for before in (True, False):
            torch.manual_seed(0)
            net = Net(nasty.Dropout(), nasty.BatchNorm(), nasty.Dropout()).double()
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
    last = nasty.BatchNorm()
    if by_hand:
        last = chunk(nn.Sequential(nasty.Plain(), last), torch.zeros(5, nasty.DIM), budget="1MiB")
    net = Net(nasty.BatchNorm(), nasty.Plain(), last).double()
    share_batch_statistics(net, init_device_mesh("cpu", (world,)))
    kept = copy.deepcopy(net)
    recompute(net)
    same = all(map(torch.equal, train(net, mean), train(kept, mean)))
    counts = []
    with CountCollectives() as mode:
        loss = mean(net, torch.randn(4, nasty.DIM, dtype=torch.float64))
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
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)
