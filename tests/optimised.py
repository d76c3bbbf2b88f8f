"""A base of small modules, whose classes name their optimizer."""

from functools import partial
from typing import Any

from lightning.pytorch import LightningModule


class Optimised(LightningModule):
    """`class Net(Optimised, by=torch.optim.SGD, lr=0.1)` trains all its parameters towards a small `loss`."""

    def __init_subclass__(cls, by: Any = None, **options: Any) -> None:
        super().__init_subclass__()
        if by is not None:
            cls._by = staticmethod(partial(by, **options))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return self._by(self.parameters())
