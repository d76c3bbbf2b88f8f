"""Claim: the kernel "sdpa" of fused attention computes what LocalAttention computes, output and gradients, for any run
of buckets, in few operators, holds no scores, keeps what its docstring says, and refuses what torch has no kernel for.
"""

import copy
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from benchmarks.kernels.count_operators import OperatorCounter
from lightning_amp._torch import attend_on_cuda, attend_on_cuda_back
from lightning_amp.errors import InstallError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.installing.install import install
from lightning_amp.models.decoders.local_attention import LocalAttention
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.simulation.byte_meter import SimulatedMeter
from lightning_amp.techniques.device_settings import settings_of
from lightning_amp.techniques.hic.attention import sdpa
from lightning_amp.techniques.hic.attention.fused import FusedLocalAttention, fuse_attention, fused_rows
from tests.parallel.attention.test_fused import (
    DIM,
    WINDOW,
    distance,
    draw,
    measure,
    operators,
    results,
    run,
)
from tests.parallel.sharded_cases import Case, Model, assert_same, make_plan, reference, train

FLOAT = 4


def fused(dim: int = DIM, window: int = WINDOW) -> FusedLocalAttention:
    return FusedLocalAttention(dim, window, kernel="sdpa")


@pytest.mark.parametrize("n", [60, 58, 21, 15, 12, 10, 7, 5, 2])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_equals_eager(n: int, device: str) -> None:
    eager, leaves = LocalAttention(DIM, WINDOW), draw(n)
    with settings_of(device):
        found = results(fuse_attention(eager, kernel="sdpa"), leaves)
    assert distance(found, results(eager, leaves)) <= 1e-12


@pytest.mark.parametrize(
    ("n", "dim", "window"), [(9, 2, 1), (3, 2, 1), (40, 6, 1), (300, 64, 100), (33, 4, 50)]
)
def test_other_sizes(n: int, dim: int, window: int) -> None:
    leaves = draw(n, dim)
    assert (
        distance(results(fused(dim, window), leaves), results(LocalAttention(dim, window), leaves)) <= 1e-12
    )


@pytest.mark.parametrize("n", [1, 2])
def test_rows_with_no_other_key_or_with_one(n: int) -> None:
    leaves = draw(n, 2)
    found, expected = results(fused(2, 1), leaves), results(LocalAttention(2, 1), leaves)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 1e-14, "weights of one, whose scores have no gradient"
    assert expected[1].norm() == expected[2].norm() == 0


@pytest.mark.parametrize(("length", "same"), [(4.8e4, True), (5.01e4, False)])
def test_scores_as_low_as_that_of_oneself(length: float, same: bool) -> None:
    leaves = [x.detach() for x in draw(2, 2)]
    # a turn by one position multiplies this inner product by cos(1)
    far = -length * 2**0.5 / torch.tensor(1.0, dtype=torch.float64).cos()
    leaves[0][0], leaves[1][1] = torch.tensor([far, 0.0]), torch.tensor([1.0, 0.0])
    leaves = [x.requires_grad_() for x in leaves]
    # a bucket of two: no row that fills it has the score 0
    found, expected = results(fused(2, 2), leaves), results(LocalAttention(2, 2), leaves)
    assert (distance(found[:1], expected[:1]) <= 1e-12) == same


@pytest.mark.parametrize("n", [40, 37, 12])
def test_any_run_of_buckets(n: int) -> None:
    eager, ours = LocalAttention(DIM, WINDOW), fused()
    n_buckets = eager.n_buckets(n)
    for first in range(n_buckets):
        for last in range(first + 1, n_buckets + 1):
            n_rows = min(last * WINDOW, n) - first * WINDOW
            found, expected = (results(run(a, first, last, n_rows), draw(n)) for a in (ours, eager))
            assert distance(found, expected) <= 1e-12
    leaves = draw(n)
    none = ours.attend(ours.prepare(*leaves), 1, 1)
    assert none.shape == (0, DIM), "a rank may own no bucket"
    none.sum().backward()
    assert all(x.grad is not None and not x.grad.any() for x in leaves)


