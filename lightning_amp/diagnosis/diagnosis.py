"""Define `Diagnosis`, a list of findings: each known signal, raised or not, with the numbers behind it."""

from dataclasses import dataclass

from lightning_amp.profiling.profile import Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One signal looked for in one modality, or in the whole profile.

    Attributes:
        signal: Name of the signal, for example "ATTENTION_DECODER".
        modality: Modality it was looked for in; None for a signal from outside, which sees the whole profile.
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
        """The first raised finding of that signal, None for None."""
        return next((f for f in self.findings if f.raised and f.signal == signal), None)
