"""Claim: strata that ranks share, or a CPU's threads, train as one after the other on one device; what would change is
refused or run alone."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.costs.model_shape import reference_shape
from lightning_amp.errors import InstallError, PlanError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.installing.install import install
from lightning_amp.planning.policies.build_rules import with_strata_by_speed
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.techniques.hic.rows import StrataParallel, StreamStrata
from lightning_amp.techniques.hic.strata.thread_pool import run_in_order, workers_for
from tests.planning.profiles import hic, profile, rna
from tests.ranks import CountCollectives, run_ranks
from tests.techniques import sharded_cases

FIVE = sharded_cases.Case(distances=(0, 1, 3, 4, 6), n_batches=2)
CASES = {"one row, no head": replace(FIVE, n_batches=1, head=False), "binarized": replace(FIVE, binarized=True)}
FORMS = [(), ("stream",)]
"""Beside those of test_exactness_matrix.py."""


def compare_all(rank: int, world_size: int) -> list[str]:
    mesh, wrong = sharded_cases.model_mesh(world_size), []
    for name, case in CASES.items():
        expected = sharded_cases.reference(case, steps=2)
        for form in FORMS:
            specs = {"strata": StrataParallel(ends="1,5")} if form else {}
            found = sharded_cases.sharded(case, (*form, "strata"), mesh, steps=2, specs=specs)
            wrong += [f"{name} {form}: {line}" for line in sharded_cases.differences(found, expected)]
    return wrong


def on_ranks(rank: int, world_size: int) -> tuple[Any, ...]:
    return compare_all(rank, world_size), count(rank, world_size), refuse(rank, world_size)


@pytest.mark.ranks
def test_equals_one_device_sends_little_and_refuses_runs_that_do_not_fit(tmp_path) -> None:
    wrong, counted, messages = zip(*run_ranks(on_ranks, 2, tmp_path, timeout=150), strict=True)
    assert wrong == ([], [])
    (counts, sent, first), (_, _, second) = counted
    assert counts == {"all_reduce": 2}, "the loss, and the gradients of what entered"
    n_floats = 1 + (FIVE.anchors + FIVE.cells) * FIVE.dim + FIVE.cells * len(FIVE.distances)
    assert sent == 8 * n_floats
    assert (first, second) == (["0", "1"], ["2", "3", "4"]), "each rank runs its own strata"
    assert all("allowed is one past the last stratum of every rank" in m for each in messages for m in each)


def count(rank: int, world_size: int) -> tuple[dict[str, int], int, list[str]]:
    mesh = sharded_cases.model_mesh(world_size)
    model = sharded_cases.Model(FIVE)
    specs = {"strata": StrataParallel(ends="2,5")}
    installed = install(model, sharded_cases.make_plan(("stream", "strata"), world_size, specs), mesh)
    seen: list[str] = []
    for k, stratum in enumerate(model.decoder.strata):
        stratum.register_forward_hook(lambda *_, k=k: seen.append(str(k)))
    with CountCollectives() as counted:
        model().backward()
    assert {id(p) for p in installed.partial} == {id(p) for p in model.decoder.strata.parameters()}
    return dict(counted.counts), counted.sent.total(), seen


def refuse(rank: int, world_size: int) -> list[str]:
    messages, mesh = [], sharded_cases.model_mesh(world_size)
    for ends in ("5", "2,4", "0,5", "2,x", "3,2", ""):
        made = sharded_cases.make_plan(("strata",), world_size, {"strata": StrataParallel(ends=ends)})
        with pytest.raises(InstallError) as caught:
            install(sharded_cases.Model(FIVE), made, mesh)
        messages.append(str(caught.value))
    return messages


def test_a_slow_rank_has_fewer_strata() -> None:
    data = profile(hic(strata=9), rna())
    made = plan(data, devices=2, strategies="stream,strata")
    shape = reference_shape(data, batch_size=made.batch_size)

    def ends(*speeds: float) -> str:
        rules = with_strata_by_speed(made, shape, speeds).rules
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


MANY = sharded_cases.Case(distances=(0, 1, 3, 4, 5, 6, 7, 8))
THREADED = {
    "independent": MANY,
    "one row for all cells": replace(MANY, n_batches=1, head=False),
    "chained": replace(MANY, chained=True),
    "chained, all with keys": replace(MANY, chained=True, distances=(1, 2, 3, 4, 5, 6, 7)),
}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


def installed(case: sharded_cases.Case, workers: int) -> sharded_cases.Model:
    model = sharded_cases.Model(case)
    spec = StreamStrata(cells=3, workers=workers)
    techniques = ("fused", "sparse", "stream") if case.key == "attention" else ("sparse", "stream")
    install(model, sharded_cases.make_plan(techniques, 1, {"stream": spec}))
    return model


def one_thread(case: sharded_cases.Case) -> sharded_cases.Results:
    torch.set_num_threads(1)
    found = sharded_cases.train(installed(case, 1), 2)
    torch.set_num_threads(3)
    return found


def threads_elsewhere() -> int:
    """What a thread that starts now computes with."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


