"""Every row of the tables is exact on sharded tensors, results and gradients, or refused by the name that the row says.

On 2 ranks parts are even, and each operator is split in one way more; on 3 ranks parts are uneven, or have their
indices in any order; on 4 ranks, as a grid of 2 x 2, tensors are split over one axis or over both. `make full` runs
every case on 2 ranks, and on 3 or on 4; `make test` runs half of them on 2, and a few on 3 and 4.
"""

import random
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from itertools import permutations
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_amp.errors import ShardError
from lightning_amp.sharding.attention import blocks
from lightning_amp.sharding.dispatch.guards import guarded
from lightning_amp.sharding.ops import ShardedTensor, attention
from lightning_amp.sharding.owners import Owners
from lightning_amp.sharding.sharded_tensor import redistribute
from lightning_amp.sharding.splits import WHOLE, MeshAxis, Split, Splits
from tests.ranks import run_ranks
from tests.sharding.table.case import Case, made
from tests.sharding.table.classes import CLASSES
from tests.sharding.table.copies import COPIES
from tests.sharding.table.layers import LAYERS, MODULES
from tests.sharding.table.odd import ODD, STEPS
from tests.sharding.table.products import PRODUCTS
from tests.sharding.table.values import PLACES, VALUES


def owners_of(n: int, size: int, how: str) -> Owners:
    """Even parts, uneven ones of at least one index, or indices in any order."""
    if how == "even":
        return Owners.even(n, size)
    draw = random.Random(f"{n} {size}")
    ranks = [*range(size), *draw.choices(range(size), k=n - size)]
    draw.shuffle(ranks)
    return Owners.from_vector(sorted(ranks) if how == "uneven" else ranks, size)


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, ShardedTensor) else x


