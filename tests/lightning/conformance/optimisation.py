"""Rows of the conformance matrix: optimisers, schedulers, accumulation, clipping, manual optimisation."""

from typing import Any

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn

from tests.lightning.conformance import cases

cases.fits(
    "accumulate_grad_batches, with a short last window", trainer={"accumulate_grad_batches": 3}, plans=cases.EVERY
)
cases.fits(
    "GradientAccumulationScheduler",
    trainer=lambda: {"max_epochs": 3, "callbacks": [GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})]},
)
cases.fits(
    "clipping by the global norm, with accumulation",
    trainer={"gradient_clip_val": 0.02, "accumulate_grad_batches": 2},
    plans=cases.EVERY,
)
cases.fits(
    "clipping by value", trainer={"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}, plans=cases.EVERY
)


class Norms(cases.Tiny):
    """Notes the global norm before every step, as people do who watch their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Tensor] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        ask = getattr(strategy, "gradient_norm", None)
        found = nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        self.norms.append(ask().clone() if ask else found)


@cases.feature(
    "norm of the gradients taken by hand",
    checked="the norm of every step",
    plans=cases.EVERY,
    note="with trainer.strategy.gradient_norm(); under S2 a norm over module.parameters() is that of the rank's shards",
)
def norm_by_hand(site: cases.Site) -> cases.Outcome:
    module = Norms()
    site.trainer().fit(module, site.loader())
    return {"norms": torch.stack(module.norms)}


class Scheduled(cases.Tiny):
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


@cases.feature("schedulers by step, with estimated_stepping_batches", checked=cases.TRAINED + ", every rate")
def by_step(site: cases.Site) -> cases.Outcome:
    module = Scheduled("step")
    return cases.fit(site, module) | {"rates": module.rates}


@cases.feature("schedulers by a monitored loss", checked=cases.TRAINED + ", every rate")
def by_loss(site: cases.Site) -> cases.Outcome:
    module = Scheduled("loss")
    return cases.fit(site, module, max_epochs=4, limit_val_batches=2) | {"rates": module.rates}


class Adversarial(cases.Tiny):
    """Two optimisers in manual optimisation: a discriminator of cells, then the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.discriminator = nn.Linear(cases.CASE.dim, 1)

    def judged(self, batch: cases.Batch, *, own: bool) -> Tensor:
        latent = self.encode(batch)
        told = self.discriminator(latent.detach() if own else latent)
        wanted = batch["batch"].unsqueeze(1).to(told.dtype)
        return nn.functional.binary_cross_entropy_with_logits(told, wanted)

    def turns(self) -> Any:
        return enumerate(self.optimizers())  # type: ignore[arg-type]

    def loss_of(self, which: int, batch: cases.Batch) -> Tensor:
        if which == 0:
            return self.judged(batch, own=True)
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss - 0.1 * self.judged(batch, own=False)

    def training_step(self, batch: cases.Batch, batch_idx: int) -> None:
        for which, optimizer in self.turns():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss_of(which, batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        rest = [*self.encoder.parameters(), *self.decoder.parameters(), self.v]
        return [torch.optim.SGD(p, lr=0.05, momentum=0.5) for p in (self.discriminator.parameters(), rest)]


cases.fits("manual optimisation, two optimisers in turn (GAN)", Adversarial, plans=cases.EVERY)


class Clipped(Adversarial):
    def training_step(self, batch: cases.Batch, batch_idx: int) -> None:
        for which, optimizer in self.turns():
            optimizer.zero_grad()
            self.manual_backward(self.loss_of(which, batch))
            self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
            optimizer.step()


cases.fits("manual optimisation with self.clip_gradients", Clipped, plans=cases.EVERY)


class Accumulating(Adversarial):
    def training_step(self, batch: cases.Batch, batch_idx: int) -> None:
        last = batch_idx % 2 == 1
        for which, optimizer in self.turns():
            with optimizer.toggle_model(sync_grad=last):
                self.manual_backward(self.loss_of(which, batch) / 2)
                if last:
                    optimizer.step()
                    optimizer.zero_grad()


cases.fits("manual accumulation with toggle_model(sync_grad)", Accumulating, against="one", plans=cases.EVERY)


class Closures(Adversarial):
    def training_step(self, batch: cases.Batch, batch_idx: int) -> None:
        for which, optimizer in self.turns():

            def closure(which: int = which, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = self.loss_of(which, batch)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)


cases.fits("manual optimisation with a step closure", Closures, plans=cases.EVERY)


class RawBackward(Adversarial):
    def training_step(self, batch: cases.Batch, batch_idx: int) -> None:
        for which, optimizer in self.turns():
            optimizer.zero_grad()
            self.loss_of(which, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


cases.fits(
    "loss.backward() instead of self.manual_backward",
    RawBackward,
    against="one",
    plans=cases.EVERY,
    note="averaged at the step, with a warning; under ddp the ranks part without a word",
)


class SeveralBackwards(Adversarial):
    def training_step(self, batch: cases.Batch, batch_idx: int) -> None:
        for which, optimizer in self.turns():
            optimizer.zero_grad()
            self.manual_backward(self.loss_of(which, batch))
            self.manual_backward(0.5 * self.loss_of(which, batch))
            optimizer.step()


cases.fits("several backwards before a step", SeveralBackwards, against="one", plans=cases.EVERY)


class Quasinewton(cases.Tiny):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")


cases.fits(
    "LBFGS with a line search",
    Quasinewton,
    trainer={"max_epochs": 1},
    against="one",
    plans=cases.EVERY,
    rtol=1e-7,
    refused={cases.WIDE: "its update mixes the elements of a parameter"},
    note="ranks take the same number of steps, which ddp does not see to; a line search scales rounding up: 1e-7",
)


class Skipping(cases.Tiny):
    def training_step(self, batch: cases.Batch, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


TOGETHER = "Skipping the `training_step` by returning None in distributed training is not supported"


cases.fits(
    "training_step that returns None",
    Skipping,
    checked="Lightning's own refusal where there are several ranks; " + cases.TRAINED + " elsewhere",
    against="one",
    refused={"2": TOGETHER, cases.WIDE: TOGETHER},
    note="Lightning refuses it with every strategy of several ranks: return a loss that is multiplied by zero",
)


class InValidation(cases.Tiny):
    """Takes gradients in validation, as attribution of inputs does."""

    automatic_optimization = False

    def training_step(self, batch: cases.Batch, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.optimizers().zero_grad()  # type: ignore[union-attr]
        self.manual_backward(loss)
        self.optimizers().step()  # type: ignore[union-attr]

    def validation_step(self, batch: cases.Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        with torch.enable_grad():
            self.manual_backward(self.loss(batch))


@cases.feature(
    "self.manual_backward in validate",
    checked="all gradients, which stay on their rank",
    against="ddp",
    plans=cases.EVERY,
    refused=dict.fromkeys(cases.EVERY, "outside of a fit"),
    note="in a fit's validation, and after a fit, it works under every plan",
)
def backward_in_validation(site: cases.Site) -> cases.Outcome:
    module = InValidation()
    site.trainer(inference_mode=False).validate(module, site.loader(), verbose=False)
    return _gradients(module)


@cases.feature(
    "self.manual_backward after a fit",
    checked="all gradients, which stay on their rank",
    against="ddp",
    plans=cases.EVERY,
)
def backward_after_fit(site: cases.Site) -> cases.Outcome:
    module = InValidation()
    site.trainer(max_epochs=1).fit(module, site.loader())
    module.zero_grad()
    batch = {name: value.double() if value.is_floating_point() else value for name, value in cases.batches()[0].items()}
    module.manual_backward(module.loss(site.part(batch)))
    return _gradients(module)


def _gradients(module: nn.Module) -> cases.Outcome:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
