"""HuggingFace's vision transformer on images of cells."""

import lightning.pytorch as pl
import torch
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification


class CellImages(pl.LightningModule):
    """The class of an image."""

    def __init__(self, side: int = 48, dim: int = 64, heads: int = 4, layers: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.model = ViTForImageClassification(
            ViTConfig(
                image_size=side,
                patch_size=4,
                num_channels=3,
                hidden_size=dim,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                intermediate_size=4 * dim,
                hidden_dropout_prob=0.1,
                num_labels=classes,
            )
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy."""
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.model(pixel_values=images).logits, labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def make_batch(images: int = 4, side: int = 48, classes: int = 10) -> tuple[Tensor, Tensor]:
    """Images and their classes."""
    return torch.randn(images, 3, side, side), torch.randint(classes, (images,))
