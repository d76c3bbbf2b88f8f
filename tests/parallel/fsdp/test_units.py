"""Claim: what is gathered together is every parameter once, and a block by itself only where nothing else uses it."""

from torch import nn

from lightning_amp.parallel.fsdp.units import find_units, units_of


def test_a_block_that_shares_a_parameter_is_left_to_the_root() -> None:
    module = nn.Module()
    module.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)])
    module.head = nn.Linear(3, 3)
    module.head.weight = module.blocks[1].weight  # type: ignore[union-attr,assignment]
    assert list(find_units(module)) == ["blocks.0", "blocks.3"]
    names = {unit.fqn: [parameter.name for parameter in unit.parameters] for unit in units_of(module)}
    assert names == {
        "blocks.0": ["blocks.0.weight", "blocks.0.bias"],
        "blocks.3": ["blocks.3.weight", "blocks.3.bias"],
        "": ["blocks.1.weight", "blocks.1.bias", "head.bias"],
    }
