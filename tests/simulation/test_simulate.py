"""A simulated step holds the bytes of the real one, rank by rank and stratum by stratum, and says where it ends."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.side_by_side.sent_bytes import sent_bytes
from lightning_amp import GLUE, AMPStrategy, SingleCellDataModule, StratumMemoryMonitor
from lightning_amp.costs.model_shape import DecoderShape, profile_of_module
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.errors import InstallError, PlanError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.footprint.module_profile import GRADIENTS, PARAMETERS
from lightning_amp.installing.describe_module import describe
from lightning_amp.installing.install import install
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.build_rules import with_strata_by_speed
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.profiling.profile import Profile
from lightning_amp.profiling.read_profile import profile
from lightning_amp.simulation import count_rank
from lightning_amp.simulation.count_rank import RankResult
from lightning_amp.simulation.models_without_values import DecoderAlone, Subject, decoder_subject
from lightning_amp.simulation.simulate import Simulation, request_reference, simulate, simulate_plan
from lightning_amp.techniques.data.gradient_sync import GradientSync
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.planning.profiles import rna
from tests.planning.work_cases import shape as sizes_of_decoder
from tests.ranks import run_ranks

BATCH = 6
LATE = 4
"""Steps that may be disturbed."""


shape = partial(sizes_of_decoder, anchors=150, window=16, strata=4)


def planned(shape: DecoderShape, strategies: str, *, ranks: int, budget: int | None = None) -> Plan:
    known = describe(decoder_subject(shape, batch_size=BATCH).module, batch_size=BATCH)
    request = {"devices": ranks, "device_memory": budget, "strategies": strategies, "batch_size": BATCH}
    return plan(profile_of_module(known), shape=known, **request)


CASES: dict[str, tuple[DecoderShape, str]] = {
    "S1": (shape(), "S1"),
    "S1, gathered nodes, two batches": (shape(features=(150, 140, 100, 3), n_batches=2), "S1,S4"),
    "S1,S3 paper chained": (shape(variant="paper", chained=True, window=100), "S1,S3"),
    "S1,S4 convolution": (shape(attention=False, dim=5), "S1,S4"),
    "S2": (shape(features=(150, 149, 1, 3)), "S1,S2"),
    "S3,S5": (shape(dim=10), "S1,S3,S5"),
    "all": (shape(dim=10), "S1,S2,S3,S4,S5"),
    # the peak is in a reduce-scatter, in which gloo's ranks receive the rows of all
    "all, wide": (shape(dim=64), "S1,S2,S3,S4,S5"),
}


def simulated(name: str, *, ranks: int, budget: int | None = None) -> Simulation:
    decoder, strategies = CASES[name]
    made = planned(decoder, strategies, ranks=ranks, budget=budget)
    return simulate_plan(lambda: decoder_subject(decoder, batch_size=BATCH), made)


SOME = [
    "S1, gathered nodes, two batches",
    "S1,S3 paper chained",
    "S1,S4 convolution",
    "S2",
    "S3,S5",
    "all",
    "all, wide",
]


def real_steps(rank: int, world_size: int, names: list[str]) -> dict[str, tuple[int, list[int]]]:
    """Case -> peak and bytes after each stratum of the second step."""
    found = {}
    plans = {name: planned(*CASES[name], ranks=world_size) for name in names}
    for name, made in plans.items():
        decoder = CASES[name][0]
        axes = (made.mesh.data, made.mesh.model)
        mesh = init_device_mesh("cpu", axes, mesh_dim_names=("data", "model"))
        found[name] = real_step(decoder, made, mesh)
    return found


def real_step(decoder: DecoderShape, made: Plan, mesh: Any) -> tuple[int, list[int]]:
    torch.manual_seed(0)
    module = DecoderAlone(decoder)
    n_features = sum(decoder.features)
    batch = {
        "u": torch.randn(BATCH, decoder.dim),
        "v": torch.randn(decoder.anchors, decoder.dim),
        "x": torch.poisson(torch.ones(BATCH, n_features)),
        "library": torch.full((BATCH, 1), 9.0),
        "batch": torch.arange(BATCH) % decoder.n_batches,
    }
    installed = install(module, made, mesh)
    gradients = GradientSync(
        module.parameters(), mesh, partial=installed.partial, sharded=[s.shard for s in installed.sharded]
    )
    optimizers = module.configure_optimizers()

    def backward(loss: Tensor) -> None:
        loss.backward()
        gradients.reduce()

    module.optimizers, module.manual_backward = lambda: optimizers[0], backward
    gradients.watch()
    module.training_step(batch, 0)
    # gloo's threads may let go of a tensor late, which can only add: the least of some steps is the step's own
    steps = [measured_step(module, batch, optimizers[0]) for _ in range(LATE + 1)]
    peaks, strata = zip(*steps, strict=True)
    return min(peaks), [min(held) for held in zip(*strata, strict=True)]


def measured_step(module: DecoderAlone, batch: dict[str, Tensor], optimizer: Any) -> tuple[int, list[int]]:
    batch["u"].grad = batch["v"].grad = None
    live, strata = LiveBytes(), []
    hooks = [s.register_forward_hook(lambda *_: strata.append(live.current)) for s in module.decoder.strata]
    held = [*module.parameters(), *module.buffers()]
    live.watch([held, [p.grad for p in module.parameters()], dict(optimizer.state), batch])
    with live:
        module.training_step(batch, 1)
    for hook in hooks:
        hook.remove()
    return live.peak, strata


def test_compiled_strata_are_simulated_as_they_are() -> None:
    as_it_is, compiled = (
        simulate_plan(lambda: decoder_subject(shape(), batch_size=BATCH), planned(shape(), strategies, ranks=1))
        for strategies in ("S4,fused,sparse", "S4,fused,sparse,compile")
    )
    assert compiled.peak_bytes == as_it_is.peak_bytes
    assert compiled.bytes_of_strata == as_it_is.bytes_of_strata


@pytest.mark.full
@pytest.mark.ranks
def test_simulated_bytes_are_the_real_ones(tmp_path) -> None:
    real = run_ranks(real_steps, 2, tmp_path, SOME)
    for name in SOME:
        found = simulated(name, ranks=2)
        assert found.status == "ok"
        assert found.peak_bytes == tuple(rank[name][0] for rank in real), name
        assert found.worst.strata_bytes == tuple(real[found.worst.rank][name][1]), name
        assert sum(found.worst.breakdown.values()) == max(found.peak_bytes)
        assert min(found.worst.breakdown.values()) > 0


@pytest.mark.parametrize("strategies", ["S1", "S1,S3,S4", "replay"])
def test_the_reference_model_holds_what_a_trainer_measures(strategies, tmp_path) -> None:
    synthesize(tmp_path / "data", cells=24, bins=30, strata=3, genes=20, seed=1)
    monitor = StratumMemoryMonitor(every_n_steps=1, dirpath=tmp_path, plot=False)
    trainer = trainer_of(AMPStrategy(strategies=strategies), limit_train_batches=2, callbacks=[monitor])
    data = SingleCellDataModule(tmp_path / "data", batch_size=4)
    trainer.fit(GLUE(latent_dim=8, window=8), datamodule=data)
    dist.destroy_process_group()
    *strata, step = [row for row in monitor.rows if row["step"] == 1]
    made = request_reference(profile(tmp_path / "data"), batch_size=4, latent_dim=8, window=8, strategies=strategies)
    found = simulate_plan(*made)
    assert found.worst.strata_bytes == tuple(row["current_bytes"] for row in strata)
    assert found.peak_bytes == (step["peak_bytes"],)


class Sent(TorchDispatchMode, Callback):
    """What a rank of a fit hands to collectives in its second step, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = Counter[str]()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (found := sent_bytes(func, args)) is not None:
            self.kinds[found[0]] += found[1]
        return func(*args, **(kwargs or {}))


