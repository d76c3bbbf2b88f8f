"""Rows of the conformance matrix: optimisers, schedulers, accumulation, clipping, manual optimisation."""

from typing import Any

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn

from tests.lightning.conformance.cases import (
    CASE,
    EVERY,
    TRAINED,
    WIDE,
    Batch,
    Outcome,
    Site,
    Tiny,
    batches,
    feature,
    fit,
    fits,
)

fits("accumulate_grad_batches, with a short last window", trainer={"accumulate_grad_batches": 3}, plans=EVERY)
fits(
    "GradientAccumulationScheduler",
    trainer=lambda: {"max_epochs": 3, "callbacks": [GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})]},
)
fits(
    "clipping by the global norm, with accumulation",
    trainer={"gradient_clip_val": 0.02, "accumulate_grad_batches": 2},
    plans=EVERY,
)
fits("clipping by value", trainer={"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}, plans=EVERY)


class Norms(Tiny):
    """Notes the global norm before every step, as people do who watch their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Tensor] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        ask = getattr(strategy, "gradient_norm", None)
        found = nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        self.norms.append(ask().clone() if ask else found)


@feature(
    "norm of the gradients taken by hand",
    checked="the norm of every step",
    plans=EVERY,
    note="with trainer.strategy.gradient_norm(); under S2 a norm over module.parameters() is that of the rank's shards",
)
def norm_by_hand(site: Site) -> Outcome:
    module = Norms()
    site.trainer().fit(module, site.loader())
    return {"norms": torch.stack(module.norms)}


class Scheduled(Tiny):
    """One schedule by step and one by a monitored loss need two runs; `by` says which."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by, self.rates = by, []  # type: ignore[var-annotated]

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        if self.by == "step":
            schedule: Any = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=0.1, total_steps=int(self.trainer.estimated_stepping_batches)
            )
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


@feature("schedulers by step, with estimated_stepping_batches", checked=TRAINED + ", every rate")
def by_step(site: Site) -> Outcome:
    module = Scheduled("step")
    return fit(site, module) | {"rates": module.rates}


@feature("schedulers by a monitored loss", checked=TRAINED + ", every rate")
def by_loss(site: Site) -> Outcome:
    module = Scheduled("loss")
    return fit(site, module, max_epochs=4, limit_val_batches=2) | {"rates": module.rates}


class Adversarial(Tiny):
    """Two optimisers in manual optimisation: a discriminator of cells, then the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.discriminator = nn.Linear(CASE.dim, 1)

    def judged(self, batch: Batch, *, own: bool) -> Tensor:
        latent = self.encode(batch)
        told = self.discriminator(latent.detach() if own else latent)
        wanted = batch["batch"].unsqueeze(1).to(told.dtype)
        return nn.functional.binary_cross_entropy_with_logits(told, wanted)

    def turns(self) -> Any:
        return enumerate(self.optimizers())  # type: ignore[arg-type]

    def loss_of(self, which: int, batch: Batch) -> Tensor:
        if which == 0:
            return self.judged(batch, own=True)
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss - 0.1 * self.judged(batch, own=False)

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        for which, optimizer in self.turns():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss_of(which, batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        rest = [*self.encoder.parameters(), *self.decoder.parameters(), self.v]
        return [torch.optim.SGD(p, lr=0.05, momentum=0.5) for p in (self.discriminator.parameters(), rest)]


fits("manual optimisation, two optimisers in turn (GAN)", Adversarial, plans=EVERY)


class Clipped(Adversarial):
    def training_step(self, batch: Batch, batch_idx: int) -> None:
        for which, optimizer in self.turns():
            optimizer.zero_grad()
            self.manual_backward(self.loss_of(which, batch))
            self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
            optimizer.step()


fits("manual optimisation with self.clip_gradients", Clipped, plans=EVERY)


class Accumulating(Adversarial):
    def training_step(self, batch: Batch, batch_idx: int) -> None:
        last = batch_idx % 2 == 1
        for which, optimizer in self.turns():
            with optimizer.toggle_model(sync_grad=last):
                self.manual_backward(self.loss_of(which, batch) / 2)
                if last:
                    optimizer.step()
                    optimizer.zero_grad()


fits("manual accumulation with toggle_model(sync_grad)", Accumulating, against="one", plans=EVERY)


class Closures(Adversarial):
    def training_step(self, batch: Batch, batch_idx: int) -> None:
        for which, optimizer in self.turns():

            def closure(which: int = which, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = self.loss_of(which, batch)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)


fits("manual optimisation with a step closure", Closures, plans=EVERY)


class RawBackward(Adversarial):
    def training_step(self, batch: Batch, batch_idx: int) -> None:
        for which, optimizer in self.turns():
            optimizer.zero_grad()
            self.loss_of(which, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


fits(
    "loss.backward() instead of self.manual_backward",
    RawBackward,
    against="one",
    plans=EVERY,
    note="averaged at the step, with a warning; under ddp the ranks part without a word",
)


class SeveralBackwards(Adversarial):
    def training_step(self, batch: Batch, batch_idx: int) -> None:
        for which, optimizer in self.turns():
            optimizer.zero_grad()
            self.manual_backward(self.loss_of(which, batch))
            self.manual_backward(0.5 * self.loss_of(which, batch))
            optimizer.step()


fits("several backwards before a step", SeveralBackwards, against="one", plans=EVERY)


class Quasinewton(Tiny):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")


fits(
    "LBFGS with a line search",
    Quasinewton,
    trainer={"max_epochs": 1},
    against="one",
    plans=EVERY,
    rtol=1e-7,
    refused={WIDE: "its update mixes the elements of a parameter"},
    note="ranks take the same number of steps, which ddp does not see to; a line search scales rounding up: 1e-7",
)


class Skipping(Tiny):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


TOGETHER = "Skipping the `training_step` by returning None in distributed training is not supported"


fits(
    "training_step that returns None",
    Skipping,
    checked="Lightning's own refusal where there are several ranks; " + TRAINED + " elsewhere",
    against="one",
    refused={"2": TOGETHER, WIDE: TOGETHER},
    note="Lightning refuses it with every strategy of several ranks: return a loss that is multiplied by zero",
)


class InValidation(Tiny):
    """Takes gradients in validation, as attribution of inputs does."""

    automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.optimizers().zero_grad()  # type: ignore[union-attr]
        self.manual_backward(loss)
        self.optimizers().step()  # type: ignore[union-attr]

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        with torch.enable_grad():
            self.manual_backward(self.loss(batch))


@feature(
    "self.manual_backward in validate",
    checked="all gradients, which stay on their rank",
    against="ddp",
    plans=EVERY,
    refused=dict.fromkeys(EVERY, "outside of a fit"),
    note="in a fit's validation, and after a fit, it works under every plan",
)
def backward_in_validation(site: Site) -> Outcome:
    module = InValidation()
    site.trainer(inference_mode=False).validate(module, site.loader(), verbose=False)
    return _gradients(module)


@feature(
    "self.manual_backward after a fit", checked="all gradients, which stay on their rank", against="ddp", plans=EVERY
)
def backward_after_fit(site: Site) -> Outcome:
    module = InValidation()
    site.trainer(max_epochs=1).fit(module, site.loader())
    module.zero_grad()
    batch = {name: value.double() if value.is_floating_point() else value for name, value in batches()[0].items()}
    module.manual_backward(module.loss(site.part(batch)))
    return _gradients(module)


def _gradients(module: nn.Module) -> Outcome:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
