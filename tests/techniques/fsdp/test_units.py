"""Claim: what is gathered together is every parameter once, and a block by itself only where nothing else uses it; a
block that is called with other parameters than those that are gathered is refused.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call

from lightning_amp.errors import ModelError
from lightning_amp.footprint.find_blocks import blocks_with_own_parameters
from lightning_amp.techniques.fsdp.fully_sharded import refuse_swapped
from lightning_amp.techniques.fsdp.look import units_of


def test_a_block_that_shares_a_parameter_is_left_to_the_root() -> None:
    module = nn.Module()
    module.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)])
    module.head = nn.Linear(3, 3)
    module.head.weight = module.blocks[1].weight  # type: ignore[union-attr,assignment]
    assert list(blocks_with_own_parameters(module)) == ["blocks.0", "blocks.3"]
    names = {unit.fqn: [parameter.name for parameter in unit.parameters] for unit in units_of(module)}
    assert names == {
        "blocks.0": ["blocks.0.weight", "blocks.0.bias"],
        "blocks.3": ["blocks.3.weight", "blocks.3.bias"],
        "": ["blocks.1.weight", "blocks.1.bias", "head.bias"],
    }


def test_a_block_that_is_called_with_other_parameters_is_refused() -> None:
    block, x = nn.Sequential(nn.Linear(3, 3)), torch.ones(2, 3)
    block.register_forward_pre_hook(partial(refuse_swapped, "blocks.0"), prepend=True)
    block(x)
    with pytest.raises(ModelError, match=r"'blocks.0' is called with other parameters than its own"):
        functional_call(block, {name: 2 * p for name, p in block.named_parameters()}, (x,))
