"""The sparse likelihood is the reference's in value and gradients, for counts given densely or by their entries."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.errors import InstallError, ModelError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.footprint.target_device import settings_of
from lightning_amp.models.decoders.stratum import ZINB
from lightning_amp.techniques.hic.rows import SPARSE_NUMBERS
from lightning_amp.techniques.hic.scores.sparse_likelihood import SparseZINB, sparse_likelihood
from tests.techniques.sharded_cases import Case, Model, assert_same, install, make_plan, reference, train

CELLS, FEATURES = 7, 150
"""With the chunks of `small_chunks`, two whole runs of columns and a shorter one."""


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_amp.techniques.hic.rows.SPARSE_NUMBERS", 1)


def counts(cells: int = CELLS, features: int = FEATURES, mean: float = 0.3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.poisson(torch.full((cells, features), mean, dtype=torch.float64), generator=generator)


def arguments(cells: int, features: int, rows: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(cells, features), (rows, features), (rows, features)]
    drawn = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    return [(2 * t - 1).to(dtype).requires_grad_() for t in drawn]


def forward_backward(leaf: nn.Module, x: Tensor | SparseCounts, given: Sequence[Tensor]) -> list[Tensor]:
    value = leaf(x, *given)
    return [value.detach(), *torch.autograd.grad(value * 3, list(given))]


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor], rtol: float = 1e-12) -> None:
    for own, other in zip(found, expected, strict=True):
        assert own.shape == other.shape
        error, norm = (own - other).norm(), other.norm()
        assert error <= rtol * norm + 1e-14, f"off by {error / norm:.1e} of {norm:.3g}"


X = {
    "few": counts(),
    "many": counts(mean=3.0),
    "none": counts() * 0,
    "all": counts() + 1,
    "no integers, and negative": counts() * 0.7 - 1.4 * (counts() > 1),
    "minus zero": counts() * -0.0,
    "one feature": counts(CELLS, 1),
    "no feature": counts(CELLS, 0),
    "one cell": counts(1, FEATURES),
    "no cell": counts(0, FEATURES),
}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("rows", ["one row", "a row per cell"])
@pytest.mark.parametrize("name", X)
def test_equals_the_dense_likelihood(name: str, rows: str) -> None:
    x = X[name]
    given = arguments(*x.shape, rows=1 if rows == "one row" else len(x))
    expected = forward_backward(ZINB(), x, given)
    for form in (x, SparseCounts.from_dense(x)):
        found = forward_backward(SparseZINB(), form, given)
        assert_close(found, expected)
        with torch.no_grad():
            value = SparseZINB()(form, *given)
        assert_close([value], expected[:1])


@pytest.mark.parametrize(("name", "rows"), [("few", 1), ("many", CELLS), ("all", 1), ("no feature", CELLS)])
def test_settings_of_an_accelerator_compute_the_same(name: str, rows: int) -> None:
    x = X[name]
    given = arguments(*x.shape, rows=rows)
    with settings_of("cuda"), Computed("lgamma", "lgamma_") as computed:
        found = forward_backward(SparseZINB(), SparseCounts.from_dense(x), given)
    assert_close(found, forward_backward(ZINB(), x, given))
    # no tables of functions: theta and x + theta of every entry, and x!
    assert computed.n == 3 * int((x != 0).sum())


def test_a_count_that_is_no_number_is_seen_and_other_shapes_and_gradients_are_refused() -> None:
    x, given = counts(), arguments(CELLS, FEATURES, 1)
    x[2, 3] = torch.nan
    assert SparseZINB()(x, *given).isnan()
    # refuses other shapes and gradients of counts
    x, given = counts(), arguments(CELLS, FEATURES, 1)
    for form in (x[:, 1:], SparseCounts.from_dense(x)[:, 1:]):
        with pytest.raises(ModelError, match=r"counts of the shape \(7, 149\) for means of the shape \(7"):
            SparseZINB()(form, *given)
    with pytest.raises(InstallError, match="counts that need a gradient, which it does not compute; detach"):
        SparseZINB()(x.requires_grad_(), *given)


def test_columns_of_a_wider_matrix_and_whole_chunks() -> None:
    wide, given = counts(40, 3000), [t.detach() for t in arguments(40, 3000, 1)]
    cut = [t[:, 200:2800].requires_grad_() for t in given]
    expected = forward_backward(ZINB(), wide[:, 200:2800], cut)
    for form in (wide, SparseCounts.from_dense(wide)):
        found = forward_backward(SparseZINB(), form[:, 200:2800], cut)
        assert_close(found, expected)


EXTREMES = {
    "no mean": (-300.0, 0.0, 0.0),
    "no theta": (0.0, -40.0, 0.0),
    "always inflated": (20.0, 0.0, 90.0),
    "never inflated": (0.0, 0.0, -90.0),
    "hardly inflated": (-8.0, 2.0, -20.0),
    "nearly always inflated": (-20.0, 5.0, 12.0),
    "zeros nearly all inflated": (30.0, 5.0, -10.0),
    "where torch's softplus has a step": (21.5, 1.0, 20.5),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_single_precision_loses_no_more_than_the_reference(name: str) -> None:
    def run(leaf: nn.Module, dtype: torch.dtype, count: float) -> Tensor:
        given = [torch.full((1, 1), v, dtype=dtype, requires_grad=True) for v in EXTREMES[name]]
        return torch.stack(
            [t.double().sum() for t in forward_backward(leaf, torch.full((1, 1), count, dtype=dtype), given)]
        )

    for count in (0.0, 1.0, 400.0):
        truth = run(ZINB(), torch.float64, count)
        assert_close([run(SparseZINB(), torch.float64, count)], [truth])
        lost, expected = ((run(leaf, torch.float32, count) - truth).abs() for leaf in (SparseZINB(), ZINB()))
        assert (lost <= 3 * expected + 1e-6 * truth.abs() + 1e-20).all(), (count, lost, expected, truth)


def test_gradients_that_nearly_cancel_keep_their_digits() -> None:
    # 1e9 entries of this kind: the gradient of zi_logits is the difference of two numbers next to 1
    given = [torch.full((1, 1), v, requires_grad=True) for v in (-4.0, 1.0, -21.0)]
    found = forward_backward(SparseZINB(), torch.zeros(1, 1), given)[3]
    exact = forward_backward(ZINB(), torch.zeros(1, 1).double(), [t.detach().double().requires_grad_() for t in given])
    torch.testing.assert_close(found.double(), exact[3], rtol=1e-4, atol=0)


def test_halves_are_computed_with_in_single_precision() -> None:
    x, given = counts(), arguments(CELLS, FEATURES, 1, torch.bfloat16)
    expected = forward_backward(ZINB(), x.float(), [t.detach().float().requires_grad_() for t in given])
    found = forward_backward(SparseZINB(), x.bfloat16(), given)
    assert [t.dtype for t in found] == [torch.float32, *[torch.bfloat16] * 3]
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    assert_close([t.float() for t in found[1:]], expected[1:], rtol=5e-3)
    with torch.autocast("cpu", torch.bfloat16):
        single = forward_backward(SparseZINB(), x.float(), [t.detach().float().requires_grad_() for t in given])
    assert_close(single, expected, rtol=1e-4)


def test_backward_passes_may_be_many_and_checkpointed_but_not_of_second_order() -> None:
    x, given = counts(), arguments(CELLS, FEATURES, 1)
    expected = forward_backward(ZINB(), x, given)[1:]
    leaf = SparseZINB()
    total = leaf(x, *given)
    for _ in range(2):
        found = torch.autograd.grad(3 * total, given, retain_graph=True)
        assert_close(list(found), expected)
    for reentrant in (False, True):
        again = checkpoint(leaf, x, *given, use_reentrant=reentrant)
        (3 * again).backward()
        assert torch.equal(again, total)
        assert_close([t.grad for t in given if t.grad is not None], expected)
        for t in given:
            t.grad = None
    with pytest.raises(ModelError, match=r"create_graph=True\) through a sparse likelihood.*leave 'sparse'"):
        torch.autograd.grad(total, given, create_graph=True)


class Computed(TorchDispatchMode):
    """How many numbers an operator has made."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names, self.n = names, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.n += result.numel() if func._opname in self.names else 0
        return result