@pytest.mark.long
@pytest.mark.parametrize("form", THREADED)
def test_equals_one_after_the_other(form: str) -> None:
    case = THREADED[form]
    model = installed(case, 3)
    seen: set[int] = set()
    for stratum in model.decoder.strata:
        stratum.register_forward_hook(lambda *_: seen.add(threading.get_ident()))
    found = sharded_cases.train(model, 2)
    assert len(seen) > 1, "the strata ran in several threads"
    assert threading.get_ident() not in seen
    assert threads_elsewhere() == torch.get_num_threads() == 3
    sharded_cases.assert_same(found, sharded_cases.reference(case, 2), rtol=1e-12)
    again, alone = sharded_cases.train(installed(case, 3), 2), one_thread(case)
    assert all(torch.equal(found[name], again[name]) for name in found), "the same in every run"
    if not case.chained:
        assert all(torch.equal(found[name], alone[name]) for name in found)


@pytest.mark.parametrize("own", [range(3, 8), range(2, 3), range(4, 4)])
@pytest.mark.parametrize("chained", [False, True])
def test_own_strata_of_a_rank(own: range, chained: bool) -> None:
    model = installed(replace(MANY, chained=chained), 3)
    decoder, walk = model.decoder, cast(Any, model.decoder.walk)
    found = []
    for way in (walk, walk.inner):
        total = way(decoder.strata, model.u, model.v, decoder.log_weights(model.u), own=own, **model.batch)
        model.zero_grad()
        if len(own):
            total.backward()
        found.append(
            {"total": total.detach()} | {n: sharded_cases.gradient(p).clone() for n, p in model.named_parameters()}
        )
    sharded_cases.assert_same(*found, rtol=1e-12)


def test_half_precision_products() -> None:
    results = []
    for workers in (3, 1):
        # as many threads inside a stratum
        torch.set_num_threads(workers)
        model = installed(MANY, workers).float()
        model.batch = {n: t.float() if t.is_floating_point() else t for n, t in model.batch.items()}
        with torch.autocast("cpu", torch.bfloat16):
            model().backward()
        results.append([p.grad for p in model.parameters()])
    plain = installed(MANY, 1).float()
    plain.batch = model.batch
    plain().backward()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not torch.equal(plain.v.grad, results[0][0]), "autocast made a difference"


def test_what_threads_would_change_runs_alone() -> None:
    linear, like = nn.Linear(2, 2), torch.ones(2)
    assert workers_for([linear, nn.Linear(2, 2)], like, most=2) == 2
    assert workers_for([linear], like, most=5) == 3, "no more than threads"
    assert workers_for([linear], like.to("meta"), most=2) == 1
    assert workers_for([linear, linear], like, most=2) == 1, "a shared module"
    assert workers_for([nn.Dropout(0.1)], like, most=2) == 1
    assert workers_for([nn.Dropout(0.1).eval()], like, most=2) == 2
    with LiveBytes():
        assert workers_for([linear], like, most=2) == 1
    with torch.device("cpu"):
        assert workers_for([linear], like, most=2) == 1
    torch.set_num_threads(1)
    assert workers_for([linear], like, most=2) == 1


def test_results_are_taken_in_order_and_few_wait() -> None:
    begun: list[int] = []
    taken: list[int] = []
    most = 0

    def work(k: int) -> int:
        nonlocal most
        begun.append(k)
        time.sleep(0.05 if k % 3 == 0 else 0)
        most = max(most, len(begun) - len(taken))
        assert torch.get_num_threads() == 1
        return k

    run_in_order(work, range(12), taken.append, workers=3)
    assert taken == list(range(12))
    assert most <= 4, "the workers', and one that waits"
    assert torch.get_num_threads() == 3


class Failing(nn.Module):
    def forward(self, *args: Tensor) -> Tensor:
        raise ValueError("of a stratum")


class Drawing(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Tensor) -> Tensor:
        result: Tensor = self.inner(*args)
        return result * torch.rand(())


def test_failures_reach_the_caller() -> None:
    model = installed(MANY, 2)
    model.decoder.strata[3].likelihood = Failing()
    with pytest.raises(ValueError, match="of a stratum"):
        model()
    assert torch.get_num_threads() == 3
    model = installed(MANY, 2)
    model.decoder.strata[3].likelihood = Drawing(model.decoder.strata[3].likelihood)
    with pytest.raises(InstallError, match=r"2 strata .* draw random numbers.* set workers=1"):
        model()
    installed(MANY, 1)().backward()
