"""Claim: under fsdp modules train the numbers of one process with the union of the ranks' cells, and what Lightning
offers in addition to plain steps works, or is refused on all ranks. Techniques on one module, fsdp among them, are in
tests/techniques/test_pairs_on_one_module.py.
"""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn

from lightning_amp.lightning.checkpoints.write_checkpoint import convert_checkpoint
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.techniques.contract.sharded_parameter import is_split
from tests.lightning.strategy.fsdp_features import (
    WAYS,
    Blocks,
    Found,
    Penalised,
    ReadsElsewhere,
    checked,
    loader,
    mixed,
    offloaded,
    saved,
    trainer_of,
    ways,
)
from tests.lightning.strategy.strategy_cases import EVEN, Batch, Case
from tests.ranks import run_ranks

RTOL = 1e-10


def whole(tensor: Tensor) -> Tensor:
    """All of it, wherever it lies; a collective for a DTensor."""
    full: Any = tensor
    return full.full_tensor().clone() if is_split(tensor) else tensor.detach().clone()


class Record(Callback):
    """Losses, whole gradients and this rank's bytes after every step."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.norms: list[Tensor] = []

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(trainer.callback_metrics["loss"].clone())
        named = module.named_parameters()
        self.gradients.append({name: whole(p.grad) for name, p in named if p.grad is not None})
        if isinstance(trainer.strategy, AMPStrategy):
            self.norms.append(trainer.strategy.gradient_norm().clone())


def close(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    assert list(found) == list(expected), where
    for name, value in expected.items():
        assert found[name].shape == value.shape, f"{where}, {name}"
        off = (found[name] - value).abs().max() if value.numel() else torch.zeros(())
        assert off <= RTOL * value.abs().max() + 1e-12, f"{where}, {name}: off by {float(off):.1e}"


def same_checkpoint(found: dict[str, Any], expected: dict[str, Any], where: str = "") -> None:
    """Weights and the state of the optimiser."""
    close(found["state_dict"], expected["state_dict"], f"{where} weights")
    (own,), (state,) = found["optimizer_states"], expected["optimizer_states"]
    assert own["param_groups"] == state["param_groups"]
    assert list(own["state"]) == list(state["state"])
    for index, values in state["state"].items():
        close(own["state"][index], values, f"{where} state of parameter {index}")


def went_on(found: Found, one: Found, where: str) -> None:
    """As one process, after two epochs."""
    close(found["state"], one["state"], where)
    assert found["whole"]
    for loss in ("val_loss", "test_loss"):
        assert found[loss] == pytest.approx(one[loss], rel=1e-10), loss


class Skips(Blocks):
    """A rank leaves a block out."""

    def through(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skipped = 1 if self.trainer.global_rank == 1 else None
        for k, block in enumerate(self.blocks):
            x = x if k == skipped else x + block(x)
        return x


class SkipsBackward(Blocks):
    """A rank runs a block, whose output its loss does not read."""

    def through(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for k, block in enumerate(self.blocks):
            made = block(x)
            x = x + (made.detach() if k == 1 and self.trainer.global_rank == 1 else made)
        return x


class Stray(Blocks):
    """A backward pass of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        self.loss(batch).backward()
        self.optimizers().step()


class StrayRoot(Stray):
    """The same, with parameters of no block alone."""

    def loss(self, batch: Batch) -> Tensor:
        return (self.last(self.first(batch["rna"]["x"])) - batch["rna"]["y"]).square().mean()


class Clamped(Blocks):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.last.bias[0] += 1
        return super().training_step(batch, batch_idx)


class Replaced(Blocks):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.last.bias.data = self.last.bias.data + 1
        return super().training_step(batch, batch_idx)