def peaks(
    leaf: nn.Module, x: Tensor | SparseCounts, rows: int, make: Callable[..., Tensor] = torch.zeros
) -> tuple[int, ...]:
    """Bytes at most in the forward pass, after it, at most in the backward pass, and after it."""
    given = [make(n, x.shape[1]).requires_grad_() for n in (x.shape[0], rows, rows)]
    with LiveBytes() as live:
        total = leaf(x, *given)
        forward, kept = live.peak, live.current
        live.reset_peak()
        grads = torch.autograd.grad(total, given)
        del total
        found = forward, kept, live.peak, live.current
    assert len(grads) == 3
    return found


@pytest.mark.parametrize("rows", [1, 256])
@pytest.mark.parametrize("share", [0.02, 0.3])
def test_keeps_the_gradients_and_little_else(rows: int, share: float) -> None:
    cells, features = 256, 2000
    x = (torch.rand(cells, features, generator=torch.Generator().manual_seed(0)) < share).float()
    n_entries, gradients = int(x.sum()), 4 * (cells + 2 * rows) * features
    chunks = (3 if rows == 1 else 6) * SPARSE_NUMBERS
    # beside what the docstring counts: the row tables of a chunk, and scalars
    small = 4 * (6 * features + 400)
    by_entry = SparseCounts.from_dense(x)
    # once for a batch, and kept with it
    by_entry.log_factorial(torch.float32)
    for form in (x, by_entry):
        forward, kept, backward, left = peaks(SparseZINB(), form, rows)
        assert kept == gradients + 4
        assert forward <= gradients + 4 * max(18 * n_entries, 11 * n_entries + chunks) + small
        assert backward <= 2 * gradients + small
        assert left == gradients
    assert peaks(ZINB(), x, rows)[1] > 2.5 * gradients


