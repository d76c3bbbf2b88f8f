"""Claim: nodes trains what one device trains, wherever the anchors are cut and whatever other strategies are there; it
sends one bucket of rows to each neighbour while the inner buckets are computed, counts what it sends, keeps a part, and
refuses what would not see all that it needs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp.errors import InstallError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.installing.install import install
from lightning_amp.models.decoders.stratified import StratifiedDecoder
from lightning_amp.models.decoders.stratum_keys import LocalAttention
from lightning_amp.techniques.hic.nodes.decoder import HaloAttention, share_anchors
from lightning_amp.techniques.hic.rows import DomainParallel
from lightning_amp.techniques.ranks.shards import shard_anchors
from tests.ranks import CountCollectives, run_ranks
from tests.techniques import sharded_cases

FEW = {0: 1, 1: 2, 2: 3}
STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Shuffled(sharded_cases.Case):
    """Features in no order of their anchors, and several with the same anchor."""

    def nodes(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(7)
        rows = [torch.tensor(rows + rows[:3]) for rows in super().nodes()]
        return [r[torch.randperm(len(r), generator=generator)].tolist() for r in rows]


LOCAL, FULL = sharded_cases.Case(), sharded_cases.Case(key="full_attention")
"""23 anchors: 11 and 12 on two ranks, 7, 8 and 8 on three."""

CASES: dict[str, tuple[sharded_cases.Case, tuple[str, ...]]] = {
    "one batch, no head": (sharded_cases.Case(n_batches=1, head=False), ("S4", "nodes")),
    "few features": (sharded_cases.Case(features=FEW), ("S4", "nodes")),
    "any order": (Shuffled(), ("nodes",)),
    "any order, S4": (Shuffled(chained=True), ("S4", "nodes", "stream")),
    "binarized": (sharded_cases.Case(binarized=True), ("nodes", "recompute")),
    "one cell": (sharded_cases.Case(cells=1, n_batches=1), ("S3", "nodes")),
    "whole buckets": (sharded_cases.Case(anchors=25, variant="paper"), ("nodes",)),
    "one bucket each": (sharded_cases.Case(anchors=18), ("nodes",)),
    "S3 inside": (sharded_cases.Case(), ("nodes", "S3")),
    "full, recompute": (Shuffled(key="full_attention"), ("nodes", "recompute")),
}
CASES_BY_RANKS = {
    2: ("any order", "whole buckets", "S3 inside"),
    3: tuple(name for name in CASES if name not in ("S3 inside", "whole buckets")),
}
"""The forms that test_exactness_matrix.py does not have."""


def body(rank: int, world_size: int, expected: dict[str, sharded_cases.Results]) -> dict[str, list[str]]:
    mesh = sharded_cases.model_mesh(world_size)
    if world_size == 3:
        the_mean_has_gradients(mesh)
        what_is_not_used_has_no_gradient(mesh)
    return {
        name: sharded_cases.differences(sharded_cases.sharded(*CASES[name], mesh, STEPS), results)
        for name, results in expected.items()
    }


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", CASES_BY_RANKS)
def test_loss_gradients_and_steps_are_those_of_one_device(world_size: int, tmp_path: Path) -> None:
    expected = {name: sharded_cases.reference(CASES[name][0], STEPS) for name in CASES_BY_RANKS[world_size]}
    for found in run_ranks(body, world_size, tmp_path, expected, timeout=180):
        assert found == {name: [] for name in expected}


def the_mean_has_gradients(mesh: DeviceMesh) -> None:
    for case in (sharded_cases.Case(features=FEW, chained=True), Shuffled()):
        expected = sharded_cases.mean_gradients(case)
        assert sharded_cases.differences(sharded_cases.mean_gradients(case, ("S4", "nodes"), mesh), expected) == []


def what_is_not_used_has_no_gradient(mesh: DeviceMesh) -> None:
    """Not one of zeros: weight decay would act on it."""
    model = sharded_cases.Model(sharded_cases.Case(binarized=True))
    install(model, sharded_cases.make_plan(("nodes",), 3), mesh)
    model.u.requires_grad_(False)
    model().backward()
    assert model.u.grad is None
    assert model.decoder.strata_weights.grad is None
    assert model.decoder.strata[0].log_theta.grad is None
    assert model.decoder.strata[0].scale.grad is not None


@pytest.mark.parametrize(("rank", "neighbours"), [(0, 1), (1, 2), (2, 1)])
def test_what_is_sent_is_counted(rank: int, neighbours: int) -> None:
    """No more than a bucket to each neighbour; anchors are 5, 10 and 8."""
    case, mesh = sharded_cases.Case(), sharded_cases.fake_mesh(rank=rank, ranks=3)
    model = sharded_cases.Model(case)
    install(model, sharded_cases.make_plan(("S4", "nodes"), 3), mesh)
    cells, strata, attending, number = case.cells, len(case.distances), 2, 8
    with CountCollectives() as forward:
        loss = model()
    with CountCollectives() as backward:
        loss.backward()
    a_bucket = neighbours * 2 * case.window * case.dim * number
    entering = 10 * case.dim + cells * case.dim + cells * strata
    assert forward.counts == {"all_to_all_single": attending, "all_gather_into_tensor": strata, "all_reduce": 1}
    assert forward.sent == {
        "all_to_all_single": attending * a_bucket,
        "all_gather_into_tensor": strata * cells * number,
        "all_reduce": number,
    }
    assert backward.counts == {"all_to_all_single": attending, "all_reduce": strata, "all_gather_into_tensor": 1}
    assert backward.sent == {
        "all_to_all_single": attending * a_bucket,
        "all_reduce": strata * cells * number,
        "all_gather_into_tensor": entering * number,
    }


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_a_ring_sends_is_counted(ranks: int) -> None:
    """Keys and values in all steps but the last; backward with their gradients, which also go the last step home."""
    model, number, attending = sharded_cases.Model(FULL), 8, 2
    install(model, sharded_cases.make_plan(("S4", "nodes"), ranks), sharded_cases.fake_mesh(rank=0, ranks=ranks))
    with CountCollectives() as forward:
        loss = model()
    with CountCollectives() as backward:
        loss.backward()
    # what is sent is of every rank in turn
    sizes = [len(own) for own in shard_anchors(23, 1, sharded_cases.fake_mesh(rank=0, ranks=ranks)["model"]).owned]
    held = [sizes[-step % ranks] for step in range(ranks)]
    steps = ranks - 1
    for found, calls, rows in (
        (forward, 2 * steps, 2 * sum(held[:-1])),
        (backward, (4 * steps + 2) * (ranks > 1), (4 * sum(held[:-1]) + 2 * held[-1]) * (ranks > 1)),
    ):
        assert found.counts["all_to_all_single"] == attending * calls
        assert found.sent["all_to_all_single"] == attending * rows * FULL.dim * number


class Order(TorchDispatchMode):
    """What came when: rows that go out, waiting for them, and softmax with the number of its buckets."""

    WORDS = {  # noqa: RUF012
        "all_to_all_single": "send",
        "wait_tensor": "wait",
        "_softmax": "softmax",
        "_softmax_backward_data": "softmax",
    }

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._opname in self.WORDS:
            word = self.WORDS[func._opname]
            self.words.append(f"{word} {len(args[0])}" if word == "softmax" else word)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("rank", "forward", "backward"), [
    (0, ["send", "softmax 2", "wait", "softmax 1"], ["softmax 1", "send", "softmax 2", "wait"]),
    (1, ["send", "softmax 1", "wait", "softmax 1", "softmax 1"],
        ["softmax 1", "softmax 1", "send", "softmax 1", "wait"]),
    (2, ["send", "softmax 2", "wait", "softmax 1"], ["softmax 1", "send", "softmax 2", "wait"]),
])  # fmt: skip
def test_inner_buckets_are_attended_while_rows_are_under_way(
    rank: int, forward: list[str], backward: list[str]
) -> None:
    rows = shard_anchors(45, 5, sharded_cases.fake_mesh(rank=rank, ranks=3)["model"])
    attention = HaloAttention(LocalAttention(4, 5), rows)
    # a node between, as there is before attention in a key
    q, k, values = (2 * torch.ones(len(rows.own), 4, requires_grad=True) for _ in range(3))
    with Order() as order:
        out = attention(q, k, values)
    assert order.words == forward
    with Order() as order:
        out.sum().backward()
    assert order.words == backward


def test_a_part_is_kept() -> None:
    """Of keys, scores and likelihood; at each border no more than some buckets."""
    case = sharded_cases.Case(distances=(0, 1), dim=4, anchors=400, window=5, cells=10, n_batches=1)

    def kept(strategies: tuple[str, ...]) -> float:
        model = sharded_cases.Model(case)
        if strategies:
            install(model, sharded_cases.make_plan(strategies, 4), sharded_cases.fake_mesh(rank=1, ranks=4))
        model()
        with LiveBytes() as live:
            loss = model()
            bytes_kept = live.current
        assert loss.requires_grad
        return float(bytes_kept)

    # 80 buckets in all, 20 own ones; the two at the border come in pieces of three, of which two are twice there
    assert kept(("nodes",)) < (20 + 6) / 80 * kept(())


def small(**changes: Any) -> StratifiedDecoder:
    settings = {"stratum_index": [0, 1], "n_anchors": 9, "n_batches": 1, "window": 3} | changes
    return StratifiedDecoder(4, [range(9), range(8)], **settings)


def test_refuses_hooks_and_buckets_of_two_sizes() -> None:
    mesh, decoder = sharded_cases.fake_mesh(rank=0, ranks=2), small(stratum_index=[1, 2])
    attention = decoder.strata[1].get_submodule("key.attention")
    # a profiler's hooks cannot be copied
    attention.register_forward_hook(lambda *_: None)
    with pytest.raises(InstallError, match=r"attention' with \['forward_hooks'\], which would not run"):
        share_anchors(decoder, DomainParallel(), mesh)
    decoder.strata[1].key.attention = LocalAttention(4, 2)  # type: ignore[union-attr]
    with pytest.raises(InstallError, match=r"has buckets of \[2, 3\] anchors"):
        share_anchors(decoder, DomainParallel(), mesh)