class Renormed(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.ModuleList([nn.Embedding(4, 3, max_norm=0.1)]).double()

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + self.idle[0](torch.arange(4)).sum()


class Old(Blocks):
    """Keeps a function that reads a parameter by itself."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.blocks[1][0].weight
        self.low_rank = lambda x: x @ weight.T @ weight

    def through(self, x: Tensor) -> Tensor:
        return self.low_rank(super().through(x))


class Sparse(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 3, sparse=True)


class Complex(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.ones(3, dtype=torch.complex128))


class Averaged(Blocks):
    """Assigns data between steps, as averaging teachers do."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.last.bias.data = self.last.bias.data * 0.5


class Copied(Blocks):
    """A target network, made when training starts."""

    def on_train_start(self) -> None:
        vars(self)["target"] = copy.deepcopy(self.blocks)


class Quasinewton(Blocks):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Hooked(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda grad: grad * 2)


class Mixed(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0][0].float()


REFUSED: dict[str, tuple[type[Blocks], dict[str, Any], str]] = {
    "a block that a rank skips": (Skips, {}, "rank 1 gathers the parameters of 'blocks.2'"),
    "gradients that a rank has not": (SkipsBackward, {}, "all ranks use the same blocks in the same order"),
    "parameters read elsewhere": (ReadsElsewhere, {"given": True}, "code outside of it has read some"),
    "a backward pass of one's own": (Stray, {}, "call self.manual_backward(loss)"),
    "one of the root's parameters alone": (StrayRoot, {}, "call self.manual_backward(loss)"),
    "a parameter changed in a step": (Clamped, {}, "'last.bias' is gathered for a training step"),
    "a parameter changed unseen": (Replaced, {}, "is gathered for a training step"),
    "a parameter changed in a block": (Renormed, {}, "'weight' is gathered for a training step, or while its block"),
    "a parameter by an old reference": (Old, {}, "which has no values any more"),
    "a sparse gradient": (Sparse, {}, "['words'] have sparse gradients"),
    "a complex parameter": (Complex, {}, "which is complex"),
    "data that are assigned": (Averaged, {}, "assigned to the .data of 'bias'"),
    "a block that is copied": (Copied, {}, "'blocks.0' was copied (copy.deepcopy)"),
    "a penalty on weights": (Penalised, {"given": True}, "the loss is computed from a rank's rows"),
    "an optimiser that mixes entries": (Quasinewton, {}, "parameters that fsdp splits over ranks"),
    "hooks on a parameter": (Hooked, {}, "'first.weight' over the ranks, which has hooks"),
    "two types in a block": (Mixed, {}, "have the types ['float32', 'float64']"),
    "averaged weights": (
        Blocks,
        {"callbacks": [lambda: StochasticWeightAveraging(swa_lrs=0.1)]},
        "averages whole parameters, and fsdp has sharded",
    ),
}


def refusals(rank: int) -> dict[str, tuple[str, bool]]:
    """What is refused, without an end that one rank waits for; and whether the module is a plain one again.

    With all its values where nothing was trained, else with the rank's rows.
    """
    found = {}
    fitted = trainer_of(rank, 2)
    fitted.fit(Blocks(), loader(Case(Blocks, cells=EVEN).batches(rank)))
    # of a module that reads no block's parameters elsewhere; a plan of one that does has no such blocks
    plan = fitted.strategy.plan  # type: ignore[attr-defined]
    for name, (kind, options, _) in REFUSED.items():
        module, data = kind(), loader(Case(kind, cells=EVEN).batches(rank))
        callbacks = [make() for make in options.get("callbacks", ())]
        strategy = AMPStrategy(plan=plan) if options.get("given") else None
        try:
            trainer_of(rank, 2, strategy, callbacks=callbacks).fit(module, data)
            told = ""
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        plain = all(type(p) is nn.Parameter for p in module.parameters())
        plain &= type(module) is kind and "training_step" not in vars(module)
        # 5 rows on 2 ranks are 3 and 2; what an ended run has of the other rank's is nan
        rows = module.first.weight[:3] if rank == 0 else module.first.weight[3:]
        ended = told.startswith(("ModelError", "RanksDiffer"))
        kept = rows if ended else torch.cat([p.flatten() for p in module.parameters()])
        found[name] = told, plain and bool(kept.isfinite().all())
        dist.barrier()
    return found


pytestmark = [pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore")]


def pair(rank: int, ranks: int, folder: Path) -> Found:
    warnings.simplefilter("ignore")
    parts = AMPStrategy(strategies="fsdp", save_distributed_checkpoint=True)
    found: Found = {"ways": ways(rank, ranks, WAYS), "mixed": mixed(rank), "offloaded": offloaded(rank)}
    found |= {"checked": checked(rank, ranks), "saved": saved(rank, 2, folder / "fsdp")}
    found["in parts"] = saved(rank, 2, folder / "parts", parts)
    if rank == 0:
        convert_checkpoint(folder / "parts" / "epoch=0.ckpt", folder / "converted.ckpt")
    dist.barrier()
    one = "epoch=0.ckpt"
    found["from plain"] = saved(rank, 2, folder / "fsdp2", resume=folder / "plain" / one)
    found["from parts"] = saved(rank, 2, folder / "fsdp3", resume=folder / "parts" / one)
    found["refused"] = refusals(rank)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Found:
    return {"saved": saved(0, 1, folder / "plain"), "ways": ways(None, 1, WAYS)}


@pytest.fixture(scope="module")
def runs(plain: Found, folder: Path) -> list[Found]:
    return run_ranks(pair, 2, folder, folder, timeout=240)


@pytest.mark.parametrize("name", WAYS)
def test_a_way_to_optimise_gives_what_one_process_gives(plain: Found, runs: list[Found], name: str) -> None:
    for rank, found in enumerate(runs):
        close(found["ways"][name], plain["ways"][name], f"{name}, rank {rank}")


def test_what_is_compared_has_been_trained(plain: Found, runs: list[Found]) -> None:
    start, end = Blocks().state_dict(), plain["ways"]["Blocks"]
    moved = {name for name, value in end.items() if (value - start[name]).abs().max() > 1e-4}
    assert {"first.weight", "back.weight", "blocks.1.2.bias", "scale", "shift", "steps"} <= moved
    assert "idle.0.weight" not in moved, "no loss reads it, and it has no gradient to decay by"


def test_rows_in_the_hosts_memory_and_gradients_that_are_looked_at(plain: Found, runs: list[Found]) -> None:
    state, norms = checked(0, 1)
    close(state, plain["ways"]["Blocks"], "one process")
    for found in runs:
        close(found["offloaded"], state, "offloaded")
        close(found["checked"][0], state, "checked")
        assert found["checked"][1] == pytest.approx(norms, rel=RTOL)


def test_half_precision_trains_as_under_ddp(runs: list[Found]) -> None:
    for found in runs:
        for name, value in found["mixed"]["ddp"].items():
            off = (found["mixed"]["fsdp"][name] - value).norm()
            assert off <= 2e-2 * value.norm() + 1e-7, f"{name}: off by {off:.1e}"


@pytest.mark.parametrize("job", ["saved", "in parts", "from plain", "from parts"])
def test_training_goes_on_from_any_checkpoint(plain: Found, runs: list[Found], job: str) -> None:
    """One process goes on from any, as its own are equal to them (below)."""
    one = plain["saved"]
    for rank, report in enumerate(runs):
        went_on(report[job], one, f"{job}, rank {rank}")


def test_prediction_may_take_unlike_numbers_of_batches(plain: Found, runs: list[Found]) -> None:
    first, second = (report["saved"]["predicted"] for report in runs)
    assert (len(first), len(second)) == (3, 4)
    for step, expected in enumerate(plain["saved"]["predicted"]):
        torch.testing.assert_close(torch.cat([first[step], second[step]]), expected, rtol=1e-10, atol=1e-12)


def test_a_checkpoint_is_the_plain_one(folder: Path, runs: list[Found]) -> None:
    names = ("fsdp/epoch=0.ckpt", "converted.ckpt", "plain/epoch=0.ckpt")
    *saved, plain_one = (torch.load(folder / name, weights_only=True) for name in names)
    for found in saved:
        same_checkpoint(found, plain_one)
    one, two = (saved[0]["state_dict"][f"{name}.weight"] for name in ("first", "back"))
    assert one.data_ptr() == two.data_ptr(), "tied, as in a plain checkpoint"


def test_every_rank_writes_its_rows_into_a_directory(folder: Path, runs: list[Found]) -> None:
    written = {path.name for path in (folder / "parts" / "epoch=0.ckpt").iterdir()}
    assert {"__0_0.distcp", "__1_0.distcp", "meta.pt", ".metadata"} <= written


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_on_all_ranks(plain: Found, runs: list[Found], name: str) -> None:
    for found in runs:
        told, restored = found["refused"][name]
        assert REFUSED[name][2] in told
        assert restored, "the module is a plain one again"
