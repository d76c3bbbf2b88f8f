"""Rows of the conformance matrix: kinds of modules and parameters, compilation, errors and interruption."""

import signal
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.lightning.conformance.callbacks import Fails
from tests.lightning.conformance.cases import (
    CASE,
    EVERY,
    N_FEATURES,
    NODES,
    STRATA,
    TRAINED,
    WIDE,
    Batch,
    Outcome,
    Site,
    Tiny,
    feature,
    fit,
    fits,
    trained,
)


class Unused(Tiny):
    """A layer that no loss uses, and one that every second step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare, self.sometimes = nn.Linear(2, 2), nn.Linear(CASE.dim, CASE.dim)
        self.steps = 0

    def encode(self, batch: Batch) -> Tensor:
        self.steps += 1
        latent = super().encode(batch)
        return self.sometimes(latent) if self.steps % 2 else latent  # type: ignore[no-any-return]


fits("parameters not used in a step, or never", Unused, plans=EVERY)


class Shared(Tiny):
    """One weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(CASE.dim, CASE.dim), nn.Linear(CASE.dim, CASE.dim)
        self.other.weight = self.one.weight

    def encode(self, batch: Batch) -> Tensor:
        latent: Tensor = self.other(self.one(super().encode(batch)).tanh())
        return latent


fits("parameters shared between modules", Shared, plans=EVERY)


class SharedWide(Tiny):
    """The wide encoder's weight is that of another layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(N_FEATURES, CASE.dim, bias=False)
        self.other.weight = self.encoder.weight

    def encode(self, batch: Batch) -> Tensor:
        return super().encode(batch) + 0.1 * self.other(batch["x"])


fits(
    "the wide encoder's weight shared with another layer",
    SharedWide,
    plans=EVERY,
    refused={WIDE: "another layer that the plan splits has it too, which would be trained separately"},
    note="S2 refuses to split it",
)


class Frozen(Tiny):
    """Parts of the encoder and of the decoder that do not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.bias.requires_grad_(False)
        self.decoder.strata[0].requires_grad_(False)


fits("frozen parameters", Frozen, plans=EVERY)


class Thawing(Tiny):
    def on_train_epoch_start(self) -> None:
        self.decoder.requires_grad_(self.current_epoch > 0)


fits("parameters unfrozen in the middle", Thawing, against="one", plans=EVERY)


class Configured(Tiny):
    """Layers that are made in configure_model, which is called again for every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.later: nn.Linear | None = None

    def configure_model(self) -> None:
        if self.later is None:
            torch.manual_seed(11)
            self.later = nn.Linear(CASE.dim, CASE.dim)

    def encode(self, batch: Batch) -> Tensor:
        assert self.later is not None, "configure_model was called"
        latent: Tensor = self.later(super().encode(batch))
        return latent


fits("configure_model", Configured, plans=EVERY)


class Bare(LightningModule):
    """Without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.losses: list[Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        self.losses.append(batch["library"].mean())

    def configure_optimizers(self) -> None: ...


@feature("a module with no parameters", checked="mean of what it has read", against="one", plans=())
def bare(site: Site) -> Outcome:
    module = Bare()
    site.trainer().fit(module, site.loader())
    return trained(site, module)


class Normalised(Tiny):
    """With batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(CASE.dim)

    def encode(self, batch: Batch) -> Tensor:
        latent: Tensor = self.norm(super().encode(batch))
        return latent


@feature(
    "sync_batchnorm",
    checked=TRAINED + ", running statistics",
    against="one",
    plans=EVERY,
    note="on CPU too, where ddp refuses; share_batch_statistics=True is the default",
)
def sync_batchnorm(site: Site) -> Outcome:
    return fit(site, Normalised(), **({"sync_batchnorm": True} if site.strategies else {}))


COMPILED = "torch.compile was applied to"
CHANGED = {WIDE: COMPILED, STRATA: COMPILED, NODES: COMPILED}


@feature("torch.compile of the LightningModule", plans=EVERY, refused=CHANGED)
def compiled(site: Site) -> Outcome:
    module = Tiny()
    site.trainer(max_epochs=1, limit_train_batches=2).fit(torch.compile(module, backend="eager"), site.loader())
    torch._dynamo.reset()
    return trained(site, module)


class CompiledEncoder(Tiny):
    def __init__(self) -> None:
        super().__init__()
        body = nn.Sequential(nn.Linear(CASE.dim, CASE.dim), nn.Tanh())
        self.body = torch.compile(body, backend="eager")

    def encode(self, batch: Batch) -> Tensor:
        latent: Tensor = self.body(super().encode(batch))
        return latent


@feature("torch.compile of a layer", plans=EVERY)
def compiled_layer(site: Site) -> Outcome:
    found = fit(site, CompiledEncoder(), max_epochs=1)
    torch._dynamo.reset()
    return found


class CompiledDecoder(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = torch.compile(self.decoder, backend="eager")  # type: ignore[assignment]


@feature("torch.compile of the decoder", plans=EVERY, refused=CHANGED)
def compiled_decoder(site: Site) -> Outcome:
    found = fit(site, CompiledDecoder(), max_epochs=1, limit_train_batches=2)
    torch._dynamo.reset()
    return found


def hooks_left(module: nn.Module) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in module.parameters())


@feature(
    "an exception in a hook of all ranks",
    checked="on_exception was told, the module is whole and without hooks; " + TRAINED + " of a fit after it",
    plans=EVERY,
)
def exception(site: Site) -> Outcome:
    fails, module = Fails(ArithmeticError), Tiny()
    shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    raised = ""
    try:
        site.trainer(callbacks=[fails]).fit(module, site.loader())
    except ArithmeticError as error:
        raised = str(error)
    after = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    left = hooks_left(module)
    again = fit(site)
    return again | {"raised": raised, "told": fails.told, "whole": after == shapes, "hooks": left}


@feature(
    "KeyboardInterrupt",
    checked="on_exception was told, status; the module is whole and without hooks",
    plans=EVERY,
    note="the exit status is 130, as shells have it, where Lightning's is 1",
)
def keyboard(site: Site) -> Outcome:
    fails, module = Fails(KeyboardInterrupt), Tiny()
    before = signal.getsignal(signal.SIGINT)
    trainer: Trainer = site.trainer(callbacks=[fails])
    status: Any = None
    try:
        trainer.fit(module, site.loader())
    except SystemExit as left:
        status = left.code
    finally:
        signal.signal(signal.SIGINT, before)
    shape = tuple(module.encoder.weight.shape)
    expected = 130 if isinstance(trainer.strategy, AMPStrategy) else 1
    found = {"told": fails.told, "exit": status == expected, "state": str(trainer.state.status)}
    return found | {"whole": shape, "hooks": hooks_left(module)}


@feature(
    "a misspelt strategy name",
    checked="Lightning's own refusal",
    against="one",
    plans=(),
    refused=dict.fromkeys(("1", "2"), "You selected an invalid strategy name: `strategy='apm'`"),
    note='the names are "amp", "amp_spawn", "amp_fork" and "amp_notebook"',
)
def misspelt(site: Site) -> Outcome:
    if site.strategies:
        Trainer(strategy="apm", accelerator="cpu", logger=False)
    return {}
