"""HuggingFace's GPT-2, whose head is the embedding: with a large vocabulary the logits are most of the memory."""

import lightning.pytorch as pl
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel


class LanguageModel(pl.LightningModule):
    """The next word is predicted."""

    def __init__(self, words: int = 8000, dim: int = 48, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(
            GPT2Config(vocab_size=words, n_positions=256, n_embd=dim, n_layer=layers, n_head=heads, use_cache=False)
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Cross-entropy of every next word."""
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make_batch(texts: int = 8, length: int = 64, words: int = 8000) -> Tensor:
    """Words of each text."""
    return torch.randint(words, (texts, length))
