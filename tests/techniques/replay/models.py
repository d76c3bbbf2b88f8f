"""Modules without lists of blocks: parts are attributes, lists of layers, functions, and the head is in the step."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.any_module import QUIET, Meter
from tests.optimised import Optimised


class Trained(Optimised, by=torch.optim.AdamW, lr=1e-3):
    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train", loss)
        return loss


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(before, after, 3, stride, 1), nn.Conv2d(after, after, 3, 1, 1)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.shortcut = nn.Conv2d(before, after, 1, stride) if (before, stride) != (after, 1) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norm1(self.one(x)))
        return functional.relu(self.norm2(self.two(inner)) + self.shortcut(x))


class UNet(Trained):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem, self.down1 = nn.Conv2d(1, width, 3, 1, 1), Residual(width, width)
        self.down2, self.down3 = Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2)
        self.middle = Residual(4 * width, 4 * width)
        self.grow2, self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), Residual(4 * width, 2 * width)
        self.grow1, self.up1 = nn.ConvTranspose2d(2 * width, width, 2, 2), Residual(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def loss(self, batch: Tensor) -> Tensor:
        one = self.down1(self.stem(batch))
        two = self.down2(one)
        up = self.up2(torch.cat([self.grow2(self.middle(self.down3(two))), two], 1))
        up = self.up1(torch.cat([self.grow1(up), one], 1))
        return functional.mse_loss(self.out(up), batch)


class ResNet(Trained):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, width, 3, 1, 1), nn.BatchNorm2d(width)
        self.a1, self.a2 = Residual(width, width), Residual(width, width)
        self.b1, self.b2 = Residual(width, 2 * width, 2), Residual(2 * width, 2 * width)
        self.c1, self.c2 = Residual(2 * width, 4 * width, 2), Residual(4 * width, 4 * width)
        self.d1, self.d2 = Residual(4 * width, 8 * width, 2), Residual(8 * width, 8 * width)
        self.head = nn.Linear(8 * width, 10)

    def loss(self, batch: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.stem(batch)))
        for part in (self.a1, self.a2, self.b1, self.b2, self.c1, self.c2, self.d1, self.d2):
            x = part(x)
        return functional.cross_entropy(self.head(x.mean((2, 3))), batch[:, 0, :, :10].mean(1).argmax(1))


class WaveNet(Trained):
    def __init__(self, width: int = 16, layers: int = 10) -> None:
        super().__init__()
        self.stem, self.out = nn.Conv1d(1, width, 1), nn.Conv1d(width, 1, 1)
        dilations = [2 ** (i % 5) for i in range(layers)]
        self.filters = nn.ModuleList(nn.Conv1d(width, width, 3, dilation=d, padding=d) for d in dilations)
        self.gates = nn.ModuleList(nn.Conv1d(width, width, 3, dilation=d, padding=d) for d in dilations)
        self.skips = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in dilations)

    def loss(self, batch: Tensor) -> Tensor:
        x, total = self.stem(batch), torch.zeros((), dtype=batch.dtype)
        for one, gate, skip in zip(self.filters, self.gates, self.skips, strict=True):
            inner = skip(one(x).tanh() * gate(x).sigmoid())
            x, total = x + inner, total + inner
        return functional.mse_loss(self.out(functional.relu(total)), batch)


class Rotary(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.first, self.second = heads, nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, n, width = x.shape
        y = self.first(x)
        q, k, v = (part(y).view(b, n, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = (t * cos + torch.cat([-t.chunk(2, -1)[1], t.chunk(2, -1)[0]], -1) * sin for t in (q, k))
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(found.transpose(1, 2).reshape(b, n, width))
        y = self.second(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(Trained):
    """Layers as attributes; head and loss are in the step, where the largest tensor is."""

    def __init__(self, width: int = 32, heads: int = 4, words: int = 2000) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        for i in range(4):
            setattr(self, f"layer{i}", Rotary(width, heads))
        self.norm = nn.RMSNorm(width)

    def loss(self, batch: Tensor) -> Tensor:
        x, n = self.embed(batch[:, :-1]), batch.shape[1] - 1
        size = x.shape[-1] // self.layer0.heads
        steps = torch.arange(n, dtype=x.dtype)[:, None] / 10 ** (torch.arange(size // 2, dtype=x.dtype) / size)
        angles = torch.cat([steps, steps], -1)
        for i in range(4):
            x = getattr(self, f"layer{i}")(x, angles.cos(), angles.sin())
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class Points(Trained):
    """A model of points in the manner of Transolver: slices that points are soft members of."""

    def __init__(self, width: int = 32, slices: int = 16) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, width), nn.Linear(width, 1)
        for i in range(4):
            setattr(self, f"assign{i}", nn.Linear(width, slices))
            setattr(self, f"mix{i}", nn.Linear(width, width))
            setattr(self, f"wide{i}", nn.Linear(width, 2 * width))
            setattr(self, f"narrow{i}", nn.Linear(2 * width, width))
            setattr(self, f"norm{i}", nn.LayerNorm(width))

    def loss(self, batch: Tensor) -> Tensor:
        x = self.enter(batch)
        for i in range(4):
            y = getattr(self, f"norm{i}")(x)
            weights = getattr(self, f"assign{i}")(y).softmax(-1)
            tokens = weights.transpose(1, 2) @ y / weights.sum(1)[..., None]
            x = x + weights @ getattr(self, f"mix{i}")(tokens)
            x = x + getattr(self, f"narrow{i}")(functional.gelu(getattr(self, f"wide{i}")(x)))
        return functional.mse_loss(self.leave(x)[..., 0], batch.square().sum(-1))


MODELS: dict[str, tuple[Callable[[], Trained], Callable[[int], Tensor]]] = {
    "U-Net": (UNet, lambda n: torch.randn(8 * n, 1, 64, 64)),
    "ResNet": (ResNet, lambda n: torch.randn(8 * n, 1, 64, 64)),
    "WaveNet": (WaveNet, lambda n: torch.randn(8 * n, 1, 2000)),
    "Llama": (Llama, lambda n: torch.randint(0, 2000, (4 * n, 129))),
    "points": (Points, lambda n: torch.rand(4 * n, 2000, 3)),
}
"""By name: the module, and n batches."""


def fit(name: str, strategy: Any, *, steps: int, double: bool = False, **options: Any) -> tuple[Trained, Meter, Any]:
    """Train a module; returns it, the meter and the plan."""
    make, batches = MODELS[name]
    torch.manual_seed(0)
    module, data, meter = make(), batches(steps), Meter()
    if double:
        module = module.double()
        data = data.double() if data.is_floating_point() else data
    options = {"accelerator": "cpu", "devices": 1, "precision": "64-true" if double else "32-true", **QUIET, **options}
    trainer = Trainer(strategy=strategy, max_epochs=1, callbacks=[meter], **options)
    torch.manual_seed(1)
    trainer.fit(module, DataLoader(data, len(data) // steps))
    return module, meter, getattr(trainer.strategy, "plan", None)


@cache
def plain(name: str, *, double: bool = False) -> tuple[Trained, int]:
    module, meter, _ = fit(name, "auto", steps=2, double=double)
    return module, meter.live.peak


def difference(one: Trained, other: Trained) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
