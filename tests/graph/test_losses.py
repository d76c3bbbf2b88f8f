"""Claim: a loss of torch computes in chunks what it computes whole, mean or sum or neither, with all gradients."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.graph.build_table import build_table
from lightning_amp.graph.peak import block_bytes
from lightning_amp.graph.table import OPERATOR
from tests.graph.calls import Captures
from tests.graph.test_flow import Op
from tests.techniques.chunk.case import Case
from tests.techniques.chunk.small_blocks import x_of

CLASSES = torch.tensor([0, 2, -100, 1, 5, 2])
PIXELS = torch.tensor([[0, 1, -100, 3]] * 3 + [[5, 1, 2, -100]] * 3)
SHARE, SIGN = torch.rand(6, 6), torch.sign(torch.randn(6, 6))
WEIGHT = torch.rand(6)
X, Y, IMAGE = x_of(6, 6), x_of(6, 6, seed=1), x_of(6, 6, 4)
Loss = Callable[..., Tensor]

LOSSES: dict[str, tuple[Loss, tuple[Any, ...]]] = {
    "mse": (F.mse_loss, (X, Y)),
    "weighted mse": (lambda x, y, w, **how: F.mse_loss(x, y, weight=w, **how), (X, Y, SHARE)),
    "l1": (F.l1_loss, (X, Y)),
    "smooth l1": (F.smooth_l1_loss, (X, Y)),
    "huber": (F.huber_loss, (X, Y)),
    "bce": (lambda x, y, **how: F.binary_cross_entropy(x.sigmoid(), y, **how), (X, SHARE)),
    "weighted bce": (
        lambda x, y, w, **how: F.binary_cross_entropy(x.sigmoid(), y, w, **how),
        (X, SHARE, WEIGHT),
    ),
    "bce of logits": (
        lambda x, y, w, **how: F.binary_cross_entropy_with_logits(x, y, w, pos_weight=w, **how),
        (X, SHARE, WEIGHT),
    ),
    "kl": (
        lambda x, y, reduction: torch.kl_div(x, y, reduction=["none", "mean", "sum"].index(reduction)),
        (X, SHARE),
    ),
    "poisson": (F.poisson_nll_loss, (X, SHARE)),
    "soft margin": (F.soft_margin_loss, (X, SIGN)),
    "hinge": (F.hinge_embedding_loss, (X, SIGN)),
    "ranking": (F.margin_ranking_loss, (X[:, 0], Y[:, 0], SIGN[:, 0])),
    "cross entropy": (F.cross_entropy, (X, CLASSES)),
    "weighted cross entropy": (lambda x, t, w, **how: F.cross_entropy(x, t, w, **how), (X, CLASSES, WEIGHT)),
    "smoothed cross entropy": (
        lambda x, t, w, **how: F.cross_entropy(x, t, w, ignore_index=2, label_smoothing=0.3, **how),
        (X, CLASSES.clamp(min=0), WEIGHT),
    ),
    "cross entropy of pixels": (F.cross_entropy, (IMAGE, PIXELS)),
    "cross entropy with shares": (
        lambda x, y, w, **how: F.cross_entropy(x, y, w, label_smoothing=0.1, **how),
        (X, SHARE, WEIGHT),
    ),
    "nll": (lambda x, t, w, **how: F.nll_loss(x, t, w, **how), (IMAGE, PIXELS, WEIGHT)),
    "multi margin": (
        lambda x, t, w, **how: F.multi_margin_loss(x, t, weight=w, **how),
        (X, CLASSES.clamp(min=0), WEIGHT),
    ),
    "multilabel margin": (F.multilabel_margin_loss, (X, CLASSES.repeat(6, 1).clamp(min=-1))),
    "cosine": (F.cosine_embedding_loss, (X, Y, SIGN[:, 0])),
    "triplet": (F.triplet_margin_loss, (X, Y, SHARE)),
}  # fmt: skip


KINDS = ("mse", "bce of logits", "cross entropy of pixels", "cosine")


@pytest.mark.parametrize(
    ("name", "reduction"),
    [*((name, "mean") for name in LOSSES), *((name, how) for name in KINDS for how in ("sum", "none"))],
)
def test_a_loss_in_chunks(name: str, reduction: str) -> None:
    """Cut along every dim that is not that of classes; a mean is divided once."""
    loss, given = LOSSES[name]
    found = Case(Op(lambda *args: loss(args[0].sin(), *args[1:], reduction=reduction)), given)
    assert found.table.unknown == ()
    regions = [r for r in found.regions if any("loss" in found.table.rows[i].op for i in r.inside(found.table))]
    regions = regions or [r for r in found.regions if r.sums or reduction == "none"]
    assert regions
    for region in {(r.last, r.dims.get(r.last), *r.dims.items()): r for r in regions}.values():
        assert found.error(replace(region, n_chunks=4)) == "", region


@pytest.mark.parametrize(("loss", "given"), [
    (F.cross_entropy, (X[0], CLASSES[0])),
    (F.cross_entropy, (X[0], SHARE[0])),
    (F.cross_entropy, (X, CLASSES.clamp(max=-100))),
    (F.triplet_margin_loss, (IMAGE, IMAGE * 2, IMAGE.exp())),
    (F.cosine_embedding_loss, (X[:1], Y, SIGN[:, 0])),
    (lambda x: x.mean(), (X,)),
])  # fmt: skip
def test_other_means(loss: Loss, given: Any) -> None:
    """One sample, none that counts, and more dims than rows."""
    block = Op(lambda *args: loss(*args).nan_to_num(nan=7.0))
    assert Case(block, given).capture.graph is not None
    right, found = (run(*given) for run in (block, lambda *args: Captures().run(block, *args)))
    torch.testing.assert_close(found, right)


def test_a_mean_of_16_bits_stays_one() -> None:
    """Its sum has no room in them; under autocast the loss has 32."""
    x = torch.full((64, 64), 1000.0, dtype=torch.float16)
    for loss in (lambda x: x.mean(), lambda x: F.mse_loss(x, torch.zeros_like(x)), lambda x: F.l1_loss(x, -x)):
        block = Op(loss)
        assert torch.equal(Captures().run(block, x), block(x))
        assert not any(row.sums for row in build_table(Captures().of(block, (x,), {})).rows)
    with torch.autocast("cpu", torch.bfloat16):
        capture = Captures().of(Op(lambda x, t: F.cross_entropy(x @ x, t)), (X.bfloat16(), CLASSES), {})
    assert capture.graph is not None
    assert "div" in capture.graph.code


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.soft_margin_loss])
def test_a_loss_lies_in_no_more_memory_than_is_counted(loss: Loss, reduction: str) -> None:
    """On a CPU torch's own sum is a number in the memory of all losses."""
    block, args = Op(lambda x, y: loss(x, y, reduction=reduction)), (torch.rand(64, 64), torch.rand(64, 64))
    with torch.no_grad():
        captures = Captures()
        table = build_table(captures.of(block, args, {}))
        with LiveBytes() as live:
            found = captures.run(block, *args)
    assert torch.equal(found, loss(*args, reduction=reduction))
    assert found.untyped_storage().nbytes() == found.nbytes
    assert live.peak <= block_bytes(table.rows, table.outputs, train=False).peak_bytes


