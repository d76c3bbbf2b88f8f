"""Claim: what ordinary code of a user has around a module, such as a data module with attributes of the user's, a
compiled layer or several loaders of an evaluation, neither stops a run nor changes what is predicted of it.
"""

from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_amp
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.lightning.conformance.cases import Tiny, batches
from tests.lightning.strategy.strategy_cases import Small, fitted, same, trainer_of

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

CELLS = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))


def rows(batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(CELLS, batch_size=batch_size)  # type: ignore[arg-type]


class Data(pl.LightningDataModule):
    """Of a user, whose attributes mean something else than those of ours."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        vars(self).update(attributes)

    def train_dataloader(self) -> Any:
        return rows()


class Named(Data):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"x": batch}


class Reading(Small):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch["x"] if isinstance(batch, dict) else batch)


@pytest.mark.parametrize(
    "attributes", [{"data_dir": "/nowhere/MNIST"}, {"balance": np.ones(3)}, {"setting": 3, "modalities": 5}], ids=str
)
def test_attributes_of_a_data_module_of_the_user_are_not_read(attributes: dict[str, Any]) -> None:
    run, plain = (fitted(Small(), Data(**attributes), strategy) for strategy in (AMPStrategy(), "auto"))
    assert run["plan"].diagnosis is not None
    assert not run["plan"].balance_cells
    run.pop("plan"), plain.pop("plan")
    assert run["steps"] == plain["steps"]
    assert same(run["seen"], plain["seen"])


def test_the_data_module_of_an_earlier_fit_has_no_part_in_the_next_one() -> None:
    own = AMPStrategy()
    trainer = trainer_of(own, max_steps=-1)
    trainer.fit(Reading(), datamodule=Named(batch_size=1))
    trainer.fit(Small(), rows())
    assert own.plan is not None
    # hooks of the other one would have made a dictionary of its batch
    assert own.plan.diagnosis is not None
    assert own.plan.batch_size == 4


class Deep(Small):
    """Blocks that a leaner plan would compute again."""

    def __init__(self, compiled: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(4)))
        if compiled == "a list":
            self.net = torch.compile(self.net, backend="eager")  # type: ignore[assignment]
        elif compiled == "a list, in place":
            self.net.compile(backend="eager")
        elif compiled == "a block, in place":
            self.net[0].compile(backend="eager")
        elif compiled == "the module, in place":
            self.compile(backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[:, :2]  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self(batch) - batch[:, :2]).square().mean()


@pytest.mark.parametrize("compiled", ["a list", "a list, in place", "a block, in place", "the module, in place"])
def test_what_is_compiled_stays_as_it_is_and_is_counted_as_it_is(compiled: str) -> None:
    def run(compiled: str, strategy: Any, *, whole: bool = False) -> dict[str, Any]:
        module = Deep(compiled)
        found = fitted(torch.compile(module, backend="eager") if whole else module, rows(), strategy)
        torch._dynamo.reset()
        return found | {"parameters": list(found["parameters"].values())}

    plain, eager = run("", "auto"), run("", AMPStrategy(strategies="S1"))["plan"]
    for whole in (False, True):
        own = run(compiled, AMPStrategy(device_memory="1KiB", on_predicted_oom="warn"), whole=whole)
        assert same(own["parameters"], plain["parameters"])
        first = (rule.fqn for rule in own["plan"].rules if rule.strategy == "recompute")
        assert "net.0" not in first
        if "recompute" not in own["plan"].strategies:
            assert own["plan"].predicted_peak_bytes == eager.predicted_peak_bytes


def test_a_policy_leaves_the_decoder_of_a_compiled_module_as_it_is() -> None:
    found = []
    for whole in (False, True):
        own, module = AMPStrategy(device_memory="10KiB", on_predicted_oom="warn"), Tiny()
        given = torch.compile(module, backend="eager") if whole else module
        trainer_of(own).fit(given, DataLoader(batches(), batch_size=None))  # type: ignore[arg-type]
        torch._dynamo.reset()
        assert own.plan is not None
        found.append(own.plan.strategies)
    assert "fused" in found[0]
    assert found[1] == ()


class Evaluated(Small):
    def validation_step(self, batch: Any) -> None:
        self.log("loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        return self.net(batch)


@pytest.mark.parametrize("as_dict", [False, True])
def test_an_evaluation_is_counted_with_the_arguments_that_its_step_takes(as_dict: bool) -> None:
    loaders = {"a": rows(), "b": rows(3)} if as_dict else [rows(), rows(3)]
    for kind, given in (("validate", rows()), ("predict", loaders)):
        own = AMPStrategy(device_memory="1GiB")
        getattr(trainer_of(own), kind)(Evaluated(), given)
        assert own.plan is not None
        assert own.plan.evaluates, own.plan.notes
        assert own.plan.batch_size == 4


def test_a_precision_may_be_a_number_as_a_trainer_takes_it() -> None:
    number, text = (lightning_amp.plan(Small(), CELLS, precision=given).plan for given in (64, "64"))
    assert number == text
