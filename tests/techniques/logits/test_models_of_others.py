"""Logits that a submodule returns, and losses that it computes, run in chunks: at the predicted peak, and exactly."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp import AMPStrategy
from tests.any_module import QUIET, Meter

WORDS = 1000
Loss = Callable[[Any, Tensor], Tensor]


class Network(nn.Module):
    """The head follows the last block, and the loss is outside, or inside with `labels`."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, WORDS)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        y = self.embed(x)
        for block in self.blocks:
            y = y + block(y).relu()
        logits = self.head(self.norm(y))
        if labels is None:
            return {"logits": logits}
        # a head in another precision, and labels that are moved, padded and ignored
        moved = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        loss = F.cross_entropy(logits.float().view(-1, WORDS), moved.view(-1), ignore_index=-100)
        return {"logits": logits, "loss": loss}


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=WORDS, **sizes))  # type: ignore[no-any-return]


def mixture() -> nn.Module:
    transformers = pytest.importorskip("transformers", "5.0")
    config = transformers.Qwen3MoeConfig(
        **{"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16},
        **{"num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts": 3, "num_experts_per_tok": 1},
        **{"max_position_embeddings": 32, "use_cache": False, "experts_implementation": "eager"},
    )
    return transformers.Qwen3MoeForCausalLM(config)  # type: ignore[no-any-return]


LOSSES: dict[str, Loss] = {
    "in the model": lambda net, x: net(x, labels=torch.where(x % 3 == 0, -100, x))["loss"],
    "in the step": lambda net, x: F.cross_entropy(net(x)["logits"][:, :-1].reshape(-1, WORDS), x[:, 1:].flatten()),
}


class Words(pl.LightningModule):
    def __init__(self, network: Callable[[], nn.Module], loss: Loss) -> None:
        super().__init__()
        self.net, self.loss = network(), loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def trained(network: Callable[[], nn.Module], loss: Loss, strategy: Any) -> tuple[dict[str, Tensor], int, Any]:
    torch.manual_seed(0)
    module, data, meter = Words(network, loss).double().train(), torch.randint(WORDS, (16, 32)), Meter()
    trainer = Trainer(
        strategy=strategy,
        max_epochs=1,
        callbacks=[meter],
        accelerator="cpu",
        devices=1,
        precision="64-true",
        **QUIET,  # type: ignore[arg-type]
    )
    # with dropout, which draws the same numbers
    torch.manual_seed(1)
    trainer.fit(module, DataLoader(data, 8))
    return module.state_dict(), meter.live.peak, getattr(trainer.strategy, "plan", None)


def check(network: Callable[[], nn.Module]) -> None:
    for name, loss in LOSSES.items():
        right, whole, _ = trained(network, loss, "auto")
        state, peak, plan = trained(network, loss, AMPStrategy(strategies="logits"))
        assert "logits" in [rule.strategy for rule in plan.rules], name
        assert peak <= plan.predicted_peak_bytes < min(1.02 * peak, 0.8 * whole), name
        # a loss in float32 has its rounding
        torch.testing.assert_close(state, right, rtol=1e-12, atol=1e-12 if name == "in the step" else 1e-9)


def test_a_submodule_returns_logits_or_their_loss() -> None:
    check(Network)


@pytest.mark.long
def test_models_of_transformers() -> None:
    for network in (gpt2, bert):
        check(network)


@pytest.mark.long
def test_a_mixture_of_experts_of_transformers_whose_rows_values_decide() -> None:
    check(mixture)
