"""Mean and squared deviations of a union from those of its parts (Chan, Golub and LeVeque 1983).

    mean = sum_r n_r mean_r / n      M2 = sum_r M2_r + n_r (mean_r - mean)^2      n = sum_r n_r

Sums of squares would lose the digits that the mean has in common with every value.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_amp.shapes import Scalar


def union_moments(
    means: Float[Tensor, "part value"], m2s: Float[Tensor, "part value"], counts: Float[Tensor, "part 1"]
) -> tuple[Float[Tensor, " value"], Float[Tensor, " value"], Scalar]:
    """Mean, sum of squared deviations and number of the union; a part may be empty."""
    count = counts.sum()
    mean = (counts * means).sum(dim=0) / count
    return mean, torch.addcmul(m2s, counts, (means - mean).square()).sum(dim=0), count
