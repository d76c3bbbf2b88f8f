"""Rows of the conformance matrix: kinds of modules and parameters, compilation, errors and interruption."""

import signal
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.lightning.conformance import cases
from tests.lightning.conformance.callbacks import Fails


class Unused(cases.Tiny):
    """A layer that no loss uses, and one that every second step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare, self.sometimes = nn.Linear(2, 2), nn.Linear(cases.CASE.dim, cases.CASE.dim)
        self.steps = 0

    def encode(self, batch: cases.Batch) -> Tensor:
        self.steps += 1
        latent = super().encode(batch)
        return self.sometimes(latent) if self.steps % 2 else latent  # type: ignore[no-any-return]


cases.fits("parameters not used in a step, or never", Unused, plans=cases.EVERY)


class Shared(cases.Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(cases.CASE.dim, cases.CASE.dim), nn.Linear(cases.CASE.dim, cases.CASE.dim)
        self.other.weight = self.one.weight

    def encode(self, batch: cases.Batch) -> Tensor:
        return self.other(self.one(super().encode(batch)).tanh())


cases.fits("parameters shared between modules", Shared, plans=cases.EVERY)


class SharedWide(cases.Tiny):
    """The wide encoder's weight is that of another layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(cases.N_FEATURES, cases.CASE.dim, bias=False)
        self.other.weight = self.encoder.weight

    def encode(self, batch: cases.Batch) -> Tensor:
        return super().encode(batch) + 0.1 * self.other(batch["x"])


cases.fits(
    "the wide encoder's weight shared with another layer",
    SharedWide,
    plans=cases.EVERY,
    refused={cases.WIDE: "another layer that the plan splits has it too, which would be trained separately"},
    note="S2 refuses to split it",
)


class Frozen(cases.Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.encoder.bias.requires_grad_(False)
        self.decoder.strata[0].requires_grad_(False)


cases.fits("frozen parameters", Frozen, plans=cases.EVERY)


class Thawing(cases.Tiny):
    def on_train_epoch_start(self) -> None:
        self.decoder.requires_grad_(self.current_epoch > 0)


cases.fits("parameters unfrozen in the middle", Thawing, against="one", plans=cases.EVERY)


class Configured(cases.Tiny):
    """Layers that are made in configure_model, which is called again for every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.later: nn.Linear | None = None

    def configure_model(self) -> None:
        if self.later is None:
            torch.manual_seed(11)
            self.later = nn.Linear(cases.CASE.dim, cases.CASE.dim)

    def encode(self, batch: cases.Batch) -> Tensor:
        assert self.later is not None, "configure_model was called"
        return self.later(super().encode(batch))


cases.fits("configure_model", Configured, plans=cases.EVERY)


class Bare(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.losses: list[Tensor] = []

    def training_step(self, batch: cases.Batch, batch_idx: int) -> None:
        self.losses.append(batch["library"].mean())

    def configure_optimizers(self) -> None: ...


@cases.feature("a module with no parameters", checked="mean of what it has read", against="one", plans=())
def bare(site: cases.Site) -> cases.Outcome:
    module = Bare()
    site.trainer().fit(module, site.loader())
    return cases.trained(site, module)


class Normalised(cases.Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(cases.CASE.dim)

    def encode(self, batch: cases.Batch) -> Tensor:
        return self.norm(super().encode(batch))


@cases.feature(
    "sync_batchnorm",
    checked=cases.TRAINED + ", running statistics",
    against="one",
    plans=cases.EVERY,
    note="on CPU too, where ddp refuses; share_batch_statistics=True is the default",
)
def sync_batchnorm(site: cases.Site) -> cases.Outcome:
    return cases.fit(site, Normalised(), **({"sync_batchnorm": True} if site.strategies else {}))


COMPILED = "torch.compile was applied to"
CHANGED = {cases.WIDE: COMPILED, cases.STRATA: COMPILED, cases.NODES: COMPILED}


@cases.feature("torch.compile of the LightningModule", plans=cases.EVERY, refused=CHANGED)
def compiled(site: cases.Site) -> cases.Outcome:
    module = cases.Tiny()
    site.trainer(max_epochs=1, limit_train_batches=2).fit(torch.compile(module, backend="eager"), site.loader())
    torch._dynamo.reset()
    return cases.trained(site, module)


class CompiledEncoder(cases.Tiny):
    def __init__(self) -> None:
        super().__init__()
        body = nn.Sequential(nn.Linear(cases.CASE.dim, cases.CASE.dim), nn.Tanh())
        self.body = torch.compile(body, backend="eager")

    def encode(self, batch: cases.Batch) -> Tensor:
        return self.body(super().encode(batch))


@cases.feature("torch.compile of a layer", plans=cases.EVERY)
def compiled_layer(site: cases.Site) -> cases.Outcome:
    found = cases.fit(site, CompiledEncoder(), max_epochs=1)
    torch._dynamo.reset()
    return found


class CompiledDecoder(cases.Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = torch.compile(self.decoder, backend="eager")  # type: ignore[assignment]


@cases.feature("torch.compile of the decoder", plans=cases.EVERY, refused=CHANGED)
def compiled_decoder(site: cases.Site) -> cases.Outcome:
    found = cases.fit(site, CompiledDecoder(), max_epochs=1, limit_train_batches=2)
    torch._dynamo.reset()
    return found


def hooks_left(module: nn.Module) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in module.parameters())


@cases.feature(
    "an exception in a hook of all ranks",
    checked="on_exception was told, the module is whole and without hooks; " + cases.TRAINED + " of a fit after it",
    plans=cases.EVERY,
)
def exception(site: cases.Site) -> cases.Outcome:
    fails, module = Fails(ArithmeticError), cases.Tiny()
    shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    raised = ""
    try:
        site.trainer(callbacks=[fails]).fit(module, site.loader())
    except ArithmeticError as error:
        raised = str(error)
    after = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    left = hooks_left(module)
    again = cases.fit(site)
    return again | {"raised": raised, "told": fails.told, "whole": after == shapes, "hooks": left}


@cases.feature(
    "KeyboardInterrupt",
    checked="on_exception was told, status; the module is whole and without hooks",
    plans=cases.EVERY,
    note="the exit status is 130, as shells have it, where Lightning's is 1",
)
def keyboard(site: cases.Site) -> cases.Outcome:
    fails, module = Fails(KeyboardInterrupt), cases.Tiny()
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


@cases.feature(
    "a misspelt strategy name",
    checked="Lightning's own refusal",
    against="one",
    plans=(),
    refused=dict.fromkeys(("1", "2"), "You selected an invalid strategy name: `strategy='apm'`"),
    note='the names are "amp", "amp_spawn", "amp_fork" and "amp_notebook"',
)
def misspelt(site: cases.Site) -> cases.Outcome:
    if site.strategies:
        Trainer(strategy="apm", accelerator="cpu", logger=False)
    return {}
