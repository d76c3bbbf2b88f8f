"""Claim: the profile of a module is its second training step to the byte, and the module stays as it is."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchmetrics import Accuracy, MeanMetric

import lightning_amp
from lightning_amp.errors import ModelError
from lightning_amp.footprint.bounded_step import users_line
from lightning_amp.footprint.module_profile import KINDS, OPTIMISER, PARTS, ModuleProfile, bytes_alive
from lightning_amp.footprint.profile_module import counted_step, profile_module
from lightning_amp.footprint.run import inner_run
from lightning_amp.footprint.run.inner_run import EnoughSeen
from lightning_amp.footprint.run.run_settings import RunSettings
from lightning_amp.footprint.step_recorder import StepRecorder
from lightning_amp.footprint.target_device import launches_operators, settings_of
from tests.any_module import NAMES, QUIET, Meter, make
from tests.optimised import Optimised

LARGEST = {"gpt2": "head", "wide_mlp": "parameters"}
"""Of the examples; of all others it is what the forward pass saves."""


def measured(module: pl.LightningModule, batch: Any, added_up: int = 1) -> int:
    meter = Meter(added_up)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, accumulate_grad_batches=added_up, **QUIET, callbacks=[meter])
    batches: Any = [batch] * 2 * added_up
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    return meter.live.peak


class Small(Optimised, by=torch.optim.Adam, lr=0.01):
    def __init__(self, net: nn.Module | None = None, classes: int = 3) -> None:
        super().__init__()
        self.net = net or nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, classes))
        self.seen: list[int] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch_idx)
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True, on_epoch=True)
        self.log_dict({"again": loss}, prog_bar=True)
        return loss


def small_batch(rows: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 5), torch.randint(3, (rows,))


def consistent(found: ModuleProfile) -> None:
    """All views of the peak have the same bytes."""
    assert set(found.by_kind) == set(KINDS)
    assert set(found.parts) == set(PARTS)
    for part in (found.by_kind, found.parts):
        assert sum(part.values()) == found.peak_bytes
    assert sum(row.n_bytes for row in found.modules) == found.peak_bytes
    assert sum(row.n_bytes for row in found.tensors) == found.peak_bytes
    assert max(sum(moment.by_kind.values()) for moment in found.timeline) == found.peak_bytes
    assert all(sum(row.by_kind.values()) == row.n_bytes for row in found.modules)
    assert found.parts[found.largest] == max(found.parts.values())


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_peak_of_eight_modules_is_what_a_real_step_needs(name: str) -> None:
    module, batch = make(name)
    found = lightning_amp.profile(module, batch)
    assert found.measured == "fake tensors", found.reason
    consistent(found)
    assert found.largest == LARGEST.get(name, "saved")
    assert found.peak_bytes == pytest.approx(measured(module, batch), rel=0.001)


def test_bytes_by_hand() -> None:
    """SGD without momentum: parameters, last step's gradients, batch, and what the loss keeps."""

    class Mean(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (self.net(batch) ** 2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    found = lightning_amp.profile(Mean(nn.Linear(1000, 10, bias=False)), torch.randn(50, 1000))
    assert found.by_kind["parameters"] == found.by_kind["gradients"] == 4 * 1000 * 10
    assert found.by_kind["optimiser state"] == 0
    # forward: the batch and the layer's result, of which the square is dropped by the mean
    assert found.peak_phase == "forward"
    assert found.by_kind["activations"] == 4 * 50 * 1000 + 4 * 50 * 10
    assert found.by_kind["temporaries"] == 4 * 50 * 10 + 4
    names = {(t.name, t.fqn): t.kind for t in found.tensors}
    assert names["net.weight", "net"] == "parameters"
    assert names["net.weight.grad", "net"] == "gradients"
    assert names["batch", ""] == names["mm", "net"] == "activations"
    assert names["pow", ""] == "temporaries"


class InItsBackward(torch.autograd.Function):
    """A layer that runs again in its backward pass and asks autograd for its gradients, as regions in chunks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight).relu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            # made by an operator that needs no node of its own
            room = torch.zeros_like(grad)
            found = torch.autograd.grad((leaves[0] @ leaves[1]).relu().exp().add(room), leaves, grad)
        return tuple(found)


class RunsAgain(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return InItsBackward.apply(input, self.weight)  # type: ignore[no-untyped-call]


def test_what_ends_before_it_begins_takes_nothing() -> None:
    first, last, n_bytes = np.array([0, 3, -1]), np.array([1, 1, 9]), np.array([5, 7, 1])
    assert bytes_alive(first, last, n_bytes, 5).tolist() == [6, 6, 1, 1, 1]


def test_what_a_backward_pass_runs_inside_belongs_to_its_module() -> None:
    net = nn.Sequential(nn.Linear(50, 50), RunsAgain(50, 50), nn.Linear(50, 50))
    found = lightning_amp.profile(Small(net, 50), (torch.randn(200, 50), torch.randint(50, (200,))))
    backward = [moment.fqn for moment in found.timeline if moment.phase == "backward"]
    first = backward.index("net.2")
    assert backward[first:] == ["net.2", "net.1", "net.0"], backward
    assert found.peak_module == "net.1"
    assert all(tensor.fqn for tensor in found.tensors if tensor.kind == "temporaries")


@pytest.mark.parametrize("added_up", [2, 3])
def test_gradients_of_batches_before_are_held(added_up: int) -> None:
    class Plain(Small):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Plain(nn.Sequential(nn.Linear(5, 200), nn.ReLU(), nn.Linear(200, 300), nn.Linear(300, 3)))
    batch = small_batch()
    found = profile_module(module, batch, run_settings=RunSettings(accumulate_grad_batches=added_up))
    consistent(found)
    gradients = sum(p.nbytes for p in module.parameters())
    assert found.peak_bytes == measured(module, batch, added_up)
    assert found.peak_phase == "backward"
    assert found.added_bytes == gradients
    # those of the batch before, and the largest of this one
    assert found.by_kind["gradients"] == gradients + 4 * (200 * 300 + 300)
    once = lightning_amp.profile(module, batch)
    assert (once.peak_phase, once.added_bytes) == ("forward", 0)
    # a gradient, before it is added to that of the batch before
    assert found.peak_bytes >= once.peak_bytes + 4 * 200 * 300 - 4 * 4 * 500


def test_recomputation_belongs_to_its_module() -> None:
    class Recomputed(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return checkpoint(self.net, batch[0], use_reentrant=False).sum()

    module, batch = (Recomputed(nn.Sequential(nn.Linear(5, 999), nn.GELU(), nn.Linear(999, 3))), small_batch(64))
    found = lightning_amp.profile(module, batch)
    assert {m.fqn for m in found.timeline if m.phase == "backward"} >= {"net.0", "net.1", "net.2"}
    assert found.peak_phase != "forward"
    assert found.peak_bytes == measured(module, batch)


def test_any_batch_size_is_that_of_a_real_batch() -> None:
    class Nested(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self.net(batch["x"] * batch["more"][1]), batch["more"][0])

    module = Nested()
    batch = {"x": torch.randn(4, 5), "more": [torch.zeros(4, dtype=torch.long), torch.ones(5)], "name": "a"}
    large = batch | {"x": torch.randn(64, 5), "more": [torch.zeros(64, dtype=torch.long), torch.ones(5)]}
    found = lightning_amp.profile(module, batch, batch_size=64)
    assert found == lightning_amp.profile(module, large)
    assert found.batch_size == 64
    assert lightning_amp.profile(module, batch).peak_bytes < found.peak_bytes


class Branching(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if loss.item() > 0 else loss


class ByGradient(Small):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.net[0].weight.grad.sum() > 0:
            self.net[0].weight.grad.mul_(2)


@pytest.mark.parametrize("kind", [Branching, ByGradient])
def test_a_step_that_needs_values_is_counted_by_them(kind: type[Small]) -> None:
    module, batch = kind(), small_batch()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    found = lightning_amp.profile(module, batch)
    assert (found.measured, found.noted) == ("fake tensors", True)
    assert "reads the value of a tensor" in found.reason
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert found.peak_bytes == measured(module, batch)
    twice = lightning_amp.profile(module, batch, batch_size=8)
    assert twice.peak_bytes > found.peak_bytes
    assert twice.batch_size == 8


def test_tensors_may_be_copied_within_a_step() -> None:
    """torch's own way of copying would write to memory that is not there."""

    class Copying(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            copy.deepcopy([self.net, torch.tensor(2.0), self.scale])
            MeanMetric()
            return super().training_step(batch, batch_idx)

    module, batch = Copying(), small_batch(32)
    module.scale = torch.ones(1000)
    found = lightning_amp.profile(module, batch)
    assert found.measured == "fake tensors", found.reason
    assert found.peak_bytes == pytest.approx(measured(module, batch), rel=0.001)


def test_what_cannot_be_profiled_is_refused() -> None:
    with torch.device("meta"):
        module = Branching()
    with pytest.raises(ModelError, match="cannot profile 'Branching': its step needs values .*device 'meta'"):
        lightning_amp.profile(module, small_batch())
    with pytest.raises(ModelError, match="cannot profile 'Small': its training step fails with .*'input'"):
        lightning_amp.profile(Small(), ["no", "tensors"])
    with pytest.raises(ModelError, match="cannot profile a 'Linear'; pass a LightningModule"):
        lightning_amp.profile(nn.Linear(2, 2), small_batch())
    with pytest.raises(ModelError, match="batch_size=0 is not supported"):
        lightning_amp.profile(Small(), small_batch(), batch_size=0)
    locked = Small()
    locked.stream = (line for line in "ab")
    with pytest.raises(ModelError, match="'Small', which cannot be copied: .*generator"):
        lightning_amp.profile(locked, small_batch())


class Manual(Small):
    """Two optimisers, one of them torch's own, a backward pass of autograd's own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(5, 3)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers(use_pl_optimizer=False)
        for optimizer, net in ((first, self.net), (second, self.other)):
            optimizer.zero_grad()
            F.cross_entropy(net(batch[0]), batch[1]).backward()
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.net.parameters()), torch.optim.SGD(self.other.parameters(), momentum=0.9)]


class Closure(Small):
    """The optimiser runs forward and backward several times."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3, history_size=2)


class Scheduled(Small):
    """Asks the Trainer how long the run is, and for a metric that is not there."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net[0].parameters())
        self.net[2].requires_grad_(False)
        assert self.trainer.estimated_stepping_batches > 1
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}


class Late(Small):
    """Makes its layers in hooks, and would download data."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def prepare_data(self) -> None:
        raise AssertionError("data are not downloaded for a profile")

    def setup(self, stage: str) -> None:
        self.scale = nn.Parameter(torch.ones(3))

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


@pytest.mark.parametrize("kind", [Manual, Scheduled, Late])
def test_lightnings_ways_are_followed(kind: type[Small]) -> None:
    module, batch = kind(), small_batch(32)
    found = lightning_amp.profile(module, batch)
    assert found.measured == "fake tensors", found.reason
    consistent(found)
    if kind is Late:
        module.prepare_data = lambda: None  # type: ignore[method-assign]
    if kind is not Scheduled:
        assert found.peak_bytes == measured(module, batch)
    assert {moment.phase for moment in found.timeline} == {"forward", "backward", "optimiser"}


@pytest.mark.parametrize(("precision", "times"), [("bf16-true", 0.5), ("64-true", 2)])
def test_what_hooks_make_has_the_precision_of_the_run(precision: str, times: float) -> None:
    plain, found = (
        profile_module(Late(), small_batch(), run_settings=RunSettings(precision=name))
        for name in ("32-true", precision)
    )
    for kind in ("parameters", "gradients"):
        assert found.by_kind[kind] == times * plain.by_kind[kind]


def test_an_optimiser_that_looks_at_values_is_counted_by_them() -> None:
    module, batch = Closure(), small_batch(32)
    found = lightning_amp.profile(module, batch)
    assert (found.measured, found.noted) == ("fake tensors", True)
    assert found.peak_bytes == measured(module, batch)
    assert {moment.phase for moment in found.timeline} >= {"forward", "backward", "optimiser"}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_cpu_stays_in_its_cache_unless_told_otherwise(device: str) -> None:
    like = torch.empty(2, device=device)
    assert not launches_operators(like)
    with settings_of("cuda"):
        assert launches_operators(like)
        with settings_of("cpu"):
            assert not launches_operators(like)
        assert launches_operators(like)
    assert not launches_operators(like)


def test_an_error_leaves_no_settings_behind() -> None:
    with pytest.raises(ZeroDivisionError), settings_of("cuda"):
        raise ZeroDivisionError
    assert not launches_operators(torch.empty(2))


def test_a_step_with_values_leaves_the_batch_as_it_was() -> None:
    class Halves(Optimised, by=torch.optim.SGD, lr=0.1):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch["x"].sum() > 0:
                batch["x"].div_(2)
            return self.layer(batch["x"]).mean()

    class Reads(Halves):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert self.layer.weight.grad.sum() > 0

    class ReadsMemory(Halves):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert len(self.layer.weight.grad.untyped_storage().tolist()) == 16

    batch = {"x": torch.ones(3, 4)}
    for kind, how in ((Halves, "fake tensors"), (Reads, "fake tensors"), (ReadsMemory, "a real step")):
        assert profile_module(kind(), batch).measured == how
        assert torch.equal(batch["x"], torch.ones(3, 4))


def test_products_of_sparse_matrices_are_recorded() -> None:
    """The recorder took the last two sizes of the values of a sparse factor, which has one."""

    class Squares(Small):
        def on_train_batch_start(self, *_: Any) -> None:
            # a step with values: fake tensors have no sparse products
            assert len(next(self.parameters()).untyped_storage().tolist())

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            edges = torch.eye(6).to_sparse_csr()
            return super().training_step(batch, batch_idx) + (edges @ edges).to_dense().sum() * 0

    assert lightning_amp.profile(Squares(), small_batch()).measured == "a real step"


def test_lines_of_a_folder_that_begins_as_a_library_are_the_users() -> None:
    """They were taken for the library's, and a message did not say where the step had failed."""
    folder = f"{Path(lightning_amp.__file__).parent}_runs"
    with pytest.raises(ValueError, match="mine") as raised:
        exec(compile("raise ValueError('mine')", f"{folder}/model.py", "exec"))
    assert users_line(raised.value).startswith("model.py:1:")


def test_a_line_of_a_library_that_begins_like_torch_is_not_the_users() -> None:
    with pytest.raises(ValueError, match="preds") as raised:
        Accuracy(task="multiclass", num_classes=3)(torch.zeros(5, 3), torch.zeros(5, 5, 5).long())
    assert users_line(raised.value).startswith("test_profile_module.py:")


def test_a_conversion_in_the_step_that_changes_nothing_needs_no_values() -> None:
    """Switch Transformers converts its router in every forward pass."""

    class Router(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(4, 2)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.router = self.router.to(batch.dtype)
            return self.router(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    assert profile_module(Router(), torch.zeros(8, 4)).measured == "fake tensors"
    assert nn.Module._apply.__module__ == "torch.nn.modules.module"


def test_a_conversion_in_the_step_to_another_type_needs_no_values() -> None:
    """Switch Transformers keeps its router in float32, also in a model of float64; the first step converts it."""

    class Router(pl.LightningModule):
        def __init__(self, *, back: bool) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)
            self.router = nn.Sequential(nn.Linear(16, 4, bias=False), nn.BatchNorm1d(4))
            self.double()
            self.back = back

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            found = self.layer(batch)
            self.router = self.router.to(torch.float32)
            return self.router(found.float()).square().mean() + found.square().mean()

        def on_after_backward(self) -> None:
            if self.back:
                self.router.double()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), momentum=0.9)

    batch = torch.rand(64, 16, dtype=torch.float64)
    for back in (False, True):
        module, first, second = Router(back=back), Meter(), Meter()
        first.at = 0
        found = profile_module(module, batch)
        assert found.measured == "fake tensors", found.reason
        trainer = pl.Trainer(accelerator="cpu", max_steps=2, precision="64-true", callbacks=[first, second], **QUIET)
        trainer.fit(module, torch.utils.data.DataLoader(torch.cat([batch, batch]), 64))
        assert [found.first_bytes, found.peak_bytes] == [first.live.peak, second.live.peak]


def test_adafactor_scales_its_updates_by_numbers_that_decide_nothing() -> None:
    class Factored(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.layers(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adafactor(self.parameters(), lr=1e-3)

    module, meter = Factored(), Meter()
    found = profile_module(module, torch.zeros(64, 16))
    assert found.measured == "fake tensors"
    trainer = pl.Trainer(accelerator="cpu", max_steps=2, callbacks=[meter], **QUIET)
    trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(128, 16), 64))
    assert found.peak_bytes == meter.live.peak


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.NAdam])
def test_on_a_gpu_optimizers_take_the_form_that_is_their_default_there(kind: Any) -> None:
    def counted(device: str, **options: Any) -> Any:
        module = Small(nn.Sequential(nn.Linear(5, 64), nn.Linear(64, 64), nn.Linear(64, 3)))
        module.configure_optimizers = lambda: kind(module.parameters(), **options)  # type: ignore[method-assign]
        with settings_of(device):
            found = profile_module(module, small_batch())
        return found.peak_bytes, sum(moment.n_operators for moment in found.timeline if moment.phase == OPTIMISER)

    assert counted("cuda") == counted("cuda", foreach=True) == counted("cpu", foreach=True)
    assert counted("cpu") == counted("cuda", foreach=False)
    assert counted("cpu") != counted("cuda")


class LookedAt(Small):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        super().training_step(batch, batch_idx)
        raise EnoughSeen


@pytest.mark.parametrize(("kind", "times"), [(LookedAt, 0), (Small, 1)])
def test_nothing_is_foreseen_of_a_step_that_is_only_looked_at(
    kind: type[Small], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Any]()
    monkeypatch.setattr(inner_run, "foresee", lambda *args: asked.append(args) or ())
    counted_step(kind(), small_batch(), None, StepRecorder)
    assert len(asked) == times
