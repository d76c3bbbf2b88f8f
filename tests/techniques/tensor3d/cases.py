"""Modules that are trained on grids of ranks: a GPT with a tied head, a gated MLP, a convolutional net."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional


class Trained(pl.LightningModule):
    """Three steps of Adam; `losses` has those of all steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.losses: list[Tensor] = []

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        self.log("train", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("valid", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        # by their number of dims, as language models do
        groups = [[p for p in self.parameters() if (p.dim() > 1) == wide] for wide in (True, False)]
        decays = zip(groups, (0.1, 0.0), strict=True)
        return torch.optim.AdamW([{"params": g, "weight_decay": d} for g, d in decays if g], lr=1e-2)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, n, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, n, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(b, n, width))
        return x + self.mlp(self.second(x))


class GPT(Trained):
    """Its embedding and its head are one parameter."""

    def __init__(self, width: int = 8, heads: int = 2, words: int = 11) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Parameter(torch.randn(1, 6, width) * 0.1)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def body(self, x: Tensor) -> Tensor:
        return self.blocks(x)  # type: ignore[no-any-return]

    def loss(self, batch: Any) -> Tensor:
        x = self.embed(batch[:, :-1]) + self.place
        logits = self.head(self.norm(self.body(x)))
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class GroupedBlock(Block):
    """Two heads of queries share one of keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.qkv = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, width = x.shape
        heads, few = self.heads, self.heads // 2
        parts = self.qkv(self.first(x)).unflatten(-1, (heads + 2 * few, -1)).transpose(1, 2)
        q, k, v = parts.split([heads, few, few], 1)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(found.transpose(1, 2).reshape(b, n, width))
        return x + self.mlp(self.second(x))


class Grouped(GPT):
    def __init__(self) -> None:
        super().__init__(heads=4)
        self.blocks = nn.Sequential(*[GroupedBlock(8, 4) for _ in range(2)])


class Gated(Trained):
    """Odd widths, a frozen layer, and a parameter without a dim."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.scale = nn.Linear(5, 14), nn.Linear(7, 3), nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Linear(5, 5).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        gate, value = self.one(self.frozen(batch)).chunk(2, -1)
        return (self.scale * self.two(gate.sigmoid() * value) - batch[:, :3]).square().mean()


class Convolutional(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(2, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.two, self.out = nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.Linear(16, 3)

    def loss(self, batch: Any) -> Tensor:
        x = functional.silu(self.norm(self.one(batch)))
        return (self.out(self.two(x).mean((2, 3))) - 1).square().mean()


class Separable(Trained):
    """Convolutions in groups, a transposed one, and batch normalisation, whose statistics are those of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(2, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.depth, self.point = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 12, 1)
        self.up = nn.ConvTranspose2d(12, 8, 2, stride=2, groups=4, bias=False)
        self.rows, self.out = nn.BatchNorm1d(8), nn.Linear(8, 5)

    def loss(self, batch: Any) -> Tensor:
        x = functional.silu(self.norm(self.one(batch)))
        x = self.up(self.point(self.depth(x)).relu())
        return functional.cross_entropy(self.out(self.rows(x.mean((2, 3)))), LABELS[: len(x)], label_smoothing=0.1)


LABELS = torch.tensor([0, 0, 0, 0])


class Limited(torch.autograd.Function):
    """Its backward pass is no linear function of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (grad > 0)


class Read(Trained):
    """Parameters that the step reads as objects: a tied one counts once, and all are Parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.again.weight = self.first.weight

    def loss(self, batch: Any) -> Tensor:
        decay = sum(p.square().sum() for p in self.parameters() if isinstance(p, nn.Parameter))
        kept = deepcopy(self.last)(batch).detach()
        x = Limited.apply(self.again(self.first(batch).tanh()))  # type: ignore[no-untyped-call]
        return (self.last(x.tanh()) + kept - 1).square().mean() + 0.01 * decay  # type: ignore[no-any-return]


class Case(NamedTuple):
    """A module, and a batch of four rows."""

    module: Callable[[], Trained]
    batch: Callable[[], Tensor]


CASES = {
    "gpt": Case(GPT, lambda: torch.randint(0, 11, (4, 7))),
    "grouped": Case(Grouped, lambda: torch.randint(0, 11, (4, 7))),
    "gated": Case(Gated, lambda: torch.randn(4, 5).double()),
    "read": Case(Read, lambda: torch.randn(4, 16).double()),
    "convolutional": Case(Convolutional, lambda: torch.randn(4, 2, 10, 9).double()),
    "separable": Case(Separable, lambda: torch.randn(4, 2, 6, 5).double()),
}
