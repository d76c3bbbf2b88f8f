"""Terms of the GLUE loss, each a mean over cells, so that the gradient of a batch is that of its parts, averaged."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lightning_amp.shapes import PerCell, Scalar

LEAK = 0.2


def normal_kl(loc: Float[Tensor, "row dim"], std: Float[Tensor, "row dim"]) -> Scalar:
    """Divergence of Normal(loc, std) from the standard normal, summed over channels, mean over rows."""
    return divergence(loc, std).mean()


def divergence(loc: Float[Tensor, "row dim"], std: Float[Tensor, "row dim"]) -> Float[Tensor, " row"]:
    """Divergence of Normal(loc, std) from the standard normal, summed over channels."""
    return (0.5 * (loc.square() + std.square() - 1) - std.log()).sum(dim=1)


class Discriminator(nn.Module):
    """Guesses from a cell's latent which modality the cell is of."""

    def __init__(self, dim: int, n_modalities: int, *, width: int, depth: int):
        super().__init__()
        sizes = [dim] + [width] * depth
        hidden = [(nn.Linear(a, b), nn.LeakyReLU(LEAK)) for a, b in pairwise(sizes)]
        self.layers = nn.Sequential(
            *(layer for pair in hidden for layer in pair), nn.Linear(sizes[-1], n_modalities)
        )

    def forward(self, u: PerCell) -> Float[Tensor, "cell modality"]:
        """Logits of the modalities."""
        logits: Tensor = self.layers(u)
        return logits


def alignment_loss(discriminator: Discriminator, latents: dict[int, PerCell], *, frozen: bool) -> Scalar:
    """Cross-entropy of the discriminator's guesses: mean over the cells of a modality, then over modalities.

    Args:
        latents: class of a modality -> latent of its cells.
        frozen: compute with detached parameters, so that backward reaches the latents only.
    """
    parameters = {n: p.detach() if frozen else p for n, p in discriminator.named_parameters()}
    total = torch.zeros((), device=next(iter(latents.values())).device)
    for label, u in latents.items():
        logits = torch.func.functional_call(discriminator, parameters, (u,))
        total = total + F.cross_entropy(logits, torch.full((len(u),), label, device=u.device))
    return total / len(latents)
