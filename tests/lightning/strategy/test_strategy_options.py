"""Claim: what a person asks of the strategy is checked, found by name, and read from YAML, before ranks exist; a fit
shows its plan in five lines and writes all of it where its logs are; a mistake is one message.
"""

import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentError, ArgumentParser
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader

import lightning_amp  # noqa: F401  registers the names
from lightning_amp import Plan
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import AmpError, InstallError, PlanError
from lightning_amp.lightning._compat import MultiProcessingLauncher
from lightning_amp.lightning.consistency.replicas import check_replicas, decide_on_one_rank
from lightning_amp.lightning.faults.launchers import end_as_ours
from lightning_amp.lightning.steps.cells import counted_once
from lightning_amp.lightning.steps.loss_weight import cells_to_weigh, count_cells
from lightning_amp.lightning.strategy.refusals import check_compiled
from lightning_amp.lightning.strategy.registration import refuse
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.techniques.fsdp.row import FullyShard
from lightning_amp.techniques.recompute.row import RecomputeBlock
from tests.lightning.strategy.strategy_cases import Small, trainer_of
from tests.paths import ROOT


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"policy": "fastest"}, "policy='fastest' is not supported; allowed are 'auto', 'paper'"),
        ({"start_method": "exec"}, "start_method='exec' is not supported; allowed are 'popen'"),
        ({"balance_cells": 1}, "balance_cells=1 is not supported; allowed are True, False, 'auto'"),
        ({"share_batch_statistics": None}, "share_batch_statistics=None is not supported; allowed are True, False"),
        ({"model_parallel_size": 0}, "model_parallel_size=0 is not supported; allowed are 'auto' and"),
        ({"bucket_mb": 0}, "bucket_mb=0 is not supported; allowed is a number of MiB above 0"),
        ({"fsdp_ranks": 1, "strategies": "fsdp"}, "fsdp_ranks=1 is not supported; allowed is a whole number, 2 or"),
        ({"fsdp_ranks": 2}, "fsdp_ranks=2 is an option of fsdp; add strategies='fsdp', or leave"),
        ({"chunk_queries": 64, "strategies": "chunk"}, "chunk_queries=64 is an option of S3"),
        ({"chunk_queries": 0, "strategies": "S3"}, "chunk_queries=0 is not supported; allowed is a whole number, 1"),
        ({"chunk_policy": "paper", "strategies": "S3"}, "chunk_policy='paper' is an option of chunk"),
        ({"chunk_policy": "fast", "strategies": "chunk"}, "chunk_policy='fast' is not supported; allowed are 'auto'"),
        ({"host_memory": "1GiB", "strategies": "S1"}, "host_memory='1GiB' is an option of fsdp and offload and"),
        ({"fsdp_offload": True, "strategies": "S1"}, "fsdp_offload=True is an option of fsdp"),
        ({"device_speeds": [1, 0]}, "device_speeds=[1, 0] is not supported; allowed are numbers above 0, one per rank"),
        ({"fsdp_offload": 1, "strategies": "fsdp"}, "fsdp_offload=1 is not supported; allowed are True, False"),
        ({"micro_batches": 0, "strategies": "pipeline"}, "micro_batches=0 is not supported; allowed is a whole"),
        ({"micro_batches": True, "strategies": "pipeline"}, "micro_batches=True is not supported; allowed is a whole"),
        ({"micro_batches": 4}, "micro_batches=4 is an option of pipeline; add strategies='pipeline', or leave it out"),
        ({"schedule": "1f1b", "strategies": "S1"}, "schedule='1f1b' is an option of pipeline"),
        ({"schedule": "zero", "strategies": "pipeline"}, "schedule='zero' is not supported; allowed are"),
        ({"plan": 3}, "plan=3 is not supported; allowed are a Plan and the path"),
        ({"plan": "p.json", "strategies": "S1"}, "plan='p.json' and strategies='S1' cannot be used together"),
        ({"device_memory": 8}, "would be bytes; add the unit, for example '8GiB'"),
        (
            {"on_predicted_oom": "train"},
            "on_predicted_oom='train' is not supported; allowed are None, 'refuse', 'warn'",
        ),
        ({"unfit": "warn"}, "unfit='warn' is not supported; allowed are None, 'refuse', 'train'"),
        (
            {"unfit": "train", "on_predicted_oom": "refuse"},
            "unfit='train' and on_predicted_oom='refuse' cannot be used",
        ),
        ({"data_dir": 3}, "data_dir=3 is not supported; allowed is the path"),
        ({"rates": 3}, "rates=3 is not supported; allowed is the path of a file that `lightning-amp calibrate`"),
        ({"plan": "plan.json", "policy": "paper"}, "cannot be used with {'policy': 'paper'}, which a plan decides"),
    ],
)
def test_wrong_values_are_refused_at_once(options: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError) as caught:
        AMPStrategy(**options)
    assert text in str(caught.value)


