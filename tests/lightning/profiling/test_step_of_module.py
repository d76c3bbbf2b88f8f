"""Claim: of a technique that refuses a module, or that its step has shown to be impossible, the plan says why, not that
it helps, and a plan that asks for it is refused; of a pipeline that was not counted it is not said that it fits; how a
stream gives a batch.

Claim: `lightning_amp.plan(module, batch)` plans any module without a run, in the words of the module, and answers
what Lightning's batch-size finder would.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

import lightning_amp
from lightning_amp.costs.device_rates import CPU_CORE
from lightning_amp.costs.model_shape import profile_of_module
from lightning_amp.errors import AmpError, DataError, ModelError, PlanError
from lightning_amp.footprint.run.run_settings import RunSettings
from lightning_amp.installing.describe_module import describe
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.lightning.strategy.refusals import announce
from lightning_amp.lightning.strategy.request import Request
from lightning_amp.planning.modules.plan_module import diagnose_module, plan_module, split_by_planner
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.planning.reports.plan_report import plan_report
from tests.lightning.strategy.strategy_cases import Small
from tests.planning.modules.test_plan_step import Deep


class Normalised(Small):
    """Blocks that normalise by the batch."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40)) for _ in range(6))
        self.net = nn.Sequential(nn.Embedding(50, 40, sparse=sparse), *blocks)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Blocks(Normalised):
    """Blocks of which some can run again, or in chunks."""

    def __init__(self) -> None:
        super().__init__(sparse=False)
        blocks = (nn.Sequential(nn.Linear(40, 160), nn.Tanh(), nn.Linear(160, 40)) for _ in range(3))
        self.net = nn.Sequential(*blocks)


class Words(pl.LightningModule):
    """A small language model, whose attention grows with the square of the length."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.words, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.head(self.layers(self.words(batch["ids"])))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


@pytest.mark.parametrize("sparse", [False, True])
def test_what_a_technique_refuses_is_said(sparse: bool) -> None:
    step = StepOfModule(Normalised(sparse=sparse), lambda: torch.arange(4), run_settings=RunSettings())
    found = diagnose_module(step.profiled(CPU_CORE), ranks=2)
    assert "pipeline" not in found.helps
    assert "statistics of a batch (BatchNorm)" in found.does_not_help["pipeline"]
    assert ("fsdp" in found.helps) is not sparse
    if sparse:
        assert "have sparse gradients" in found.does_not_help["fsdp"]


class Skipping(Blocks):
    """As a U-Net: what the first block returns is read by the loss."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        first = self.net[0](batch)
        return (self.net[2](self.net[1](first)) + first).square().mean()


