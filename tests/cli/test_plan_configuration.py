"""Claim: `plan --config` plans any module of a configuration: what holds the peak, what helps, the largest batch that
fits and the fewest devices; `simulate --config` does so for any number of devices, and draws the schedule of stages;
`profile` says where the memory of its step is, in 80 columns and as JSON; a class needs no configuration.
"""

import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_amp.cli.main import main
from lightning_amp.costs.device_rates import CPU_CORE, rates_for
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.errors import PlanError
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.reports.plan_report import plan_report
from lightning_amp.techniques.fsdp.row import ON_HOST, FullyShard

FILE = """
import lightning.pytorch as pl
import torch


class Deep(pl.LightningModule):
    def __init__(self):
        super().__init__()
        nn = torch.nn
        blocks = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)]
        self.blocks = nn.ModuleList(blocks)

    def training_step(self, batch, batch_idx):
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Skipping(Deep):
    # what its first block returns is read after the last one

    def training_step(self, batch, batch_idx):
        first = self.blocks[0](batch)
        for block in self.blocks[1:]:
            batch = block(first)
        return (batch + first).square().mean()


class Late(Deep):
    # its blocks are made when a fit begins, with what the data say

    def __init__(self):
        pl.LightningModule.__init__(self)
        self.blocks = None

    def setup(self, stage):
        self.width = self.trainer.datamodule.rows.shape[1]

    def configure_model(self):
        if self.blocks is None:
            assert self.width == 64
            self.blocks = Deep().blocks


class Drawn(Late):
    # whose layers cannot be made without values

    def configure_model(self):
        super().configure_model()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]


class Sampled(pl.LightningModule):
    def configure_model(self):
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in rates))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Rows(pl.LightningDataModule):
    def setup(self, stage):
        self.rows = torch.randn(1200, 64)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.rows, batch_size=600)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.randn(1200, 64))


class Streams(Rows):
    # of which no example batch can be made by hand

    def train_dataloader(self):
        return {"rows": torch.utils.data.DataLoader(Stream(), batch_size=600)}


class Named(Deep):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch["rows"], batch_idx)
"""
WORDS = """
import lightning.pytorch as pl
import torch


class Words(pl.LightningModule):
    def __init__(self, width, name):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(50, width), torch.nn.Linear(width, 50)
        assert name == "mine"

    def training_step(self, batch, batch_idx):
        scores = self.head(self.embed(batch["ids"]).mean(1))
        return torch.nn.functional.cross_entropy(scores, batch["labels"])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
"""
IGNORED = pytest.mark.filterwarnings(
    "ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning", "ignore::DeprecationWarning"
)
pytestmark = IGNORED


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "deep_model.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "deep.yaml"
    path.write_text("seed_everything: 1\nmodel:\n  class_path: deep_model.Deep\ndata:\n  class_path: deep_model.Rows\n")
    return str(path)


