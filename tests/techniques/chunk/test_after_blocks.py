"""Claim: what a module computes after its last block runs in chunks, to the same numbers, or is refused by name."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_amp.costs.rule import Rule
from lightning_amp.errors import InstallError, ModelError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.installing.install import install_rules
from lightning_amp.techniques.chunk.row import ChunkBlock
from lightning_amp.techniques.chunk.run.after_blocks_in_chunks import AfterBlocksInChunks
from lightning_amp.techniques.recompute.row import RecomputeBlock
from tests.techniques.chunk.words import LAYERS, WORDS, Block, Words

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def batch() -> tuple[Tensor, Tensor]:
    return torch.randint(WORDS, (4, 16)), torch.randint(WORDS, (4, 16))


def head_of(model: nn.Module, budget_bytes: int = 160_000) -> Rule:
    spec = ChunkBlock(budget_bytes=budget_bytes, after=LAYERS)
    return Rule(fqn="model", strategy="chunk", spec=spec, why="a test")


def steps(model: nn.Module, *rules: Rule, n: int = 3) -> tuple[list[float], list[Tensor], int]:
    """Losses, parameters and buffers after some steps, and the most bytes of one."""
    torch.manual_seed(1)
    holder = nn.ModuleDict({"model": model})
    install_rules(holder, rules)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, peak = [], 0
    for _ in range(n):
        words, labels = batch()
        optimizer.zero_grad(set_to_none=True)
        with LiveBytes() as live:
            loss = model(words, labels=labels)[0]
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        peak = live.peak
    return losses, [*(p.detach() for p in model.parameters()), *model.buffers()], peak


def same(model: nn.Module, *rules: Rule) -> tuple[int, int]:
    """Bytes of a step with and without the rules, which change no number."""
    model = model.double()
    losses, state, peak = steps(copy.deepcopy(model))
    own_losses, own, own_peak = steps(copy.deepcopy(model), *rules)
    assert own_losses == pytest.approx(losses, rel=1e-12)
    torch.testing.assert_close(own, state, rtol=1e-10, atol=1e-12)
    return own_peak, peak


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_head_and_loss_train_to_the_same_numbers(dropout: float) -> None:
    """A block that is computed again is inside; dropout before the blocks and in the head draws as it did."""
    torch.manual_seed(0)
    model = Words()
    model.dropout.p = dropout
    own, plain = same(
        model, Rule(fqn="model.blocks.1", strategy="recompute", spec=RecomputeBlock(), why="a test"), head_of(model)
    )
    assert own < 0.5 * plain


class ReadsEmbedding(Words):
    """A residual around all blocks, which the head reads: it is looked up again."""

    def forward(self, words: Tensor, labels: Tensor) -> Any:
        x = self.embed(words)
        return self.head(self.hidden(x) + x, labels)


class Tries(Words):
    """Its forward catches what goes wrong, and cleans up."""

    def hidden(self, x: Tensor) -> Tensor:
        try:
            return super().hidden(x)
        except Exception:
            return x
        finally:
            pass


class Inner(Words):
    """Its blocks lie two modules below it, and it is called by keywords alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.blocks = self.blocks
        del self.blocks

    def hidden(self, x: Tensor) -> Tensor:
        for block in self.inner.blocks:  # type: ignore[union-attr]
            x = block(x)
        return x


class Frozen(Words):
    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.norm.requires_grad_(False)


class Shared(Words):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()] * LAYERS)


class ReturnsTwo(Words):
    """Its blocks return a tuple, of which the head reads both of the last one."""

    def hidden(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, other = block(x)
        return x * other

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(LAYERS))


class Pair(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), torch.sigmoid(x)


@pytest.mark.parametrize("kind", [ReadsEmbedding, Tries, Inner, Frozen, Shared, ReturnsTwo])
def test_other_ways_around_the_blocks(kind: type[Words]) -> None:
    torch.manual_seed(0)
    model = kind()
    own, plain = same(model, head_of(model))
    assert own < 0.6 * plain


class Skips(Words):
    """The head reads what the first block returns."""

    def hidden(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](first)) + first


class Collects(Words):
    def forward(self, words: Tensor, labels: Tensor) -> Any:
        x, extra = self.embed(words), 0.0
        for block in self.blocks:
            x = block(x)
            extra = extra + x.square().mean()
        loss, guess = self.head(x, labels)
        return loss + extra, guess


