"""Owners of indices, layers whose features are split, and what users call."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp import ShardedTensor, ShardError, check_shard, register_shard
from lightning_amp.footprint.live_bytes import tensors_of
from lightning_amp.lightning.profiling.dry_steps import DrySteps
from lightning_amp.sharding.dispatch.guards import guarded
from lightning_amp.sharding.owners import Owners
from lightning_amp.sharding.sharded_tensor import redistribute
from lightning_amp.sharding.splits import MeshAxis, Sent, Split, Splits, axis_of
from lightning_amp.techniques.tensor3d.row import TensorParallel3D
from tests.ranks import run_ranks

WORDS, ROWS = 64, 12
TARGET = torch.arange(ROWS) * 5


class Largest(TorchDispatchMode):
    """The entries of the largest tensor that an operator has returned."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found = max([self.found, *(t.numel() for t in tensors_of(out) if type(t) is not ShardedTensor)])
        return out


def counted(call: Callable[..., Tensor], *given: tuple[tuple[int, ...], dict[str, int]]) -> tuple[list[Sent], int]:
    """What a rank of a grid of 2 x 2 sends for a call and its gradients, and its largest tensor.

    Args:
        call: Takes tensors.
        given: Their shapes, and the dims that are split over the axes.
    """
    sent: list[Sent] = []
    axes = {name: MeshAxis(name, 2, 0, None, "gather", sent) for name in "xy"}
    tensors = []
    for shape, at in given:
        splits = [Split(axes[name], dim, Owners.even(shape[dim], 2)) for name, dim in at.items()]
        tensors.append(redistribute(nn.Parameter(torch.randn(shape)), Splits.of(splits)))
    with Largest() as largest, guarded(list(axes.values())):
        call(*tensors).sum().backward()
    return sent, largest.found


def test_a_table_is_never_gathered() -> None:
    index = torch.arange(ROWS)
    sent, _ = counted(lambda w: F.embedding(index, w), ((WORDS, 8), {"y": 0, "x": 1}))
    assert [(one.kind, one.why) for one in sent if one.why] == [("all_reduce", "embedding"), ("all_reduce", "sum")]


@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1}, {"weight": torch.rand(WORDS)}], ids=["plain", "smooth", "weights"]
)
def test_logits_are_never_whole(options: dict[str, Any]) -> None:
    """A head over the vocabulary: a few numbers per row are sent beside the sums of features."""
    sent, largest = counted(
        lambda h, w: F.cross_entropy(F.linear(h, w), TARGET, **options),
        ((ROWS, 8), {"x": 1}),
        ((WORDS, 8), {"y": 0, "x": 1}),
    )
    assert all(one.n_bytes <= 4 * 2 * ROWS for one in sent if one.why != "linear" and not one.backward)
    assert {one.kind for one in sent} <= {"all_reduce", "all_gather", "reduce_scatter"}
    assert largest < ROWS * WORDS


