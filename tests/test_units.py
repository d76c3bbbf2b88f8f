"""Claim: a decoder made of a user's own units needs a loss per unit and nothing else to be streamed, computed again, or
dealt to ranks, exactly; test_adapters.py starts the ranks.
"""

import pytest
from torch import nn

from lightning_amp.errors import ModelError
from lightning_amp.models.units import UnitDecoder
from lightning_amp.parallel.capabilities import with_unsupported
from lightning_amp.parallel.describe import describe, unpredicted
from tests.foreign_cases import units
from tests.unit_cases import DIM, SIZES, Chromosome, Counts


def test_one_device_trains_the_same() -> None:
    assert all(far <= 1e-10 for far in units(0, 1).values())


def test_the_plan_knows_what_units_can_do() -> None:
    module = Counts()
    shape = with_unsupported(module, describe(module, batch_size=7))
    assert shape.decoder is not None
    assert shape.decoder.features == SIZES
    assert shape.decoder.unsupported == ("S2", "S3", "S4", "S5", "fused", "sparse", "nodes")
    assert "what the units of UnitDecoder keep is not predicted" in unpredicted(module, shape)[0]


def test_no_unit_and_something_else_are_refused() -> None:
    with pytest.raises(ModelError, match=r"UnitDecoder got 'nothing' for units; allowed are one or more"):
        UnitDecoder([], n_anchors=3, dim=DIM)
    with pytest.raises(ModelError, match=r"UnitDecoder got \['Linear'\] for units"):
        UnitDecoder([Chromosome(0, 3), nn.Linear(2, 2)], n_anchors=3, dim=DIM)  # type: ignore[list-item]