@pytest.mark.parametrize("rows", [1, 64])
def test_without_values_memory_is_counted_for_one_count_in_20(rows: int) -> None:
    n = 64 * 4000 // 20
    x = torch.zeros(64, 4000)
    x.view(-1)[::20] = 1
    real = peaks(SparseZINB(), x, rows)
    assert int(x.sum()) == n

    def meta(*shape: int) -> Tensor:
        return torch.empty(*shape, device="meta")

    empty = torch.empty(n, dtype=torch.int64, device="meta")
    entries = SparseCounts(empty, empty, torch.empty(n, device="meta"), x.shape)
    for form in (x.to("meta"), entries):
        simulated = peaks(SparseZINB(), form, rows, meta)
        assert simulated[1:] == real[1:]
        assert simulated[0] == pytest.approx(real[0], rel=0.02)
    with FakeTensorMode():
        fake = torch.empty(64, 4000)
        assert SparseZINB()(fake, fake, fake[:1], fake[:1]).shape == ()


class Scaled(ZINB):
    def forward(self, *given: Any) -> Tensor:
        return 2 * super().forward(*given)


class Detached(ZINB):
    def forward(self, x: Any, log_mu: Tensor, log_theta: Tensor, zi_logits: Tensor) -> Tensor:
        return super().forward(x, log_mu, log_theta.detach() + 0 * log_theta, zi_logits)


class Clamped(ZINB):
    def __init__(self, argument: int, least: float, most: float) -> None:
        super().__init__()
        self.argument, self.bounds = argument, (least, most)

    def forward(self, *given: Tensor) -> Tensor:
        clamped = [t.clamp(*self.bounds) if i == self.argument else t for i, t in enumerate(given)]
        return super().forward(*clamped)


class Added(ZINB):
    def forward(self, x: Any, log_mu: Tensor, *tables: Tensor) -> Tensor:
        return super().forward(x, (log_mu.exp() + 1e-10).log(), *tables)


BOUNDS = [(0, 0, 1e4), (1, -5, 9), (1, -30, 99), (1, -99, 15), (2, -5, 99), (2, -99, 5), (3, -10, 10)]


@pytest.mark.parametrize(("leaf", "message"), [
    (nn.Identity(), r"'Identity', which takes \['input'\], where counts with many zeros have \['x'"),
    (Scaled(), "'Scaled', which returns value .* for a small example; only a module without state"),
    (Detached(), "'Detached', which returns gradient of log_theta .* for a small example.*leave"),
    *((leaf, "which returns (value|gradient) .* for a small example")
        for leaf in [*(Clamped(*bounds) for bounds in BOUNDS), Added()]),
])  # fmt: skip
def test_refuses_what_is_no_plain_likelihood(leaf: nn.Module, message: str) -> None:
    with pytest.raises(InstallError, match=f"(?s){message}"):
        sparse_likelihood(leaf)


SUBSETS = [("sparse",), ("sparse", "recompute"), ("S3", "S4", "sparse", "stream")]


@pytest.mark.parametrize("subset", SUBSETS, ids="+".join)
def test_a_decoder_trains_as_before(subset: tuple[str, ...]) -> None:
    case = Case(chained=len(subset) > 2, n_batches=1 + ("stream" in subset))
    expected = reference(case)
    for sparse_batch in (False, True):
        model = Model(case)
        if sparse_batch:
            model.batch["x"] = SparseCounts.from_dense(model.batch["x"])
        found = train(model, 3, install(model, make_plan(subset, 1)))
        assert_same(found, expected)
    assert isinstance(model.decoder.strata[0].likelihood, SparseZINB)
