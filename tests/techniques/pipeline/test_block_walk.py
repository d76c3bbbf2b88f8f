"""Claim: a stage runs its own blocks of a step on what it receives, computes from the batch what it needs, and nothing
that another stage should have computed is ever taken for a number: it is refused with the reason."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp._torch import has_no_values
from lightning_amp.errors import InstallError, ModelError
from lightning_amp.footprint.forward_overrides import Override, add_override
from lightning_amp.techniques.pipeline.run.block_walk import BlockWalk, Span, StageBlock, spans
from lightning_amp.techniques.pipeline.run.run_stages import Rest, Stages, Work, joined
from lightning_amp.techniques.pipeline.schedule.schedules import schedule

CPU = torch.device("cpu")
X = torch.arange(6.0).view(3, 2)


class Net(nn.Module):
    """Four layers; `walk` is how a step calls them."""

    def __init__(self, walk: Callable[["Net", Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(2, 2)
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        self.walk = walk

    def forward(self, x: Tensor) -> Any:
        return self.walk(self, x)


def plain(net: Net, x: Tensor) -> Tensor:
    h = net.embed(x)
    for block in net.blocks:
        h = block(h).tanh()
    return h + torch.ones(3, 2, device=h.device)


def staged(net: Net) -> BlockWalk:
    walk = BlockWalk("blocks", len(net.blocks))
    for i, block in enumerate(net.blocks):
        add_override(str(i), block, Override("pipeline", StageBlock(walk, i), StageBlock.position))
    return walk


def without(net: Net, span: Span) -> None:
    """What other stages hold."""
    kept = list(net.blocks)[span.first : span.end]
    for module in [net.embed, *net.blocks]:
        if module not in kept and not (module is net.embed and span.first == 0):
            module._parameters = {n: nn.Parameter(p.to("meta")) for n, p in module._parameters.items()}


def through(walk_of: Callable[[Net, Tensor], Any], ends: tuple[int, ...] = (1, 3, 4)) -> Any:
    """What the last of three stages returns, one after the other in one process."""
    sent: Any = None
    for span in spans(ends):
        net = Net(walk_of)
        walk = staged(net)
        without(net, span)

        def receive(placeholders: Tensor, sent: Any = sent) -> Any:
            assert has_no_values(placeholders)
            assert placeholders.shape == sent.shape
            return sent

        sent, returned = walk.run(span, lambda net=net: net(X), receive=receive, device=CPU)
    return returned


@pytest.mark.parametrize("ends", [(1, 3, 4), (2, 4), (1, 2, 3, 4), (4,)])
def test_stages_compute_what_the_step_does(ends: tuple[int, ...]) -> None:
    assert torch.equal(through(plain, ends), Net(plain)(X))


def skips(net: Net, x: Tensor) -> Tensor:
    first = h = net.blocks[0](net.embed(x))
    for block in list(net.blocks)[1:]:
        h = block(h)
    return h + first


def adds(net: Net, x: Tensor) -> Tensor:
    first = h = net.blocks[0](net.embed(x))
    for block in list(net.blocks)[1:]:
        h = block(h)
    h += first
    return h


def reads_other(net: Net, x: Tensor) -> Tensor:
    first = h = net.blocks[0](net.embed(x))
    for block in list(net.blocks)[1:3]:
        h = block(h)
        first = first * 2
    return net.blocks[3](first)


def backwards(net: Net, x: Tensor) -> Tensor:
    for block in reversed(net.blocks):
        x = block(x)
    return x


def twice(net: Net, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(block(x))
    return x


def too_few(net: Net, x: Tensor) -> Tensor:
    for block in list(net.blocks)[:2]:
        x = block(x)
    return x


def writes(net: Net, x: Tensor) -> Tensor:
    made = torch.zeros(3, 2)
    made[:, :1] = net.embed(x)[:, :1]
    for block in net.blocks:
        made = block(made)
    return made


def asks(net: Net, x: Tensor) -> Tensor:
    h = net.embed(x)
    if h.sum() > 0:
        h = h * 2
    for block in net.blocks:
        h = block(h)
    return h


def by_row(net: Net, x: Tensor) -> Any:
    return torch.vmap(lambda row: plain(net, row[None]))(x)


def penalty(net: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(plain(net, x).sum(), x, create_graph=True)[0]


class Overwrites(nn.Linear):
    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h.relu_())


def overwrites(net: Net, x: Tensor) -> Tensor:
    h = x = x - 2
    net.blocks[0].__class__ = Overwrites
    for block in net.blocks:
        h = block(h)
    return h + x


@pytest.mark.parametrize(("walk", "told"), [
    (overwrites, "writes in place into an argument of shape \\(3, 2\\)"),
    (by_row, r"block 0 of 'blocks' is called inside a function that torch.func \(vmap"),
    (penalty, r"computes gradients \(torch.autograd.grad, as for a gradient penalty\)"),
    (reads_other, "that the block before it does not return"),
    (backwards, "block 3 of 'blocks' where block 0 was next"),
    (twice, "block 0 of 'blocks' where block 1 was next"),
    (too_few, "called 2 of the 4 blocks"),
    (writes, "writes a value of another rank"),
    (asks, "needs values that another rank computed"),
])  # fmt: skip
def test_a_step_that_cannot_be_cut_is_refused(walk: Callable[[Net, Tensor], Tensor], told: str) -> None:
    with pytest.raises(InstallError, match=told):
        through(walk, (3, 4))


class Rated(nn.Linear):
    rate = 1.0

    def forward(self, h: Tensor) -> Any:
        return super().forward(h), self.rate


def test_a_number_that_another_block_returns_is_that_of_the_step() -> None:
    def rated(net: Net, x: Tensor) -> Any:
        (h, rate), total = net.blocks[0](net.embed(x)), 0.0
        for block in list(net.blocks)[1:]:
            total += rate
            h = block(h)
        return h * total

    net, span = Net(rated), Span(2, 4, 4)
    first: Any = net.blocks[0]
    first.__class__ = Rated
    walk = staged(net)
    without(net, span)
    found = []
    for first.rate in (1.0, 2.0):
        found.append(walk.run(span, lambda: net(X), receive=lambda _: X.clone(), device=CPU)[1])
    assert torch.equal(2 * found[0], found[1])


def test_a_validation_refuses_what_blocks_overwrite_and_leaves_what_training_can_keep() -> None:
    with torch.inference_mode(), pytest.raises(InstallError, match="writes in place into an argument"):
        through(overwrites, (3, 4))
    net, span, gain = Net(plain), Span(2, 4, 4), nn.Parameter(torch.ones(2))
    walk = staged(net)
    without(net, span)

    def step(x: Tensor) -> Tensor:
        h = gain * net.embed.weight.sum() + net.embed(x)
        for block in net.blocks:
            h = block(h) * gain
        return h

    # blocks that stay in one mode, as a frozen part of a model does
    for context in (torch.inference_mode, torch.enable_grad):
        with context():
            found = walk.run(span, lambda: step(X), receive=lambda _: X.clone(), device=CPU)[1]
    assert found.requires_grad


def test_what_no_block_hands_on_cannot_be_read_after_the_blocks() -> None:
    for walk in (skips, adds):
        with pytest.raises(InstallError, match="a tensor of an earlier stage that no block returns"):
            through(walk, (3, 4))


def test_outside_of_a_pass_blocks_are_as_they_are_and_can_be_copied() -> None:
    net = Net(plain)
    expected = net(X)
    walk = staged(net)
    assert torch.equal(net(X), expected)
    for twin in (copy.deepcopy(walk), pickle.loads(pickle.dumps(walk))):
        assert (twin.name, twin.blocks) == ("blocks", 4)


def test_results_of_micro_batches_are_joined_where_they_differ_from_the_batch() -> None:
    whole = {"h": torch.empty(2, 5), "bias": torch.empty(3), "n": 1}
    parts = [{"h": torch.ones(2, n), "bias": torch.zeros(3), "n": 1} for n in (2, 3)]
    found = joined(parts, whole)
    assert torch.equal(found["h"], torch.ones(2, 5))
    assert found["n"] == 1
    with pytest.raises(ModelError, match="one dimension"):
        joined([torch.ones(2, 2), torch.ones(2, 2)], torch.empty(2, 5))


CELLS, P = torch.arange(12.0).view(6, 2) / 9, 3


class Hides(nn.Module):
    """Dropout of the inputs before the blocks; the loss is of what was hidden, or of all."""

    def __init__(self, of_hidden: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.of_hidden = of_hidden

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.rand(x.shape) < 0.5
        h = x.masked_fill(hidden, 0)
        for block in self.blocks:
            h = block(h)
        squares = (h - x).square()
        return (squares * hidden).sum() / hidden.sum() if self.of_hidden else squares.mean()


def run(net: Hides, mesh: DeviceMesh) -> Any:
    walk = BlockWalk("blocks", 2)
    for i, block in enumerate(net.blocks):
        add_override(str(i), block, Override("pipeline", StageBlock(walk, i), StageBlock.position))
    stages = Stages(walk, spans([2]), mesh, torch.device("cpu"))
    parts = CELLS.chunk(P)
    rest = Rest(step=lambda: net(CELLS), silently=lambda: net(CELLS), seed=7)
    work = Work(step=lambda j: net(parts[j]), seeds=range(P), weights=[1 / P] * P, rest=rest)
    return stages.run(schedule("gpipe", 1, P)[0], work)


def test_a_loss_of_what_is_drawn_before_the_blocks_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(ModelError, match="drawn before the blocks"):
        run(Hides(of_hidden=True), mesh)


def test_draws_of_the_inputs_alone_are_each_micro_batch_s_own(mesh: DeviceMesh) -> None:
    net, plain = Hides(of_hidden=False), Hides(of_hidden=False)
    run(net, mesh)
    losses = []
    for j, part in enumerate(CELLS.chunk(P)):
        torch.manual_seed(j)
        losses.append(plain(part) / P)
    torch.stack(losses).sum().backward()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(ours.grad, theirs.grad)