@pytest.mark.parametrize("borders", [(0, 10, 25, 38), (0, 5, 35, 38), (0, 35, 38), (0, 15, 15, 38)])
@pytest.mark.parametrize("halo", [WINDOW, 2 * WINDOW])
def test_runs_with_halos_add_up(borders: tuple[int, ...], halo: int) -> None:
    leaves = draw(38)

    def parts(q: Tensor, k: Tensor, values: Tensor) -> Tensor:
        rows = []
        for begin, end in pairwise(borders):
            start, stop = max(begin - halo, 0), min(end + halo, 38)
            near = slice(start, stop)
            around: dict[str, Any] = {"before": begin - start, "after": stop - end, "kernel": "sdpa"}
            rows.append(fused_rows(q[begin:end], k[near], values[near], window=WINDOW, **around))
        return torch.cat(rows)

    assert distance(results(parts, leaves), results(LocalAttention(DIM, WINDOW), leaves)) <= 1e-12


def test_one_tensor_for_all_and_strange_strides() -> None:
    one, eager, ours = draw(23)[:1], LocalAttention(DIM, WINDOW), fused()
    assert distance(results(lambda x: ours(x, x, x), one), results(lambda x: eager(x, x, x), one)) <= 1e-12
    packed = [torch.cat([x.detach() for x in draw(25)], dim=1).T.contiguous().T.requires_grad_()]
    found, expected = (results(lambda x, a=a: a(*x.chunk(3, dim=1)), packed) for a in (ours, eager))
    assert distance(found, expected) <= 1e-12
    leaves = draw(25)
    sums = [torch.autograd.grad(a(*leaves).sum(), leaves)[2] for a in (ours, eager)]
    assert distance(sums[:1], sums[1:]) <= 1e-12, "the gradient of a sum has no memory of its own"
    rows = [torch.cat([x[:WINDOW], x]).detach()[WINDOW:].requires_grad_() for x in leaves]
    assert distance(results(ours, rows), results(eager, leaves)) <= 1e-12, "values begin within other memory"


def test_zero_keys_and_large_scores() -> None:
    leaves = draw(23)
    with torch.no_grad():
        leaves[1][7] = 0
        leaves[1][9] *= 1e-13
    found, expected = (results(a, leaves) for a in (fused(), LocalAttention(DIM, WINDOW)))
    assert distance(found, expected) <= 1e-12
    large = [(x.detach() * f).requires_grad_() for x, f in zip(draw(23), (1e4, 1, 1), strict=True)]
    found, expected = (results(a, large) for a in (fused(), LocalAttention(DIM, WINDOW)))
    assert distance(found[:1] + found[3:], expected[:1] + expected[3:]) <= 1e-10


def test_float32_and_below() -> None:
    leaves, single = draw(600, 16), draw(600, 16, dtype=torch.float32)
    assert distance(results(fused(16, 40), single), results(LocalAttention(16, 40), leaves)) <= 1e-6
    low = draw(60, dtype=torch.bfloat16)
    found = results(fused(), low)
    assert all(x.dtype == torch.bfloat16 for x in found)
    expected = results(LocalAttention(DIM, WINDOW), [x.detach().double().requires_grad_() for x in low])
    # what is left is the rounding of the results, half a unit in the last place at most
    assert distance(found, expected) <= torch.finfo(torch.bfloat16).eps / 3


