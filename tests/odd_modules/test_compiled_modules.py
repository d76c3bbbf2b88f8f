"""Claim: a module that torch.compile returned is planned and counted without Dynamo compiling our frames; batches that
are not counted run compiled.
"""

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

import lightning_amp
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.lightning.strategy.strategy_cases import Small, fitted


class Silent(Small):
    """Of torch 2.13, Dynamo cannot compile Lightning's `self.log`."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()


@pytest.fixture(autouse=True)
def nothing_compiled() -> Any:
    yield
    torch._dynamo.reset()


def test_counted_steps_of_a_compiled_module_compile_no_frame_of_ours() -> None:
    graphs, by_batch, said = list[Any](), list[int](), list[str]()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    class Counts(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            by_batch.append(len(graphs))

    class Says(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler, log = Says(), logging.getLogger("torch._dynamo")
    log.addHandler(handler)
    data = DataLoader([torch.ones(16, 4)] * 3, batch_size=None)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            strategy = AMPStrategy(device_memory="1GiB")
            fitted(torch.compile(Silent(), backend=backend), data, strategy, callbacks=[Counts()])
    finally:
        log.removeHandler(handler)
    assert said == []
    assert [str(one.message) for one in warned if "Dynamo" in str(one.message)] == []
    # the first two batches are counted, operator by operator; the third runs compiled
    assert by_batch[:2] == [0, 0]
    assert by_batch[2] > 0


def test_a_module_that_was_compiled_is_planned_as_a_trainer_takes_it() -> None:
    plain = lightning_amp.plan(Small(), "16x4")
    compiled = torch.compile(Small(), backend="eager")
    for _ in range(2):
        found = lightning_amp.plan(compiled, "16x4")
        assert found.plan.predicted_peak_bytes == plain.plan.predicted_peak_bytes
    assert lightning_amp.profile(compiled, "16x4").peak_bytes == plain.profile.peak_bytes
    # as in a fit, whose plan changes nothing in what is compiled as a whole
    found = lightning_amp.plan(compiled, "16x4", device_memory=plain.profile.peak_bytes // 2, strategies="auto")
    assert found.plan.rules == ()
