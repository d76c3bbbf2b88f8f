"""Every row of the tables is exact on sharded tensors, results and gradients, or refused by the name that the row says.

On 2 ranks parts are even, and each operator is split in one way more; on 3 ranks parts are uneven, or have their
indices in any order; on 4 ranks, as a grid of 2 x 2, tensors are split over one axis or over both. `make full` runs
every case on 2 ranks, and on 3 or on 4; `make test` runs half of them on 2, and a few on 3 and 4.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lightning_amp.dist import ring_attention
from lightning_amp.dist.sharded_tensor import redistribute
from lightning_amp.dist.splits import MeshAxis, Split, Splits
from tests.dist.check import named_splits, other_splits, outcome, owners_of, wrong_chains
from tests.dist.table.case import made
from tests.dist.table.classes import CLASSES
from tests.dist.table.copies import COPIES
from tests.dist.table.layers import LAYERS, MODULES
from tests.dist.table.odd import ODD, STEPS
from tests.dist.table.products import PRODUCTS
from tests.dist.table.values import PLACES, VALUES
from tests.ranks import run_ranks

CASES = [*VALUES, *PLACES, *PRODUCTS, *LAYERS, *CLASSES]
REST = [*ODD, *STEPS, *MODULES, *COPIES]
IN_ORDER = ("put with a step",)
"""Cases that are refused where a rank owns several ranges."""
FEW = {2: 2, 3: 8, 4: 8}
"""By number of ranks: of how many cases one is run."""


def grid_axes(rank: int) -> list[MeshAxis]:
    """The two axes of a grid of 2 x 2 ranks."""
    pairs = {"rows": [(0, 2), (1, 3)], "columns": [(0, 1), (2, 3)]}
    found = []
    for name, groups in pairs.items():
        made = {ranks: dist.new_group(list(ranks)) for ranks in groups}
        own = next(ranks for ranks in groups if rank in ranks)
        found.append(MeshAxis(name, 2, own.index(rank), made[own]))
    return found


def ways(i: int, case: Any, size: int, axis: MeshAxis, grid: list[MeshAxis]) -> list[Any]:
    """The splits of a case on a number of ranks: (splits, axes, whether they are those of the row)."""
    if any(made(case.inputs)[k].shape[d] < size for k in case.at for d in case.dims(k)[:1]):
        return []
    if size == 4:
        if any(len(case.dims(k)) == 2 for k in case.at):
            return [(named_splits(case, grid, "uneven"), grid, True)]
        both = other_splits(case, grid, "mixed")
        if i % 2 and both:
            return [(both[i % len(both)], grid, False)]
        return [(named_splits(case, [axis], "uneven"), [axis], True)]
    how = "even" if size == 2 else "mixed" if i % 2 and case.name not in IN_ORDER else "uneven"
    found = [(named_splits(case, [axis], how), [axis], True)]
    others = other_splits(case, [axis], "mixed") if size == 2 else []
    return found + ([(others[i % len(others)], [axis], False)] if others else [])


def everything(rank: int, size: int, of: int) -> dict[str, Any]:
    """What is wrong on a number of ranks, by kind; of so many cases one is run."""
    axis = MeshAxis("sequence", size, rank, dist.group.WORLD)
    grid = grid_axes(rank) if size == 4 else []
    found: dict[str, Any] = {}
    for name, table in (("cases", CASES), ("odd", REST)):
        some = enumerate(table[size % of :: of])
        # where a slice leaves nothing to a rank, and it gets other rows, writes to it are refused
        exact = name == "cases" or size < 4
        most = 1 if name == "odd" and size == 2 else 2
        outcomes = [
            outcome(c, s, a, named=n and exact) for i, c in some for s, a, n in ways(i, c, size, axis, grid)[:most]
        ]
        found[name] = [text for text in outcomes if text]
    if size == 2:
        # as on devices without torch's kernel
        with patch.object(ring_attention, "ON_CPU", ()):
            some = [c for c in PRODUCTS if c.name.startswith(("attention", "causal", "cross-attention"))]
            found["attention"] = [
                text for c in some if (text := outcome(c, named_splits(c, [axis], "uneven"), [axis], named=True))
            ]
    n = 120 // of if size > 2 else 60 // of
    found["chains"], refused = wrong_chains(axis, n)
    found["refused chains"] = refused / n
    found["drawn"] = drawn(axis)
    return found


def drawn(axis: MeshAxis) -> list[torch.Tensor]:
    """Random numbers of the same tensor in several layouts."""
    found = []
    for how in ("even", "mixed"):
        x = torch.ones(6, 9, dtype=torch.float64)
        x = redistribute(x, Splits.of([Split(axis, 1, owners_of(9, axis.size, how))]))
        torch.manual_seed(3)
        found.append(torch.stack([F.dropout(x, 0.3), torch.randn_like(x), torch.rand_like(x)]).full_tensor())
    return found


Reports = dict[int, list[dict[str, Any]]]


@pytest.fixture(
    scope="module", params=[FEW, pytest.param({2: 1, 3: 2, 4: 2}, marks=pytest.mark.exhaustive)], ids=["few", "all"]
)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    return {
        size: run_ranks(everything, size, tmp_path_factory.mktemp(f"on {size}"), of, timeout=400)
        for size, of in request.param.items()
    }


def wrong(found: Reports, kind: str) -> list[str]:
    return [text for reports in found.values() for report in reports for text in report.get(kind, ())]


@pytest.mark.ranks
def test_operators_are_exact_or_refused_by_name(found: Reports) -> None:
    assert len(CASES) > 480
    assert wrong(found, "cases") == []


@pytest.mark.ranks
def test_attention_is_exact_without_a_kernel_of_torch(found: Reports) -> None:
    assert wrong(found, "attention") == []


@pytest.mark.ranks
def test_odd_expressions_are_exact_or_refused_by_name(found: Reports) -> None:
    assert len(REST) > 350
    assert wrong(found, "odd") == []


@pytest.mark.ranks
def test_random_chains_of_views_slices_and_concatenations_are_exact(found: Reports) -> None:
    assert wrong(found, "chains") == []
    assert max(reports[0]["refused chains"] for reports in found.values()) <= 0.2


@pytest.mark.ranks
def test_random_numbers_do_not_depend_on_the_ranks(found: Reports) -> None:
    first, *others = [t for reports in found.values() for report in reports for t in report["drawn"]]
    assert all(torch.equal(first, other) for other in others)
    dropped, normal, uniform = first
    assert 0.15 < (dropped == 0).double().mean() < 0.45
    assert abs(normal.mean()) < 0.4
    assert 0 <= uniform.min() < uniform.max() < 1