class Penalty(Blocks):
    """Of the gradients by the inputs, as a critic's."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        x = batch.clone().requires_grad_()
        (slopes,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return (slopes.norm(dim=1) - 1).square().mean()


class ByRow(Blocks):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return vmap(self.net)(batch).square().mean()


class Swapped(Blocks):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        other = {name: 2 * p for name, p in self.net[1].named_parameters()}
        return functional_call(self.net[0], other, (self.net(batch),)).square().mean()


REFUSED: dict[tuple[type[Blocks], str], str] = {
    (Penalty, "pipeline"): r"takes gradients while it runs \(torch.autograd.grad.*goes back through the block 'net.0'",
    (Penalty, "fsdp"): "takes gradients while it runs .*as for a gradient penalty.*train with strategies='S1'",
    (ByRow, "pipeline"): r"torch.func \(vmap, grad, jvp, ...\) transforms a function that calls the block 'net.0'",
    (Swapped, "pipeline"): "once, in order, and called 4 of 3",
    (Swapped, "fsdp"): "'net.0' is called with other parameters than its own .*train with strategies='S1'",
}


def planned(kind: type[Blocks], strategies: str, memory: str | None = None) -> Plan:
    module = kind()
    step = StepOfModule(module, lambda: torch.randn(64, 40), run_settings=RunSettings())
    seen = step.profiled(CPU_CORE)
    shape = replace(describe(module, batch_size=64), profiled=True)
    asked, named = split_by_planner(f"S1,{strategies}", policy="auto")
    request = {"devices": 2, "strategies": asked, "device_memory": memory, "shape": shape, "rates": CPU_CORE}
    base = plan(profile_of_module(shape), **request)
    return plan_module(base, seen, named=named, budget_named=memory is not None, count=step.count)


def test_a_step_that_shows_that_a_technique_cannot_be_is_refused_by_its_name() -> None:
    for (kind, strategies), words in REFUSED.items():
        with pytest.raises(PlanError, match=f"{strategies} (is not possible|cannot run this step): .*{words}"):
            planned(kind, strategies)
    # where it is no hindrance
    assert "fsdp" in planned(ByRow, "fsdp").strategies
    assert "recompute" in planned(Swapped, "recompute").strategies


class Graphs(Small):
    """Layers on nodes and the edges between them, of several graphs end to end."""

    def __init__(self, *, reads_values: bool) -> None:
        super().__init__()
        self.net = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.reads_values = reads_values

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        x, (source, target), graph = batch["x"], batch["edge_index"], batch["graph"]
        for layer in self.net:
            x = x.index_add(0, target, torch.tanh(layer(x))[source])
        n = int(graph.max()) + 1 if self.reads_values else len(batch["y"])
        return (x.new_zeros(n, 8).index_add(0, graph, x).mean(1) - batch["y"]).square().mean()


@pytest.mark.parametrize("reads_values", [False, True])
def test_collated_graphs_have_no_micro_batches_and_are_planned(reads_values: bool) -> None:
    torch.manual_seed(0)
    batch = {
        "x": torch.randn(9, 8),
        "edge_index": torch.randint(9, (2, 30)),
        "graph": torch.arange(9) // 3,
        "y": torch.randn(3),
    }
    step = StepOfModule(Graphs(reads_values=reads_values), lambda: batch, run_settings=RunSettings())
    found = diagnose_module(step.profiled(CPU_CORE), ranks=2)
    assert "tensors have [2, 3, 9] rows" in found.does_not_help["pipeline"]


def test_a_micro_batch_that_fails_is_a_pipeline_that_cannot_be() -> None:
    """Rows of a batch that point to other rows of it."""

    class Pointing(Blocks):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            x, others = batch[:, :40], batch[:, 40].long()
            assert int(others.max()) < len(x), "of the whole batch"
            return self.net(x)[others].square().mean()

    batch = torch.cat([torch.randn(8, 40), torch.arange(8.0).flip(0)[:, None]], 1)
    found = StepOfModule(Pointing(), lambda: batch, run_settings=RunSettings()).profiled(CPU_CORE)
    assert "cannot be counted" in diagnose_module(found, ranks=2, budget=1).does_not_help["pipeline"]


def test_a_pipeline_that_was_not_counted_does_not_fit() -> None:
    counted, unknown = planned(Blocks, "pipeline", "1GiB"), planned(Skipping, "pipeline", "1GiB")
    assert (counted.fits, counted.uncounted) == (True, "")
    assert unknown.fits is None
    assert "the block before it does not return" in unknown.uncounted
    said = " ".join(plan_report(unknown).split())
    assert "predicted peak per rank unknown, at least" in said
    assert "(fits)" not in said
    assert Plan.from_json(unknown.to_json()) == unknown
    for held, memory in ((False, "1GiB"), (True, None)):
        asked = Request(strategies="pipeline", device_memory=memory)
        with pytest.raises(PlanError, match="whether a step fits is not known") if memory else nullcontext():
            announce(unknown, asked, held=held)
    announce(unknown, Request(strategies="pipeline", device_memory="1GiB", on_predicted_oom="warn"), held=False)
    # of what is chosen by what stages hold nothing is left out in silence
    with pytest.raises(
        PlanError, match="together with recompute requires that .*they were not: .*leave 'recompute' out"
    ):
        planned(Skipping, "pipeline,recompute", "1GiB")


def test_a_step_that_is_profiled_again_is_counted_with_the_batch_of_that_time() -> None:
    batches = iter((torch.randn(64, 40), torch.randn(640, 40)))
    step = StepOfModule(Blocks(), lambda: next(batches), run_settings=RunSettings())
    first, second = step.profiled(CPU_CORE), step.profiled(CPU_CORE)
    assert (first.profile.batch_size, second.profile.batch_size) == (64, 640)
    assert second.profile.peak_bytes > first.profile.peak_bytes


SHAPE = "512x32"


class Late(Deep):
    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.blocks = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.blocks is None:
            self.blocks = Deep().blocks


@pytest.fixture(scope="module")
def whole() -> Any:
    return lightning_amp.plan(Deep(), SHAPE)


@pytest.fixture(scope="module")
def lean(whole: Any) -> Any:
    return lightning_amp.plan(Deep(), SHAPE, device_memory=int(0.6 * whole.plan.predicted_peak_bytes))


def test_a_module_and_a_batch_are_planned(whole: Any, lean: Any) -> None:
    assert (whole.plan.strategies, whole.plan.fits, whole.plan.batch_size) == ((), None, 512)
    assert whole.plan.predicted_peak_bytes == whole.profile.peak_bytes
    assert lean.plan.strategies == ("recompute",)
    assert lean.plan.fits
    # chunks, stages and replay are looked for, which a profile alone does not allow
    assert {"recompute", "chunk", "replay"} <= lean.plan.diagnosis.helps.keys()
    assert lightning_amp.Plan.from_json(lean.plan.to_json()) == lean.plan


def test_it_prints_in_the_words_of_the_module(whole: Any, lean: Any) -> None:
    text = str(lean)
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("Deep on 1 device\n")
    # repeated modules and their tensors are one row
    assert "blocks.*.* (12 x Linear)" in text
    assert "6 x [512, 128] float32  activations  blocks.*.1: gelu" in text
    words = " ".join(text.split())
    assert "plan recompute of blocks.0 ... blocks." in words
    assert "per device (fits) predicted step" in words
    assert "at the rates of one CPU core" in text
    assert "fsdp" in whole.plan.diagnosis.helps
    assert "nothing to install" in str(whole)
    assert f"<pre>{text[:10]}" in lean._repr_html_()
    assert "does NOT fit" in str(lightning_amp.plan(Deep(), "4x32", device_memory=1000))


@pytest.mark.long
def test_the_largest_batch_fits_with_the_plan_and_one_more_does_not(lean: Any) -> None:
    budget = lean.plan.budget_bytes
    for strategies in ("S1", "recompute"):
        n = lightning_amp.plan(Deep(), SHAPE, device_memory=budget, strategies=strategies).largest_batch()
        assert (n > 512) is (strategies == "recompute")
        for more, fits in ((0, True), (1, False)):
            found = lightning_amp.plan(Deep(), SHAPE, device_memory=budget, strategies=strategies, batch_size=n + more)
            assert found.plan.fits is fits


@pytest.mark.long
@pytest.mark.parametrize(("strategies", "near"), [("S1", 1.0), (None, 0.97)])
def test_the_largest_length_and_batch_are_those_of_a_plan_that_fits(strategies: str | None, near: float) -> None:
    def planned(rows: int, length: int) -> Any:
        ids = torch.randint(0, 50, (rows, length))
        asked = {"device_memory": budget, "strategies": strategies}
        return lightning_amp.plan(Words(), {"ids": ids, "labels": ids.clone()}, **asked)

    budget = 2_000_000
    made = planned(4, 48)
    rows, length = made.largest_batch(), made.largest("ids")
    assert (rows > 4, length > 48) == (True, True)
    for found in (planned(rows, 48), planned(4, length)):
        assert near * budget <= found.plan.predicted_peak_bytes <= budget or strategies == "S1"
        assert found.plan.fits
    if strategies == "S1":
        assert not planned(4, length + 1).plan.fits
    assert made.largest("batch.labels", dim=1) == length
    with pytest.raises(PlanError, match="'text' is no tensor of the batch; allowed are 'ids', 'labels'"):
        made.largest("text")
    with pytest.raises(PlanError, match=r"dim=2 is not supported for 'ids', a tensor of 2 dimensions"):
        made.largest("ids", dim=2)


@pytest.mark.release
def test_the_batch_fits_on_the_fewest_devices_and_on_one_less_it_does_not() -> None:
    # parameters are most of it
    small = lightning_amp.plan(Deep(), "2x32")
    budget = int(0.6 * small.plan.predicted_peak_bytes)
    n = lightning_amp.plan(Deep(), "2x32", device_memory=budget).fewest_devices()
    assert n is not None
    assert n > 1
    for devices, fits in ((n, True), (n - 1, False)):
        assert lightning_amp.plan(Deep(), "2x32", device_memory=budget, devices=devices).plan.fits is fits
    tight = lightning_amp.plan(Deep(), "2x32", device_memory=1000)
    assert tight.fewest_devices() is None
    assert tight.largest_batch() == 0


def test_what_cannot_be_planned_or_answered_is_refused(whole: Any) -> None:
    for question in (whole.largest_batch, whole.fewest_devices):
        with pytest.raises(PlanError, match="requires a plan with one budget, found none; give device_memory='24GiB'"):
            question()
    with pytest.raises(ModelError, match="cannot plan a 'Linear' and a batch; give a LightningModule"):
        lightning_amp.plan(nn.Linear(2, 2), SHAPE)  # type: ignore[call-overload]
    with pytest.raises(PlanError, match="node_devices was given with the profile of a module's step"):
        lightning_amp.plan(lightning_amp.profile(Deep(), SHAPE), node_devices=2)
    with pytest.raises(ModelError, match=r"makes layers in .* call them before: module.configure_model\(\)"):
        lightning_amp.plan(Late(), SHAPE)
    made = Late()
    made.configure_model()
    assert lightning_amp.plan(made, SHAPE).plan == whole.plan
    with pytest.raises(AmpError, match="its training step fails with .*mat1 and mat2 shapes cannot be multiplied"):
        lightning_amp.plan(Deep(), "4x5")


def test_batches_are_made_of_their_shapes() -> None:
    from lightning_amp.data.batch import batch_of_shapes

    one, pair = batch_of_shapes("4x3"), batch_of_shapes("4x3x2, 4:int64")
    assert isinstance(one, Tensor)
    assert (one.shape, one.dtype) == ((4, 3), torch.float32)
    assert torch.equal(one, batch_of_shapes("4x3"))  # type: ignore[arg-type]
    assert isinstance(pair, tuple)
    assert [(tuple(part.shape), part.dtype) for part in pair] == [((4, 3, 2), torch.float32), ((4,), torch.int64)]
    (alone,) = batch_of_shapes("4x3,")
    assert torch.equal(alone, one)  # type: ignore[arg-type]
    named = batch_of_shapes("ids=4x3:int32,mask=4:bool")
    assert isinstance(named, dict)
    assert [(name, part.dtype) for name, part in named.items()] == [("ids", torch.int32), ("mask", torch.bool)]
    for text in ("", "4x", "0x3", "4x3:int65", "4x3,,", "a=4,5", "a=4,a=5", "four"):
        with pytest.raises(DataError, match="the shapes of a batch are"):
            batch_of_shapes(text)
