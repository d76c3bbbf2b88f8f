"""A user's own decoder as docs/howto/model.md shows it: independent units, each of which says its loss alone."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_amp.models.decoders.independent_units import Unit, UnitDecoder
from tests.optimised import Optimised

SIZES, DIM, STEPS = (5, 3, 4), 6, 5


class Chromosome(Unit):
    def __init__(self, first: int, size: int) -> None:
        super().__init__(n_features=size)
        self.columns = slice(first, first + size)
        self.gate = nn.Linear(DIM, DIM, bias=False)
        self.offset = nn.Parameter(torch.zeros(size))

    def nll(self, v: Tensor, u: Tensor, **cells: Tensor) -> Tensor:
        own = self.gate(v)[self.columns].tanh()
        log_rate = (u @ own.T + self.offset).log_softmax(1) + cells["library"].log()
        return F.poisson_nll_loss(log_rate, cells["x"][:, self.columns], reduction="sum")


class Counts(Optimised, by=torch.optim.Adam, lr=1e-2):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        firsts = [sum(SIZES[:i]) for i in range(len(SIZES))]
        units = [Chromosome(first, size) for first, size in zip(firsts, SIZES, strict=True)]
        self.encoder = nn.Linear(sum(SIZES), DIM)
        self.v = nn.Parameter(torch.randn(sum(SIZES), DIM))
        self.decoder = UnitDecoder(units, n_anchors=sum(SIZES), dim=DIM)
        self.double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        u = self.encoder(batch["x"].log1p())
        loss: Tensor = self.decoder(u, self.v, library=batch["library"], x=batch["x"])
        return loss / batch["x"].numel() + 0.1 * u.square().mean()


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    rate = torch.full((STEPS, 7, sum(SIZES)), 0.8, dtype=torch.float64)
    counts = torch.poisson(rate, generator=generator)
    return [{"x": x, "library": x.sum(1, keepdim=True) + 1} for x in counts]
