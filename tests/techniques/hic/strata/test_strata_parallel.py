"""Claim: ranks that share the strata train as one device does, send little, and refuse what they cannot share."""

from dataclasses import replace

import pytest

from lightning_amp.costs.model_shape import reference_shape
from lightning_amp.errors import InstallError, PlanError
from lightning_amp.installing.install import install
from lightning_amp.planning.policies.build_rules import with_speeds
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.techniques.hic.rows import StrataParallel
from tests.planning.profiles import hic, profile, rna
from tests.ranks import CountCollectives, run_ranks
from tests.techniques.sharded_cases import Case, Model, differences, make_plan, model_mesh, reference, sharded

FIVE = Case(distances=(0, 1, 3, 4, 6), n_batches=2)
CASES = {"one row, no head": replace(FIVE, n_batches=1, head=False), "binarized": replace(FIVE, binarized=True)}
FORMS = [(), ("stream",)]
"""Beside those of test_exactness_matrix.py."""


def compare_all(rank: int, world_size: int) -> list[str]:
    mesh, wrong = model_mesh(world_size), []
    for name, case in CASES.items():
        expected = reference(case, steps=2)
        for form in FORMS:
            specs = {"strata": StrataParallel(ends="1,5")} if form else {}
            found = sharded(case, (*form, "strata"), mesh, steps=2, specs=specs)
            wrong += [f"{name} {form}: {line}" for line in differences(found, expected)]
    return wrong


@pytest.mark.ranks
def test_equals_one_device(tmp_path) -> None:
    for rank, wrong in enumerate(run_ranks(compare_all, 2, tmp_path, timeout=150)):
        assert not wrong, f"rank {rank}: " + "\n".join(wrong)


def count(rank: int, world_size: int) -> tuple[dict[str, int], int, list[str]]:
    mesh = model_mesh(world_size)
    model = Model(FIVE)
    specs = {"strata": StrataParallel(ends="2,5")}
    installed = install(model, make_plan(("stream", "strata"), world_size, specs), mesh)
    seen: list[str] = []
    for k, stratum in enumerate(model.decoder.strata):
        stratum.register_forward_hook(lambda *_, k=k: seen.append(str(k)))
    with CountCollectives() as counted:
        model().backward()
    assert {id(p) for p in installed.partial} == {id(p) for p in model.decoder.strata.parameters()}
    return dict(counted.counts), counted.sent.total(), seen


@pytest.mark.ranks
def test_two_collectives_whatever_the_strata(tmp_path) -> None:
    (counts, sent, first), (_, _, second) = run_ranks(count, 2, tmp_path)
    assert counts == {"all_reduce": 2}, "the loss, and the gradients of what entered"
    n_floats = 1 + (FIVE.anchors + FIVE.cells) * FIVE.dim + FIVE.cells * len(FIVE.distances)
    assert sent == 8 * n_floats
    assert (first, second) == (["0", "1"], ["2", "3", "4"]), "each rank runs its own strata"


def refuse(rank: int, world_size: int) -> list[str]:
    messages, mesh = [], model_mesh(world_size)
    for ends in ("5", "2,4", "0,5", "2,x", "3,2", ""):
        made = make_plan(("strata",), world_size, {"strata": StrataParallel(ends=ends)})
        with pytest.raises(InstallError) as caught:
            install(Model(FIVE), made, mesh)
        messages.append(str(caught.value))
    return messages


@pytest.mark.ranks
def test_runs_that_do_not_fit_are_refused(tmp_path) -> None:
    for messages in run_ranks(refuse, 2, tmp_path):
        assert all("allowed is one past the last stratum of every rank" in m for m in messages)


def test_a_slow_rank_has_fewer_strata() -> None:
    data = profile(hic(strata=9), rna())
    made = plan(data, devices=2, strategies="stream,strata")
    shape = reference_shape(data, batch_size=made.batch_size)

    def ends(*speeds: float) -> str:
        rules = with_speeds(made, shape, speeds).rules
        return next(rule.spec.ends for rule in rules if isinstance(rule.spec, StrataParallel))

    assert ends() == ends(1.0, 1.0) == "5,9"
    assert ends(1.0, 0.5) == "6,9"
    assert ends(0.5, 1.0) == "3,9"


@pytest.mark.parametrize(("strategies", "message"), [
    ("S5,strata", "S5 and strata cannot be together: both split the decoder"),
    ("nodes,strata", "nodes and strata cannot be together"),
    ("S3,fused", "S3 and fused cannot be together"),
    ("recompute,stream", "recompute and stream cannot be together"),
])  # fmt: skip
def test_contradicting_strategies_are_refused(strategies: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(profile(hic(), rna()), devices=2, strategies=strategies)


def test_more_ranks_than_strata_are_refused() -> None:
    data = profile(hic(strata=3), rna())
    with pytest.raises(PlanError, match="3 strata can be split over 3 ranks at most"):
        plan(data, devices=4, strategies="strata", model_parallel_size=4)
    made = plan(data, devices=4, strategies="strata")
    assert (made.mesh.data, made.mesh.model) == (2, 2), "not asked for so many"
