"""Rows of the conformance matrix: loaders, samplers and metrics over ranks."""

from collections.abc import Iterator
from typing import Any

import torch
import torchmetrics
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, Subset

from tests.lightning.conformance import cases


class Cells(Dataset[cases.Batch]):
    def __init__(self) -> None:
        found = cases.batches()
        self.columns = {name: torch.cat([batch[name] for batch in found]) for name in found[0]}

    def __len__(self) -> int:
        return len(self.columns["x"])

    def __getitem__(self, index: int) -> cases.Batch:
        return {name: value[index] for name, value in self.columns.items()}


class Reading(cases.Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.read: list[list[int]] = []

    def training_step(self, batch: cases.Batch, batch_idx: int) -> Any:
        self.read.append(batch["cell"].tolist())
        return super().training_step(batch, batch_idx)


def read_fit(site: cases.Site, loader: Any, **options: Any) -> cases.Outcome:
    """Train on a loader, and say which cells every step had."""
    module = Reading()
    site.trainer(**options).fit(module, loader)
    steps = [sorted(cell for part in parts for cell in part) for parts in zip(*site.gather(module.read), strict=True)]
    return cases.trained(site, module) | {"cells": steps}


def size(site: cases.Site) -> int:
    return cases.CELLS // site.data_ranks


SAMPLED = cases.TRAINED + ", cells of every step"
KEPT = "ddp shuffles it; here R ranks with b cells each read the batches of one device with R b"


@cases.feature("a loader that shuffles", checked=SAMPLED, against="sampler", plans=cases.EVERY)
def injected(site: cases.Site) -> cases.Outcome:
    loader = DataLoader(Cells(), batch_size=size(site), shuffle=True)
    return read_fit(site, loader, use_distributed_sampler=True)


class Backwards(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(31, -1, -1))

    def __len__(self) -> int:
        return 32


@cases.feature("a loader that does not shuffle", checked=SAMPLED, against="one", plans=cases.EVERY, note=KEPT)
def in_order(site: cases.Site) -> cases.Outcome:
    loader = DataLoader(Subset(Cells(), range(28)), batch_size=size(site))
    return read_fit(site, loader, use_distributed_sampler=True)


@cases.feature("a custom sampler", checked=SAMPLED, against="one", note=KEPT)
def own_sampler(site: cases.Site) -> cases.Outcome:
    loader = DataLoader(Cells(), batch_size=size(site), sampler=Backwards())
    return read_fit(site, loader, use_distributed_sampler=True)


class Reversed(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        return (batch[::-1] for batch in super().__iter__())


@cases.feature("a custom batch sampler", checked=SAMPLED, against="one", note=KEPT)
def own_batch_sampler(site: cases.Site) -> cases.Outcome:
    batch_sampler = Reversed(Backwards(), batch_size=size(site), drop_last=True)
    return read_fit(site, DataLoader(Cells(), batch_sampler=batch_sampler), use_distributed_sampler=True)


class OwnShare(Sampler[int]):
    """This rank's cells in blocks, as a sampler of one's own would deal them."""

    def __init__(self, site: cases.Site) -> None:
        self.site = site

    def __iter__(self) -> Iterator[int]:
        n, first = size(self.site), self.site.data_rank * size(self.site)
        return iter([start + first + i for start in range(0, 32, cases.CELLS) for i in range(n)])

    def __len__(self) -> int:
        return 32 // self.site.data_ranks


@cases.feature("use_distributed_sampler=False with a sampler of one's own", checked=SAMPLED)
def own_share(site: cases.Site) -> cases.Outcome:
    return read_fit(site, DataLoader(Cells(), batch_size=size(site), sampler=OwnShare(site)))


SAME_BATCH = "the same batch is needed on the 2 ranks of a model group, found different ones"


@cases.feature(
    "a sampler that gives the ranks of a model group different cells",
    checked=SAMPLED,
    against="one",
    refused={cases.WIDE: SAME_BATCH, cases.STRATA: SAME_BATCH, cases.NODES: SAME_BATCH},
    plans=cases.EVERY,
    note="on a data axis it is what every rank should have",
)
def wrong_share(site: cases.Site) -> cases.Outcome:
    by_rank = cases.Site(strategies="", rank=site.rank, ranks=site.ranks)
    return read_fit(site, DataLoader(Cells(), batch_size=size(by_rank), sampler=OwnShare(by_rank)))


class Endless(IterableDataset[cases.Batch]):
    def __init__(self, site: cases.Site) -> None:
        self.site = site

    def __iter__(self) -> Iterator[cases.Batch]:
        return (self.site.part(batch) for batch in cases.batches())


@cases.feature("IterableDataset", checked=SAMPLED)
def iterable(site: cases.Site) -> cases.Outcome:
    return read_fit(site, DataLoader(Endless(site), batch_size=None))


class Two(cases.Tiny):
    """Reads two loaders at a time, and validates on two."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch["one"]) + 0.5 * self.loss(batch["other"])
        self.losses.append(loss.detach())
        return loss


@cases.feature(
    "several dataloaders, training and validation", checked=cases.TRAINED + ", both logged losses", plans=cases.EVERY
)
def several(site: cases.Site) -> cases.Outcome:
    module, trainer = Two(), site.trainer()
    loaders = {"one": site.loader(), "other": site.loader(steps=2, seed=8)}
    validation = [site.loader(steps=2, seed=9), site.loader(steps=1, seed=10)]
    trainer.fit(module, CombinedLoader(loaders, "max_size_cycle"), validation)
    return cases.trained(site, module) | {name: value.double() for name, value in trainer.callback_metrics.items()}


class Reloading(LightningDataModule):
    """Other cells whenever it is asked; counts the hooks that were called."""

    def __init__(self, site: cases.Site) -> None:
        super().__init__()
        self.site, self.calls = site, {"setup": 0, "loader": 0}

    def setup(self, stage: str) -> None:
        self.calls["setup"] += 1

    def train_dataloader(self) -> Any:
        self.calls["loader"] += 1
        return self.site.loader(seed=20 + self.calls["loader"])


@cases.feature("reload_dataloaders_every_n_epochs, LightningDataModule", checked=cases.TRAINED + ", calls of its hooks")
def reloaded(site: cases.Site) -> cases.Outcome:
    module, data = cases.Tiny(), Reloading(site)
    site.trainer(max_epochs=4, reload_dataloaders_every_n_epochs=2).fit(module, datamodule=data)
    return cases.trained(site, module) | data.calls


class Measured(cases.Tiny):
    """Metric objects of torchmetrics, and a gather of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.average = torchmetrics.SumMetric(), torchmetrics.MeanMetric()
        self.gathered: list[Tensor] = []

    def training_step(self, batch: cases.Batch, batch_idx: int) -> Any:
        cells = batch["cell"].double()
        self.total.update(cells)
        self.average.update(cells)
        self.log_dict({"total": self.total, "average": self.average}, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


@cases.feature("torchmetrics objects", checked="sum and mean over the cells of all ranks", plans=cases.EVERY)
def metrics(site: cases.Site) -> cases.Outcome:
    trainer = site.trainer(max_epochs=1)
    trainer.fit(Measured(), site.loader())
    return {name: value.double() for name, value in trainer.callback_metrics.items()}


class Gathering(cases.Tiny):
    def on_train_batch_end(self, outputs: Any, batch: cases.Batch, batch_idx: int) -> None:
        self.losses.append(self.all_gather(batch["library"]).mean())

    def training_step(self, batch: cases.Batch, batch_idx: int) -> Any:
        return self.loss(batch)


@cases.feature(
    "self.all_gather",
    checked="the mean of what was gathered",
    note="it gathers from all ranks: a model group's values come once per rank of it",
)
def all_gather(site: cases.Site) -> cases.Outcome:
    module = Gathering()
    site.trainer().fit(module, site.loader())
    return {"gathered": torch.stack(module.losses)}
