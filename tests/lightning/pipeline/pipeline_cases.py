"""Two small models that can be stages of a pipeline, in float64, and one run of each; used by the tests beside.

`fit(None, ...)` is one process under Lightning's own strategy, `fit((rank, ranks), ...)` a rank of a pipeline.
"""

import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.lightning.strategy import strategy_cases

TOKENS, LENGTH, WIDTH, LAYERS, SAMPLES, STEPS = 11, 5, 8, 6, 7, 5
Batch = dict[str, Tensor]
METERED = 3
"""The step of which the most bytes are counted that were alive beside what was there before."""


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))
        return x + self.drop(self.down(F.gelu(self.up(self.norms[1](x)))))


class GPT(LightningModule):
    """Embedding and head have one weight; a parameter by itself, a mask from the batch, a frozen scale."""

    def __init__(self, dropout: float = 0.0, head_dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.tokens.weight
        self.drop = nn.Dropout(head_dropout)
        self.blocks[2].up.bias.requires_grad_(False)
        self.right = torchmetrics.MeanMetric()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.places[: x.shape[1]]
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=h.device).tril()
        for block in self.blocks:
            h = block(h, mask) * 1.01
        return self.head(self.drop(self.norm(h)))

    def loss(self, batch: Batch) -> Tensor:
        logits = self(batch["x"])
        return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.right(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("metric", self.right, on_step=False, on_epoch=True)
        self.log("samples", float(len(batch["x"])), reduce_fx="sum", on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch["x"]))

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), batch_size=len(batch["x"]))

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch["x"]).argmax(-1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class CNN(LightningModule):
    """As VGG: convolutions, rectifiers in place and pooling in one list, then two layers; its shapes change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        wide = [1, 4, 4, 6, 6]
        layers: list[nn.Module] = []
        for i, (inside, outside) in enumerate(pairwise(wide)):
            layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU(inplace=True)]
            layers += [nn.MaxPool2d(2)] if i % 2 else []
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 3))
        self.double()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        scores = self.classifier(self.features(x))
        return {"loss": F.cross_entropy(scores, y), "scores": scores}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


def tokens(steps: int = STEPS, samples: int = SAMPLES) -> list[Batch]:
    draw = torch.Generator().manual_seed(5)
    drawn = [torch.randint(TOKENS, (samples, LENGTH + 1), generator=draw) for _ in range(steps)]
    return [{"x": t[:, :-1], "y": t[:, 1:]} for t in drawn]


def images(steps: int = STEPS, samples: int = SAMPLES) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(6)
    return [
        (
            torch.randn(samples, 1, 8, 8, generator=draw, dtype=torch.float64),
            torch.randint(3, (samples,), generator=draw),
        )
        for _ in range(steps)
    ]


class Watch(Callback):
    """What a run has shown on this rank: outputs, norms of gradients, bytes that the rank has held."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.norms: list[float] = []
        self.bytes = self.gradient_bytes = self.state_bytes = self.peak = 0
        self._meter: LiveBytes | None = None

    def on_train_batch_start(  # type: ignore[override]
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == METERED:
            self._meter = LiveBytes()
            self._meter.__enter__()

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._meter is not None:
            self._meter.__exit__(None, None, None)
            self.peak, self._meter = self._meter.peak, None
        self.outputs.append({key: value.detach().clone() for key, value in outputs.items()})
        self.bytes = sum(p.nbytes for p in module.parameters() if not p.is_meta)

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        if hasattr(trainer.strategy, "gradient_norm"):
            self.norms.append(float(trainer.strategy.gradient_norm()))
        else:
            grads = [p.grad for p in module.parameters() if p.grad is not None]
            self.norms.append(float(torch.nn.utils.get_total_norm(grads)))
        self.gradient_bytes = sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)
        self.state_bytes = sum(
            value.nbytes
            for values in trainer.optimizers[0].state.values()
            for value in values.values()
            if isinstance(value, Tensor)
        )


def batches_of(module: LightningModule, rank: tuple[int, int] | None, data_ranks: int) -> list[Any]:
    """Of one process the union of the data ranks' batches."""
    made = tokens if isinstance(module, GPT) else images
    whole = made(samples=SAMPLES * data_ranks)
    if rank is None or data_ranks == 1:
        return whole
    at = rank[0] * data_ranks // rank[1]
    run = slice(at * SAMPLES, (at + 1) * SAMPLES)
    return [{k: v[run] for k, v in b.items()} if isinstance(b, dict) else tuple(v[run] for v in b) for b in whole]


def trainer_of(rank: tuple[int, int] | None, settings: dict[str, Any], options: dict[str, Any]) -> Trainer:
    options = {"max_steps": -1, "use_distributed_sampler": False} | options
    if rank is None:
        return strategy_cases.trainer_of("auto", **options)
    strategy = AMPStrategy(**({} if "plan" in settings else {"strategies": "pipeline"}) | settings)
    return strategy_cases.trainer_of(strategy, rank=rank[0], ranks=rank[1], **options)


def fit(
    rank: tuple[int, int] | None,
    module: LightningModule,
    settings: dict[str, Any],
    options: dict[str, Any],
    *,
    data_ranks: int = 1,
    validate: bool = False,
    ckpt_path: str | None = None,
    save: Path | None = None,
) -> dict[str, Any]:
    """Train for five steps; what came of it."""
    warnings.simplefilter("ignore")
    seed_everything(1, verbose=False)
    watch = Watch()
    trainer = trainer_of(rank, settings, options | {"callbacks": [watch]})
    batches = batches_of(module, rank, data_ranks)
    loader = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, loader, loader if validate else None, ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
    return {
        "state": {name: value.clone() for name, value in module.state_dict().items()},
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "outputs": watch.outputs,
        "plan": getattr(trainer.strategy, "plan", None),
        "norms": watch.norms,
        "peak": watch.peak,
        "bytes": (watch.bytes, watch.gradient_bytes, watch.state_bytes),
        "optimizer": trainer.optimizers[0].state_dict() if trainer.optimizers else {},
    }
