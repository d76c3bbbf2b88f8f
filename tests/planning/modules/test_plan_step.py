"""Claim: `lightning_amp.plan` takes what `lightning_amp.profile` gives, of a module too; both print as reports."""

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_amp
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import ModelError, PlanError
from lightning_amp.footprint.chain.chain import CHUNKED, RECOMPUTED, peak_bytes
from lightning_amp.footprint.chain.chain_of import count_step
from lightning_amp.footprint.profile_module import profile_module
from lightning_amp.installing.install import install_rules
from lightning_amp.planning.plan.mesh_shape import MeshShape
from lightning_amp.techniques.chunk.forms import ChunkForms
from lightning_amp.techniques.chunk.look import block_tables
from lightning_amp.techniques.chunk.row import ChunkBlock
from lightning_amp.techniques.recompute.row import RecomputeBlock
from tests.odd_modules.collection.blocks import DIM
from tests.odd_modules.collection.hooks import Custom
from tests.optimised import Optimised
from tests.planning import profiles as sizes
from tests.techniques.chunk.small_blocks import Attention, FeedForward


class Deep(Optimised, by=torch.optim.Adam):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6)]
        self.blocks = nn.Sequential(*blocks)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(batch).square().mean()


@pytest.fixture(scope="module")
def profile() -> Any:
    return lightning_amp.profile(Deep(), torch.randn(512, 32))


def test_a_modules_profile_is_planned(profile: Any) -> None:
    as_it_is = lightning_amp.plan(profile)
    assert (as_it_is.strategies, as_it_is.rules, as_it_is.fits) == ((), (), None)
    assert as_it_is.predicted_peak_bytes == profile.peak_bytes
    budget = int(0.6 * profile.peak_bytes)
    within = lightning_amp.plan(profile, device_memory=budget)
    assert within.fits
    assert within.strategies == ("recompute",)
    assert within.batch_size == 512
    assert within.predicted_peak_bytes <= budget
    two = lightning_amp.plan(profile, devices=2, strategies="fsdp")
    assert two.strategies == ("S1", "fsdp")
    assert two.predicted_peak_bytes < lightning_amp.plan(profile, devices=2).predicted_peak_bytes
    assert lightning_amp.plan(profile, device_memory=1000).fits is False
    assert lightning_amp.Plan.from_json(within.to_json()) == within
    assert lightning_amp.plan(pickle.loads(pickle.dumps(profile)), device_memory=budget) == within


def test_what_cannot_be_profiled_or_planned_is_refused(profile: Any) -> None:
    with pytest.raises(ModelError, match=r"'Deep' requires a batch, an example .*profile\(module, batch\)"):
        lightning_amp.profile(Deep())
    with pytest.raises(PlanError, match="cannot plan a 'ModuleProfile'; pass a module and a batch"):
        lightning_amp.plan(profile_module(Deep(), torch.randn(4, 32)))
    with pytest.raises(PlanError, match="cannot plan a 'Deep'; pass"):
        lightning_amp.plan(Deep())  # type: ignore[call-overload]
    with pytest.raises(PlanError, match="batch_size was given with the profile of a module's step"):
        lightning_amp.plan(profile, batch_size=4)
    data = sizes.profile()
    for call, said in (
        (lambda: lightning_amp.plan(data, latent_dim=3), "latent_dim=3 is not supported; .* even for local attention"),
        (lambda: lightning_amp.plan(data, torch.zeros(2)), "batch was given with a directory's profile"),
        (lambda: lightning_amp.profile("data", batch_size=4), "batch_size was given with a directory"),
        (lambda: lightning_amp.profile(Deep(), torch.zeros(2, 32), setting="x"), "setting was given with a module"),
    ):
        with pytest.raises(PlanError, match=said):
            call()  # type: ignore[no-untyped-call]
    with pytest.raises(PlanError, match="chunk is not possible: the blocks were not looked at"):
        lightning_amp.plan(profile, strategies="chunk", device_memory="1MiB")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"model_parallel_size": 3}, r"model_parallel_size=3 .* with 4 devices; .* one of \[1, 2, 4\]"),
        ({"model_parallel_size": 8}, "model_parallel_size=8 is not supported with 4 devices"),
        ({"model_parallel_size": 0}, "model_parallel_size=0 is not supported; allowed are"),
        ({"model_parallel_size": True}, "model_parallel_size=True is not supported; allowed are"),
        ({"model_parallel_size": 2, "policy": "paper"}, "model_parallel_size=2 .* S1 split nothing over"),
    ],
)
def test_a_model_axis_that_cannot_be_is_refused(profile: Any, request_: Any, message: str) -> None:
    """Three ranks of four had been planned, and the others left out."""
    with pytest.raises(PlanError, match=message):
        lightning_amp.plan(profile, devices=4, **request_)


