"""Claim: fused attention computes what LocalAttention computes, output and gradients, for any run of buckets, holds no
scores of the whole sequence, keeps its inputs for the backward pass and, if told to, the weights, and nothing else, and
replaces no other module.
"""

import copy
import pickle
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lightning_amp._torch import TorchDispatchMode, softmax_backward
from lightning_amp.errors import ModelError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.footprint.target_device import settings_of
from lightning_amp.models.decoders.stratum_keys import AttentionKey, LocalAttention
from lightning_amp.techniques.contract.protocol import BucketedAttention
from lightning_amp.techniques.hic.attention import banded_softmax, rotary
from lightning_amp.techniques.hic.attention.bucket_runs import RunSizes
from lightning_amp.techniques.hic.attention.install import FusedLocalAttention, fuse_attention, fused_rows

DIM, WINDOW = 8, 5
DOUBLE = 8
Function = Callable[..., Tensor]


def draw(n: int, dim: int = DIM, *, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n)
    draws = [torch.randn(n, dim, dtype=torch.float64, generator=generator) for _ in range(3)]
    return [values.to(dtype).requires_grad_() for values in draws]


def results(attention: Function, leaves: list[Tensor]) -> list[Tensor]:
    """Output, and gradients of a sum that weights every number of it differently."""
    out = attention(*leaves)
    # of few digits, to be the same number in every dtype
    weight = torch.linspace(-1, 2, out.numel()).mul(64).round().div(64).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, weight)]


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Largest relative error, by norm."""
    pairs = zip(found, expected, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def set_sizes(monkeypatch: pytest.MonkeyPatch, together: int, chunk: int, *, padded: bool = False) -> None:
    sizes = RunSizes(together, chunk, padded=padded)
    monkeypatch.setattr(banded_softmax, "run_sizes", lambda window, launched: sizes)


KERNELS = ("products", "sdpa")
SIZES = [(1, 5, False), (1, 2, False), (2, 5, False), (3, 5, True), (100, 5, False), (100, 5, True)]
BORDERS = [(0, 10, 25, 38), (0, 5, 35, 38), (0, 35, 38), (0, 15, 15, 38)]


def of_one(attention: nn.Module) -> Function:
    """Keys that are the queries."""
    return lambda qk, values: attention(qk, qk, values)


def test_equals_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = LocalAttention(DIM, WINDOW)
    for n in (60, 58, 21, 12, 7, 5, 2):
        leaves = draw(n)
        qk, _, values = draw(n)
        with torch.no_grad():
            # neither has a direction, and the second is divided by the least norm
            qk[0], qk[1] = 0.0, 1e-14
        expected, expected_of_one = results(eager, leaves), results(of_one(eager), [qk, values])
        for device in ("cpu", "cuda"):
            with settings_of(device):
                found = results(fuse_attention(eager, kernel="sdpa"), leaves)
            assert distance(found, expected) <= 1e-12, (n, device)
        assert distance(results(fuse_attention(eager), leaves), expected) <= 1e-12
        for sizes in SIZES:
            set_sizes(monkeypatch, *sizes[:2], padded=sizes[2])
            forms = [fuse_attention(eager, keep=keep) for keep in (False, True)]
            again, kept = (results(form, leaves) for form in forms)
            assert distance(again, expected) <= 1e-12, (n, sizes)
            assert distance(kept, again) == 0, "kept weights are those computed again"
            again, kept = (results(of_one(form), [qk, values]) for form in forms)
            assert distance(again, expected_of_one) <= 1e-12, (n, sizes)
            assert distance(kept, again) == 0
        monkeypatch.undo()


@pytest.mark.parametrize("kernel", KERNELS)
def test_other_sizes(kernel: str) -> None:
    for n, dim, window in ((9, 2, 1), (1, 2, 1), (2, 2, 1), (40, 6, 1), (300, 64, 100), (33, 4, 50)):
        leaves = draw(n, dim)
        found = results(FusedLocalAttention(dim, window, kernel=kernel), leaves)
        for a, b in zip(found, results(LocalAttention(dim, window), leaves), strict=True):
            assert (a - b).norm() <= 1e-12 * b.norm() + (n < 3) * 1e-14, "weights of one have no gradient"


def run(attention: BucketedAttention, first: int, last: int, n_rows: int) -> Function:
    """A run of buckets, without the rows that fill the last one."""
    return lambda *leaves: attention.attend(attention.prepare(*leaves), first, last)[:n_rows]


def test_any_run_of_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = LocalAttention(DIM, WINDOW)
    forms = [("sdpa", SIZES[0]), *(("products", SIZES[i]) for i in (1, 3, 4, 5))]
    for n in (37, 10):
        n_buckets = eager.n_buckets(n)
        for kernel, sizes in forms:
            set_sizes(monkeypatch, *sizes[:2], padded=sizes[2])
            fused = FusedLocalAttention(DIM, WINDOW, kernel=kernel)
            assert fused.n_buckets(n) == n_buckets
            for first in range(n_buckets):
                for last in range(first + 1, n_buckets + 1):
                    n_rows = min(last * WINDOW, n) - first * WINDOW
                    found, expected = (results(run(a, first, last, n_rows), draw(n)) for a in (fused, eager))
                    assert distance(found, expected) <= 1e-12, (kernel, sizes, first, last)
            leaves = draw(n)
            state = fused.prepare(*leaves)
            none = fused.attend(state, 1, 1)
            assert none.shape == (0, DIM), "a rank may own no bucket"
            none.sum().backward()
            assert all(x.grad is None or not x.grad.any() for x in leaves)
            if kernel == "products":
                assert len(fused.attend(state, 0, n_buckets)) == n, "rows that fill are not computed"


@pytest.mark.parametrize("kernel", KERNELS)
def test_runs_with_halos_add_up(kernel: str) -> None:
    leaves = draw(38)
    expected = results(LocalAttention(DIM, WINDOW), leaves)
    for borders, halo in product(BORDERS, (WINDOW, 2 * WINDOW)):

        def parts(q: Tensor, k: Tensor, values: Tensor, borders: Any = borders, halo: int = halo) -> Tensor:
            rows = []
            for begin, end in pairwise(borders):
                start, stop = max(begin - halo, 0), min(end + halo, 38)
                near = slice(start, stop)
                around: dict[str, Any] = {"before": begin - start, "after": stop - end}
                how = {"keep": begin % 2 == 1} if kernel == "products" else {"kernel": kernel}
                rows.append(fused_rows(q[begin:end], k[near], values[near], window=WINDOW, **around, **how))
            return torch.cat(rows)

        assert distance(results(parts, leaves), expected) <= 1e-12, "further rows make no difference"


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_tensor_for_all_and_strange_strides(kernel: str) -> None:
    eager, fused = LocalAttention(DIM, WINDOW), FusedLocalAttention(DIM, WINDOW, kernel=kernel)
    one = draw(23)[:1]
    assert distance(results(lambda x: fused(x, x, x), one), results(lambda x: eager(x, x, x), one)) <= 1e-12
    for n in (23, 25):
        packed = [torch.cat([x.detach() for x in draw(n)], dim=1).T.contiguous().T.requires_grad_()]
        found, expected = (
            results(lambda x, a=a, n=n: a(*x.chunk(3, dim=1)).expand(2, n, DIM), packed) for a in (fused, eager)
        )
        assert distance(found, expected) <= 1e-12
        leaves = draw(n)
        found, expected = (torch.autograd.grad(a(*leaves).sum(), leaves) for a in (fused, eager))
        assert distance([found[2]], [expected[2]]) <= 1e-12, "the gradient of a sum has no memory of its own"


@pytest.mark.parametrize("kernel", KERNELS)
def test_zero_keys_and_large_scores(kernel: str) -> None:
    leaves = draw(23)
    with torch.no_grad():
        leaves[1][7] = 0
        leaves[1][9] *= 1e-13
    both = (FusedLocalAttention(DIM, WINDOW, kernel=kernel), LocalAttention(DIM, WINDOW))
    found, expected = (results(a, leaves) for a in both)
    assert distance(found, expected) <= 1e-12
    assert expected[2][7].norm() > 1e8, "the slope of the normalisation at 0 is 1 / 1e-12"
    large = [(x.detach() * f).requires_grad_() for x, f in zip(draw(23), (1e4, 1, 1), strict=True)]
    found, expected = (results(a, large) for a in both)
    assert distance(found[:1] + found[3:], expected[:1] + expected[3:]) <= 1e-10


def test_float32_at_far_positions() -> None:
    n, dim, window = 6000, 16, 40
    expected = results(LocalAttention(dim, window), draw(n, dim))
    single = draw(n, dim, dtype=torch.float32)
    found, eager = (results(a(dim, window), single) for a in (FusedLocalAttention, LocalAttention))
    assert all(x.dtype == torch.float32 for x in found)
    assert distance(found, expected) <= 1e-6
    assert distance(found, eager) <= 1e-5


def test_low_precision() -> None:
    for dtype, kernel in product((torch.bfloat16, torch.float16), KERNELS):
        low = draw(60, dtype=dtype)
        fused = FusedLocalAttention(DIM, WINDOW, kernel=kernel)
        found = results(fused, low)
        assert all(x.dtype == dtype for x in found)
        rounded = [x.detach().double().requires_grad_() for x in low]
        expected = results(LocalAttention(DIM, WINDOW), rounded)
        # what is left is the rounding of the results, half a unit in the last place at most
        assert distance(found, expected) <= torch.finfo(dtype).eps / 3
        if kernel == "products":
            assert distance(results(FusedLocalAttention(DIM, WINDOW, keep=True), low), found) == 0.0
            mixed = [low[0], low[1], rounded[2].detach().float().requires_grad_()]
            found = results(fused, mixed)
            assert [x.dtype for x in found] == [torch.float32, dtype, dtype, torch.float32]
            assert distance(found, expected) <= torch.finfo(dtype).eps / 3
            assert distance(found[:1] + found[3:], expected[:1] + expected[3:]) <= 1e-6, "float32 is not rounded"


@pytest.mark.parametrize(
    ("n", "window", "device", "keep"),
    [(600, 40, "cuda", False), (620, 40, "cpu", True), (590, 150, "cpu", False), (130, 150, "cuda", True)],
)
def test_autocast_to_bfloat16_is_no_more_wrong_than_the_reference(n: int, window: int, device: str, keep: bool) -> None:
    leaves, single = draw(n, 16), draw(n, 16, dtype=torch.float32)
    ours, reference = FusedLocalAttention(16, window, keep=keep), LocalAttention(16, window)
    expected = results(reference, leaves)
    with settings_of(device), torch.autocast("cpu", torch.bfloat16):
        found, eager = (results(a, single) for a in (ours, reference))
        assert all(x.dtype == torch.float32 for x in found)
        with torch.autocast("cpu", torch.float16):
            assert distance(results(ours, single), expected) <= 1e-6, "float16 is left alone"
    errors = [(distance([a], [e]), distance([b], [e])) for a, b, e in zip(found, eager, expected, strict=True)]
    if n > 2 * window:  # where every bucket meets the missing rows, a CPU computes in float32
        assert all(own > 1e-5 for own, _ in errors), errors
    assert all(own <= 1.1 * theirs for own, theirs in errors), errors


@pytest.mark.parametrize("kernel", KERNELS)
def test_without_gradients_recomputed_and_inside_another_pass(kernel: str) -> None:
    fused, leaves = FusedLocalAttention(DIM, WINDOW, kernel=kernel), draw(38)
    expected = results(LocalAttention(DIM, WINDOW), leaves)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert distance([fused(*leaves)], expected[:1]) <= 1e-12
    again = results(lambda *x: checkpoint(fused, *x, use_reentrant=False), leaves)
    assert distance(again, expected) <= 1e-12

    out = fused(*leaves).square().sum()
    with pytest.raises(ModelError, match="second derivative"):
        torch.autograd.grad(out, leaves[:1], create_graph=True)
    out = fused(*leaves)
    with torch.no_grad():
        leaves[1].mul_(2)
    if kernel == "products":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def measure(attention: nn.Module, leaves: list[Tensor], grad: Tensor) -> tuple[int, int, int]:
    """Bytes kept after the forward pass, its peak, and the peak of the backward pass."""
    with LiveBytes() as live:
        out = attention(*leaves)
        kept, forward = live.current, live.peak
        live.reset_peak()
        torch.autograd.grad(out, leaves, grad)
        return kept, forward, live.peak


@pytest.mark.long
@pytest.mark.parametrize(("together", "chunk"), [(1, 25), (2, 100)])
def test_memory_is_as_documented(together: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n, dim, w = 2350, 32, 100
    set_sizes(monkeypatch, together, chunk)
    leaves, whole = draw(n, dim), n * dim * DOUBLE
    grad = torch.randn(n, dim, dtype=torch.float64)
    FusedLocalAttention(dim, w)(*leaves)
    kept, forward, backward = measure(FusedLocalAttention(dim, w), leaves, grad)
    assert kept == whole, "the output, and nothing for the backward pass"
    # what the docstring of banded_softmax.py calls the work
    work = 24 * w + 2 * together * chunk * 3 * w + 2 * together * w * dim
    sums_of_rows = 3 * (together + 2) * w * DOUBLE
    assert abs(forward - (24 * w * dim + n * dim + work) * DOUBLE) <= sums_of_rows
    assert abs(backward - 2 * whole - (3 * 24 * w * dim + work) * DOUBLE) <= sums_of_rows
    # of 24 buckets the first has 2w keys, the last two have 2.5w and 1.5w, half a bucket is missing: one more column
    weights = (3 * n * w - w * w - w * w // 2 - 3 * w * w // 4 + 3 * w // 2) * DOUBLE
    one_chunk = together * chunk * 3 * w * DOUBLE
    found = measure(FusedLocalAttention(dim, w, keep=True), leaves, grad)
    assert found == (whole + weights, forward + weights - one_chunk, backward + weights - one_chunk)
    with LiveBytes() as live, torch.no_grad():
        FusedLocalAttention(dim, w, keep=True)(*leaves)
    assert live.peak == forward, "without gradients there is nothing to keep"
    eager = measure(LocalAttention(dim, w), leaves, grad)
    assert eager[0] > n * 3 * w * DOUBLE
    assert backward < eager[2] / 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("n", "sizes", "keep"), [(2350, (1, 100), False), (2400, (1, 30), True), (150, (4, 100), True)]
)
def test_without_values_the_same_memory(n: int, sizes: Any, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    set_sizes(monkeypatch, *sizes, padded=n < 1000)
    fused, leaves = FusedLocalAttention(8, 100, keep=keep), draw(n, dtype=torch.float32)
    meta = [x.detach().to("meta").requires_grad_() for x in leaves]
    # the tables of the rotation are there from then on
    fused(*leaves), fused(*meta)
    real = measure(fused, leaves, torch.ones(n, 8))
    assert measure(fused, meta, torch.ones(n, 8, device="meta")) == real


def operators(attention: Function, leaves: list[Tensor]) -> list[str]:
    """Names of all operators of a forward and a backward pass."""

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func._opname)
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    results(attention, leaves)
    with Names():
        results(attention, leaves)
    return names


def test_an_accelerator_runs_few_operators_on_all_buckets_and_waits_for_none() -> None:
    leaves = draw(5 * WINDOW + 2, dtype=torch.float32)
    with settings_of("cuda"):
        found = {keep: operators(FusedLocalAttention(DIM, WINDOW, keep=keep), leaves) for keep in (True, False)}
    # scores, out; gradients of values, weights, keys, queries; scores again
    assert [sum("bmm" in name for name in names) for names in found.values()] == [10, 11]
    assert not {"_local_scalar_dense", "nonzero", "index", "lift_fresh", "arange", "cos"} & set(found[False])
    with settings_of("cpu"):
        # each of six turns is two products with small tables, of which none is a part; a softmax's backward pass is
        # one operator, and not three
        assert len(operators(FusedLocalAttention(DIM, WINDOW), leaves)) == len(found[False]) + 6 - 2


def test_backward_takes_the_settings_that_the_forward_pass_took() -> None:
    leaves = draw(5 * 150 + 2)
    with settings_of("cuda"):
        out = FusedLocalAttention(DIM, 150, keep=True)(*leaves)
    found = [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]
    out = LocalAttention(DIM, 150)(*leaves)
    assert distance(found, [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]) <= 1e-12


def test_tables_of_the_rotation_are_made_once() -> None:
    leaves = draw(4 * WINDOW)
    results(FusedLocalAttention(DIM, WINDOW), leaves)
    after = rotary._kept.cache_info()
    mode = FakeTensorMode()
    fake = [mode.from_tensor(x.detach()) for x in leaves]
    with mode:
        assert FusedLocalAttention(DIM, WINDOW)(*fake).shape == (4 * WINDOW, DIM)
    assert rotary._kept.cache_info() == after, "a fake tensor's tables would be found by a real one"


def test_state_dict_copies_and_undo() -> None:
    key = AttentionKey(DIM, WINDOW)
    names, eager = list(key.state_dict()), key.attention
    v = draw(23, dtype=torch.float32)[0]
    expected = key(v)[0]
    key.attention = fuse_attention(eager)  # type: ignore[assignment]
    assert list(key.state_dict()) == names
    for module in (key, copy.deepcopy(key), pickle.loads(pickle.dumps(key))):
        assert (module(v)[0] - expected).norm() <= 1e-5 * expected.norm()
    key.attention = eager
    assert torch.equal(key(v)[0], expected)


def test_the_backward_pass_of_a_softmax_writes_only_where_numbers_follow_each_other() -> None:
    weights = torch.randn(2, 3, 5, dtype=torch.float64).softmax(-1).requires_grad_()
    scores = weights.detach().log().requires_grad_()
    grad = torch.randn_like(weights)
    (expected,) = torch.autograd.grad(scores.softmax(-1), scores, grad)
    out = grad.clone()
    softmax_backward(out, weights.detach(), out=out)
    torch.testing.assert_close(out, expected)
    # torch itself would write a wrong gradient here
    with pytest.raises(AssertionError, match="contiguous"):
        softmax_backward(grad, weights.detach(), out=torch.empty(2, 5, 3, dtype=torch.float64).mT)