def written_for_processes(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> str:
    """A configuration, whose module processes that are started find too."""
    (folder / f"{module}.py").write_text(FILE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parents[2]}")
    (folder / "deep.yaml").write_text(
        f"seed_everything: 1\nmodel:\n  class_path: {module}.Deep\ndata:\n  class_path: {module}.Rows\n"
        "trainer:\n  accelerator: cpu\n"
    )
    return str(folder / "deep.yaml")


def planned(words: list[str], capsys: Any) -> Plan:
    assert main([*words, "--format", "json"]) in (0, 3)
    return Plan.from_json(capsys.readouterr().out)


def refused(words: list[str], said: str, capsys: Any) -> str:
    capsys.readouterr()
    assert main(words) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("lightning-amp: error: ") == 1
    return err


@pytest.mark.full
@pytest.mark.long
def test_json_has_the_largest_batch_the_fewest_devices_and_what_would_help(config: str, capsys: Any) -> None:
    """Claim: the answers of the text are fields, null where there is none; the plan is read from the same file."""

    def written(memory: str, status: int) -> tuple[dict[str, Any], str]:
        words = ["plan", "deep_model:Deep", "--batch", "600x64", "--strategies", "recompute", "--format", "json"]
        assert main([*words, "--device-memory", memory]) == status
        text = capsys.readouterr().out
        return json.loads(text), " ".join(plan_report(Plan.from_json(text)).split())

    found, text = written("16MiB", 0)
    batch, devices = found["largest_batch"], found["fewest_devices"]
    assert (found["fits"], found["would_help"]) == (True, None)
    assert batch["said"] in text
    assert devices["said"] in text
    assert batch["samples"] >= 600
    assert (devices["devices"], batch["ranks_that_share_it"]) == (1, 1)
    found, text = written("300KiB", 3)
    assert (found["fits"], found["largest_batch"]["samples"]) == (False, 0)
    assert found["fewest_devices"] is None
    assert found["would_help"]["said"] in text
    assert found["would_help"]["techniques"]


@pytest.mark.long
def test_a_decoder_that_is_made_when_a_fit_begins_is_seen(tmp_path: Path, capsys: Any) -> None:
    synthesize(tmp_path / "data", cells=24, bins=30, strata=3, genes=20, seed=1)
    path = tmp_path / "glue.yaml"
    path.write_text(
        "seed_everything: 1\nmodel:\n  class_path: lightning_amp.GLUE\n"
        "data:\n  class_path: lightning_amp.SingleCellDataModule\n"
        f"  init_args: {{data_dir: {tmp_path / 'data'}, batch_size: 4}}\n"
    )
    assert main(["plan", "--config", str(path)]) == 0
    assert " base + 3 strata x " in capsys.readouterr().out


@pytest.mark.long
def test_a_batch_of_several_streams_is_that_of_training(config: str, capsys: Any) -> None:
    text = Path(config).read_text()
    Path(config).write_text(text.replace("model.Deep", "model.Named").replace("model.Rows", "model.Streams"))
    assert planned(["plan", "--config", config], capsys).batch_size == 600


def test_a_configuration_is_planned(config: str, capsys: Any) -> None:
    whole = planned(["plan", "--config", config], capsys)
    assert whole.batch_size == 600
    assert whole.diagnosis is not None
    assert whole.diagnosis.largest == "saved"
    assert "recompute" in whole.diagnosis.helps
    # on two ranks, for there is nothing to share on one
    assert "on 2 ranks" in whole.diagnosis.helps["fsdp"]
    memory = whole.predicted_peak_bytes // 2
    lean = planned(["plan", "--config", config, "--device-memory", str(memory + 2**20)], capsys)
    assert lean.strategies == ("recompute",)
    assert lean.fits
    assert next(rule.fqn for rule in lean.rules).startswith("blocks.")
    text = plan_report(lean)
    assert max(map(len, text.splitlines())) <= 80
    assert "the fewest devices for this step" in text
    assert "the largest batch of a rank that fits" in text
    # layers that are made when a fit begins are planned alike
    Path(config).write_text(Path(config).read_text().replace("deep_model.Deep", "deep_model.Late"))
    late = planned(["plan", "--config", config, "--device-memory", str(memory + 2**20)], capsys)
    assert (late.rules, late.candidates, late.notes) == (lean.rules, lean.candidates, lean.notes)


def test_layers_that_are_made_with_values_alone_are_profiled(config: str, capsys: Any) -> None:
    """They were refused: values were for a step that needs them, and not for `configure_model`."""
    Path(config).write_text(Path(config).read_text().replace("deep_model.Deep", "deep_model.Drawn"))
    assert main(["profile", "--config", config, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["by_kind"]["parameters"] == 4 * 4 * (64 * 128 * 2 + 64 + 128)
    assert main(["profile", "deep_model:Sampled", "--batch", "4x64", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["by_kind"]["parameters"] == 4 * 3 * (64 * 64 + 64)
    assert main(["plan", "deep_model:Sampled", "--batch", "4x64", "--device-memory", "1GiB"]) == 0


@pytest.mark.long
def test_how_fsdp_splits_is_read_from_the_configuration(config: str, capsys: Any) -> None:
    asked = "{strategies: fsdp, fsdp_ranks: 2, fsdp_offload: true}"
    strategy = f"class_path: lightning_amp.AMPStrategy\n    init_args: {asked}"
    Path(config).write_text(f"{Path(config).read_text()}trainer:\n  strategy:\n    {strategy}\n")
    words = ["simulate", "--config", config, "--devices", "4", "--device", "A100"]
    on_gpus, on_cpus = planned(words, capsys), planned(words[:-2], capsys)
    for found in (on_gpus, on_cpus):
        assert found.strategies == ("S1", "fsdp")
        specs = {replace(rule.spec, host_bytes=0) for rule in found.rules if isinstance(rule.spec, FullyShard)}
        assert specs == {FullyShard(shard_ranks=2, offload=True)}
    assert ON_HOST in on_cpus.notes
    assert ON_HOST not in on_gpus.notes
    assert on_gpus.predicted_peak_bytes < on_cpus.predicted_peak_bytes
    said = "fsdp_ranks=2 is not supported, found 3 ranks that average gradients"
    refused(["plan", "--config", config, "--devices", "3"], said, capsys)


@pytest.mark.long
def test_a_class_is_planned_without_a_configuration(config: str, capsys: Any) -> None:
    words = ["--device-memory", str(3 * 2**20)]
    named = ["plan", "deep_model:Deep", "--batch", "600x64", *words]
    assert planned(named, capsys) == planned(["plan", "--config", config, *words], capsys)
    for more, said in (
        (["--config", config], "--batch goes with MODULE:CLASS alone"),
        (["--recommend-devices"], "cannot be used with --recommend-devices"),
        (["--setting", "x"], "cannot be used with --setting"),
        (["--init", "a=1"], "cannot be made: TypeError"),
        (["--batch", "600x3"], "with --batch 600x64 --batch 600x3: "),
    ):
        refused([*named, *more], said, capsys)
    refused(["plan", "deep_model:Deep"], "was named without --batch", capsys)
    refused([*named, "--largest", "batch:1"], "the step does not run with other lengths than 64", capsys)
    refused(["plan", "data", "--largest", "ids"], "--largest requires --config FILE.yaml or MODULE:CLASS", capsys)


def test_a_dimension_that_the_batch_does_not_have_is_found_before_planning(
    config: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned_first(*_: Any, **__: Any) -> None:
        raise AssertionError("it is planned")

    monkeypatch.setattr("lightning_amp.lightning.profiling.plan_of_module.plan_of_module", planned_first)
    for asked, said in (
        ("x", "'x' is no tensor of the batch; allowed are 'batch'"),
        ("batch:2", "dim=2 is not supported for 'batch'"),
        ("ids:", "write NAME or NAME:DIM, for example ids or image:2"),
    ):
        for named in (["--config", config], ["deep_model:Deep", "--batch", "600x64"]):
            refused(["plan", *named, "--device-memory", "3MiB", "--largest", asked], said, capsys)


def test_any_number_of_devices(config: str, capsys: Any) -> None:
    found = planned(["simulate", "--config", config, "--devices", "512"], capsys)
    assert found.mesh.data == 512
    assert json.loads(found.to_json())["diagnosis"]["largest"] == "saved"


@pytest.mark.full
def test_the_code_of_blocks_in_chunks_is_shown(config: str, capsys: Any) -> None:
    assert main(["plan", "--config", config, "--strategies", "chunk", "--show-code"]) == 0
    text = capsys.readouterr().out
    report, _, code = text.partition("\n# blocks.0\n")
    assert "chunk" in report
    assert "def region_0(put, size" in code
    assert "torch.nn.functional.gelu(" in code
    assert main(["plan", "--config", config, "--show-code"]) == 0
    assert "no block of this plan runs in chunks" in capsys.readouterr().out
    for words, said in (
        (["--config", config, "--show-code", "--format", "json"], "--show-code cannot be used with --format json"),
        (["data", "--show-code"], "--show-code requires --config"),
        (["data", "--config", config], "cannot be used with DIR"),
        (["--config", config, "--recommend-devices"], "cannot be used with --recommend-devices"),
    ):
        refused(["plan", *words], said, capsys)


def test_all_options_of_a_strategy_and_the_precision_of_products_are_followed(
    config: str, monkeypatch: Any, capsys: Any
) -> None:
    """Where a sequence is split, a grid and its cache had been left out; rates were those of single precision."""
    seen = dict[str, Any]()

    def look(*_: Any, **given: Any) -> Any:
        seen.update(given)
        raise PlanError("seen")

    monkeypatch.setattr("lightning_amp.lightning.profiling.plan_of_module.plan_of_module", look)
    asked = "{strategies: tensor3d, tensor_grid: [2, 1, 2], tensor_cache: 1MiB, on_predicted_oom: warn}"
    strategy = f"{{class_path: lightning_amp.AMPStrategy, init_args: {asked}}}"
    text = f"{Path(config).read_text()}trainer: {{precision: bf16-true, strategy: {strategy}}}\n"
    Path(config).write_text(text)
    words = ["plan", "--config", config, "--devices", "4", "--device", "A100"]
    assert main(words) == 2
    assert seen["rates"] == rates_for("A100", products="half")
    assert (seen["options"]["tensor_grid"], seen["options"]["tensor_cache"]) == ((2, 1, 2), "1MiB")
    assert (seen["options"]["on_predicted_oom"], seen["request"]["model_parallel_size"]) == ("warn", 2)
    assert main([*words, "--strategies", "tensor3d", "--tensor-grid", "1,2,1"]) == 2
    assert (seen["options"]["tensor_grid"], seen["request"]["model_parallel_size"]) == ((1, 2, 1), "auto")
    assert main([*words, "--strategies", "tensor3d", "--tensor-grid", "auto"]) == 2
    assert (seen["options"]["tensor_grid"], seen["request"]["model_parallel_size"]) == (None, "auto")
    text = text.replace("tensor3d, tensor_grid: [2, 1, 2], tensor_cache: 1MiB", "sequence, sequence_dim: {batch: 1}")
    Path(config).write_text(text)
    assert main(words) == 2
    assert seen["options"]["sequence_dim"] == {"batch": 1}
    refused([*words, "--tensor-grid", "auto"], "tensor_grid=('auto',) is an option of tensor3d", capsys)
    assert main([*words, "--strategies", "host_optimizer", "--host-memory", "500GiB"]) == 2
    assert seen["options"]["host_memory"] == "500GiB"
    refused([*words, "--strategies", "S1", "--host-memory", "5GiB"], "host_memory='5GiB' is an option of", capsys)
    refused([*words, "--strategies", "offload", "--host-memory", "5"], "'5'", capsys)
    refused(["plan", "data", "--host-memory", "5GiB"], "cannot be used with --host-memory", capsys)


@pytest.mark.exhaustive
@pytest.mark.release
def test_trainer_and_strategy_of_the_configuration_are_followed(config: str, capsys: Any) -> None:
    """Half the bytes in bfloat16; gradients that are added up and clipped; the strategy's arguments."""
    file = Path(config)
    plain, words = file.read_text(), ["plan", "--config", config]

    def held(trainer: str, *more: str) -> Plan:
        file.write_text(f"{plain}trainer: {trainer}\n")
        return planned([*words, *more], capsys)

    def profiled(trainer: str) -> dict[str, Any]:
        file.write_text(f"{plain}trainer: {trainer}\n")
        assert main(["profile", "--config", config, "--batch-size", "2", "--format", "json"]) == 0
        return json.loads(capsys.readouterr().out)

    whole, half = held("{precision: 32-true}"), held("{precision: bf16-true}")
    assert whole.diagnosis is not None
    assert half.predicted_peak_bytes == pytest.approx(whole.predicted_peak_bytes / 2, rel=0.01)
    once, added, clipped = (
        profiled(f"{{{setting}}}")
        for setting in ("precision: 32-true", "accumulate_grad_batches: 4", "gradient_clip_val: 0.5")
    )
    assert once["added_bytes"] == 0
    assert added["added_bytes"] == once["by_kind"]["gradients"] > 0
    operators = [sum(moment["n_operators"] for moment in found["timeline"]) for found in (once, clipped)]
    assert operators[0] < operators[1]
    memory = whole.predicted_peak_bytes // 2 + 2**20
    rates = file.with_name("rates.json")
    rates.write_text(replace(CPU_CORE, device="mine").to_json())
    asked = f"device_memory: {memory}, strategies: [S1], model_parallel_size: 1, rates: {rates}"
    strategy = f"{{strategy: {{class_path: lightning_amp.AMPStrategy, init_args: {{{asked}}}}}}}"
    named = held(strategy)
    assert (named.budget_bytes, named.strategies, named.rates_device) == (memory, ("S1",), "mine")
    assert not named.fits
    for more in (("--policy", "auto"), ("--strategies", "recompute")):
        other = held(strategy, *more)
        assert (other.budget_bytes, other.strategies[-1], other.fits) == (memory, "recompute", True)
    assert held(strategy, "--device-memory", "1GiB", "--device", "cpu").rates_device != "mine"
    assert held(strategy, "--device-memory", "1GiB").budget_bytes == 2**30
    file.write_text(plain + "trainer: {strategy: {class_path: lightning_amp.AMPStrategy, init_args: {plan: x.json}}}\n")
    refused(words, "has a strategy that carries out plan='x.json'", capsys)


def test_the_schedule_of_a_pipeline_is_drawn(config: str, capsys: Any, tmp_path: Path) -> None:
    picture = tmp_path / "schedule.png"
    words = ["--config", config, "--devices", "2", "--strategies", "pipeline", "--plot", str(picture)]
    assert main(["simulate", *words]) == 0
    assert "stages of" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_peak_that_is_not_known_is_none_that_fits(config: str, monkeypatch: Any, capsys: Any) -> None:
    path = Path(config)
    path.write_text(path.read_text().replace("deep_model.Deep", "deep_model.Skipping"))
    words = ["plan", "--config", config, "--devices", "2", "--strategies", "pipeline"]
    assert main([*words, "--format", "json"]) == 0
    made = Plan.from_json(capsys.readouterr().out)
    assert "what the stages hold was not counted" in made.uncounted
    # with a memory that is named: the answers to its questions take seconds
    named = replace(made, budget_bytes=2**30)
    monkeypatch.setattr("lightning_amp.cli.commands.plan.plan_of_configuration", lambda *_: (named, {}, ""))
    assert main(words) == 3
    assert "predicted peak per rank unknown, at least" in " ".join(capsys.readouterr().out.split())


def test_a_configuration_is_profiled(config: str, capsys: Any) -> None:
    assert main(["profile", "--config", config, "--batch-size", "4"]) == 0
    text = capsys.readouterr().out
    assert "largest part: parameters, gradients and optimiser state (parameters)" in text
    assert "batch of 4" in text
    assert ".0.weight" in text
    assert "counted on fake tensors" in text
    assert max(map(len, text.splitlines())) <= 80
    assert main(["profile", "--config", config, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["batch_size"] == 600
    assert found["largest"] == "saved"


def test_a_step_is_drawn(config: str, tmp_path: Path, capsys: Any) -> None:
    picture = tmp_path / "step.png"
    assert main(["profile", "--config", config, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    for words, said in (
        (["--config", config, "--plot", str(tmp_path / "step.txt")], "allowed is the name of a PNG file"),
        ([str(tmp_path), "--plot", str(picture)], "has no training step to draw"),
    ):
        refused(["profile", *words], said, capsys)


def test_a_step_is_written_for_viewers_of_memory(config: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "step.pickle"
    assert main(["profile", "--config", config, "--trace", str(file)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "step.pickle, which pytorch.org/memory_viz opens. CUDA's allocator would reserve" in said
    assert pickle.loads(file.read_bytes())["device_traces"][0]
    for words, why in (
        (["--config", config, "--trace", str(tmp_path / "step.txt")], "its name ends in '.txt'; give .pickle"),
        ([str(tmp_path), "--trace", str(file)], "has no training step to draw"),
    ):
        refused(["profile", *words], why, capsys)


def test_one_of_both_is_asked_for(config: str, capsys: Any) -> None:
    for words in (["profile"], ["profile", "data", "--config", config]):
        refused(words, "give one of them: a data directory, or a configuration", capsys)
    refused(["profile"], "profile got neither DIR nor --config", capsys)


def test_an_option_of_the_other_kind_is_refused(config: str, capsys: Any) -> None:
    """It had been ignored."""
    for words, said in (
        (["profile", "data", "--batch-size", "4"], "DIR='data' cannot be used with --batch-size"),
        (["profile", "--config", config, "--keys", "attention"], "a training step cannot be used with --keys"),
        (["profile", "deep_model:Deep", "--batch", "4x64", "--setting", "x"], "step cannot be used with --setting"),
        (["simulate", "data", "--tensor-grid", "1,1,1"], "--shape cannot be used with --tensor-grid"),
    ):
        refused(words, said, capsys)


def test_a_class_is_profiled_without_a_configuration(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert main(["profile", "deep_model:Deep", "--batch", "4x64"]) == 0
    text = capsys.readouterr().out
    assert "batch of 4" in text
    assert ".0.weight" in text
    # one of the current folder, which is not on the path of a console script
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "words_model.py").write_text(WORDS)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    words = ["profile", "words_model:Words", "--batch", "ids=4x7:int64", "--batch", "labels=4:int64"]
    assert main([*words, "--init", "width=24", "--init", "name=mine", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["batch_size"] == 4
    assert any(row["name"] == "embed.weight" and row["shape"] == [50, 24] for row in found["tensors"])


LARGE = """
import lightning.pytorch as pl
import torch


class Large(pl.LightningModule):
    # 16 TiB

    def __init__(self, width=2**21, rate=0.1):
        super().__init__()
        self.layer = torch.nn.Linear(width, width)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())


class Late(Large):
    def __init__(self):
        pl.LightningModule.__init__(self)
        self.layer = None

    def configure_model(self):
        if self.layer is None:
            self.layer = torch.nn.Linear(2**21, 2**21)


class Appends(Large):
    # which makes a layer in each call

    def __init__(self):
        pl.LightningModule.__init__(self)
        self.layers = torch.nn.ModuleList()

    def configure_model(self):
        self.layers.append(torch.nn.Linear(8, 8))

    def training_step(self, batch, batch_idx):
        return sum(layer(batch).square().mean() for layer in self.layers)


SCALE = torch.tensor(3.0)


class Rates(Large):
    # whose constructor reads values, and whose step some that the file makes

    def __init__(self):
        super().__init__(8)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.width = int(SCALE.item())

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * SCALE


class Selecting(Large):
    # whose step does

    def __init__(self):
        super().__init__(8)

    def training_step(self, batch, batch_idx):
        out = self.layer(batch)
        return out[out > self.layer.weight.max()].sum() + out.mean()
"""


def test_a_class_larger_than_this_machine_is_profiled_and_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "large_model.py").write_text(LARGE)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("Large", "Late"):
        assert main(["profile", f"large_model:{name}", "--batch", "1x2097152", "--format", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["by_kind"]["parameters"] == 4 * (2**42 + 2**21)
    made = planned(["plan", "large_model:Late", "--batch", "1x2097152", "--device-memory", "1TiB"], capsys)
    assert made.fits is False
    for name in ("Rates", "Selecting", "Appends"):
        assert main(["profile", f"large_model:{name}", "--batch", "2x8", "--format", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["by_kind"]["parameters"] == 4 * 72


def test_what_is_wrong_with_a_class_or_its_batch_is_said_in_one_message(
    config: str, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "words_model.py").write_text(WORDS)
    (tmp_path / "broken_model.py").write_text("import no_such_thing\n")
    batch = ["--batch", "4x64"]
    for words, said in (
        (["deep_modell:Deep", *batch], "there is no module 'deep_modell' in the current folder"),
        (["broken_model:Net", *batch], "importing 'broken_model' fails: ModuleNotFoundError: No module named 'no"),
        (["deep_model:Dep", *batch], "'deep_model' has no 'Dep'; its LightningModules are ['Deep', "),
        (["deep_model:Rows", *batch], "'Rows' is no LightningModule; its LightningModules are ['Deep', "),
        (["deep_model", *batch], "expected MODULE:CLASS, got 'deep_model'; write for example"),
        (["words_model:Words", *batch], "cannot be made: TypeError: Words.__init__() missing 2 required"),
        (["deep_model:Deep", *batch, "--init", "width"], "write --init NAME=VALUE"),
        (["deep_model:Deep", "--batch", "4by100"], "'4by100' is no [NAME=]SIZES[:DTYPE]"),
        (["--config", config, *batch], "--batch goes with MODULE:CLASS alone"),
        (["--config", config, "--init", "a=1"], "--init goes with MODULE:CLASS and --batch"),
        (["deep_model:Deep", "--batch", "4x7"], "with --batch 4x7: "),
    ):
        err = refused(["profile", *words], said, capsys)
    # which step, with which error, at which line
    assert "training step fails" in err
    assert "mat1 and mat2 shapes cannot be multiplied" in err
    assert "deep_model.py:15: batch = block(batch)" in err