@pytest.mark.parametrize(("old", "new"), [("train", "warn"), ("refuse", "refuse")])
def test_the_old_name_of_an_option_is_taken_with_one_warning_that_names_the_new_one(old: Any, new: str) -> None:
    with pytest.warns(DeprecationWarning, match="deprecated") as told:
        strategy = AMPStrategy(unfit=old, device_memory="1GiB")
    assert [(str(one.message), one.filename) for one in told] == [
        (f"unfit={old!r} is deprecated: use on_predicted_oom={new!r}", __file__)
    ]
    assert strategy.on_predicted_oom == new
    assert strategy.request == AMPStrategy(on_predicted_oom=new, device_memory="1GiB").request
    # plans within less memory copy the request
    assert replace(strategy.request, device_memory="1MiB").refuses is (new == "refuse")


def test_the_trainer_finds_the_strategy_by_name() -> None:
    methods = {"amp": "popen", "AMP": "popen", "amp_spawn": "spawn", "amp_fork": "fork", "amp_notebook": "fork"}
    for name, method in methods.items():
        strategy = Trainer(strategy=name, accelerator="cpu", devices=2, logger=False).strategy
        assert type(strategy) is AMPStrategy
        assert (strategy._start_method, strategy.num_processes) == (method, 2)


def test_one_device_works_in_a_notebook_which_cannot_start_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE", True)
    options: dict[str, Any] = {"strategy": "amp", "accelerator": "cpu", "logger": False}
    assert isinstance(Trainer(**options, devices=1).strategy, AMPStrategy)
    with pytest.raises(MisconfigurationException, match="not compatible with an interactive"):
        Trainer(**options, devices=2)


def test_the_twin_package_is_refused_with_advice() -> None:
    registry = _StrategyRegistry()
    refuse(registry)
    refuse(registry)
    with pytest.raises(AmpError, match=r"strategy='amp_spawn' does not support pytorch_lightning.Trainer"):
        registry.get("amp_spawn")


def test_yaml_reads_every_option_and_none_of_ddps() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Strategy, "strategy")
    init = {"policy": "paper", "strategies": ["S1", "S3"], "plan": None, "balance_cells": True}
    init["blocks"] = ["decoder.*", "torch.nn.Linear"]
    path = "lightning_amp.lightning.strategy.strategy.AMPStrategy"
    parsed = parser.parse_object({"strategy": {"class_path": path, "init_args": init}}).strategy.init_args
    strategy = AMPStrategy(**vars(parsed))
    assert (strategy.policy, strategy.strategies, strategy.balance_cells) == ("paper", ["S1", "S3"], True)
    assert strategy.request.blocks == ["decoder.*", "torch.nn.Linear"]
    assert strategy._ddp_kwargs == {}
    planned = parser.parse_object({"strategy": {"class_path": path, "init_args": {"plan": "plan.json"}}})
    assert planned.strategy.init_args.plan == "plan.json"
    with pytest.raises(ArgumentError, match="fastest"):
        parser.parse_object({"strategy": {"class_path": path, "init_args": {"policy": "fastest"}}})


def tensors(*sizes: int) -> dict[str, torch.Tensor]:
    return {str(i): torch.zeros(n, 2) for i, n in enumerate(sizes)}


@pytest.mark.parametrize(
    ("batch", "cells"),
    [
        (torch.zeros(4, 2), 4),
        ([torch.zeros(4, 2), (torch.zeros(4), "name", 3)], 4),
        ({"rna": tensors(5, 5), "hic": tensors(5)}, 5),
        ({"rna": tensors(5), "hic": tensors(3, 3)}, 8),
        ({"rna": tensors(5), "hic": tensors(3, 4)}, None),
        ({"rna": tensors(5), "names": {"cell": ["a"] * 5}}, 5),
        ({"rna": tensors(5), "hic": {}}, None),
        (tensors(5, 3), None),
        ({"x": torch.zeros(6), "step": torch.tensor(3)}, 6),
        (torch.tensor(1.0), None),
        ({}, None),
        (None, None),
    ],
)
def test_cells_are_counted_or_said_to_be_unknown(batch: Any, cells: int | None) -> None:
    assert count_cells(batch) == cells


