"""Small blocks of every kind that regions are cut from, with what they are called with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def x_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


class Attention(nn.Module):
    def __init__(self, dim: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        weight = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1)
        return x + self.out((weight @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


class NoBias(FeedForward):
    """The product with the second weight is a sum over inner features, which may be cut."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__(dim)
        self.narrow = nn.Linear(4 * dim, dim, bias=False)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(x)))


class Broadcast(nn.Module):
    """A bias that is broadcast, a scale per row, and a mask that is made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.scale = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(7, 1))

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.arange(x.shape[-1]) > 1
        return torch.where(keep, x.exp() + self.bias, x) * self.scale


class Several(nn.Module):
    """Several results, nested, one of whole numbers, and a sum over what is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x).tanh()
        z = self.b(y)
        return {"y": y, "both": (z, [(y * y).sum(1), None, 3]), "signs": (z > 0).to(torch.int64)}


class Merged(nn.Module):
    """Dims are merged and split on the way, so a position is several rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.layer(x.view(x.shape[0] * x.shape[1], -1)).relu()
        return flat.view(x.shape[0], x.shape[1], 2, 2).permute(0, 2, 1, 3).reshape(x.shape[0], 2, -1)


class Matrices(nn.Module):
    """Products summed over the cut dim, an index, and a parameter that is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.left, self.right = nn.Parameter(torch.randn(6, 10)), nn.Parameter(torch.randn(10, 5))

    def forward(self, rows: Tensor, y: Tensor) -> Tensor:
        x = self.table(rows)
        return torch.einsum("nd,ne->de", x, y) + (x.t() @ y).cos() + (self.left @ self.right).tanh()


BLOCKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "attention": (Attention, lambda: (x_of(2, 7, 8),)),
    "feed-forward": (FeedForward, lambda: (x_of(2, 7, 6),)),
    "no bias": (NoBias, lambda: (x_of(2, 7, 6),)),
    "convolution": (Convolution, lambda: (x_of(5, 3, 6, 6),)),
    "broadcast": (Broadcast, lambda: (x_of(3, 7, 5),)),
    "several": (Several, lambda: (x_of(3, 7, 4),)),
    "merged": (Merged, lambda: (x_of(6, 5, 4),)),
    "matrices": (Matrices, lambda: (torch.arange(7), x_of(7, 5))),
}
