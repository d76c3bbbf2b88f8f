"""A language model, most of whose memory is its head and its loss."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, DIM, LAYERS = 300, 8, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Words(nn.Module):
    """A language model whose head is its embedding, and whose forward returns its loss and what it is computed of."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)
        self.dropout = nn.Dropout(0.3)

    def forward(self, words: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(self.hidden(self.dropout(self.embed(words))), labels)

    def hidden(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def head(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(self.dropout(self.norm(x)), self.embed.weight)
        return F.cross_entropy(logits.view(-1, WORDS), labels.reshape(-1)), x
