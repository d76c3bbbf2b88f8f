"""Claim: layers whose features are split send no more than sums, and hold no tensor of the whole size."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp.dist.dispatch.guards import guarded
from lightning_amp.dist.ops import ShardedTensor
from lightning_amp.dist.owners import Owners
from lightning_amp.dist.registry import tensors_in
from lightning_amp.dist.sharded_tensor import redistribute
from lightning_amp.dist.splits import MeshAxis, Sent, Split, Splits
from lightning_amp.lightning.profiling.dry_steps import DrySteps
from lightning_amp.techniques.tensor3d.row import TensorParallel3D

WORDS, ROWS = 64, 12
TARGET = torch.arange(ROWS) * 5


class Largest(TorchDispatchMode):
    """The entries of the largest tensor that an operator has returned."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found = max([self.found, *(t.numel() for t in tensors_in(out) if type(t) is not ShardedTensor)])
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