def test_one_rank_of_the_model_axis_has_no_stages() -> None:
    module, batch = Blocks(*(nn.Linear(64, 64) for _ in range(4))), torch.randn(4, 64)
    free, one = (
        lightning_amp.plan(module, batch, devices=2, device_memory="130KiB", model_parallel_size=size).plan
        for size in ("auto", 1)
    )
    assert "pipeline" in free.strategies
    assert one.mesh == MeshShape(data=2, model=1)
    assert "pipeline" not in one.strategies


class Skips(Deep):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        return -1


def test_a_step_that_is_not_run_has_no_profile() -> None:
    """It had a peak of 0 bytes."""
    for module, batch in ((Deep(), None), (Skips(), torch.randn(4, 32))):
        with pytest.raises(ModelError, match="whose training_step was not called"):
            profile_module(module, batch)


class Blocks(Optimised, by=torch.optim.Adam):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()


def forms_of(module: Blocks, batch: Tensor) -> ChunkForms:
    step = count_step(module, batch, ())
    chain, calls = step.chain, step.calls
    return ChunkForms(chain, lambda: block_tables(module, calls))


def rules(forms: ChunkForms, chosen: dict[str, int]) -> list[Rule]:
    found = []
    for name, number in chosen.items():
        if number == RECOMPUTED or forms.form(name, number).again:
            found.append(Rule(fqn=name, strategy="recompute", spec=RecomputeBlock(), why="a test"))
        if number >= CHUNKED:
            spec = ChunkBlock(budget_bytes=forms.form(name, number).budget_bytes)
            found.append(Rule(fqn=name, strategy="chunk", spec=spec, why="a test"))
    return sorted(found, key=lambda rule: rule.strategy, reverse=True)


@pytest.mark.full
@pytest.mark.long
def test_the_peak_of_every_form_is_nearly_that_which_is_counted() -> None:
    module, batch = Blocks(*(Attention(16) for _ in range(3))), torch.randn(2, 64, 16)
    forms = forms_of(module, batch)
    block = forms.chain.blocks[0]
    again = [form.again for form in block.chunks]
    assert again == sorted(again)
    assert 0 < sum(again) < len(again)
    # the least and the most of those that are recomputed, and of the others
    every, one = ("blocks.0", "blocks.1", "blocks.2"), ("blocks.1",)
    kept = len(again) - sum(again)
    for number, names in ((0, every), (kept - 1, one), (kept, every), (len(again) - 1, one)):
        chosen = dict.fromkeys(names, CHUNKED + number)
        installed = install_rules(module, rules(forms, chosen))
        counted = profile_module(module, batch)
        installed.undo()
        assert counted.measured == "fake tensors", counted.reason
        assert peak_bytes(forms.chain, chosen) == pytest.approx(counted.peak_bytes, rel=0.1)


@pytest.mark.long
def test_a_mixture_of_all_forms_trains_to_the_same_numbers() -> None:
    torch.manual_seed(0)
    module, batch = Blocks(*(Attention(16) for _ in range(4))).double(), torch.randn(2, 64, 16).double()
    forms = forms_of(module, batch)
    last = CHUNKED + len(forms.chain.blocks[0].chunks) - 1
    chosen = {"blocks.0": CHUNKED, "blocks.1": RECOMPUTED, "blocks.2": last}
    loss = module.training_step(batch, 0)
    right = [loss, *torch.autograd.grad(loss, list(module.parameters()))]
    installed = install_rules(module, rules(forms, chosen))
    loss = module.training_step(batch, 0)
    found = [loss, *torch.autograd.grad(loss, list(module.parameters()))]
    assert {"blocks.0", "blocks.1", "blocks.2"} == {one.fqn for one in installed.overridden}
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-14)
    installed.undo()
    assert not any("forward" in vars(block) for block in module.blocks)


def test_a_block_that_cannot_run_in_chunks_says_why() -> None:
    x = torch.randn(8, 6)
    assert "'Scale'" in forms_of(Blocks(Custom()), torch.randn(3, DIM)).reason
    alone = Blocks()
    alone.head = nn.Linear(6, 6)
    assert "calls no child of a list" in forms_of(alone, x.requires_grad_()).reason
    assert "draws random numbers" in forms_of(Blocks(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1))), x).reason
    # one block that can is enough
    assert forms_of(Blocks(nn.Dropout(0.1), FeedForward()), torch.randn(64, 6)).reason == ""


def test_a_block_whose_batch_statistics_ranks_exchange_has_no_chunks() -> None:
    blocks = [nn.Sequential(FeedForward(), nn.BatchNorm1d(6)) for _ in range(2)]
    blocks[1][1].eval()
    module = Blocks(*blocks)
    calls = count_step(module, torch.randn(64, 6), ()).calls
    assert not any(isinstance(table, str) for table in block_tables(module, calls))
    trains, frozen = block_tables(module, calls, shared=True)
    assert trains == "ranks exchange the statistics of a BatchNorm in it (share_batch_statistics)"
    assert not isinstance(frozen, str)
