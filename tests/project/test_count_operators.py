"""Claim: operators, kernels, views and host syncs are told apart, and no step waits for a device."""

from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule

from benchmarks.count_operators import OperatorCounter
from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.footprint.target_device import settings_of
from lightning_amp.installing.install import install
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.models.glue import GLUE
from lightning_amp.techniques.hic.rows import StreamStrata
from lightning_amp.techniques.hic.scores import nonzero_counts
from lightning_amp.techniques.hic.scores.nonzero_counts import entries, find_entries, known_entries
from lightning_amp.techniques.hic.scores.sparse_likelihood import SparseZINB
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.techniques.sharded_cases import Case, Model, assert_same, make_plan, train

OURS = ("S4", "fused", "sparse", "stream")
FORMS = {
    "independent": Case(),
    "chained": Case(chained=True),
    "one row for all cells": Case(n_batches=1, head=False),
    "paper": Case(variant="paper"),
}


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: torch.equal(x, x),
        lambda x: torch.tensor([1.0, 2.0]),
        lambda x: x.to("meta"),
    ],
)
def test_what_the_host_waits_for_is_seen(look) -> None:
    with OperatorCounter() as counter:
        look(torch.ones(3))
    assert counter.host_syncs.total() == 1


NO_WAIT = ("techniques/hic/attention/", "data/sparse_counts.py")
"""Where numbers of the host become tensors that a GPU is not waited for: a number assigned to a slice is a fill there,
and places of counts come from pinned memory."""


def step(case: Case, strategies: tuple[str, ...], cells: int) -> OperatorCounter:
    """The operators of the second step of a decoder, by the settings of CUDA; counts by their entries."""
    model = Model(case)
    install(model, make_plan(strategies, 1, {"stream": StreamStrata(cells=cells)}))
    model.batch["x"] = SparseCounts.from_dense(model.batch["x"])
    with settings_of("cuda"):
        model().backward()
        with OperatorCounter() as counter:
            model().backward()
    return counter


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("strategies", "cells"), [((), 4), (("S4", "sparse"), 4), (OURS, 4), (OURS, 3)])
def test_a_step_of_a_decoder_waits_for_no_device(form: str, strategies: tuple[str, ...], cells: int) -> None:
    found = step(FORMS[form], strategies, cells).host_syncs
    waits = [wait for wait in found if not (wait[0] == "lift_fresh" and wait[1].startswith(NO_WAIT))]
    assert not waits


class ThirdStep(Callback):
    """Counts the operators of a training step: both optimisers', without the loader's."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if batch_idx == 2:
            self.counter = OperatorCounter()
            self.counter.__enter__()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if batch_idx == 2:
            self.counter.__exit__(None, None, None)
            trainer.should_stop = True


@pytest.mark.parametrize("strategies", ["S1", "S1,S4,fused,sparse,stream"])
@pytest.mark.parametrize("sparse", [True, False])
def test_a_step_of_the_reference_model_waits_for_no_device(tmp_path, sparse: bool, strategies: str) -> None:
    data = tmp_path / "data"
    synthesize(data)
    third = ThirdStep()
    with settings_of("cuda"):
        trainer = trainer_of(AMPStrategy(strategies=strategies), callbacks=third, max_steps=-1, limit_val_batches=0)
        model = GLUE(latent_dim=8, hidden_dim=16, hidden_depth=1, window=10)
        trainer.fit(model, datamodule=SingleCellDataModule(data, batch_size=8, sparse=sparse))
    assert not third.counter.host_syncs


def test_a_decoder_looks_for_the_entries_of_dense_counts_once_a_batch() -> None:
    model, expected = Model(Case()), train(Model(Case()), 2)
    installed = install(model, make_plan(OURS, 1, {"stream": StreamStrata(cells=2)}))
    with settings_of("cuda"):
        assert_same(train(model, 2, installed), expected)
        with OperatorCounter() as counter:
            model().backward()
        assert not [name for name, _ in counter.host_syncs if name == "nonzero"], "known from the steps before"
        model.batch["x"].add_(1)
        with OperatorCounter() as counter:
            changed = model()
        found = [name for name, _ in counter.host_syncs.elements() if name == "nonzero"]
        assert len(found) == 1, "for three strata, in two parts"
    assert torch.allclose(changed, model(), rtol=1e-10), "a CPU finds the same"
    x = model.batch["x"]
    assert known_entries(x[:, 2:5]) is None, "a CPU looks a stratum at a time"
    with settings_of("cuda"):
        part = known_entries(x[1:3, 2:5])
        assert torch.equal(part.to_dense(), x[1:3, 2:5])
        assert all(known_entries(other) is None for other in (x, x[:, ::2], x.T[2:5], x.clone()))
    with settings_of("cuda"), torch.inference_mode():
        inside = {"x": x.clone()}
        find_entries({"x": x}, inside, SparseZINB, model)
        assert known_entries(inside["x"][:, 2:5]) is None, "a tensor that counts no writes is looked through every time"
    n = len(nonzero_counts._KNOWN)
    del x, part
    model.batch.clear()
    assert len(nonzero_counts._KNOWN) == n - 1, "a batch that is gone is forgotten"


class Thinned(LightningModule):
    """Halves the counts of a batch that was moved, and perhaps adds a tensor."""

    def __init__(self, more: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.more = Model(Case()), more
        install(self.inner, make_plan(OURS, 1, {"stream": StreamStrata(cells=2)}))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**self.more, **batch, "x": batch["x"] // 2}


@pytest.mark.parametrize("more", [{}, {"a": torch.zeros(3)}])
def test_entries_are_those_of_what_a_hook_returns(more: dict[str, torch.Tensor]) -> None:
    module = Thinned(more)
    batch = {"x": 2 * module.inner.batch["x"] + 1}
    moved = module.on_after_batch_transfer(batch, 0)
    with settings_of("cuda"):
        find_entries(batch, moved, SparseZINB, module)
        assert torch.equal(known_entries(moved["x"][:, 2:5]).to_dense(), moved["x"][:, 2:5])


def test_entries_are_those_of_counts_in_any_order_in_memory() -> None:
    x = torch.from_numpy(np.asfortranarray(Model(Case()).batch["x"].numpy()))
    with settings_of("cuda"):
        for some in (x[:, 2:5], x[1:3, 2:5]):
            found = entries(some, [slice(0, 3)], dtype=torch.float64)
            dense = torch.zeros_like(some).index_put((found.row, found.column), found.value)
            assert torch.equal(dense, some)
