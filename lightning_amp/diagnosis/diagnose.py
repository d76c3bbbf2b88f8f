"""The three bottleneck signals of AMP, read from a profile (Zhang et al. 2026, Section 3.2 and Table 3).

Signals concern the modality with three-dimensional contacts only: without one, data parallelism is enough
(Section 3.3), and the diagnosis is empty.
"""

from collections.abc import Callable

from lightning_amp.diagnosis.diagnosis import Diagnosis, Finding
from lightning_amp.profiling.profile import ModalityProfile, Profile

HIGH_INPUT_DIMENSIONALITY = "HIGH_INPUT_DIMENSIONALITY"
ATTENTION_DECODER = "ATTENTION_DECODER"
HEAVY_DECOMPOSITION = "HEAVY_DECOMPOSITION"

DIMENSIONALITY_RATIO = 10.0
"""Features relative to the next largest modality: "over one order of magnitude" (Section 3.2)."""

DECOMPOSED_STRATA = 2
"""Strata from which a decoder counts as a "multi-layer decomposed structure" (Table 3)."""

Signal = Callable[[ModalityProfile], Finding]


def high_input_dimensionality(modality: ModalityProfile) -> Finding:
    """Raised when the modality has over an order of magnitude more features than the next largest."""
    if modality.scale is None:
        raised, evidence = False, f"{modality.features:,} features, no other modality to compare with"
    else:
        raised = modality.scale >= DIMENSIONALITY_RATIO
        sign = ">=" if raised else "<"
        evidence = (
            f"{modality.features:,} features, {modality.scale:.1f} x the next largest modality"
            f" ({sign} {DIMENSIONALITY_RATIO:g} x)"
        )
    return Finding(signal=HIGH_INPUT_DIMENSIONALITY, modality=modality.name, raised=raised, evidence=evidence)


def attention_decoder(modality: ModalityProfile) -> Finding:
    """Raised when the modality's decoder builds its keys with attention."""
    parts = modality.decomposition
    raised = parts is not None and parts.attention
    evidence = f"keys of {parts.anchors:,} anchors by local attention" if parts and raised else "no attention"
    return Finding(signal=ATTENTION_DECODER, modality=modality.name, raised=raised, evidence=evidence)


def heavy_decomposition(modality: ModalityProfile) -> Finding:
    """Raised when the modality's decoder repeats its block over several strata."""
    parts = modality.decomposition
    strata = parts.strata if parts else 1
    raised = strata >= DECOMPOSED_STRATA
    noun = "stratum" if strata == 1 else "strata"
    return Finding(
        signal=HEAVY_DECOMPOSITION,
        modality=modality.name,
        raised=raised,
        evidence=f"{strata} {noun} in the decoder",
    )


SIGNALS: tuple[Signal, ...] = (high_input_dimensionality, attention_decoder, heavy_decomposition)


def diagnose(profile: Profile) -> Diagnosis:
    """Look for every signal in every modality whose decoder is decomposed."""
    spatial = [m for m in profile.modalities if m.decomposition is not None]
    return Diagnosis(profile=profile, findings=tuple(signal(m) for signal in SIGNALS for m in spatial))
