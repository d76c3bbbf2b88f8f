"""A U-Net with group norm, and attention where the image is smallest, as diffusion models use it."""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """Two convolutions with group norm."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norm_1, self.conv_1 = nn.GroupNorm(4, inside), nn.Conv2d(inside, outside, 3, padding=1)
        self.norm_2, self.conv_2 = nn.GroupNorm(4, outside), nn.Conv2d(outside, outside, 3, padding=1)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[image, inside, row, column] -> [image, outside, row, column]."""
        inner = self.conv_1(F.silu(self.norm_1(x)))
        return self.skip(x) + self.conv_2(F.dropout(F.silu(self.norm_2(inner)), 0.1, self.training))


class PixelAttention(nn.Module):
    """Every pixel looks at every other."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(4, channels), nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[image, channel, row, column] -> the same."""
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).chunk(3, dim=-1)
        weight = torch.softmax(q @ k.transpose(1, 2) * q.shape[-1] ** -0.5, dim=-1)
        return x + self.out((weight @ v).transpose(1, 2).reshape(x.shape))


class UNet(pl.LightningModule):
    """Removes noise from images; the module steps its optimiser itself."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.automatic_optimization = False
        wide = 2 * channels
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.down = nn.ModuleList([Residual(channels, channels), Residual(channels, wide)])
        self.middle = nn.ModuleList([Residual(wide, wide), PixelAttention(wide), Residual(wide, wide)])
        self.up = nn.ModuleList([Residual(2 * wide, wide), Residual(wide + channels, channels)])
        self.last = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """The noise in images, [image, 3, row, column]."""
        x, kept = self.first(x), []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        for block in self.middle:
            x = block(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], dim=1))
        return self.last(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        """Mean squared error of the noise."""
        noise = torch.randn_like(batch)
        loss = F.mse_loss(self(batch + noise), noise)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer.step()
        self.log("loss", loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def make_batch(images: int = 4, side: int = 48) -> Tensor:
    """Images."""
    return torch.randn(images, 3, side, side)
