"""Claim: the three signals of AMP are raised by the criteria of the paper's Table 3, and carry their evidence."""

from dataclasses import replace

import pytest

from lightning_amp.diagnosis import (
    ATTENTION_DECODER,
    DIMENSIONALITY_RATIO,
    HEAVY_DECOMPOSITION,
    HIGH_INPUT_DIMENSIONALITY,
    diagnose,
)
from tests.planning.profiles import hic, profile, rna


def test_heavy_configuration_raises_all_three_with_numbers() -> None:
    diagnosis = diagnose(profile())
    assert diagnosis.signals == (HIGH_INPUT_DIMENSIONALITY, ATTENTION_DECODER, HEAVY_DECOMPOSITION)
    assert "34.0 x" in diagnosis.findings[0].evidence
    assert "5,400 anchors" in diagnosis.findings[1].evidence
    assert "32 strata" in diagnosis.findings[2].evidence


@pytest.mark.parametrize(
    ("modality", "absent"),
    [
        (hic(scale=DIMENSIONALITY_RATIO - 0.1), HIGH_INPUT_DIMENSIONALITY),
        (hic(scale=None), HIGH_INPUT_DIMENSIONALITY),
        (hic(attention=False), ATTENTION_DECODER),
        (hic(strata=1), HEAVY_DECOMPOSITION),
    ],
)
def test_each_signal_depends_on_its_own_criterion_only(modality, absent) -> None:
    signals = diagnose(profile(modality, rna())).signals
    assert absent not in signals
    assert len(signals) == 2


@pytest.mark.parametrize(
    ("parts", "evidence"),
    [
        ({"full": True, "known_from": "declared by A"}, "full attention, of an anchor to all 5,400 (declared by A)"),
        ({"window": 640}, "local attention, of an anchor to 1,920 in 3 buckets of 640"),
        ({"window": 2000}, "local attention, of an anchor to 5,400 in 3 buckets of 2,000"),
        ({"known_from": "as it was requested"}, "local attention (as it was requested)"),
    ],
)
def test_attention_is_local_or_full_with_its_width_and_from_where_that_is_known(parts, evidence) -> None:
    modality = hic()
    modality = replace(modality, decomposition=replace(modality.decomposition, **parts))
    (found,) = (f for f in diagnose(profile(modality, rna())).findings if f.signal == ATTENTION_DECODER)
    assert found.raised
    assert found.evidence == f"keys of 5,400 anchors by {evidence}"


def test_without_three_dimensional_contacts_nothing_is_looked_for() -> None:
    assert diagnose(profile(rna())).findings == ()