def fitted(rank: int, ranks: int, data_dir: str, strategies: str) -> tuple[int, dict[str, int]]:
    """Peak of a later step of a rank, the least of some as in `real_step`, and what it sends in one."""
    found = []
    for callback in (StratumMemoryMonitor(every_n_steps=1, dirpath=f"{data_dir}/{rank}", plot=False), Sent()):
        trainer = trainer_of(
            AMPStrategy(strategies=strategies), rank=rank, ranks=ranks, max_steps=-1, callbacks=[callback]
        )
        trainer.fit(GLUE(latent_dim=8, window=8), SingleCellDataModule(data_dir, batch_size=4))
        found.append(callback)
    peaks = [row["peak_bytes"] for row in found[0].rows if row["stratum"] == "step" and row["rank"] == rank]
    return min(peaks[1:]), dict(found[1].kinds)


AGREEMENT = 2
"""Bytes by which the ranks of a fit agree on their batches."""


@pytest.mark.ranks
@pytest.mark.parametrize(
    "strategies",
    [
        "S2,replay",
        *(pytest.param(one, marks=pytest.mark.full) for one in ("S1,S2,S4", "S1,S2,S3,S4,S5", "strata,replay")),
    ],
)
def test_ranks_of_a_fit_hold_and_send_what_is_simulated(strategies: str, tmp_path) -> None:
    """A pass that reaches no partial gradient, as that of a discriminator, had been taken to sum all of them. Operators
    with which ranks weight a loss and average gradients had moved the segments of a replay.
    """
    synthesize(tmp_path / "data", cells=160, bins=30, strata=3, genes=20, seed=1)
    sizes: dict[str, Any] = {"batch_size": 4, "latent_dim": 8, "window": 8}
    found = simulate_plan(*request_reference(profile(tmp_path / "data"), **sizes, strategies=strategies, devices=2))
    real = run_ranks(fitted, 2, tmp_path, str(tmp_path / "data"), strategies)
    assert found.peak_bytes == tuple(peak for peak, _ in real)
    for (_, sent), one in zip(real, found.ranks, strict=True):
        sent["all_reduce"] -= AGREEMENT
        # gloo sends the rows of a reduce-scatter to their owners
        sent["reduce_scatter"] = sent.pop("all_to_all", 0)
        assert one.comm_bytes == {kind: n for kind, n in sent.items() if n}


