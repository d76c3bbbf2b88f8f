"""Claim: what `tensor3d` does not support is refused by name, with what to do, and nothing is trained wrongly."""

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


class Normed(Small):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.SyncBatchNorm(4)  # type: ignore[assignment]


class ByHand(Small):
    """A norm of parts would be too small."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        return loss


class Coupled(Small):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


class Stray(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (0.5 * self.loss(batch)).backward()
        return self.loss(batch)


class Hooked(Small):
    def __init__(self) -> None:
        super().__init__()
        self.net.weight.register_hook(lambda grad: 2 * grad)


class Elsewhere(Small):
    """A part of one entry would go with any other."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [nn.Parameter(torch.ones(2))]
        self.scale = self.held[0]

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.held[0].sum()


class Frozen(Elsewhere):
    """A reference without a gradient, which no hook of a gradient would notice."""

    def loss(self, batch: Any) -> Tensor:
        return Small.loss(self, batch) * self.held[0].detach().sum()


class Twice(Small):
    """Two Parameters with one memory: an update of one is an update of the other."""

    def setup(self, stage: str) -> None:
        self.more.weight.data = self.net.weight.data


class Kept(Small):
    def setup(self, stage: str) -> None:
        self.first = self.net.weight.data[:2]


class Normed1(Small):
    """Between steps a rank has a part of the weight."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.net.weight.div_(self.net.weight.norm())


class Anew(Small):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net.reset_parameters()


class Copied(Small):
    def on_train_start(self) -> None:
        self.more = deepcopy(self.net)


class Scripted(Small):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.jit.trace(nn.Linear(5, 4).double(), torch.zeros(2, 5).double())


class Transformed(Small):
    def loss(self, batch: Any) -> Tensor:
        return torch.func.vmap(self.net)(batch).square().mean()  # type: ignore[no-any-return]


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


scale = Scale.apply


class Named(Small):
    """A Function under a name that was taken before the step."""

    def loss(self, batch: Any) -> Tensor:
        return scale(self.net(batch)).square().mean()  # type: ignore[no-any-return,no-untyped-call]


class Branching(Small):
    """Ranks of the axis z take layers of the same shape by their own rows."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.first = self.global_rank == 0

    def loss(self, batch: Any) -> Tensor:
        net = self.net if getattr(self, "first", True) else self.more
        return (net(batch) - 1).square().mean()  # type: ignore[no-any-return]


class Writing(Small):
    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            self.net.weight.clamp_(-1, 1)
        return super().loss(batch)


class WritingData(Small):
    def loss(self, batch: Any) -> Tensor:
        self.net.weight.data.clamp_(-1, 1)
        return super().loss(batch)


class Compiled(Small):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.compile(self.net, backend="eager")  # type: ignore[assignment]


class WithoutValues(Small):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.more = self.net.to("meta"), self.more.to("meta")


class Mixed(Small):
    def __init__(self) -> None:
        super().__init__()
        self.net = self.net.to("meta")


class NoReset(Small):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.to("meta")


BATCH = CASES["gated"].batch
REFUSED: dict[str, tuple[Callable[[], Trained], Grid, dict[str, Any], str]] = {
    "ranks": (Small, (3, 1, 1), {}, "model_parallel_size|a grid of 3 ranks was given for 2 ranks"),
    "rows": (Small, (1, 1, 4), {}, "a grid of 4 ranks was given for 2 ranks"),
    "batch norm": (Normed, (2, 1, 1), {}, "'more' is a SyncBatchNorm"),
    "by hand": (ByHand, (2, 1, 1), {}, "self.clip_gradients"),
    "an optimiser": (Coupled, (2, 1, 1), {}, "'Adafactor'.*tensor3d splits"),
    "a backward pass": (Stray, (2, 1, 1), {}, "under tensor3d the Trainer has to begin"),
    "a hook": (Hooked, (2, 1, 1), {}, "'net.weight' has hooks"),
    "a reference": (Elsewhere, (2, 1, 1), {}, "under tensor3d a parameter has this rank's part"),
    "a reference without a gradient": (Frozen, (1, 1, 2), {}, "has read 'scale' by a reference"),
    "one memory": (Twice, (2, 1, 1), {}, "'net.weight' and 'more.weight' are two with one memory"),
    "a view": (Kept, (1, 1, 2), {}, "'first' is a view of the parameter 'net.weight'"),
    "a norm between steps": (Normed1, (2, 1, 1), {}, "'on_train_batch_end' calls .*norm' .*'net.weight'"),
    "values drawn anew": (Anew, (2, 1, 1), {}, "'on_train_batch_start' fails with ValueError.*flat. If it"),
    "a copy": (Copied, (2, 1, 1), {}, "'on_train_start' copies the parameter 'net.weight'.*make the copy in"),
    "a transform": (Transformed, (2, 1, 1), {}, "'linear' in 'Transformed'.*inside a transform of"),
    "scripted": (Scripted, (2, 1, 1), {}, "'net' is a ScriptModule, whose compiled code reads"),
    "a function by another name": (Named, (1, 2, 1), {}, "autograd Functions do not see parts"),
    "a branch": (Branching, (1, 1, 2), {}, "under tensor3d all ranks use the same .*rank 1 gathers"),
    "a write": (Writing, (2, 1, 1), {}, "'clamp_'.*Writing"),
    "a write by way of data": (WritingData, (1, 1, 2), {}, "'clamp_'.*WritingData"),
    "compiled": (Compiled, (2, 1, 1), {}, "torch.compile was applied"),
    "values": (WithoutValues, (1, 1, 2), {"options": {"strategies": "S1", "tensor_grid": None}},
        "this plan shards none"),
    "some values": (Mixed, (2, 1, 1), {}, "'net.weight' is on the device 'meta', and 'more.weight' is not"),
    "no reset": (NoReset, (2, 1, 1), {}, "'the module' .NoReset. has tensors .* no method reset_parameters"),
    "averages": (Small, (2, 1, 1), {"callbacks": [EMAWeightAveraging()]}, "it averages whole parameters"),
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