@pytest.mark.parametrize("groups", [8, 4, 2])
def test_groups_of_a_convolution_stay_on_their_ranks(groups: int) -> None:
    sent, _ = counted(
        lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=groups),
        ((2, 8, 5, 4), {"y": 1}),
        ((16, 8 // groups, 3, 3), {"y": 0}),
        ((16,), {"y": 0}),
    )
    assert {one.why for one in sent} <= {"sum", ""}
    sent, _ = counted(
        lambda x, w: F.conv_transpose1d(x, w, groups=groups), ((2, 8, 5), {"y": 1}), ((8, 3, 3), {"y": 0})
    )
    assert {one.why for one in sent} <= {"sum", ""}


class Passing(TorchFunctionMode):
    """Looks at calls, as for a reference to a parameter in a first step."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_dry_run_passes_checks_of_values_and_takes_positions_in_lists() -> None:
    """Other ranks' values are not there in a dry run: a check of all has to be one of the own ones."""

    def call(x: Tensor) -> Tensor:
        found = torch.distributions.Normal(x, x.exp(), validate_args=True).log_prob(x)
        assert (x == x).all()
        return found[:, [2, 0, 1]] + found[:, (3, 3, 1)]

    with Passing():
        counted(call, ((ROWS, 8), {"x": 1}))


def test_operators_that_need_features_whole_are_named() -> None:
    """What is sent for sums is not theirs; a note names them from a tenth of what a forward pass sends on."""
    steps = DrySteps("tensor3d", TensorParallel3D(grid="2x1x1"), 2)
    linear = (ROWS, 8), {"x": 1}
    for call, named in ((lambda x, w: F.linear(x, w), False), (lambda x, w: x.cumsum(-1) * w[:ROWS], True)):
        sent, _ = counted(call, linear, ((WORDS, 8), {"x": 1}))
        steps.sent[:] = sent
        assert any(one.moves for one in sent) == named
        assert any("features whole" in note and "cumsum" in note for note in steps.sent_notes()) == named


def _vector(owners: Owners) -> list[int]:
    return [rank for length, rank in owners.expanded() for _ in range(length)]


def _blocks(vector: list[int], n: int) -> list[list[int]]:
    return [vector[i : i + n] for i in range(0, len(vector), n)]


def test_every_operation_is_that_of_the_vector() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        size = draw.randint(1, 4)
        base = [draw.randrange(size) for _ in range(draw.randint(1, 12))]
        base = sorted(base) if draw.random() < 0.3 else base
        vector = base * draw.choice([1, 1, 2, 3])
        n, k = len(vector), draw.randint(1, 3)
        owners = Owners.from_vector(vector, size)
        assert _vector(owners) == vector
        assert owners.counts == tuple(vector.count(rank) for rank in range(size))
        # equal vectors are one object, whatever way they were made
        assert owners.repeated(k) is Owners.from_vector(vector * k, size)
        assert owners.widened(k) is Owners.from_vector([rank for rank in vector for _ in range(k)], size)
        if n % k == 0:
            rows, columns = _blocks(vector, k), _blocks(vector, n // k)
            outer, inner = owners.outer(k), owners.inner(k)
            assert (outer is not None) == all(len(set(row)) == 1 for row in rows)
            assert outer is None or _vector(outer) == [row[0] for row in rows]
            assert (inner is not None) == all(column == columns[0] for column in columns)
            assert inner is None or _vector(inner) == columns[0]
        start = draw.randint(0, n)
        indices = range(n)[start : draw.randint(start, n) : draw.choice([1, 1, 2, 3])]
        for some in (indices, indices[::-1], range(n)[::-1]):
            assert owners.take(some) is Owners.from_vector([vector[i] for i in some], size)
            for rank in range(size):
                own = [i for i, owner in enumerate(vector) if owner == rank]
                places = [p for one in owners.local(rank, some) for p in one]
                assert [own[p] for p in places] == [i for i in some if vector[i] == rank]
        assert owners.proportional(7).n == 7
        assert Owners.joined([owners, owners], size) is Owners.from_vector(vector * 2, size)


def test_sizes_are_those_of_parts_in_the_order_of_the_ranks() -> None:
    assert Owners.even(7, 3).sizes == (3, 2, 2)
    assert Owners.contiguous([2, 5]).sizes == (2, 5)
    assert Owners.even(7, 3).repeated(2).sizes is None
    assert Owners.even(7, 3).take(range(7)[::-1]).sizes is None


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@torch.library.custom_op("tests_dist::shifted", mutates_args=())
def shifted(x: Tensor, by: float) -> Tensor:
    return x + by


def refusal(call: Any) -> str:
    try:
        call()
    except ShardError as error:
        return str(error)
    return ""


def body(rank: int, size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("model",))
    whole = torch.arange(90, dtype=torch.float64).view(2, 9, 5)
    sizes = [6, 3]
    part = whole.split(sizes, 1)[rank].clone()
    x, y = (ShardedTensor.from_local(part, mesh, dim=-2, sizes=given) for given in (sizes, None))
    found: dict[str, Any] = {
        "whole": [torch.equal(t.full_tensor(), whole) for t in (x, y)],
        "part": x.to_local() is part and axis_of(mesh) is axis_of(mesh["model"]),
        "sizes": refusal(lambda: ShardedTensor.from_local(part, mesh, dim=1, sizes=[4, 5])),
        "mesh": refusal(lambda: axis_of(init_device_mesh("cpu", (size, 1), mesh_dim_names=("a", "b")))),
        "Function": refusal(lambda: _guarded(mesh, lambda: Doubled.apply(x))),
        "operator": refusal(lambda: shifted(x, 1.0)),
        "target": refusal(lambda: register_shard(3)),
    }
    register_shard(Doubled)(lambda x: ShardedTensor(Doubled.apply(x.local), x.splits))
    register_shard(torch.ops.tests_dist.shifted)(lambda op, x, by: ShardedTensor(x.local + by, x.splits))
    # a handler that forgets the other ranks
    register_shard(torch.special.entr)(lambda x: ShardedTensor(x.local - x.local.mean(), x.splits))
    found["twice"] = refusal(lambda: register_shard(Doubled))
    found["handlers"] = [torch.equal(_guarded(mesh, lambda: Doubled.apply(x)).full_tensor(), whole * 2),
                         torch.equal(shifted(x, 1.0).full_tensor(), whole + 1)]  # fmt: skip
    check_shard(lambda t, n: Doubled.apply(t).softmax(1) * n, whole / 90, 3, mesh=mesh, dim=1, sizes=sizes)
    check_shard(torch.nn.functional.linear, whole, torch.ones(4, 5), torch.ones(4), mesh=mesh, dim=1)
    found["wrong"] = refusal(lambda: check_shard(torch.special.entr, whole, mesh=mesh, dim=1))
    return found


def _guarded(mesh: Any, call: Any) -> Any:
    with guarded([axis_of(mesh)]):
        return call()


@pytest.mark.ranks
def test_tensors_of_parts_and_handlers_from_outside(tmp_path: Path) -> None:
    for found in run_ranks(body, 2, tmp_path, fresh=True):
        assert all([*found["whole"], *found["handlers"], found["part"]])
        words = {"sizes": "from_local(sizes=[4, 5])", "mesh": "mesh['model']", "Function": "register_shard",
                 "operator": "tests_dist::shifted", "target": "register_shard(3)", "twice": "has a handler",
                 "wrong": "differs from one process: result 0"}  # fmt: skip
        for name, word in words.items():
            assert word in found[name], f"{name}: {found[name]!r}"
