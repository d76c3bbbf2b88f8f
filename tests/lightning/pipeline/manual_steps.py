"""Modules that optimise by hand, and can be stages of a pipeline or not; used by the test beside."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.lightning.pipeline.attacks import Batch, Net


class ByHand(Net):
    """As Lightning's documentation has it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)


class Clipped(ByHand):
    """Zero_grad first of all, and a result."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.clip_gradients(optimizer=optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()
        self.untoggle_optimizer(optimizer=optimizer)
        return {"loss": loss, "n": len(batch["x"])}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


class Accumulates(Clipped):
    """A step of the optimiser for two batches, or for what is left; another loss goes back than is logged."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        last = batch_idx % 2 == 1 or self.trainer.is_last_batch
        loss = self.loss(batch)
        with optimizer.toggle_model(sync_grad=last):
            self.manual_backward(loss / 2)
            if last:
                optimizer.step()
                optimizer.zero_grad()
        self.log("loss", loss)


class Scheduled(Clipped):
    """Of each batch another rate."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        schedule: Any = self.lr_schedulers()
        schedule.step()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.3)]

    def on_train_end(self) -> None:
        assert self.global_step == 3, self.global_step
        assert abs(self.trainer.optimizers[0].param_groups[0]["lr"] - 0.5 * 0.3**3) < 1e-12


class KeepsZeros(ByHand):
    """Gradients of zeros, by which AdamW decays and goes on moving what the second step does not train."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h.detach() if self.global_step == 1 else h)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad(set_to_none=False)
        self.manual_backward(loss)
        optimizer.step()


class TwoOptimizers(ByHand):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.manual_backward(loss)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.embed, self.blocks)]


class TwoBackwards(ByHand):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.manual_backward(loss.square())


class NoBackward(ByHand):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.loss(batch)


class Retains(ByHand):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.manual_backward(self.loss(batch), retain_graph=True)


class Closure(ByHand):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        def closure() -> Tensor:
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer: Any = self.optimizers()
        optimizer.step(closure)


class StepsFirst(ByHand):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.step()
        self.manual_backward(self.loss(batch))


class ReadsNorm(ByHand):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        self.log("norm", nn.utils.get_total_norm([p.grad for p in self.head.parameters()]))


class SetsRate(ByHand):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.param_groups[0]["lr"] = 0.1
        super().training_step(batch, batch_idx)


EXACT = (ByHand, Clipped, Accumulates, Scheduled, KeepsZeros)
REFUSED: dict[type[Net], str] = {
    TwoOptimizers: "has 2 optimizers",
    TwoBackwards: "calls self.manual_backward twice",
    NoBackward: "has not called self.manual_backward",
    Retains: "gives self.manual_backward ['retain_graph']",
    Closure: "gives step of its optimizer",
    StepsFirst: "steps its optimizer before self.manual_backward",
    ReadsNorm: "reads a parameter or its gradient by '__get__'",
    SetsRate: "uses 'param_groups' of its optimizer",
}
"""Words of what is said, by one rank at least."""
