"""Claim: several nodes train as one device does, under torchrun and under SLURM's environment; the model axis stays
inside a node unless a person asks for more; and when a rank of one node is killed, both nodes end.

Nodes are processes of this machine: two torchrun agents that meet over the loopback interface, and ranks with the
variables that SLURM sets.
"""

import json
import multiprocessing
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.errors import PlanError
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.profiling.profile import Profile
from lightning_amp.profiling.read_profile import profile
from tests.lightning.faults import fault_cases, node_cases
from tests.lightning.faults.fault_cases import Case, free_port, run_commands, run_scripts
from tests.lightning.faults.fault_table import said

# it measures seconds of several processes
pytestmark = pytest.mark.alone

ACROSS = {"strategies": "S1,S5", "model_parallel_size": 2, "balance_cells": False}
INSIDE = {"strategies": "S1,S5", "balance_cells": False}
ONE = {"strategies": "S3", "balance_cells": False, "model_parallel_size": 1}


def torchrun(port: int) -> list[list[str]]:
    """Two agents with one rank each."""
    return [
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)),
            *("--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)),
        ]
        for node in range(2)
    ]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("nodes") / "data"
    synthesize(out, cells=40, rna_cells=30, bins=40, strata=4, genes=30, seed=2)
    return out


def forked(data_dir: Path, out: Path, *, nodes: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    out.mkdir()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.lightning.faults.node_cases", "tests.lightning.faults.fault_cases"])
    ranks, port = 1 if nodes == 1 else 2 * nodes, free_port()
    processes = [
        context.Process(target=node_cases.serve_slurm, args=(rank, port, data_dir, out, nodes, settings))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=fault_cases.START_S)
    assert [p.exitcode for p in processes] == [0] * ranks, [f.read_text() for f in out.glob("*.txt")]
    return [torch.load(out / f"rank{rank}.pt") for rank in range(ranks)]


def started(data_dir: Path, out: Path) -> list[dict[str, Any]]:
    out.mkdir()
    arguments = [node_cases.__file__, str(data_dir), str(out), "2", "1", json.dumps(ACROSS)]
    outcome = run_commands([[*agent, *arguments] for agent in torchrun(free_port())], out)
    assert outcome.statuses == [0, 0], outcome.texts
    assert outcome.left == []
    return [torch.load(out / f"rank{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def runs(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("runs")
    with ThreadPoolExecutor(2) as pool:
        across = pool.submit(started, data_dir, root / "torchrun")
        one = forked(data_dir, root / "one", nodes=1, settings=ONE)
        inside = forked(data_dir, root / "slurm", nodes=2, settings=INSIDE)
        return {"one": one, "slurm": inside, "torchrun": across.result()}


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["torchrun", "slurm"])
def test_two_nodes_train_as_one_device(how: str, runs: dict[str, list[dict[str, Any]]]) -> None:
    (one,) = runs["one"]
    for rank in runs[how]:
        assert rank["steps"] == one["steps"] > 1
        for name, value in one["state"].items():
            # biases before a BatchNorm have no gradient but rounding, which the optimiser divides by its own size
            torch.testing.assert_close(rank["state"][name], value, rtol=1e-7, atol=1e-9, msg=name)
        ours, its = (
            torch.cat([t.flatten() for t in state.values() if t.is_floating_point()])
            for state in (rank["state"], one["state"])
        )
        assert (ours - its).norm() <= 1e-9 * its.norm()


@pytest.mark.ranks
def test_lightning_s_own_environments_are_used(runs: dict[str, list[dict[str, Any]]]) -> None:
    assert [r["environment"] for r in runs["torchrun"]] == ["TorchElasticEnvironment"] * 2
    assert [r["environment"] for r in runs["slurm"]] == ["SLURMEnvironment"] * 4
    assert [r["node"] for r in runs["torchrun"]] == [0, 1]
    assert [r["node"] for r in runs["slurm"]] == [0, 0, 1, 1]


@pytest.mark.ranks
def test_the_model_axis_stays_inside_a_node_unless_asked(runs: dict[str, list[dict[str, Any]]]) -> None:
    assert [r["mesh"] for r in runs["slurm"]] == [[2, 2]] * 4
    assert [r["mesh"] for r in runs["torchrun"]] == [[1, 2]] * 2
    crosses = "the model axis of 2 ranks crosses nodes of 1"
    assert any(crosses in note for note in runs["torchrun"][0]["notes"])
    assert not any("crosses nodes" in note for note in runs["slurm"][0]["notes"])


@pytest.mark.ranks
@pytest.mark.parametrize("how", [Case(1, "training_step", "kill", nodes=2), Case(0, "training_step", "raise", nodes=2)])
def test_when_a_rank_of_one_node_ends_both_nodes_do(how: Case, tmp_path: Path) -> None:
    outcome = run_scripts(how, tmp_path / "run", torchrun(free_port()), devices=1)
    assert all(outcome.statuses), outcome.statuses
    assert outcome.left == []
    assert outcome.seconds < fault_cases.LIMIT_S
    other = outcome.texts[1 - how.rank]
    expected = "rank 1 ended without a word" if how.how == "kill" else "rank 0 failed in training_step"
    assert any(expected in message for message in said(other)), other
    assert sorted(file.name for file in (tmp_path / "run").glob("*.ckpt")) == ["step=2.ckpt", "step=4.ckpt"]


# --- the plan ---


@pytest.fixture(scope="module")
def read(data_dir: Path) -> Profile:
    return profile(data_dir)


@pytest.mark.parametrize(("devices", "node"), [(8, 4), (8, 2), (6, 3), (12, 4)])
def test_no_candidate_crosses_nodes(read: Profile, devices: int, node: int) -> None:
    made = plan(read, devices=devices, node_devices=node)
    assert {node % candidate.model for candidate in made.candidates} == {0}
    assert max(candidate.model for candidate in made.candidates) == max(
        c.model for c in plan(read, devices=node).candidates
    )
    assert all(candidate.data * candidate.model == devices for candidate in made.candidates)


def test_nodes_of_one_device_have_no_model_axis_by_themselves(read: Profile) -> None:
    with pytest.raises(PlanError, match=r"stays inside a node, and a node has 1 device; set model_parallel_size=4"):
        plan(read, devices=4, node_devices=1, strategies="S1,S5")
    assert plan(read, devices=4, node_devices=1).mesh.model == 1
