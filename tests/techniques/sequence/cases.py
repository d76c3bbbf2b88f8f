"""LightningModules that know nothing of ranks, and how their batches are split."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanSquaredError

from tests.lightning.strategy.test_fsdp import whole
from tests.optimised import Optimised

DIM, LENGTH, WORDS = 8, 11, 7


class Steps(Optimised, by=torch.optim.SGD, lr=0.05, momentum=0.9):
    """All four steps, which write down their losses; trained in float64 by SGD with momentum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.losses: list[Tensor] = []
        self.gradients: list[dict[str, Tensor]] | None = None

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train", loss, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach().clone())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.gradients is not None:
            named = self.named_parameters()
            self.gradients.append({name: whole(p.grad) for name, p in named if p.grad is not None})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch)


class Text(Steps):
    """A causal transformer with learned positions, whose head has the embedding's weights."""

    def __init__(self, inner: int = 16) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(WORDS, DIM), nn.Parameter(0.1 * torch.randn(LENGTH, DIM))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 2, inner, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(DIM, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embed(batch["ids"]) + self.positions
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch).flatten(0, 1), batch["labels"].flatten(), ignore_index=0)


class Padded(Steps):
    """A transformer over genes of which some are padding, pooled by a mean over those that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, DIM)
        self.block = nn.TransformerEncoderLayer(DIM, 2, 16, dropout=0.0, batch_first=True)
        self.head, self.error = nn.Linear(DIM, 1), MeanSquaredError()

    def forward(self, batch: Any) -> Tensor:
        genes, padding, _ = batch
        x = self.block(self.embed(genes), src_key_padding_mask=padding)
        kept = (~padding)[..., None].to(x.dtype)
        return self.head((x * kept).sum(1) / kept.sum(1))[:, 0]

    def loss(self, batch: Any) -> Tensor:
        found = self(batch)
        if not self.training:
            self.error(found, batch[2])
            self.log("error", self.error)
        return F.mse_loss(found, batch[2])


class Picture(Steps):
    """A small U-Net with batch norm, pooling, transposed convolution and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU())
        self.low = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), nn.GELU())
        self.up, self.out = nn.ConvTranspose2d(4, 4, 2, stride=2), nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        high = self.down(image)
        return self.out(torch.cat([high, self.up(self.low(high))], 1))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch["image"] if isinstance(batch, dict) else batch)

    def loss(self, batch: Tensor) -> Tensor:
        # a step that calls another one, with something else than a batch
        return (self.predict_step({"image": batch}, 0) - batch[:, :1].roll(1, 2)).square().mean()


class Normed(Picture):
    """With batch norms of a split tensor and of one that every rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.pooled = nn.BatchNorm1d(4, momentum=None)

    def forward(self, image: Tensor) -> Tensor:
        scale = self.pooled(self.down(image).mean((2, 3)))
        return super().forward(image) * (1 + scale.mean(1)[:, None, None, None])


class Noisy(Steps):
    """Diffusion noise and dropout: random numbers are those of one process."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, DIM), nn.ReLU(), nn.Dropout(0.3), nn.Linear(DIM, 3))

    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch)

    def loss(self, batch: Tensor) -> Tensor:
        noise = torch.randn_like(batch)
        return (self(batch + 0.3 * noise) - noise).square().mean()


class Activated(Steps):
    """Blocks that begin without parameters: what they receive alone requires gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, DIM)
        self.blocks = nn.ModuleList(nn.Sequential(nn.GELU(), nn.Tanh(), nn.Linear(DIM, DIM)) for _ in range(6))

    def forward(self, batch: Tensor) -> Tensor:
        x = self.first(batch)
        for block in self.blocks:
            x = x + block(x)
        return x

    def loss(self, batch: Tensor) -> Tensor:
        return self(batch).square().mean()


class Case(NamedTuple):
    """A module, its batch for a seed, and options of the strategy."""

    module: Callable[[], Steps]
    batch: Callable[[], Any]
    options: dict[str, Any]


def _text() -> dict[str, Tensor]:
    ids = torch.randint(WORDS, (3, LENGTH + 1))
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


def _genes() -> tuple[Tensor, Tensor, Tensor]:
    padding = torch.arange(LENGTH) >= torch.tensor([11, 6, 3])[:, None]
    return torch.randn(3, LENGTH, 3).double(), padding, torch.randn(3).double()


CASES = {
    "text": Case(Text, _text, {"sequence_dim": {"ids": 1, "labels": 1}}),
    "text, causal parts": Case(Text, _text, {"sequence_dim": {"ids": 1, "labels": -1}, "sequence_sizes": "causal"}),
    "text, fsdp, recompute": Case(Text, _text, {"sequence_dim": {"ids": 1, "labels": 1},
        "strategies": "sequence,recompute,fsdp"}),
    "text, fsdp, recompute, offload": Case(Text, _text, {"sequence_dim": {"ids": 1, "labels": 1},
        "strategies": "sequence,recompute,fsdp,offload"}),
    "activated, recompute, offload": Case(Activated, lambda: torch.randn(16, 64, 3).double(),
        {"sequence_dim": {"batch": 1}, "strategies": "sequence,recompute,offload"}),
    "padded, offload": Case(Padded, _genes, {"sequence_dim": {"0": 1, "1": 1}, "strategies": "sequence,offload"}),
    "padded": Case(Padded, _genes, {"sequence_dim": {"0": 1, "1": 1}}),
    "padded, auto": Case(Padded, _genes, {"sequence_dim": "auto"}),
    "picture": Case(Picture, lambda: torch.randn(2, 2, 12, 8).double(),
        {"sequence_dim": {"batch": 2}, "sequence_sizes": [8, 4]}),
    "noise": Case(Noisy, lambda: torch.randn(4, 9, 3).double(), {"sequence_dim": {"batch": 1}}),
    "one sample": Case(Noisy, lambda: torch.randn(1, 9, 3).double(), {"sequence_dim": {"batch": 1}}),
}  # fmt: skip
WIDE = Case(
    lambda: Text(1024), _text, {"sequence_dim": {"ids": 1, "labels": 1}, "strategies": "sequence,recompute,fsdp"}
)
"""Most of the peak are parameters, gradients and the optimiser's state."""
RANDOM = ["noise", "one sample"]
TWO_DIMS = Case(
    Picture, lambda: torch.randn(2, 2, 12, 8).double(), {"sequence_dim": {"batch": [2, 3]}, "sequence_grid": "2x2"}
)