def test_a_technique_that_one_rank_cannot_count_alone_is_refused() -> None:
    """It had been left out, and the bytes were those of whole parameters."""
    data = Profile(data_dir="d", modalities=(rna(),), graph=None)
    made = request_reference(data, batch_size=4, latent_dim=8, window=None, strategies="S1,fsdp", devices=2)
    with pytest.raises(PlanError, match="simulate does not support fsdp: it counts the step of one rank by itself"):
        simulate_plan(*made)


def test_every_operator_of_a_step_has_a_place(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    synthesize(tmp_path / "data", cells=24, bins=30, strata=2, genes=20, seed=1)
    sizes: dict[str, Any] = {"batch_size": 4, "latent_dim": 8, "window": 8}
    recorders = []
    result_of = count_rank._result

    def result(recorder: Any, *args: Any, **kwargs: Any) -> RankResult:
        recorders.append(recorder)
        return result_of(recorder, *args, **kwargs)

    monkeypatch.setattr(count_rank, "_result", result)
    simulate(*request_reference(profile(tmp_path / "data"), **sizes, strategies="S1", devices=2), rank=0)
    (found,) = recorders
    strata = count_rank.Strata("decoders.hic")
    every = [strata.place(found.lives, found.work, at) for at in range(len(found.work))]
    outside, others, reduced = "the encoders and the graph", "the other decoders", "the reduction of gradients"
    # the discriminator has its own step first
    discriminator = ["the weights, optimiser state and batch", outside, f"the backward pass of {outside}", reduced]
    forward = ["the optimiser step", "stratum 0", others, "stratum 1"]
    backward = [f"the backward pass of {where}" for where in (others, "stratum 1", "stratum 0")]
    assert list(dict.fromkeys(every)) == [*discriminator, *forward, *backward]
    changes = [place for k, place in enumerate(every) if k == 0 or every[k - 1] != place]
    # a few operators of Lightning's loop lie between
    passes = [place for place in changes if place != others]
    assert passes[-3:] == [f"the backward pass of {outside}", reduced, "the optimiser step"]


@pytest.mark.long
def test_a_step_ends_where_the_budget_does() -> None:
    free = simulated("S1", ranks=1)
    assert free.worst.requested_bytes is None
    for k, held in list(enumerate(free.worst.strata_bytes))[1:]:
        found = simulated("S1", ranks=1, budget=held - 1)
        assert found.status == f"out of memory at stratum {k}"
        assert found.worst.failed_at == f"stratum {k}"
        assert found.worst.strata_bytes == free.worst.strata_bytes[:k]
        before = found.worst.peak_bytes - found.worst.requested_bytes
        assert before <= held - 1 < found.worst.peak_bytes
    peak = max(simulated("S3,S5", ranks=2).peak_bytes)
    found = simulated("S3,S5", ranks=2, budget=peak - 1)
    assert found.status == "out of memory at the backward pass of stratum 3"
    assert len(found.worst.strata_bytes) == 4
    assert simulated("S1", ranks=1, budget=1000).status.endswith("the weights, optimiser state and batch")
    assert simulated("S1", ranks=1, budget=max(free.peak_bytes)) == replace(
        free, plan=planned(CASES["S1"][0], "S1", ranks=1, budget=max(free.peak_bytes))
    )


@pytest.mark.long
def test_a_fast_rank_is_predicted_to_need_the_memory_of_its_strata() -> None:
    """It had been that of ranks of one speed, of which each has two."""
    decoder, known = shape(), describe(decoder_subject(shape(), batch_size=BATCH).module, batch_size=BATCH)
    equal = planned(decoder, "S1,strata", ranks=2)
    made = with_strata_by_speed(equal, known, (1.0, 0.3))
    (spec,) = [rule.spec for rule in made.rules if rule.strategy == "strata"]
    assert spec.ends == "3,4"
    step = simulate_plan(lambda: decoder_subject(decoder, batch_size=BATCH), made)
    # the batch is not in the shape
    batch = sum(t.nbytes for t in decoder_subject(decoder, batch_size=BATCH).batch.values())
    assert max(step.peak_bytes) == pytest.approx(made.predicted_peak_bytes + batch, rel=0.02)
    assert made.predicted_peak_bytes > 1.05 * equal.predicted_peak_bytes


def test_parts_that_are_left_out_change_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of chunks with equal bytes a few are counted."""
    decoder, found, lengths = shape(anchors=60_000, window=64, strata=2), [], []
    made = planned(decoder, "S1,S4,fused,sparse,stream", ranks=1)
    result_of = count_rank._result

    def result(recorder: Any, *args: Any, **kwargs: Any) -> RankResult:
        lengths.append(len(recorder.work))
        return result_of(recorder, *args, **kwargs)

    monkeypatch.setattr(count_rank, "_result", result)
    for counting in (count_rank.leaving_out_equal, nullcontext):
        monkeypatch.setattr(count_rank, "leaving_out_equal", counting)
        found.append(simulate(lambda: decoder_subject(decoder, batch_size=BATCH), made, rank=0))
    assert found[0] == found[1]
    assert 1.5 * lengths[0] < lengths[1]


def test_communication_of_s2_by_hand() -> None:
    decoder = shape(anchors=40, dim=4, window=8, strata=3)
    found = simulate(lambda: decoder_subject(decoder, batch_size=BATCH), planned(decoder, "S1,S2", ranks=2), rank=0)
    parameters = list(decoder_subject(decoder, batch_size=BATCH).module.parameters())
    n_partial = sum(p.numel() for p in parameters) - 3
    forward_and_border = 4 + 4 * (BATCH * 4 + 40 * 4 + 3)
    normalisers = 3 * BATCH * 4
    assert found.comm_bytes == {
        "all_gather": normalisers,
        "all_reduce": normalisers + forward_and_border + len(parameters) + 4 * n_partial,
    }


def test_nothing_is_left_behind_and_nothing_is_shared_with_a_real_group() -> None:
    decoder, _ = CASES["S1"]
    made = planned(decoder, "S1,S2", ranks=2)

    def broken() -> Subject:
        subject = decoder_subject(decoder, batch_size=BATCH)
        subject.module.decoder.strata[1].features = nn.Identity()
        return subject

    with pytest.raises(InstallError, match="whose stratum 1 has features="):
        simulate_plan(broken, made)
    subject = decoder_subject(decoder, batch_size=BATCH)
    expected, names = simulate_plan(lambda: subject, made), set(subject.module.state_dict())
    assert set(subject.module.state_dict()) == names
    assert all(p.grad is None for p in subject.module.parameters())
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert simulate_plan(lambda: subject, made) == expected
    finally:
        dist.destroy_process_group()


class Unreached(DecoderAlone):
    """Has parameters that no step reaches, and one whose gradient is a view of a larger tensor."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__(shape)
        self.idle = nn.Linear(100, 100)
        self.pair = nn.Parameter(torch.empty(500))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.decoder(batch["u"], batch["v"], **{n: batch[n] for n in ("batch", "library", "x")})
        loss = loss + torch.cat((self.pair, self.pair.detach())).square().sum()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def test_the_step_before_leaves_the_gradients_that_this_one_does() -> None:
    decoder, _ = CASES["S1"]
    made = planned(decoder, "S1", ranks=1)

    def make() -> Subject:
        with torch.device("meta"):
            module = Unreached(decoder)
        return Subject(module=module, batch=decoder_subject(decoder, batch_size=BATCH).batch)

    module = make().module
    reached = sum(p.nbytes for name, p in module.named_parameters() if not name.startswith("idle"))
    found = simulate(make, made, rank=0)
    assert found.breakdown[GRADIENTS] == reached + 500 * 4
    assert found.breakdown["optimiser state"] < found.breakdown[PARAMETERS] - 100 * 101 * 4