ROWS, PLACES, FEW = x_of(4, 6, 8), torch.randint(8, (4, 6, 3)), torch.tensor([3, 0, 3, 1])
PICTURE, WINDOWS, MATRICES = x_of(4, 6, 8, 8), x_of(6, 4, 2, 2), x_of(4, 6, 3, 3)


@pytest.mark.parametrize(("function", "args", "flowing"), [
    (lambda x: F.glu(x, 1), (ROWS,), {0, 2}),
    (lambda x: F.glu(x), (ROWS,), {0, 1}),
    (lambda x: x.topk(2, 1).values, (ROWS,), {0, 2}),
    (lambda x: x.sort(-1, descending=True)[0], (ROWS,), {0, 1}),
    (lambda x: torch.sort(x, dim=1, stable=True)[0], (ROWS,), {0, 2}),
    (lambda x: x.max(1).values, (ROWS,), {0, 1}),
    (lambda x: x.min(-1, keepdim=True).values, (ROWS,), {0, 1}),
    (lambda x: torch.maximum(x, x.cos()).median(0).values, (ROWS,), {0, 1}),
    (lambda x: torch.max(x, x.cos()), (ROWS,), {0, 1, 2}),
    (lambda x: x.max(), (ROWS,), set()),
    (lambda x: x.cumsum(1), (ROWS,), {0, 2}),
    (lambda x: x.cumprod(-1), (ROWS,), {0, 1}),
    (lambda x: x.logcumsumexp(0), (ROWS,), {1, 2}),
    (lambda x: x.roll(1, 2), (ROWS,), {0, 1}),
    (lambda x: x.roll(3), (ROWS,), set()),
    (lambda x: x.tril(), (ROWS,), {0}),
    (lambda x: F.pad(x, (0, 0, 1, 2)), (ROWS,), {0, 2}),
    (lambda x: F.pad(x, (1, 1), mode="reflect"), (ROWS,), {0, 1}),
    (lambda x: torch.einsum("bij,bkj->bik", x, x.cos()), (ROWS,), {0, 1, 2}),
    (lambda x: x.std((1, 2)), (ROWS,), {0}),
    (lambda x: torch.linalg.vector_norm(x, dim=-1), (ROWS,), {0, 1}),
    (lambda x, i: x.gather(-1, i), (ROWS, PLACES), {0, 1}),
    (lambda x, i: x.gather(-1, i[:2]), (ROWS, PLACES), {1}),
    (lambda x, i: x.index_select(1, i), (ROWS, FEW), {0, 1, 2}),
    (lambda x: torch.renorm(x, 2, 1, 0.5), (ROWS,), {1}),
    (lambda x: torch.cross(x[:, :3], x.cos()[:, :3], 1), (ROWS,), {0, 2}),
    (lambda x: torch.cdist(x, x.cos(), 1), (ROWS,), {0, 1, 2}),
    (lambda x: F.prelu(x, x[0, :, 0]), (ROWS,), {0, 1, 2}),
    (lambda x: x.diagonal(1, 1, 2), (ROWS,), {0}),
    (lambda x: torch.diag_embed(x), (ROWS,), {0, 1}),
    (lambda x: torch.linalg.solve_triangular(x, x.cos(), upper=True), (MATRICES,), {0, 1}),
    (lambda x: torch.linalg.solve_triangular(x[:1], x.cos(), upper=True), (MATRICES,), set()),
    (lambda x: torch.linalg.matrix_exp(x), (MATRICES,), {0, 1}),
    (lambda x, w: F.conv_transpose2d(x, w, stride=2), (PICTURE, WINDOWS), {0, 1}),
    (lambda x: F.max_pool1d(x, 2), (ROWS,), {0, 1}),
    (lambda x: F.avg_pool1d(x[0], 2), (ROWS,), {0}),
    (lambda x: F.adaptive_max_pool2d(x, 3), (PICTURE,), {0, 1}),
    (lambda x: F.interpolate(x, scale_factor=2, mode="linear"), (ROWS,), {0, 1}),
    (lambda x: F.max_pool2d(x, 2, return_indices=True)[0], (PICTURE,), {0, 1}),
    (lambda x: F.unfold(x, 2), (PICTURE,), {0}),
    (lambda x: F.unfold(x[0], 2), (PICTURE,), set()),
    (lambda x: F.fold(x, (3, 4), (2, 1)), (ROWS[:, :6, :8],), {0}),
    (lambda x: F.grid_sample(x, x[:, :2].permute(0, 2, 3, 1), align_corners=False), (PICTURE,), {0, 1, 2, 3}),
    (lambda x: x.kthvalue(2, 1).values, (ROWS,), {0, 1}),
    (lambda x: x.nansum(1), (ROWS,), {0, 1}),
    (lambda x: F.logsigmoid(x).square().clamp_min(0.3).log1p(), (ROWS,), {0, 1, 2}),
])  # fmt: skip
def test_a_rule(function: Callable[..., Any], args: Any, flowing: set[int]) -> None:
    found = Case(Op(lambda x, *more: function(x.sin(), *more)), args)
    assert found.table.unknown == ()
    (result,) = found.table.outputs
    own = next(r for r in reversed(found.table.rows[: result + 1]) if r.kind == OPERATOR and r.op != "getitem")
    assert {d for d, sources in enumerate(own.dims or ()) if sources} == flowing
    for region in {(r.last, r.dims.get(r.last)): r for r in found.regions}.values():
        assert found.error(replace(region, n_chunks=min(3, region.units))) == "", region


def test_bags_are_told_by_values() -> None:
    block = Op(lambda i, w, begin: F.embedding_bag(i, w, begin))
    given = (torch.arange(6), x_of(6, 4), torch.tensor([0, 2, 4]))
    assert build_table(Captures().of(block, given, {})).unknown == ("aten.embedding_bag.padding_idx",)
