"""Define a training step as data for planning (`ProfiledStep`), a draft plan (`Draft`), and a pipeline stage (`Stage`).

Legend: bytes are per rank; D ranks average gradients, in most plans those of the data axis; a stage's seconds are
predicted for one micro-batch; stage s runs on rank s mod the ranks of the model axis.
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
    """One pipeline stage.

    Attributes:
        first, end: It has the blocks first <= i < end.
        rank: Rank of the model axis.
        forward_seconds, backward_seconds: Seconds of one micro-batch.
        send_forward_seconds: Time to send the last block's output to the next stage.
        send_backward_seconds: Time to send the gradient of its input to the previous stage.
        peak_bytes: Peak of its rank.
        idle: Share of the schedule in which its rank computes nothing (the bubble).
        rest_seconds: For the last stage: time of computations for the complete batch before its first backward pass.
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
TIE = 1.02
"""Times that differ by at most this factor are a tie: the cost model is not more accurate."""
ALONE = 2**20
"""Bytes from which a gradient is averaged in place; smaller ones are packed (techniques/data/gradient_sync.py)."""
COPIED = 2 * 25 * 2**20
"""Bytes of two buckets of packed gradients, which exist at the same time."""
WEIGHT_BYTES = 16
"""Bytes of the two integers with which ranks agree on the number of cells in a step (loss_weight.py)."""