def test_ranks_weigh_by_one_measure_and_sum_integers_exactly() -> None:
    # modalities agree on one rank and not on the other
    batches = [{"rna": tensors(4), "hic": tensors(4)}, {"rna": tensors(4), "hic": tensors(3)}]
    assert [cells_to_weigh(batch) for batch in batches] == [8, 7]
    assert cells_to_weigh(torch.zeros(4, 2)) == 4
    assert cells_to_weigh({"rna": tensors(5), "hic": {}}) is None
    total = torch.tensor(2 * (2**24 + 1))
    assert counted_once(total, "sum", model_ranks=2) == 2**24 + 1


def test_workers_are_seeded_by_the_data_coordinate(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = AMPStrategy(model_parallel_size=2)
    seeded, own = DataLoader([1]), DataLoader([1], worker_init_fn=print)  # type: ignore[arg-type]
    strategy.process_dataloader(seeded)
    assert seeded.worker_init_fn is None
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    monkeypatch.setattr(AMPStrategy, "global_rank", 5)
    for loader in (seeded, own):
        strategy.process_dataloader(loader)
    assert isinstance(seeded.worker_init_fn, partial)
    assert seeded.worker_init_fn.func is pl_worker_init_function
    assert seeded.worker_init_fn.keywords == {"rank": 2}
    assert own.worker_init_fn is print
    assert strategy.process_dataloader("anything else") == "anything else"


def test_a_breakdown_on_rank_0_reaches_the_others() -> None:
    told: list[Any] = []

    def send(outcome: Any) -> Any:
        told.append(outcome)
        return outcome

    def break_down() -> None:
        raise ZeroDivisionError("by mistake")

    with pytest.raises(ZeroDivisionError, match="by mistake"):
        decide_on_one_rank(break_down, rank=0, broadcast=send)
    with pytest.raises(PlanError, match="rank 0 failed to plan: ZeroDivisionError: by mistake"):
        decide_on_one_rank(break_down, rank=1, broadcast=lambda mine: told[0])
    assert decide_on_one_rank(lambda: 7, rank=0, broadcast=send) == 7


def test_replicas_that_differ_only_in_order_are_refused() -> None:
    one = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    first: list[Any] = []
    check_replicas(one, rank=0, broadcast=lambda mine: first.append(mine) or mine, any_rank=bool)
    other = nn.ModuleDict({"b": one["b"], "a": one["a"]})
    with pytest.raises(InstallError, match="parameters or buffers differ from another rank's: .*their order"):
        check_replicas(other, rank=1, broadcast=lambda mine: first[0], any_rank=bool)


def cells() -> Any:
    return DataLoader(torch.randn(24, 4), batch_size=4)  # type: ignore[arg-type]


def fitted(folder: Path, caplog: pytest.LogCaptureFixture, *, logger: bool = True, **options: Any) -> list[str]:
    caplog.clear()
    own: dict[str, Any] = {"max_steps": -1, "log_every_n_steps": 1, "default_root_dir": folder}
    trainer_of(AMPStrategy(**options), logger=CSVLogger(folder) if logger else False, **own).fit(Small(), cells())
    return caplog.text.splitlines()


def test_a_fit_says_five_lines_and_writes_the_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = fitted(tmp_path, caplog)
    start = next(n for n, line in enumerate(said) if line.startswith("plan  "))
    end = said.index("", start)
    names = [name for line in said[start:end] if (name := line[:16].strip())]
    assert names == ["plan", "predicted peak", "predicted step", "less memory", "more"]
    assert "4 samples" in said[start + 2]
    assert said[-1].startswith("measured step   ")
    assert not [line for line in said if "cell" in line or "paper" in line]
    logs = tmp_path / "lightning_logs" / "version_0"
    assert f"more            {logs}/amp_plan.txt, or AMPStrategy(verbose=True)" in " ".join(
        "\n".join(said[start:end]).replace("\n" + " " * 16, " ").splitlines()
    )
    assert not [line for line in said[start:end] if len(line) > 80 and str(logs) not in line]
    report = (logs / "amp_plan.txt").read_text()
    assert report.startswith("Plan (policy auto): ")
    assert "cell" not in report
    plan = Plan.read(logs / "amp_plan.json")
    assert f"{plan}\n" == report
    assert f"amp_predicted_peak_bytes: {plan.predicted_peak_bytes}\n" in (logs / "hparams.yaml").read_text()

    whole = fitted(tmp_path, caplog, verbose=True)
    assert "\n".join(whole).count(report.strip()) == 1
    assert not [line for line in whole if line.startswith("more ")]

    before = sorted(tmp_path.rglob("*"))
    assert any("print(trainer.strategy.plan)" in line for line in fitted(tmp_path, caplog, logger=False))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.full
@pytest.mark.long
def test_one_device_opens_no_port_and_leaves_no_rank_behind(tmp_path: Path) -> None:
    script = """
        import os, torch, torch.distributed as dist
        from lightning.pytorch import Trainer
        from lightning.pytorch.demos.boring_classes import BoringModel
        import lightning_amp

        def no_port(*args, **kwargs):
            raise RuntimeError("a port was opened")

        dist.TCPStore.__init__ = no_port
        trainer = Trainer(strategy="amp", devices=1, accelerator="cpu", max_steps=2, logger=False, num_nodes=1,
                          enable_checkpointing=False, enable_progress_bar=False)
        trainer.fit(BoringModel())
        print("trained", trainer.global_step, "LOCAL_RANK" in os.environ)
    """
    words = [sys.executable, "-c", textwrap.dedent(script)]
    found = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert "trained 2 False" in found.stdout, found.stderr[-2000:]


def test_a_plan_that_is_refused_is_written_and_one_that_trains_anyway_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(PlanError, match="predicted to run out of memory"):
        fitted(tmp_path, caplog, device_memory="1KiB")
    assert "does NOT fit" in (tmp_path / "lightning_logs" / "version_0" / "amp_plan.txt").read_text()
    assert "does NOT fit" in caplog.text
    with pytest.warns(UserWarning, match="predicted to run out of memory"):
        fitted(tmp_path, caplog, device_memory="1KiB", on_predicted_oom="warn")


def test_ranks_that_were_started_by_multiprocessing_raise_the_mistake_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher: Any = object.__new__(MultiProcessingLauncher)
    end_as_ours(launcher)
    for text, kind in (("lightning_amp.errors.PlanError: what to do", PlanError), ("ValueError: other", Exception)):

        def launch(self: Any, *args: Any, text: str = text) -> None:
            raise ProcessRaisedException(f"Process 1 terminated\nTraceback (most recent call last):\n{text}\n", 1, 2)

        monkeypatch.setattr(MultiProcessingLauncher, "launch", launch)
        with pytest.raises(kind, match="what to do|other") as found:
            launcher.launch()
        assert isinstance(found.value, PlanError) is (kind is PlanError)


SCRIPT = """
from lightning.pytorch import Trainer
from lightning_amp import AMPStrategy
from tests.lightning.strategy.test_strategy_options import Small, cells


strategy = AMPStrategy(device_memory="100B")
options = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}
Trainer(strategy=strategy, **options).fit(Small(), cells())
"""


@pytest.mark.full
@pytest.mark.ranks
def test_two_ranks_say_a_mistake_once_without_a_traceback(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=280
    )
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    assert run.stderr.count("predicted to run out of memory") == 1
    assert "lightning_amp.errors.DoesNotFitError: predicted to run out of memory" in run.stderr


@pytest.mark.parametrize("in_place", [False, True])
def test_a_pattern_of_what_is_compiled_is_refused(in_place: bool) -> None:
    net = nn.ModuleDict({"layers": nn.ModuleList(nn.ModuleDict({"a": nn.ReLU(), "b": nn.ReLU()}) for _ in range(2))})
    compiled: Any = net["layers"][1]  # type: ignore[index]
    if in_place:
        compiled["a"].compile(backend="eager")
    else:
        compiled["a"] = torch.compile(compiled["a"], backend="eager")
    for fqn, refused in {
        "layers.*": False,
        "layers.*.a": True,
        "layers.1.a": True,
        "*.a": True,
        "layers.*.b": False,
    }.items():
        plan: Any = SimpleNamespace(rules=[Rule(fqn=fqn, spec=FullyShard(), strategy="fsdp", why="it replaces none")])
        check_compiled(net, plan)
        plan.rules = [Rule(fqn=fqn, spec=RecomputeBlock(), strategy="recompute", why="a test")]
        if refused:
            with pytest.raises(PlanError, match=r"torch.compile was applied to \['layers.1.a'\]"):
                check_compiled(net, plan)
        else:
            check_compiled(net, plan)
