"""Claim: what a block's forms in chunks would make of a step's peak is known before any is installed, nearly as it is
counted with them; blocks without such a form say why.
"""

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_amp.costs.rule import Rule
from lightning_amp.footprint.chain.chain import CHUNKED, RECOMPUTED, peak_bytes
from lightning_amp.footprint.chain.chain_of import count_step
from lightning_amp.footprint.profile_module import profile_module
from lightning_amp.installing.install import install_rules
from lightning_amp.techniques.chunk.forms import ChunkForms
from lightning_amp.techniques.chunk.look import block_tables
from lightning_amp.techniques.chunk.row import ChunkBlock
from lightning_amp.techniques.recompute.row import RecomputeBlock
from tests.graph.test_capture import Custom
from tests.techniques.chunk.small_blocks import Attention, FeedForward


class Blocks(pl.LightningModule):
    """Blocks one after the other."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def forms_of(module: Blocks, batch: Tensor) -> ChunkForms:
    step = count_step(module, batch, ())
    chain, calls = step.chain, step.calls
    return ChunkForms(chain, lambda: block_tables(module, calls))


def rules(forms: ChunkForms, chosen: dict[str, int]) -> list[Rule]:
    """What a plan has for them."""
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
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)
    installed.undo()
    assert not any("forward" in vars(block) for block in module.blocks)


def test_a_block_that_cannot_run_in_chunks_says_why() -> None:
    x = torch.randn(8, 6)
    assert "'Twice'" in forms_of(Blocks(Custom()), torch.randn(3, 4)).reason
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
