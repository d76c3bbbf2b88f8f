"""Claim: a stage runs its own blocks of a step on what it receives, computes from the batch what it needs, and nothing
that another stage should have computed is ever taken for a number: it is refused with the reason.
"""

import copy
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from lightning_amp._torch import has_no_values
from lightning_amp.errors import InstallError, ModelError
from lightning_amp.footprint.forward_overrides import Override, add_override
from lightning_amp.techniques.pipeline.run.block_walk import BlockWalk, Span, StageBlock, spans
from lightning_amp.techniques.pipeline.run.run_stages import Rest, Stages, Work, joined
from lightning_amp.techniques.pipeline.schedule.schedules import schedule
from lightning_amp.techniques.ranks.placeholders import Absent, AbsentParameter, Placeholders, absent_parameter

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


def staged(net: Any) -> BlockWalk:
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


def in_turn(blocks: Iterable[nn.Module], h: Tensor, noise: Callable[[], Tensor] | None = None) -> Tensor:
    for block in blocks:
        h = block(h if noise is None else h + noise())
    return h


def skips(net: Net, x: Tensor) -> Tensor:
    first = net.blocks[0](net.embed(x))
    return in_turn(net.blocks[1:], first) + first


def adds(net: Net, x: Tensor) -> Tensor:
    first = net.blocks[0](net.embed(x))
    h = in_turn(net.blocks[1:], first)
    h += first
    return h


def reads_other(net: Net, x: Tensor) -> Tensor:
    first = h = net.blocks[0](net.embed(x))
    for block in net.blocks[1:3]:
        h = block(h)
        first = first * 2
    return net.blocks[3](first)


def writes(net: Net, x: Tensor) -> Tensor:
    made = torch.zeros(3, 2)
    made[:, :1] = net.embed(x)[:, :1]
    return in_turn(net.blocks, made)


def asks(net: Net, x: Tensor) -> Tensor:
    h = net.embed(x)
    return in_turn(net.blocks, h * 2 if h.sum() > 0 else h)


def penalty(net: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(plain(net, x).sum(), x, create_graph=True)[0]


class Overwrites(nn.Linear):
    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h.relu_())


def overwrites(net: Net, x: Tensor) -> Tensor:
    x = x - 2
    net.blocks[0].__class__ = Overwrites
    return in_turn(net.blocks, x) + x


@pytest.mark.parametrize(("walk", "told"), [
    (overwrites, "writes in place into an argument of shape \\(3, 2\\)"),
    (lambda net, x: torch.vmap(lambda row: plain(net, row[None]))(x),
        r"block 0 of 'blocks' is called inside a function that torch.func \(vmap"),
    (penalty, r"computes gradients \(torch.autograd.grad, as for a gradient penalty\)"),
    (reads_other, "that the block before it does not return"),
    (lambda net, x: in_turn(reversed(net.blocks), x), "block 3 of 'blocks' where block 0 was next"),
    (lambda net, x: in_turn([b for b in net.blocks for _ in range(2)], x),
        "block 0 of 'blocks' where block 1 was next"),
    (lambda net, x: in_turn(net.blocks[:2], x), "called 2 of the 4 blocks"),
    (writes, "writes a value of another rank"),
    (asks, "needs values that another rank computed"),
])  # fmt: skip
def test_a_step_that_cannot_be_cut_is_refused(walk: Callable[[Net, Tensor], Tensor], told: str) -> None:
    with pytest.raises(InstallError, match=told) as error:
        through(walk, (3, 4))
    assert "FakeTensor" not in str(error.value), "words of torch"


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
        squares = (in_turn(self.blocks, x.masked_fill(hidden, 0)) - x).square()
        return (squares * hidden).sum() / hidden.sum() if self.of_hidden else squares.mean()


def run(net: Hides, mesh: DeviceMesh) -> Any:
    stages = Stages(staged(net), spans([2]), mesh, CPU)
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


# Claim: a stage reads no number that it draws after another rank has drawn, for it would be another one.


def drawn(net: Net, x: Tensor) -> Tensor:
    """Noise for all blocks, drawn after a draw for the first one; what is drawn between blocks is for the next one."""
    h = F.dropout(net.embed(x), 0.5)
    noise = torch.rand(2)
    return in_turn(net.blocks, h, lambda: noise)


def skips_layers(net: Net, x: Tensor) -> Tensor:
    """As transformers do it that skip a layer with some probability: 0 if it is not set."""
    h = F.dropout(net.embed(x), 0.5)
    for block in net.blocks:
        if torch.rand([]) < 0.0 or torch.rand(1) >= 1:
            continue
        h = block(h)
    return h


def skips_some(net: Net, x: Tensor) -> Tensor:
    h = F.dropout(net.embed(x), 0.5)
    for block in net.blocks:
        chance = torch.rand([])
        chance *= 2
        if chance < 1.0:
            h = h + 1
        h = block(h)
    return h


def attends(net: Net, x: Tensor) -> Tensor:
    h = net.embed(x)
    h = F.scaled_dot_product_attention(h[None, None], h[None, None], h[None, None])[0, 0]
    h = torch.native_dropout(h, 0.5, train=False)[0]
    noise = torch.rand(3, 2)
    return in_turn(net.blocks, h, lambda: noise)


class Drops(nn.Linear):
    def forward(self, h: Tensor) -> Tensor:
        return F.dropout(super().forward(h), 0.5) * torch.rand(())


def drawn_later(net: Net, x: Tensor) -> Tensor:
    net.blocks[0].__class__ = Drops
    h = net.blocks[0](net.embed(x))
    noise = torch.rand(2)
    return in_turn(net.blocks[1:], h, lambda: noise)


class Noises(nn.Linear):
    def forward(self, h: Tensor) -> Any:
        return super().forward(h), torch.empty(2).normal_()


def from_a_block(net: Net, x: Tensor) -> Tensor:
    net.blocks[0].__class__ = Noises
    h, noise = net.blocks[0](net.embed(x))
    return in_turn(net.blocks[1:], h, lambda: noise)


class Keeps(nn.Linear):
    def forward(self, h: Tensor) -> Any:
        self.noise = [torch.rand(2)]
        return super().forward(h)


def from_an_attribute(net: Net, x: Tensor) -> Tensor:
    first: Any = net.blocks[0]
    first.__class__ = Keeps
    return in_turn(net.blocks[1:], first(net.embed(x)), lambda: first.noise[0])


def test_what_is_drawn_after_another_rank_has_drawn_is_not_read() -> None:
    middle, last = spans((1, 3, 4))[1:]
    # draws follow those of the first block where a stage has received its result
    of_last = ((walk, last) for walk in (drawn, drawn_later, from_a_block, from_an_attribute))
    for walk, span in ((drawn, middle), *of_last):
        net = Net(walk)
        staged_walk = staged(net)
        without(net, span)
        # the second time a block's shapes are known
        for _ in range(2):
            with pytest.raises(InstallError, match="an earlier stage"):
                staged_walk.run(span, lambda net=net: net(X), receive=lambda _: X.clone(), device=CPU)
    through(lambda net, x: in_turn(net.blocks, F.dropout(net.embed(x), 0.5), lambda: torch.rand(2)))


def test_what_an_earlier_draw_does_not_decide_is_no_reason_to_refuse() -> None:
    for walk in (skips_layers, attends):
        torch.manual_seed(1)
        through(walk)
    with pytest.raises(InstallError, match="needs values that another rank computed"):
        through(skips_some)


# Claim: no operator takes a parameter that another rank holds for a number, and a module with it is a module.

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
