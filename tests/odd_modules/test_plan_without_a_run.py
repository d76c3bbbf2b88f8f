"""A plan without a run is the plan of a fit with the same request, also where samples are split over ranks."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_amp
from lightning_amp import AMPStrategy
from lightning_amp.cli.main import main
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.planning.plan.plan import Plan
from tests.any_module import make
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")
Kind = type[pl.LightningModule]


class Trained(pl.LightningModule):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Images(Trained):
    """One sample of many pixels: on two ranks it fits where it is split, and on one it does not."""

    example = (1, 2, 64, 64)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


class Blocks(Trained):
    example = (8, 16)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def in_a_fit(rank: int, ranks: int, kind: Kind, memory: int) -> Plan | str:
    strategy = AMPStrategy(device_memory=f"{memory}B")
    trainer = trainer_of(strategy, rank=rank, ranks=ranks, max_steps=1, num_sanity_val_steps=0)
    try:
        trainer.fit(kind(), DataLoader([torch.ones(kind.example)] * ranks, batch_size=None))
    except lightning_amp.AmpError as error:
        return type(error).__name__
    return strategy.plan


def facts(plan: Plan) -> dict[str, Any]:
    return {
        "strategies": plan.strategies,
        "ranks": (plan.mesh.data, plan.mesh.model),
        "rules": [(rule.strategy, rule.fqn, rule.spec) for rule in plan.rules],
        "peak": plan.predicted_peak_bytes,
        "fits": plan.fits,
    }


@pytest.mark.parametrize(("kind", "share"), [(Images, 0.8), (Blocks, 1.1), (Blocks, 0.75), (Blocks, 0.6)])
def test_one_rank(kind: Kind, share: float) -> None:
    peak = lightning_amp.profile(kind(), torch.ones(kind.example)).peak_bytes
    made = lightning_amp.plan(kind(), torch.ones(kind.example), device_memory=int(share * peak)).plan
    found = in_a_fit(0, 1, kind, int(share * peak))
    if isinstance(found, Plan):
        assert facts(found) == facts(made)
    else:
        assert made.fits is False


@pytest.mark.full
@pytest.mark.ranks
def test_samples_are_split_where_they_have_to_be(tmp_path: Path) -> None:
    batch = torch.ones(Images.example)
    memory = int(0.55 * lightning_amp.profile(Images(), batch).peak_bytes)
    made = lightning_amp.plan(Images(), batch, devices=2, device_memory=memory)
    assert made.plan.fits
    (split,) = {"sequence", "tensor3d"} & {*made.plan.strategies}
    for found in run_ranks(in_a_fit, 2, tmp_path, Images, memory):
        assert facts(found) == facts(made.plan)
    with pytest.raises(lightning_amp.PlanError, match=f"largest_batch does not support a plan with {split!r}"):
        made.largest_batch()
    on_one = lightning_amp.plan(Images(), batch, device_memory=memory)
    assert on_one.plan.fits is False
    assert on_one.fewest_devices() == 2
    found = on_one.answers()
    assert found is not None
    assert found.said[0].startswith("the fewest devices for this step with a batch of 1 on each: 2, ")


CELLS = """
trainer: {{strategy: {{class_path: AMPStrategy, init_args: {{device_memory: {memory}}}}}, logger: false}}
model: {{class_path: lightning_amp.GLUE, init_args: {{latent_dim: 8, window: 10, hidden_depth: 1}}}}
data: {{class_path: lightning_amp.SingleCellDataModule, init_args: {{data_dir: {data}, batch_size: 8}}}}
"""


@pytest.mark.parametrize("memory", ["1GiB", "4.6MiB"])
def test_the_plan_of_a_configuration_of_cells_is_that_of_its_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], memory: str
) -> None:
    synthesize(tmp_path / "data", cells=24, bins=60, strata=4, genes=40, cell_types=2)
    config = tmp_path / "config.yaml"
    config.write_text(CELLS.format(memory=memory, data=tmp_path / "data"))
    main(["plan", "--config", str(config), "--format", "json"])
    made = json.loads(capsys.readouterr().out)
    strategy = AMPStrategy(device_memory=memory, on_predicted_oom="warn")
    trainer = trainer_of(strategy, max_steps=1, num_sanity_val_steps=0)
    module = lightning_amp.GLUE(latent_dim=8, window=10, hidden_depth=1)
    trainer.fit(module, lightning_amp.SingleCellDataModule(tmp_path / "data", batch_size=8))
    assert strategy.plan is not None
    found = json.loads(strategy.plan.to_json())
    assert {name for name in found if found[name] != made[name]} <= {"validation", "notes"}


EXAMPLES = ("gene_transformer", "unet", "evoformer", "wide_mlp", "cnn")
SHARES = (1.1, 0.7, 0.45)


def fits_of(rank: int, ranks: int, memory: dict[tuple[str, float], int]) -> dict[tuple[str, float], Any]:
    """Facts of the plan of each fit, or the name of its error."""
    found = dict[tuple[str, float], Any]()
    for (name, share), n_bytes in memory.items():
        module, batch = make(name)
        strategy = AMPStrategy(device_memory=n_bytes)
        trainer = trainer_of(strategy, rank=rank, ranks=ranks, max_steps=1, num_sanity_val_steps=0)
        try:
            trainer.fit(module, DataLoader([batch] * ranks, batch_size=None))
        except lightning_amp.AmpError as error:
            found[name, share] = type(error).__name__
        else:
            assert strategy.plan is not None
            found[name, share] = facts(strategy.plan)
    return found


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_plan_of_an_example_is_that_of_its_fit(ranks: int, tmp_path: Path) -> None:
    memory, made = dict[tuple[str, float], int](), dict[tuple[str, float], Any]()
    for name in EXAMPLES:
        peak = lightning_amp.profile(*make(name)).peak_bytes
        for share in SHARES:
            memory[name, share] = int(share * peak)
            made[name, share] = lightning_amp.plan(*make(name), devices=ranks, device_memory=memory[name, share]).plan
    for rank in run_ranks(fits_of, ranks, tmp_path, memory, timeout=500):
        for key, found in rank.items():
            if isinstance(found, str):
                assert made[key].fits is False, (key, found)
            else:
                assert found == facts(made[key]), key