def leaves_of(value: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(value)


def difference(a: Any, b: Any) -> float:
    """The largest difference of two values; infinite where they have other types or shapes."""
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return 0.0 if a == b else float("inf")
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if a.dtype == torch.bool or not a.numel():
        return float((a != b).any())
    same = (a == b) | (a.isnan() & b.isnan())
    apart = torch.where(same, 0, (a - b).abs() / b.abs().nan_to_num(0, 0, 0).max().clamp(min=1))
    return float(apart.detach().nan_to_num(float("inf")).max())


def compare(case: Case, splits: Sequence[Splits], axes: Sequence[MeshAxis]) -> float:
    """The largest difference of results and gradients; an error of the call on sharded tensors is raised."""
    torch.manual_seed(len(case.name))
    inputs = made(case.inputs)
    found = []
    for sharded in (False, True):
        torch.manual_seed(7)
        own = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
        given = [redistribute(t, s) if sharded else t for t, s in zip(own, splits, strict=True)]
        results = []
        # of what is refused, one process may have no result
        with guarded(axes) if sharded else suppress(Exception) if case.refused else nullcontext():
            results = [whole(t) for t in leaves_of(case.call(*given))]
        draw = torch.Generator().manual_seed(3)
        loss = torch.zeros((), dtype=torch.float64)
        for t in results:
            if isinstance(t, Tensor) and t.requires_grad:
                loss = loss + (t * torch.randn(t.shape, generator=draw, dtype=torch.float64)).abs().pow(2).sum()
        if loss.requires_grad:
            loss.backward()
        gradients = []
        for t in own:
            grad = torch.zeros_like(t) if t.grad is None else t.grad
            if sharded and t.requires_grad:
                for axis in axes:
                    dist.all_reduce(grad, group=axis.group)
                    grad /= axis.size
            gradients.append(grad)
        found.append([*results, *gradients])
    if len(found[0]) != len(found[1]):
        return float("inf")
    return max([difference(b, a) for a, b in zip(*found, strict=True)], default=0.0)


def named_splits(case: Case, axes: Sequence[MeshAxis], how: str) -> list[Splits]:
    """The tensors of a case split along the dims that its row names, as many of them as there are axes."""
    found = []
    for i, t in enumerate(made(case.inputs)):
        dims = zip(axes, case.dims(i), strict=False)
        found.append(Splits.of([Split(a, d, owners_of(t.shape[d], a.size, how)) for a, d in dims]))
    return found


def other_splits(case: Case, axes: Sequence[MeshAxis], how: str) -> list[list[Splits]]:
    """One tensor split along one dim for every axis, in all ways but that of the row."""
    found = []
    inputs = made(case.inputs)
    for i, t in enumerate(inputs):
        dims = [d for d in range(t.dim()) if t.shape[d] >= axes[0].size]
        ways = (
            [(d,) for d in dims if case.at.keys() != {i} or case.dims(i)[0] != d]
            if len(axes) == 1
            else list(permutations(dims, 2))
        )
        for way in ways:
            own = [Split(a, d, owners_of(t.shape[d], a.size, how)) for a, d in zip(axes, way, strict=True)]
            found.append([Splits.of(own) if k == i else WHOLE for k in range(len(inputs))])
    return found


def judged(case: Case, splits: Sequence[Splits], axes: Sequence[MeshAxis]) -> tuple[str, str]:
    """Whether a case is "exact", "refused" or "wrong", and why."""
    try:
        apart = compare(case, splits, axes)
    except ShardError as error:
        return "refused", str(error)
    except Exception:
        return "wrong", traceback.format_exc(limit=-3)
    return ("exact", "") if apart <= case.tolerance else ("wrong", f"differs by {apart:.1e}")


def outcome(case: Case, splits: Sequence[Splits], axes: Sequence[MeshAxis], *, named: bool) -> str:
    """What is wrong; "" where the case is exact or refused as it should be.

    Args:
        named: Whether the splits are those of the row, which says what is refused; else a ShardError is right too.
    """
    kind, why = judged(case, splits, axes)
    if kind == "refused" and (case.refused == "?" or not named or (case.refused and case.refused in why)):
        return ""
    if kind == "exact":
        if not named or case.refused in ("", "?"):
            return ""
        why = "not refused"
    return f"{case.name!r} with {' | '.join(map(str, splits))}: {why}"


Step = Callable[[Tensor], Tensor]


def _factors(n: int, draw: random.Random) -> tuple[int, int]:
    a = draw.choice([k for k in range(1, n + 1) if n % k == 0])
    return a, n // a


def step(shape: Sequence[int], draw: random.Random) -> Step:
    """One operator that a tensor of a shape can have."""
    n = len(shape)
    d, e = draw.randrange(n), draw.randrange(n)
    size = shape[d]
    start = draw.randrange(size)
    stop = draw.randrange(start + 1, size + 1)
    factors, shift, order = _factors(size, draw), draw.randrange(1, 9), draw.sample(range(n), n)
    steps: list[Step] = [
        lambda x: x.permute(order),
        lambda x: x.transpose(d, e),
        lambda x: x.unflatten(d, factors),
        lambda x: x.flatten(min(d, e), max(d, e)),
        lambda x: x.narrow(d, start, stop - start),
        lambda x: x[(slice(None),) * d + (slice(start, None, 2),)],
        lambda x: torch.cat([x, x.narrow(d, start, stop - start)], d),
        lambda x: torch.cat(x.chunk(3, d)[::-1], d),
        lambda x: x.flip(d),
        lambda x: x.roll(shift, d),
        lambda x: x.unsqueeze(d).expand(*shape[:d], 2, *shape[d:]),
        lambda x: x.select(d, start) if n > 1 else x * 2,
        lambda x: torch.stack([x, x * 2], d),
        lambda x: x.reshape(-1).reshape(*shape[::-1]),
        lambda x: x.repeat_interleave(2, d),
        lambda x: x * torch.arange(1, size + 1).view([-1, *[1] * (n - 1 - d)]),
        lambda x: x.index_select(d, torch.tensor([start, stop - 1, 0])),
    ]
    return draw.choice(steps)


def chain(seed: int) -> tuple[Case, int]:
    """A case of several operators, and the dim of its tensor that is split."""
    draw = random.Random(seed)
    shape = [draw.choice((1, 2, 4, 6, 7, 8)) for _ in range(draw.choice((2, 3, 4)))]
    dim = draw.randrange(len(shape))
    shape[dim] = draw.choice((6, 7, 8, 9))
    steps, x = [], torch.empty(shape, device="meta")
    while len(steps) < draw.choice((2, 4, 6)) and x.numel() < 5000 and x.dim() < 7:
        steps.append(step(x.shape, draw))
        x = steps[-1](x.cpu() if x.device.type == "cpu" else torch.zeros(x.shape))

    def call(x: Tensor) -> Tensor:
        for one in steps:
            x = one(x)
        return x

    return Case(f"chain {seed}", call, (tuple(shape),), {0: dim}), dim


def wrong_chains(axis: MeshAxis, n: int) -> tuple[list[str], int]:
    """Chains whose results or gradients differ, and the number of those that were refused."""
    wrong, refused = [], 0
    for seed in range(n):
        case, dim = chain(seed)
        how = ("even", "uneven", "mixed")[seed % 3]
        splits = Splits.of([Split(axis, dim, owners_of(case.inputs[0][dim], axis.size, how))])
        try:
            apart = compare(case, [splits], [axis])
        except ShardError:
            refused += 1
            continue
        if not apart <= 1e-12:
            wrong.append(f"{case.name} {case.inputs} {splits}: {apart:.1e}")
    return wrong, refused


pytestmark = pytest.mark.ranks
CASES = [*VALUES, *PLACES, *PRODUCTS, *LAYERS, *CLASSES]
REST = [*ODD, *STEPS, *MODULES, *COPIES]
IN_ORDER = ("put with a step",)
"""Cases that are refused where a rank owns several ranges."""
FEW = {2: 2, 3: 8, 4: 8}
"""By number of ranks: of how many cases one is run."""


def grid_axes(rank: int) -> list[MeshAxis]:
    pairs = {"rows": [(0, 2), (1, 3)], "columns": [(0, 1), (2, 3)]}
    found = []
    for name, groups in pairs.items():
        made = {ranks: dist.new_group(list(ranks)) for ranks in groups}
        own = next(ranks for ranks in groups if rank in ranks)
        found.append(MeshAxis(name, 2, own.index(rank), made[own]))
    return found


def ways(i: int, case: Any, size: int, axis: MeshAxis, grid: list[MeshAxis]) -> list[Any]:
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
    # every way of attention; on two ranks as on devices without torch's kernel
    some = [c for c in PRODUCTS if c.name.startswith(("attention", "causal", "cross-attention"))]
    found["attention"] = []
    for over in range(1, size):
        with (
            patch.object(attention, "heads_over", lambda shapes, *of, over=over: over if shapes[0][1] >= over else 1),
            patch.object(blocks, "ON_CPU", blocks.WRITTEN_OUT if size == 2 else blocks.ON_CPU),
        ):
            for case in some if size % over == 0 else ():
                if min(made(case.inputs)[k].shape[d] for k in case.at for d in case.dims(k)[:1]) >= size:
                    found["attention"].append(outcome(case, named_splits(case, [axis], "uneven"), [axis], named=True))
    found["attention"] = [text for text in found["attention"] if text]
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


# operators, attention without a kernel of torch, and odd expressions
@pytest.mark.parametrize("kind", ["cases", "attention", "odd"])
def test_all_are_exact_or_refused_by_name(found: Reports, kind: str) -> None:
    assert len(CASES) > 480
    assert len(REST) > 350
    assert wrong(found, kind) == []


def test_random_chains_of_views_slices_and_concatenations_are_exact(found: Reports) -> None:
    assert wrong(found, "chains") == []
    assert max(reports[0]["refused chains"] for reports in found.values()) <= 0.2


def test_random_numbers_do_not_depend_on_the_ranks(found: Reports) -> None:
    first, *others = [t for reports in found.values() for report in reports for t in report["drawn"]]
    assert all(torch.equal(first, other) for other in others)
    dropped, normal, uniform = first
    assert 0.15 < (dropped == 0).double().mean() < 0.45
    assert abs(normal.mean()) < 0.4
    assert 0 <= uniform.min() < uniform.max() < 1