class DropsBefore(ReadsEmbedding):
    """What is read again was drawn."""

    def forward(self, words: Tensor, labels: Tensor) -> Any:
        x = self.dropout(self.embed(words))
        return self.head(self.hidden(x) + x, labels)


class ChangesBefore(Words):
    """What is read again was changed in place, by way of a view."""

    def forward(self, words: Tensor, labels: Tensor) -> Any:
        x = self.embed(words) * 1.0
        x[:, 0].mul_(2)
        return self.head(self.hidden(x) + x, labels)


class Counts(Words):
    """A buffer counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, words: Tensor, labels: Tensor) -> Any:
        self.calls += 1
        return super().forward(words, labels)


class CountsInPython(Words):
    """An attribute counts what follows the blocks."""

    calls = 0

    def head(self, x: Tensor, labels: Tensor) -> Any:
        self.calls += 1
        return super().head(x, labels)


class Branches(Words):
    def head(self, x: Tensor, labels: Tensor) -> Any:
        return super().head(-x if x.sum() > 0 else x, labels)


class Hooked(Words):
    def __init__(self) -> None:
        super().__init__()
        self.norm.register_forward_hook(lambda module, given, result: result * 2)


class Within(Words):
    """Blocks are called within a context that ends after them."""

    def __init__(self, context: Callable[[], Any]) -> None:
        super().__init__()
        self.context = context

    def hidden(self, x: Tensor) -> Tensor:
        with self.context():
            return super().hidden(x)


class Checkpointed(Words):
    def hidden(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Fewer(Words):
    """One block is left out."""

    def hidden(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


# first what depends on more than the last block, then blocks that are called in another way
@pytest.mark.parametrize(("kind", "error", "why"), [
    (Skips, ModelError, "neither an argument nor a parameter"),
    (Collects, ModelError, "neither an argument nor a parameter"),
    (DropsBefore, ModelError, "needs what .* did before them"),
    (ChangesBefore, ModelError, "needs what .* did before them"),
    (Counts, ModelError, "changes 'owner.calls' in place"),
    (CountsInPython, ModelError, "changes the attribute"),
    (Branches, ModelError, "cannot run on fake tensors"),
    (Hooked, ModelError, "has hooks"),
    (partial(Within, lambda: torch.autocast("cpu", torch.bfloat16)), InstallError, "autocast"),
    (partial(Within, lambda: torch.autograd.graph.save_on_cpu()), InstallError, "ends after it"),
    (partial(Within, torch.no_grad), InstallError, "another gradient mode"),
    (Checkpointed, InstallError, "a checkpoint"),
    (Fewer, InstallError, "must call 3 blocks; it has called 2"),
])  # fmt: skip
def test_what_does_not_follow_from_the_last_block_is_refused(
    kind: Callable[[], Words], error: type[Exception], why: str
) -> None:
    model = kind()
    with pytest.raises(error, match=why):
        steps(model, head_of(model), n=1)


def test_hooks_of_the_module_run_once_around_it() -> None:
    model, seen = Words(), []
    model.register_forward_pre_hook(lambda module, given: seen.append("before"))
    model.register_forward_hook(lambda module, given, result: (result[0] * 2, result[1]))
    model.dropout.p = 0.0
    own, plain = same(model, head_of(model))
    assert own < plain
    assert seen == ["before"] * 6


def test_without_gradients_it_computes_the_same() -> None:
    torch.manual_seed(0)
    model = Words().eval()
    words, labels = batch()
    with torch.no_grad():
        loss, guess = model(words, labels)
        found, own = AfterBlocksInChunks(100_000, LAYERS)(model, words, labels)
    torch.testing.assert_close(found, loss)
    assert torch.equal(own, guess)
    # other lengths are planned again and the same ones are not
    torch.manual_seed(0)
    model, run = Words(), AfterBlocksInChunks(200_000, LAYERS)
    for length in (16, 16, 9):
        run(model, *(values[:, :length] for values in batch()))
    assert len(run.known) == 2
    assert not any(block._forward_hooks for block in model.blocks)
    twin = copy.deepcopy(run)
    assert (type(twin), twin.known) == (AfterBlocksInChunks, run.known)
