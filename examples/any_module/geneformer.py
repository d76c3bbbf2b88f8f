"""HuggingFace's BERT as Geneformer uses it: genes in the order of their expression are the words of a cell."""

import lightning.pytorch as pl
import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM


class Geneformer(pl.LightningModule):
    """Masked genes are predicted."""

    def __init__(self, genes: int = 600, dim: int = 64, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.model = BertForMaskedLM(
            BertConfig(
                vocab_size=genes,
                hidden_size=dim,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                intermediate_size=2 * dim,
                max_position_embeddings=256,
                hidden_act="relu",
                hidden_dropout_prob=0.02,
                attention_probs_dropout_prob=0.02,
            )
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of the masked genes."""
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        """AdamW with a linear schedule over the run."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_batch(cells: int = 8, length: int = 96, genes: int = 600) -> dict[str, Tensor]:
    """Ranked genes; every seventh one is to be predicted."""
    ids = torch.randint(genes, (cells, length))
    asked = (torch.arange(length) % 7 == 0).repeat(cells, 1)
    return {
        "input_ids": ids.masked_fill(asked, 1),
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(~asked, -100),
    }
