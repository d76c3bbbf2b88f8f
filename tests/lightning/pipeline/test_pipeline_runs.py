"""Claim: of a pipeline, checkpoints are whole and resume on any number of stages, a mesh of data and stages trains as
one process does, draws do not depend on the stages, every rank evaluates, and holds its own stage only.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything

from lightning_amp.data.cut_batch import cut
from lightning_amp.techniques.pipeline.steps.pipelined_steps import seed_of
from tests.lightning.pipeline.pipeline_cases import GPT, LAYERS, STEPS, fit, tokens
from tests.lightning.pipeline.test_pipeline import close
from tests.ranks import run_ranks

pytestmark = [pytest.mark.exhaustive, pytest.mark.release]
Run = dict[str, Any]
MICRO = {"micro_batches": 3}
GO_ON = {"max_epochs": 2}
"""The end of two steps is that of the first epoch, so that a run from there needs a second one."""


def runs(rank: int, ranks: int, folder: Path) -> dict[str, Run]:
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
    me = rank, ranks
    found = {"first": fit(me, GPT(), MICRO, {"max_steps": 2}, save=folder / f"after{ranks}.ckpt")}
    start = folder / ("after4.ckpt" if ranks == 2 else "plain.ckpt")
    found["resumed"] = fit(me, GPT(), MICRO, GO_ON, ckpt_path=str(start), validate=True)
    if ranks == 2:
        found["dropout"] = fit(me, GPT(0.3, 0.2), MICRO, {})
        for strategies in ("pipeline", "pipeline,recompute"):
            settings = {"strategies": strategies, "schedule": "gpipe", "micro_batches": 7}
            found[strategies] = fit(me, GPT(0.3), settings, {})
    else:
        settings = MICRO | {"model_parallel_size": 2}
        found["2 x 2"] = fit(me, GPT(), settings, {"gradient_clip_val": 0.05}, data_ranks=2)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[int, list[dict[str, Run]]]:
    fit(None, GPT(), {}, {"max_steps": 2}, save=folder / "plain.ckpt")
    both = {}
    for ranks in (4, 2):
        meet = folder / f"meet{ranks}"
        meet.mkdir()
        both[ranks] = run_ranks(runs, ranks, meet, folder, timeout=300)
    return both


def each(found: dict[int, list[dict[str, Run]]], name: str) -> list[Run]:
    return [run[name] for ranks in found for run in found[ranks] if name in run]


def test_draws_are_those_of_one_process_that_seeds_every_micro_batch(found: Any) -> None:
    seed_everything(1, verbose=False)
    module = GPT(0.3, 0.2)
    optimizer = module.configure_optimizers()
    for step, batch in enumerate(tokens()):
        parts, sizes = cut(batch, 3)
        optimizer.zero_grad()
        for j, part in enumerate(parts):
            torch.manual_seed(seed_of(1, "training_step", 0, step, 0, j))
            (module.loss(part) * sizes[j] / sum(sizes)).backward()
        optimizer.step()
    for run in each(found, "dropout"):
        for name, value in module.state_dict().items():
            assert torch.allclose(run["state"][name], value, rtol=0, atol=1e-10), name


def test_blocks_of_a_stage_can_be_computed_again_with_the_same_draws_and_fewer_bytes(found: Any) -> None:
    pairs = zip(each(found, "pipeline,recompute"), each(found, "pipeline"), strict=True)
    for again, kept in pairs:
        close(again, kept)
        assert again["peak"] < 0.85 * kept["peak"], (again["peak"], kept["peak"])


def test_a_run_goes_on_from_one_process_and_from_other_stages_and_validates(found: Any, folder: Path) -> None:
    expected = fit(None, GPT(), {}, GO_ON, ckpt_path=str(folder / "plain.ckpt"), validate=True)
    assert "val_loss" in expected["logged"]
    assert len(expected["outputs"]) >= STEPS, "it goes on"
    resumed = each(found, "resumed")
    assert len(resumed) == 4 + 2
    for run in resumed:
        close(run, expected)


def test_a_checkpoint_is_that_of_one_process(found: Any, folder: Path) -> None:
    plain = torch.load(folder / "plain.ckpt", weights_only=False)
    whole = fit(None, GPT(), {}, GO_ON, ckpt_path=str(folder / "plain.ckpt"))
    for ranks in (2, 4):
        saved = torch.load(folder / f"after{ranks}.ckpt", weights_only=False)
        assert list(saved["state_dict"]) == list(plain["state_dict"])
        ours, theirs = (c["optimizer_states"][0]["state"] for c in (saved, plain))
        assert ours.keys() == theirs.keys()
        for index, values in theirs.items():
            for key, value in values.items():
                assert torch.allclose(ours[index][key], value, rtol=0, atol=1e-10)
        # one process goes on from it, unaware
        ended = fit(None, GPT(), {}, GO_ON, ckpt_path=str(folder / f"after{ranks}.ckpt"))
        close(ended, whole)


def test_stages_over_a_data_axis_train_on_the_union_of_the_batches(found: Any) -> None:
    expected = fit(None, GPT(), {}, {"gradient_clip_val": 0.05}, data_ranks=2)
    for run in each(found, "2 x 2"):
        for name, value in expected["state"].items():
            if "right" not in name:
                assert torch.allclose(run["state"][name], value, rtol=0, atol=1e-10), name
        assert run["norms"] == pytest.approx(expected["norms"], abs=1e-10)


def test_a_rank_holds_its_own_stage(found: Any) -> None:
    module = GPT()
    block = sum(p.nbytes for p in module.blocks[0].parameters())
    frozen = module.blocks[2].up.bias.nbytes
    beside = {
        "first": module.tokens.weight.nbytes + module.places.nbytes,
        "last": module.tokens.weight.nbytes + sum(p.nbytes for p in module.norm.parameters()),
    }
    for ranks in (2, 4):
        runs = [run["first"]["bytes"] for run in found[ranks]]
        stages = found[ranks][0]["first"]["plan"].stages
        per = [stage.end - stage.first for stage in stages]
        assert sum(per) == LAYERS
        for rank, (held, grads, state) in enumerate(runs):
            own = per[rank] * block + (rank == 0) * beside["first"] + (rank == ranks - 1) * beside["last"]
            trained = own - frozen * (stages[rank].first <= 2 < stages[rank].end)
            assert (held, grads) == (own, trained)
            assert trained * 2 <= state <= trained * 2 + 8 * 100, "two moments, and a count for every parameter"
