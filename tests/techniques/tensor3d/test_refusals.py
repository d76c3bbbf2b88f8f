"""Claim: what a grid does not support is refused by name, by all ranks with one message and what to do. Modules with
unusual code are rows of tests/odd_modules.
"""

import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn

from lightning_amp import AMPStrategy
from lightning_amp.errors import AmpError, PlanError
from tests.ranks import run_ranks
from tests.techniques.tensor3d.cases import CASES, Case, Gated, Trained
from tests.techniques.tensor3d.test_tensor3d import Grid, run


class Small(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.more = nn.Linear(5, 4), nn.Linear(5, 4)

    def loss(self, batch: Any) -> Tensor:
        return (self.net(batch) - 1).square().mean()  # type: ignore[no-any-return]


def small(init: Callable[[Any], object] = lambda m: None, **methods: Any) -> Callable[[], Trained]:
    """A module with other methods, or changed when it is made."""

    def make(module: Any) -> None:
        Small.__init__(module)
        init(module)

    return type("Changed", (Small,), {"__init__": make, **methods})


def by_hand(m: Any, batch: Any, batch_idx: int) -> Tensor:
    """A norm of parts would be too small."""
    loss = Small.training_step(m, batch, batch_idx)
    m.manual_backward(loss)
    nn.utils.clip_grad_norm_(m.parameters(), 0.1)
    return loss


def stray(m: Any, batch: Any, batch_idx: int) -> Any:
    (0.5 * m.loss(batch)).backward()
    return m.loss(batch)


def hold(m: Any) -> None:
    """A part of one entry would go with any other."""
    m.held = [nn.Parameter(torch.ones(2))]
    m.scale = m.held[0]


@torch.no_grad()
def normed(m: Any, *_: Any) -> None:
    """Between steps a rank has a part of the weight."""
    m.net.weight.div_(m.net.weight.norm())


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


scale: Any = Scale.apply
"""A Function under a name that was taken before the step."""


def branching(m: Any, batch: Any) -> Any:
    """Ranks of the axis z take layers of the same shape by their own rows."""
    net = m.net if getattr(m, "first", True) else m.more
    return (net(batch) - 1).square().mean()


def writing(m: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        m.net.weight.clamp_(-1, 1)
    return Small.loss(m, batch)


def writing_data(m: Any, batch: Any) -> Tensor:
    m.net.weight.data.clamp_(-1, 1)
    return Small.loss(m, batch)


def scripted(m: Any) -> None:
    m.net = torch.jit.trace(nn.Linear(5, 4).double(), torch.zeros(2, 5).double())


def no_reset(m: Any) -> None:
    m.scale = nn.Parameter(torch.ones(2))
    m.to("meta")


BATCH = CASES["gated"].batch
X, Y, Z = (2, 1, 1), (1, 2, 1), (1, 1, 2)
PLAIN: dict[str, Any] = {"options": {"strategies": "S1", "tensor_grid": None}}
REFUSED: dict[str, tuple[Callable[[], Trained], Grid, dict[str, Any], str]] = {
    "ranks": (Small, (3, 1, 1), {}, "model_parallel_size|a grid of 3 ranks was given for 2 ranks"),
    "rows": (Small, (1, 1, 4), {}, "a grid of 4 ranks was given for 2 ranks"),
    "batch norm": (small(lambda m: setattr(m, "more", nn.SyncBatchNorm(4))), X, {}, "'more' is a SyncBatchNorm"),
    "by hand": (small(lambda m: setattr(m, "automatic_optimization", False), training_step=by_hand), X, {},
        "self.clip_gradients"),
    "an optimiser": (small(configure_optimizers=lambda m: torch.optim.Adafactor(m.parameters())), X, {},
        "'Adafactor'.*tensor3d splits"),
    "a backward pass": (small(training_step=stray), X, {}, "tensor3d requires that the Trainer starts it"),
    "a hook": (small(lambda m: m.net.weight.register_hook(lambda grad: 2 * grad)), X, {}, "'net.weight' has hooks"),
    "a reference": (small(hold, loss=lambda m, batch: Small.loss(m, batch) * m.held[0].sum()), X, {},
        "under tensor3d a parameter has this rank's part"),
    # no hook of a gradient would notice it
    "a reference without a gradient": (
        small(hold, loss=lambda m, batch: Small.loss(m, batch) * m.held[0].detach().sum()), Z, {},
        "has read 'scale' by a reference"),
    # an update of one is an update of the other
    "one memory": (small(setup=lambda m, stage: setattr(m.more.weight, "data", m.net.weight.data)), X, {},
        "'net.weight' and 'more.weight' are two with one memory"),
    "a view": (small(setup=lambda m, stage: setattr(m, "first", m.net.weight.data[:2])), Z, {},
        "'first' is a view of the parameter 'net.weight'"),
    "a norm between steps": (small(on_train_batch_end=normed), X, {},
        "'on_train_batch_end' calls .*norm' .*'net.weight'"),
    "values drawn anew": (small(on_train_batch_start=lambda m, batch, batch_idx: m.net.reset_parameters()), X, {},
        "'on_train_batch_start' fails with ValueError.*flat. If it"),
    "a copy": (small(on_train_start=lambda m: setattr(m, "more", deepcopy(m.net))), X, {},
        "'on_train_start' copies the parameter 'net.weight'.*make the copy in"),
    "a transform": (small(loss=lambda m, batch: torch.func.vmap(m.net)(batch).square().mean()), X, {},
        "'linear' in 'Changed'.*inside a transform of"),
    "scripted": (small(scripted), X, {}, "'net' is a ScriptModule, whose compiled code reads"),
    "a function by another name": (small(loss=lambda m, batch: scale(m.net(batch)).square().mean()), Y, {},
        "autograd Functions do not see parts"),
    "a branch": (
        small(loss=branching, on_train_batch_start=lambda m, *_: setattr(m, "first", m.global_rank == 0)), Z, {},
        "under tensor3d all ranks use the same .*rank 1 gathers"),
    "a write": (small(loss=writing), X, {}, "'clamp_'.*Changed"),
    "a write by way of data": (small(loss=writing_data), Z, {}, "'clamp_'.*Changed"),
    "compiled": (small(lambda m: setattr(m, "net", torch.compile(m.net, backend="eager"))), X, {},
        "torch.compile was applied"),
    "values": (small(lambda m: m.to("meta")), Z, PLAIN, "this plan shards none"),
    "some values": (small(lambda m: m.net.to("meta")), X, {},
        "'net.weight' is on the device 'meta', and 'more.weight' is not"),
    "no reset": (small(no_reset), X, {}, "'the module' .Changed. has tensors .* no method reset_parameters"),
    "averages": (Small, X, {"callbacks": [EMAWeightAveraging()]}, "it averages whole parameters"),
}  # fmt: skip


def refused(rank: int, ranks: int) -> dict[str, tuple[str, str]]:
    found = {}
    for name, (module, grid, given, _) in REFUSED.items():
        try:
            run(Case(module, BATCH), grid, rank, ranks, **given)
            found[name] = "", ""
        except Exception as error:
            kind = "AmpError" if isinstance(error, AmpError) else repr(error)
            found[name] = kind, str(error)
    return found


@pytest.mark.ranks
def test_what_is_not_supported_is_refused(tmp_path: Path) -> None:
    for found in run_ranks(refused, 2, tmp_path):
        for name, (*_, words) in REFUSED.items():
            assert found[name][0] == "AmpError", (name, found[name])
            assert re.search(words, found[name][1], re.DOTALL), (name, found[name])


def test_options_are_checked_before_processes_start() -> None:
    for options, words in (
        ({"tensor_grid": (2, 1, 1)}, "is an option of tensor3d"),
        ({"strategies": "tensor3d,sequence", "tensor_grid": (2, 1, 1)}, "leave 'sequence' out"),
        ({"strategies": "tensor3d,fsdp"}, "fsdp and tensor3d cannot be together: z of a grid shards"),
        ({"strategies": ["tensor3d", "chunk"]}, "it captures a block as a graph of whole tensors"),
        ({"strategies": ["tensor3d", "pipeline"], "tensor_grid": (2, 1, 1)}, "a stage has whole blocks"),
        ({"strategies": "tensor3d,logits"}, "logits and tensor3d cannot be together: .* over classes"),
        ({"strategies": "tensor3d,replay"}, "replay and tensor3d cannot be together: .* has parts"),
        ({"strategies": "tensor3d,S3"}, "S3 and tensor3d cannot be together: it is not supported"),
        ({"strategies": "tensor3d", "tensor_grid": (2, 1)}, "allowed are three whole numbers"),
        ({"strategies": "tensor3d", "tensor_grid": (2, 1, 0)}, "allowed are three whole numbers"),
        ({"strategies": "tensor3d", "tensor_grid": (2, 1, 1), "model_parallel_size": 4}, "leave model_paral"),
    ):
        with pytest.raises(PlanError, match=words):
            AMPStrategy(**options)
    assert Gated().losses == []
