"""Claim: several nodes train as one device does, under torchrun and under SLURM's environment; the model axis stays
inside a node unless a person asks for more; and when a rank of one node is killed, both nodes end.

Nodes are processes of this machine: two torchrun agents that meet over the loopback interface, and ranks with the
variables that SLURM sets.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_amp.errors import PlanError
from lightning_amp.planning.policies.make_plan import plan
from tests.lightning.faults import fault_cases
from tests.lightning.faults.fault_cases import Case, free_port, run_group, run_scripts
from tests.lightning.faults.fault_table import said
from tests.planning.profiles import profile

# it measures seconds of several processes
pytestmark = pytest.mark.alone

INSIDE = {"strategies": "pipeline"}
ACROSS = INSIDE | {"model_parallel_size": 2}
Runs = dict[str, list[dict[str, Any]]]


def torchrun(port: int) -> list[list[str]]:
    """Two agents with one rank each."""
    return [
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)),
            *("--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)),
        ]
        for node in range(2)
    ]


def slurm(rank: int, ranks: int, port: int) -> dict[str, str]:
    """A task of a SLURM job with two tasks a node, without SLURM."""
    job = {"JOB_ID": 1, "JOB_NAME": "train", "NODELIST": "localhost", "NTASKS": ranks, "NTASKS_PER_NODE": 2}
    job |= {"NNODES": ranks // 2, "PROCID": rank, "LOCALID": rank % 2, "NODEID": rank // 2}
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return meet | {f"SLURM_{name}": str(value) for name, value in job.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """What each rank has found; of one device with the samples of one data rank, and of two."""
    root = tmp_path_factory.mktemp("nodes")
    outcomes = {
        "one": run_group(Case(), root / "one", ranks=1),
        "one of two": run_group(Case(batch=2), root / "one of two", ranks=1),
        "slurm": run_group(Case(settings=INSIDE, nodes=2), root / "slurm", ranks=4, environment=slurm, devices=2),
        "torchrun": run_scripts(Case(settings=ACROSS, nodes=2), root / "torchrun", torchrun(free_port()), devices=1),
    }
    for outcome in outcomes.values():
        assert outcome.statuses == [0] * len(outcome.statuses), outcome.texts
        assert outcome.left == []
        assert not any(said(text) for text in outcome.texts), "nothing is said of a run without faults"
    return {name: [torch.load(file) for file in sorted((root / name).glob("end*.pt"))] for name in outcomes}


@pytest.mark.ranks
@pytest.mark.parametrize(("how", "one"), [("torchrun", "one"), ("slurm", "one of two")])
def test_two_nodes_train_as_one_device(how: str, one: str, runs: Runs) -> None:
    (expected,) = (run["state"] for run in runs[one])
    assert len(runs[how]) == (2 if how == "torchrun" else 4)
    for rank in runs[how]:
        # as of one device, but for the names of a list
        for value, own in zip(expected.values(), rank["state"].values(), strict=True):
            torch.testing.assert_close(own, value, rtol=1e-9, atol=1e-12)


@pytest.mark.ranks
def test_lightning_s_own_environments_are_used(runs: Runs) -> None:
    assert [r["environment"] for r in runs["torchrun"]] == ["TorchElasticEnvironment"] * 2
    assert [r["environment"] for r in runs["slurm"]] == ["SLURMEnvironment"] * 4
    assert [r["node"] for r in runs["torchrun"]] == [0, 1]
    assert [r["node"] for r in runs["slurm"]] == [0, 0, 1, 1]


@pytest.mark.ranks
def test_the_model_axis_stays_inside_a_node_unless_asked(runs: Runs) -> None:
    assert [r["mesh"] for r in runs["slurm"]] == [[2, 2]] * 4
    assert [r["mesh"] for r in runs["torchrun"]] == [[1, 2]] * 2
    crosses = "the model axis of 2 ranks crosses nodes of 1"
    assert any(crosses in note for note in runs["torchrun"][0]["notes"])
    assert not any("crosses nodes" in note for note in runs["slurm"][0]["notes"])


@pytest.mark.ranks
def test_when_a_rank_of_one_node_is_killed_both_nodes_end(tmp_path: Path) -> None:
    case = Case(1, "training_step", "kill", nodes=2)
    outcome = run_scripts(case, tmp_path / "run", torchrun(free_port()), devices=1)
    assert all(outcome.statuses), outcome.statuses
    assert outcome.left == []
    assert outcome.seconds < fault_cases.LIMIT_S
    assert any("rank 1 ended without a word" in message for message in said(outcome.texts[0])), outcome.texts[0]
    assert sorted(file.name for file in (tmp_path / "run").glob("*.ckpt")) == ["step=2.ckpt", "step=4.ckpt"]


# --- the plan ---


READ = profile()


@pytest.mark.parametrize(("devices", "node"), [(8, 4), (8, 2), (6, 3), (12, 4)])
def test_no_candidate_crosses_nodes(devices: int, node: int) -> None:
    made = plan(READ, devices=devices, node_devices=node)
    assert {node % candidate.model for candidate in made.candidates} == {0}
    assert max(candidate.model for candidate in made.candidates) == max(
        c.model for c in plan(READ, devices=node).candidates
    )
    assert all(candidate.data * candidate.model == devices for candidate in made.candidates)


def test_nodes_of_one_device_have_no_model_axis_by_themselves() -> None:
    with pytest.raises(PlanError, match=r"stays inside a node, and a node has 1 device; set model_parallel_size=4"):
        plan(READ, devices=4, node_devices=1, strategies="S1,S5")
    assert plan(READ, devices=4, node_devices=1).mesh.model == 1
