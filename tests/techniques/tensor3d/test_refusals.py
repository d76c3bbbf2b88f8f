"""Claim: modules with unusual code are trained exactly on a grid, or refused by name by all ranks with one message and
what to do."""

import pickle
import re
import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp import AMPStrategy
from lightning_amp.errors import AmpError, PlanError
from tests.any_module import QUIET
from tests.each import BEFORE_A_RELEASE
from tests.lightning.strategy.strategy_cases import RunningRanks
from tests.ranks import run_ranks
from tests.techniques.tensor3d.cases import CASES, Case, Gated, Trained
from tests.techniques.tensor3d.odd_modules import AROUND, KEPT, LAYERS, ROWS, WEIGHTS, Odd
from tests.techniques.tensor3d.odd_networks import NETWORKS
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


TABLES = {"weights": WEIGHTS, "kept": KEPT, "layers": LAYERS, "networks": NETWORKS, "around": AROUND}
STEPS, BOUND = 3, 1e-10
UNNAMED = "whose training step fails: "
"""In a message: an error of torch or of Python follows."""
ODD_REFUSED = {
    "a scripted layer": "is a ScriptModule",
    "a lazy layer": "must have its shape before training starts",
    "a teacher that sees other features": "calls 'add_' on the parameter",
    "a weight of norm 1 after a step": "calls 'linalg_vector_norm' on the parameter",
    "gradients clipped by hand": "'configure_gradient_clipping' calls",
    "a running mean, assigned": "a file would hold one rank's part",
    "embedding of bounded norm": "it writes into a copy",
    "a gradient penalty": "started a backward pass",
    "a backward hook that clamps": "autograd Functions do not see parts",
}
"""Part of the message; where features are not split, some of them are exact."""
REFUSED_ON_TWO_AXES = {
    "a queue of features": "it writes sharded values into a tensor that every rank has whole",
    "a reentrant checkpoint": "call checkpoint with use_reentrant=False",
}


def trained(one: Odd, rank: int = 0, grid: Grid | None = None, ranks: int = 1) -> dict[str, Tensor]:
    """Everything that has to be equal after three steps: losses, parameters, buffers and logged values."""
    seed_everything(3, verbose=False)
    batches = [one.batch() for _ in range(STEPS)]
    given: dict[str, Any] = {"devices": 1, "accelerator": "cpu", "use_distributed_sampler": False, "max_epochs": 1}
    if grid is not None:
        rows = ROWS * grid[0] * grid[1] // ranks
        first = rank // (grid[0] * grid[1]) * rows
        batches = [_rows(batch, slice(first, first + rows)) for batch in batches]
        strategy = AMPStrategy(strategies="tensor3d", tensor_grid=grid)
        given |= {"strategy": strategy, "devices": ranks, "plugins": [RunningRanks(rank, ranks)]}
    module = one.make().double()
    trainer = Trainer(**QUIET | given)
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    found = {f"state {name}": value for name, value in module.state_dict().items()}
    losses: Any = module.losses
    found |= {f"losses {i}": value for i, value in enumerate(losses)}
    logged = trainer.callback_metrics.items()
    found |= {f"logged {name}": value for name, value in logged if name != "loss"}
    return {name: value.detach().clone() for name, value in found.items()}


def _rows(batch: Any, cut: slice) -> Any:
    return tuple(_rows(one, cut) for one in batch) if isinstance(batch, tuple) else batch[cut]


def on_rank(rank: int, ranks: int, table: str, grid: Grid, names: list[str]) -> dict[str, Any]:
    """The values of each module, or the message that refuses it."""
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name in names:
        try:
            # what cannot be written to a file is refused too
            found[name] = pickle.loads(pickle.dumps(trained(TABLES[table][name], rank, grid, ranks)))
        except AmpError as error:
            found[name] = str(error).replace(f"on rank {rank}", "on a rank")
    return found


def apart(found: list[dict[str, Tensor]], right: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference of any rank, and of what; losses of data ranks are shares of one."""
    worst, where = 0.0, ""
    for key, value in right.items():
        own = [one[key] for one in found]
        assert all(one.shape == value.shape for one in own), key
        for one in [torch.stack(own).mean(0)] if key.startswith("losses") else own:
            scale = value.abs().max().clamp(min=1) if value.is_floating_point() and value.numel() else 1
            error = float(((one.double() - value.double()).abs() / scale).max()) if one.numel() else 0.0
            if not error <= worst:
                worst, where = error, key
    return worst, where


@BEFORE_A_RELEASE[0]
@BEFORE_A_RELEASE[1]
@pytest.mark.ranks
@pytest.mark.timeout(900)
@pytest.mark.parametrize("grid", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1)])
@pytest.mark.parametrize("table", TABLES)
def test_they_are_exact_or_refused(table: str, grid: Grid, tmp_path: Path) -> None:
    split = grid[0] * grid[1] > 1
    # rows over data ranks draw other numbers than those of one process
    names = [name for name, one in TABLES[table].items() if split or not one.by_rows]
    ranks = grid[0] * grid[1] * grid[2]
    by_rank = run_ranks(on_rank, ranks, tmp_path, table, grid, names, timeout=600)
    wrong = {name: judged(name, TABLES[table][name], [one[name] for one in by_rank], grid) for name in names}
    found = [f"{name}: {why}" for name, why in wrong.items() if why]
    assert not found, "\n".join(found)


def judged(name: str, one: Odd, found: list[Any], grid: Grid) -> str:
    """What is wrong."""
    said = ODD_REFUSED | (REFUSED_ON_TWO_AXES if grid[0] > 1 and grid[1] > 1 else {})
    if isinstance(found[0], str):
        if found != found[:1] * len(found) or UNNAMED in found[0]:
            return f"ranks say {found!r}"
        return "" if name in said and said[name] in found[0] else f"refused: {found[0]}"
    split = grid[0] * grid[1] > 1
    if name in said and split:
        return "not refused"
    error, where = apart(found, found[0] if one.drawn and split else trained(one))
    return "" if error <= BOUND else f"{where} differs by {error:.1e}"