@pytest.mark.parametrize("n", [600, 620])
def test_autocast_to_bfloat16(n: int) -> None:
    leaves, single = draw(n, 16), draw(n, 16, dtype=torch.float32)
    expected = results(LocalAttention(16, 40), leaves)
    with torch.autocast("cpu", torch.bfloat16):
        found, eager = (results(a, single) for a in (fused(16, 40), LocalAttention(16, 40)))
        names = operators(fused(16, 40), single)
    assert all(x.dtype == torch.float32 for x in found)
    errors = [
        (distance([a], [e]), distance([b], [e])) for a, b, e in zip(found, eager, expected, strict=True)
    ]
    # gradients of a value are rounded in three parts before they are added, the reference's in one
    assert all(1e-5 < ours <= 1.5 * theirs for ours, theirs in errors), errors
    assert distance(found, expected) <= distance(eager, expected)
    assert not any("bmm" in name for name in names)
    with torch.autocast("cpu", torch.float16):
        assert distance(results(fused(16, 40), single), expected) <= 1e-6, "float16 is left alone"


def test_without_gradients_recomputed_and_no_second_derivative() -> None:
    ours, leaves = fused(), draw(38)
    expected = results(LocalAttention(DIM, WINDOW), leaves)
    for mode in (torch.inference_mode, torch.no_grad):
        sdpa._kept.cache_clear()
        with mode():
            assert distance([ours(*leaves)], expected[:1]) <= 1e-12
    assert distance(results(lambda *x: checkpoint(ours, *x, use_reentrant=False), leaves), expected) <= 1e-12
    out = ours(*leaves).square().sum()
    twice = [torch.autograd.grad(out, leaves, retain_graph=True) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*twice, strict=True)), "what is kept is not changed"
    (grad,) = torch.autograd.grad(out, leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


@pytest.mark.parametrize(("n", "most"), [(5 * WINDOW + 2, 30), (5 * WINDOW, 27)])
def test_few_operators_and_none_that_makes_scores_or_waits(n: int, most: int) -> None:
    leaves = draw(n, dtype=torch.float32)
    names = operators(fused(), leaves)
    assert sum("bmm" in name or "softmax" in name for name in names) == 0
    assert names.count("_scaled_dot_product_flash_attention_for_cpu") == 2
    with OperatorCounter() as counter:
        out = fused()(*leaves)
        out.backward(torch.ones_like(out.detach()))
    # of these one makes the ones, and three hand gradients to leaves
    assert counter.kernels - 4 <= most
    assert not counter.host_syncs


def test_memory_is_as_documented() -> None:
    n, dim, w = 2350, 32, 100
    # torch 2.11 takes the logarithms of float64 without values for float32
    leaves, grad = draw(n, dim, dtype=torch.float32), torch.randn(n, dim)
    fused(dim, w)(*leaves)
    kept, forward, backward = measure(fused(dim, w), leaves, grad)
    whole, rows = 2400 * dim * FLOAT, 2400 * FLOAT
    # turned rows and keys, filled values, output in both forms; a logarithm and the norm of a row
    assert kept == 5 * whole + 2 * rows
    assert forward <= kept + 2 * rows
    # gradients: of three slots of keys and values, twice; of rows; of everything, one after the other
    assert abs(backward - kept - (6 + 6 + 1 + 3 + 1) * whole) <= 2 * whole
    meta = [x.detach().to("meta").requires_grad_() for x in leaves]
    fused(dim, w)(*meta)
    assert measure(fused(dim, w), meta, grad.to("meta")) == (kept, forward, backward)


@pytest.mark.parametrize(("n", "window"), [(230, 24), (24, 24), (40, 24)])
def test_a_simulation_sees_what_is_held(n: int, window: int) -> None:
    found = []
    for live, device in ((LiveBytes(), "cpu"), (SimulatedMeter(), "meta")):
        leaves = [x.detach().to(device).requires_grad_() for x in draw(n, dtype=torch.float32)]
        with live:
            out = fused(DIM, window)(*leaves)
            out.backward(torch.empty_like(out))
        found.append(live.peak)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "case", [Case(), Case(chained=True), Case(variant="paper"), Case(anchors=25), Case(anchors=5)], ids=str
)
@pytest.mark.parametrize("strategies", [("sdpa",), ("S4", "sdpa", "sparse", "stream"), ("sdpa", "recompute")])
def test_a_decoder_trains_as_on_one_device(case: Case, strategies: tuple[str, ...]) -> None:
    model = Model(case)
    plan = Plan.from_json(make_plan(strategies, 1).to_json())
    installed = install(model, plan)
    assert isinstance(model.decoder.strata[1].get_submodule("key.attention"), FusedLocalAttention)
    assert_same(train(model, 3, installed), reference(case))


