"""Derive bottleneck signals from a profile: AMP's three (Zhang et al. 2026, Table 3), then registered ones.

    HIGH_INPUT_DIMENSIONALITY   n_features >> other modalities                    10 times the next largest
    ATTENTION_DECODER           decoder uses attention                            its keys are built with attention
    HEAVY_DECOMPOSITION         decoder has multi-layer decomposed structure      2 strata or more

The columns are the signal, its definition in Table 3, and the criterion here. The three are checked only for a
modality with Hi-C contacts: without one, data parallelism is enough (Section 3.3). A signal from `register_signal`
reads the whole profile (AMP's fifth principle, Section 3.1).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_amp.errors import PlanError
from lightning_amp.profiling.profile import ModalityProfile, Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Result of checking one signal in one modality, or in the whole profile.

    Attributes:
        signal: Name of the signal, for example "ATTENTION_DECODER".
        modality: Modality that was checked; None for a registered signal, which reads the whole profile.
        raised: Whether the criterion holds.
        evidence: The numbers and the criterion, as one sentence.
    """

    signal: str
    modality: str | None
    raised: bool
    evidence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The findings over a profile, in the order in which the signals are registered."""

    profile: Profile
    findings: tuple[Finding, ...]

    @property
    def signals(self) -> tuple[str, ...]:
        """Names of the raised signals, each once."""
        return tuple(dict.fromkeys(f.signal for f in self.findings if f.raised))

    def finding(self, signal: str | None) -> Finding | None:
        """Return the first raised finding of the signal; None if there is none or `signal` is None."""
        return next((f for f in self.findings if f.raised and f.signal == signal), None)


HIGH_INPUT_DIMENSIONALITY = "HIGH_INPUT_DIMENSIONALITY"
ATTENTION_DECODER = "ATTENTION_DECODER"
HEAVY_DECOMPOSITION = "HEAVY_DECOMPOSITION"

DIMENSIONALITY_RATIO = 10.0
"""Features relative to the next largest modality. Table 3 says "n_features >> other modalities"; Section 3.2 takes
"over one order of magnitude" as the practical criterion and calls the threshold domain-specific."""

DECOMPOSED_STRATA = 2
"""Strata from which a decoder counts as a "multi-layer decomposed structure" (Table 3)."""

Detect = Callable[[Profile], tuple[bool, str]]
"""Function of a registered signal: returns whether it is raised, and the evidence as one sentence."""
_NAME = re.compile(r"[A-Z][A-Z0-9_]*")


def high_input_dimensionality(modality: ModalityProfile) -> tuple[bool, str]:
    """Raised when the modality has over an order of magnitude more features than the next largest."""
    if modality.scale is None:
        return False, f"{modality.features:,} features, no other modality to compare with"
    raised = modality.scale >= DIMENSIONALITY_RATIO
    ratio = f"{modality.scale:.1f} x the next largest modality ({'>=' if raised else '<'} {DIMENSIONALITY_RATIO:g} x)"
    return raised, f"{modality.features:,} features, {ratio}"


def attention_decoder(modality: ModalityProfile) -> tuple[bool, str]:
    """Raised when the modality's decoder builds its keys with attention; the evidence states the attention range."""
    parts = modality.decomposition
    if parts is None or not parts.attention:
        return False, "no attention"
    how, width = ("full", f", of an anchor to all {parts.anchors:,}") if parts.full else ("local", "")
    if parts.window is not None:
        met = min(3 * parts.window, parts.anchors)
        width = f", of an anchor to {met:,} in 3 buckets of {parts.window:,}"
    known_from = f" ({parts.known_from})" if parts.known_from else ""
    return True, f"keys of {parts.anchors:,} anchors by {how} attention{width}{known_from}"


def heavy_decomposition(modality: ModalityProfile) -> tuple[bool, str]:
    """Raised when the modality's decoder repeats its block over several strata."""
    strata = modality.decomposition.strata if modality.decomposition else 1
    return strata >= DECOMPOSED_STRATA, f"{strata} {'stratum' if strata == 1 else 'strata'} in the decoder"


SIGNALS: dict[str, Callable[[ModalityProfile], tuple[bool, str]]] = {
    HIGH_INPUT_DIMENSIONALITY: high_input_dimensionality,
    ATTENTION_DECODER: attention_decoder,
    HEAVY_DECOMPOSITION: heavy_decomposition,
}
FROM_OUTSIDE: dict[str, Detect] = {}
"""Signals registered with `register_signal`, in order."""


def register_signal(name: str, detect: Detect) -> None:
    """Register a signal that `diagnose` checks after AMP's three.

    Args:
        name: Name of the signal, in capitals.
        detect: Function that takes a Profile and returns a pair of bool and str: whether the signal is raised, and one
            sentence with the numbers and the criterion.

    Raises:
        PlanError: The name is invalid or already registered, or `detect` is not callable.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PlanError(
            f"a signal was registered as {name!r}; allowed are capitals, digits and _, such as 'SPARSE_INPUT'"
        )
    if name in known_signals():
        raise PlanError(
            f"a signal was registered as {name!r}, which is registered already; choose a name other than"
            f" {', '.join(known_signals())}, and register once in a process"
        )
    if not callable(detect):
        raise PlanError(f"the signal {name!r} was registered with detect={detect!r}; allowed is a function")
    FROM_OUTSIDE[name] = detect


def known_signals() -> tuple[str, ...]:
    """Names of all signals that `diagnose` checks."""
    return (*SIGNALS, *FROM_OUTSIDE)


def diagnose(profile: Profile) -> Diagnosis:
    """Check AMP's signals in every modality with a decomposed decoder, then registered signals.

    Raises:
        PlanError: The function of a registered signal did not return a pair of bool and str.
    """
    spatial = [m for m in profile.modalities if m.decomposition is not None]
    answers: list[tuple[str, str | None, Any]] = [(n, m.name, look(m)) for n, look in SIGNALS.items() for m in spatial]
    answers += [(name, None, detect(profile)) for name, detect in FROM_OUTSIDE.items()]
    findings = []
    for name, modality, answer in answers:
        raised, evidence = answer if isinstance(answer, tuple) and len(answer) == 2 else (None, None)
        if not isinstance(raised, bool) or not isinstance(evidence, str):
            raise PlanError(
                f"the signal {name!r} answered {answer!r}; allowed is a pair of True or False and a sentence with the"
                " numbers behind it, such as (True, '95 % of the counts are zero')"
            )
        findings.append(Finding(signal=name, modality=modality, raised=raised, evidence=evidence))
    return Diagnosis(profile=profile, findings=tuple(findings))
