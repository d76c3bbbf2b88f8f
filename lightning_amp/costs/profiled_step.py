"""Define a module's training step as planning sees it (`ProfiledStep`), and a plan in the making (`Draft`).

Legend: bytes are of one rank; D ranks that average gradients, those of the data axis in most plans.

Define what a plan records of pipeline stages: their blocks, their times, and the bytes of their ranks.

Legend: seconds are predicted, of one micro-batch; stage s is on rank s mod the ranks of the model axis.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from lightning_amp.costs.device_rates import Rates
from lightning_amp.costs.rule import Rule, Spec
from lightning_amp.footprint.chain.chain import Chain
from lightning_amp.footprint.module_profile import ACTIVATIONS, HELD, OPTIMISER, ModuleProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage.

    Attributes:
        first, end: Its blocks are first <= i < end.
        rank: Of the model axis.
        forward_seconds, backward_seconds: Of one micro-batch through it.
        send_forward_seconds: Of what its last block returns, to the next stage.
        send_backward_seconds: Of the gradient of what it was sent, to the stage before.
        peak_bytes: Of its rank.
        idle: Share of the schedule in which its rank computes nothing (the bubble).
        rest_seconds: Of the last stage: what it computes once, for the whole batch, before its first backward pass.
    """

    first: int
    end: int
    rank: int
    forward_seconds: float
    backward_seconds: float
    send_forward_seconds: float
    send_backward_seconds: float
    peak_bytes: int
    idle: float
    rest_seconds: float = 0.0


LEAST_SECONDS = 1e-9
ALONE = 2**20
"""Bytes of a gradient from which on it is averaged where it is; smaller ones are put together
(techniques/data/gradient_sync.py)."""
COPIED = 2 * 25 * 2**20
"""Of these there are two buckets at a time."""
WEIGHT_BYTES = 16
"""Of the two integers by which ranks agree on how many cells a step has (lightning/steps/cells.py)."""


class CountedWith(Protocol):
    """A step that was counted with a rule installed."""

    @property
    def profile(self) -> ModuleProfile:
        """Its bytes."""

    @property
    def chain(self) -> Chain:
        """Its blocks, and its seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledStep:
    """A module's step as it is, on one device.

    Attributes:
        profile: Its bytes.
        chain: Its blocks, and what a choice of recomputed ones costs.
        rates: What the device reaches.
        gradient_sizes: Bytes of every gradient that ranks would average.
        facts: By technique, what the `look` of its row has found in the step.
        requested: By technique, the spec that a request or a given plan has for it; else the policy decides.
        refused: Techniques that this module was found to refuse, and why.
        beyond: Sets of techniques -> bytes by which counts with them installed have exceeded the prediction.
        statistics_bytes: What batch norms allocate in addition where several ranks share statistics.
        notes: What else a person should know of the count, one sentence each.
        sent_seconds: Time of a technique's collectives, without those of gradients that ranks average.
        averages: Whether ranks average whole gradients; else `sent_seconds` has those of parts.
        counted: A rule -> the step with it, or why it cannot be; None where nobody counts it.
    """

    profile: ModuleProfile
    chain: Chain
    rates: Rates
    gradient_sizes: tuple[int, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    requested: Mapping[str, Spec] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    beyond: Mapping[frozenset[str], tuple[int, ...]] = field(default_factory=dict)
    statistics_bytes: int = 0
    notes: tuple[str, ...] = ()
    sent_seconds: float = 0.0
    averages: bool = True
    counted: Callable[[Rule], CountedWith | str] | None = None

    def requesting(self, specs: Mapping[str, Spec]) -> "ProfiledStep":
        """The same step with these specs requested in addition."""
        return replace(self, requested={**self.requested, **specs})

    def exceeding(self, names: frozenset[str], n_bytes: int) -> "ProfiledStep":
        """The same step, where a count has exceeded the prediction for these techniques by so many bytes more."""
        return replace(self, beyond={**self.beyond, names: (*self.beyond.get(names, ()), n_bytes)})

    @property
    def seconds(self) -> float:
        """Of the step, without the averaging of gradients."""
        return max(self.chain.seconds, LEAST_SECONDS) + self.sent_seconds

    @property
    def held_bytes(self) -> int:
        """What a step keeps for the next one."""
        return sum(self.profile.by_kind[kind] for kind in HELD)

    def peak_bytes(self, ranks: int) -> int:
        """The peak on D ranks that average gradients: small ones are copied into one buffer when backward ends."""
        alone = max(self.profile.peak_bytes, self.profile.first_bytes)
        return max(alone + self.agreed_bytes(ranks), self.averaging_bytes(ranks))

    def averaging_bytes(self, ranks: int) -> int:
        """What is there when gradients are whole, with a byte for each of them, and the small ones' copies; of one
        rank, which averages nothing, 0.
        """
        if ranks == 1:
            return 0
        kinds, timeline = (*HELD, ACTIVATIONS), self.profile.timeline
        after = [moment for moment in timeline if moment.phase == OPTIMISER] or timeline[-1:]
        there = max(sum(moment.by_kind[kind] for kind in kinds) for moment in after)
        small = min(sum(n_bytes for n_bytes in self.gradient_sizes if n_bytes < ALONE), COPIED)
        agreed = len(self.gradient_sizes) + self.agreed_bytes(ranks)
        return there + self.profile.left_bytes + small + agreed

    def agreed_bytes(self, ranks: int) -> int:
        """What ranks that average gradients have in a step to agree on cells and statistics."""
        return 0 if ranks == 1 else WEIGHT_BYTES + self.statistics_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A plan in the making: techniques are added to it one after the other.

    Attributes:
        ranks: D.
        peak_bytes: Predicted peak with what has been added so far; of the fullest rank, less `more_bytes`.
        more_bytes: Of a pipeline, what the device of that rank has more than the smallest one.
        relief_bytes: How much less a rank has than one device has at the moments of the chain; below zero: more.
        chain: The blocks of the step with what has been added that changes what they hold; None as it is.
        floor_bytes: What it has at another moment, whatever blocks keep: while gradients are averaged.
        seconds: Predicted time of a step.
        targets: What has been added.
        model: Ranks of the model axis.
        stages: Of a pipeline.
        held_bytes: What the fullest rank keeps between steps, None for that of the whole module.
    """

    ranks: int
    peak_bytes: int
    seconds: float
    targets: tuple[Rule, ...] = ()
    model: int = 1
    stages: tuple[Stage, ...] = ()
    held_bytes: int | None = None
    more_bytes: int = 0
    relief_bytes: int = 0
    floor_bytes: int = 0
    chain: Chain | None = None

    def with_chain_peak(self, chain_peak_bytes: int) -> int:
        """The rank's peak, given that of the chain on one device."""
        return max(self.floor_bytes, chain_peak_bytes - self.relief_bytes)

    @property
    def pace(self) -> float:
        """Seconds of a step by how much of the samples it takes that as many ranks of a data axis would."""
        return self.seconds * self.model

    @property
    def strategies(self) -> tuple[str, ...]:
        """Ids of what has been added."""
        return tuple(dict.fromkeys(target.strategy for target in self.targets))