def test_masks_are_made_once_and_not_of_fake_tensors() -> None:
    leaves, mode = draw(4 * WINDOW), FakeTensorMode()
    results(fused(), leaves)
    before = sdpa._kept.cache_info()
    results(fused(), leaves)
    fake = [mode.from_tensor(x.detach()) for x in leaves]
    with mode:
        assert fused()(*fake).shape == (4 * WINDOW, DIM)
    after = sdpa._kept.cache_info()
    assert (after.misses, after.hits) == (before.misses, before.hits + 2), "a mask, and zeros"


@pytest.mark.parametrize("n", [58, 12, 5])
def test_cuda_s_kernels_are_called_as_they_are_declared(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU their shapes are all that can be tested."""
    called = []

    def there(q: Tensor, k: Tensor, values: Tensor, own: Tensor, *args: Any, **kwargs: Any) -> Any:
        assert own.stride()[:2] in ((0, 0), (sdpa._columns(WINDOW), 0)), "one mask for all buckets"
        assert all(stride * 4 % sdpa.ALIGNED_BYTES == 0 for stride in own.stride()[:3])
        assert own.storage_offset() * 4 % sdpa.ALIGNED_BYTES == 0
        called.append("there")
        return attend_on_cuda(q, k, values, own, *args, **kwargs)

    def back(*args: Any, **kwargs: Any) -> Any:
        called.append("back")
        return attend_on_cuda_back(*args, **kwargs)

    monkeypatch.setattr(sdpa, "attend_on_cuda", there)
    monkeypatch.setattr(sdpa, "attend_on_cuda_back", back)
    monkeypatch.setattr(sdpa, "_is_cuda", lambda x: True)
    leaves = [x.detach().to("meta").requires_grad_() for x in draw(n, dtype=torch.float32)]
    out = fused()(*leaves)
    grads = torch.autograd.grad(out, leaves, torch.empty_like(out))
    assert [x.shape for x in (out, *grads)] == [(n, DIM)] * 4
    assert called == ["there"] * (len(called) // 2) + ["back"] * (len(called) // 2)


@pytest.mark.parametrize(
    ("kind", "dim", "dtype"),
    [
        ("cuda", 8, torch.float64),
        ("cuda", 6, torch.float32),
        ("cuda", 12, torch.bfloat16),
        ("mps", 8, torch.float32),
    ],
)
def test_refuses_what_has_no_kernel(kind: str, dim: int, dtype: torch.dtype) -> None:
    device: Any = SimpleNamespace(device=SimpleNamespace(type=kind), shape=(3, dim))
    with pytest.raises(InstallError, match=f"found {dim} channels .* on '{kind}'.*choose 'fused'"):
        sdpa._check(device, dtype)
    if kind == "cuda":
        sdpa._check(SimpleNamespace(device=device.device, shape=(3, 8)), torch.float32)  # type: ignore[arg-type]


def test_it_says_what_it_is_and_what_it_cannot_replace() -> None:
    with pytest.raises(InstallError, match="'sdpa' was asked for on 'Linear'.*leave 'sdpa' out"):
        fuse_attention(torch.nn.Linear(2, 2), kernel="sdpa")
    ours = fuse_attention(LocalAttention(DIM, WINDOW), kernel="sdpa")
    assert repr(copy.deepcopy(ours)) == "FusedAttention(dim=8, window=5, kernel='sdpa')"