class CountedWith(Protocol):
    """Protocol of a step that was counted with a rule installed."""

    @property
    def profile(self) -> ModuleProfile:
        """Bytes of the step."""

    @property
    def chain(self) -> Chain:
        """Blocks and seconds of the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledStep:
    """A module's step without techniques, on one device.

    Attributes:
        profile: Bytes of the step.
        chain: Blocks of the step, and the costs of recomputing them.
        rates: Rates of the device.
        gradient_sizes: Bytes of every gradient that ranks would average.
        partial_sizes: Bytes of those of which a rank of the model axis has a part, so that its ranks sum them too.
        facts: Technique -> result of the `look` function of its row in the table.
        requested: Technique -> spec that the user or a given plan requests; without one the policy decides.
        host_memory: Most bytes of host memory that techniques of the policy may take on a rank; None for no bound.
        host_room: Bytes of host memory that are free for a rank, which bound what has no other bound; None outside a
            fit, where they are not known.
        refused: Technique that this module does not support -> reason.
        beyond: Sets of techniques -> bytes by which counts with them installed exceeded the prediction.
        counts: Sets of techniques -> least peak of a step that was counted with them.
        least: Plan with the least counted peak; None if steps were not counted to find it.
        no_room: Sets of techniques with which the step had no room to be counted.
        statistics_bytes: Bytes that batch norms allocate in addition if several ranks share statistics.
        notes: Notes on the count, one sentence each.
        sent_seconds: Time of a technique's collectives, without those that average gradients.
        averages: Whether ranks average full gradients; otherwise `sent_seconds` includes the collectives of shards.
        own_checkpoints: Whether the user's code checkpoints parts of the step.
        frees_gradients: Whether a technique of the draft frees gradients as they are made.
        counted: Function that maps a rule to the step with the rule, or to the reason why it is impossible; None if
            no step is counted with rules.
    """

    profile: ModuleProfile
    chain: Chain
    rates: Rates
    gradient_sizes: tuple[int, ...] = ()
    partial_sizes: tuple[int, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    requested: Mapping[str, Spec] = field(default_factory=dict)
    host_memory: int | None = None
    host_room: int | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    beyond: Mapping[frozenset[str], tuple[int, ...]] = field(default_factory=dict)
    counts: Mapping[frozenset[str], int] = field(default_factory=dict)
    least: "Draft | None" = None
    no_room: frozenset[tuple[str, ...]] = frozenset()
    statistics_bytes: int = 0
    notes: tuple[str, ...] = ()
    sent_seconds: float = 0.0
    averages: bool = True
    own_checkpoints: bool = False
    frees_gradients: bool = False
    counted: Callable[[Rule], CountedWith | str] | None = None

    def requesting(self, specs: Mapping[str, Spec]) -> "ProfiledStep":
        """Return the step with these specs requested in addition."""
        return replace(self, requested={**self.requested, **specs})

    def exceeding(self, names: frozenset[str], n_bytes: int) -> "ProfiledStep":
        """Return the step after a count that exceeded the prediction for these techniques by `n_bytes` more."""
        return replace(self, beyond={**self.beyond, names: (*self.beyond.get(names, ()), n_bytes)})

    @property
    def seconds(self) -> float:
        """Seconds of the step, without averaging gradients."""
        return max(self.chain.seconds, LEAST_SECONDS) + self.sent_seconds

    @property
    def held_bytes(self) -> int:
        """Bytes that are kept between steps."""
        # at the peak the last step's gradients may have been freed
        peak, end = self.profile.by_kind, self.profile.timeline[-1].by_kind
        return max(sum(peak[kind] for kind in HELD), sum(end[kind] for kind in HELD))

    def peak_bytes(self, ranks: int) -> int:
        """Return the peak on D ranks that average gradients; small ones are copied when the backward pass ends."""
        alone = self.profile.larger_peak_bytes
        return max(alone + self.agreed_bytes(ranks), self.averaging_bytes(ranks))

    def averaging_bytes(self, ranks: int) -> int:
        """Return all bytes that exist while ranks reduce gradients; 0 for one rank without partial gradients.

        They include the copies of small gradients, or before these a byte per gradient with which ranks agree.
        """
        if ranks == 1 and not self.partial_sizes:
            return 0
        kinds, timeline = (*HELD, ACTIVATIONS), self.profile.timeline
        after = [moment for moment in timeline if moment.phase == OPTIMISER] or timeline[-1:]
        there = max(sum(moment.by_kind[kind] for kind in kinds) for moment in after)
        # partial gradients have buckets of their own, which are freed before those of the others
        partial, every = (sum(n for n in sizes if n < ALONE) for sizes in (self.partial_sizes, self.gradient_sizes))
        small = min(partial if ranks == 1 else max(partial, every - partial), COPIED)
        copies = max(small, len(self.gradient_sizes))
        return there + self.profile.left_bytes + copies + self.agreed_bytes(ranks)

    def agreed_bytes(self, ranks: int) -> int:
        """Return the bytes with which ranks that average gradients agree on cells and statistics."""
        return 0 if ranks == 1 else WEIGHT_BYTES + self.statistics_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A draft of a plan, to which techniques are added one after the other.

    Attributes:
        ranks: D.
        peak_bytes: Predicted peak with the techniques so far; of the fullest rank, minus `more_bytes`.
        more_bytes: In a pipeline, memory of that rank's device beyond the smallest device.
        below_one_device_bytes: Bytes by which a rank is below a single device at the moments of the chain; negative if
            it is above.
        chain: Blocks of the step, as changed by the techniques; None if unchanged.
        floor_bytes: Bytes while gradients are averaged, whatever the blocks keep.
        seconds: Predicted time of a step.
        targets: Rules of the techniques added so far.
        model: Ranks of the model axis.
        stages: Stages of a pipeline.
        held_bytes: Bytes that the fullest rank keeps between steps, None for those of the complete module.
    """

    ranks: int
    peak_bytes: int
    seconds: float
    targets: tuple[Rule, ...] = ()
    model: int = 1
    stages: tuple[Stage, ...] = ()
    held_bytes: int | None = None
    more_bytes: int = 0
    below_one_device_bytes: int = 0
    floor_bytes: int = 0
    chain: Chain | None = None

    def with_chain_peak(self, chain_peak_bytes: int) -> int:
        """Return the peak of the rank, given the peak of the chain on one device."""
        return max(self.floor_bytes, chain_peak_bytes - self.below_one_device_bytes)

    @property
    def pace(self) -> float:
        """Seconds of a step times the ranks that share its batch, comparable with plans without a model axis."""
        return self.seconds * self.model

    @property
    def strategies(self) -> tuple[str, ...]:
        """Ids of the techniques added so far."""
        return tuple(dict.fromkeys(target.strategy for target in self.targets))
