"""What is known of a module's training step before a plan is made, what was asked for, and a plan in the making.

Legend: bytes are of one rank; D ranks that average gradients, those of the data axis in most plans.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from lightning_amp.footprint.chain.chain import Chain
from lightning_amp.footprint.chain.passes import Passes
from lightning_amp.footprint.module_profile import ACTIVATIONS, HELD, ModuleProfile
from lightning_amp.techniques.chunk.forms import ChunkForms
from lightning_amp.techniques.fsdp.bytes_of_ranks import OPTIMISER, Unit
from lightning_amp.planning.plan.plan import Rule
from lightning_amp.techniques.specs import ChunkBlock, FullyShard, Spec
from lightning_amp.costs.stage import Stage
from lightning_amp.costs.device_rates import Rates
from lightning_amp.techniques.replay.choose_cuts import Replays

LEAST_SECONDS = 1e-9
ALONE = 2**20
"""Bytes of a gradient from which on it is averaged where it is; smaller ones are put together
(techniques/data/gradient_sync.py)."""
COPIED = 2 * 25 * 2**20
"""Of these there are two buckets at a time."""
WEIGHT_BYTES = 16
"""Of the two integers by which ranks agree on how many cells a step has (lightning/steps/cell_weight.py)."""

PassesOf = Callable[[int | None], Passes | str]
"""Samples of a micro-batch, None for the whole batch -> the passes of a step, or why it cannot be run as stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageChunks:
    """The blocks of stages in chunks.

    Attributes:
        forms: Samples of a micro-batch -> what its blocks may run as.
        passes: Samples, and specs of blocks by name or pattern -> the passes of a step, or why it cannot be run so.
    """

    forms: Callable[[int], ChunkForms]
    passes: Callable[[int, Mapping[str, ChunkBlock]], Passes | str]


class CountedWith(Protocol):
    """A step that was counted with a rule installed."""

    @property
    def profile(self) -> ModuleProfile:
        """Its bytes."""

    @property
    def chain(self) -> Chain:
        """Its blocks, and its seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A module's step as it is, on one device.

    Attributes:
        profile: Its bytes.
        chain: Its blocks, and what a choice of recomputed ones costs.
        units: Parameters that can be gathered together.
        rates: What the device reaches.
        passes: Its blocks as stages of a pipeline, for a batch of any length; None where there can be no pipeline.
        no_stages: Why there is none.
        chunks: Its blocks in chunks; None where nobody has looked at their operators.
        stage_chunks: The same within stages of a pipeline.
        fsdp: How fsdp is to split, if it does; None leaves it to the policy.
        refused: Techniques that this module was found to refuse, and why.
        statistics_bytes: What batch norms make beside their results where several ranks share statistics.
        notes: What else a person should know of the count, one sentence each.
        sent_seconds: What collectives of a technique with steps take, without those of gradients that ranks average.
        averages: Whether ranks average whole gradients; else `sent_seconds` has those of parts.
        replays: Specs that are installed -> stretches of the step with them that may be replayed; None where nobody
            has looked at its operators.
        counted: A rule -> the step with it, or why it cannot be; None where nobody counts it.
    """

    profile: ModuleProfile
    chain: Chain
    units: tuple[Unit, ...]
    rates: Rates
    passes: PassesOf | None = None
    no_stages: str = "its blocks were not looked at"
    chunks: ChunkForms | None = None
    stage_chunks: StageChunks | None = None
    fsdp: FullyShard | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    statistics_bytes: int = 0
    notes: tuple[str, ...] = ()
    sent_seconds: float = 0.0
    averages: bool = True
    replays: Callable[[tuple[Rule, ...]], Replays] | None = None
    counted: Callable[[Rule], CountedWith | str] | None = None

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
        """What is there when gradients are whole, beside it a byte for each of them, and the small ones' copies; of one
        rank, which averages nothing, 0."""
        if ranks == 1:
            return 0
        kinds, timeline = (*HELD, ACTIVATIONS), self.profile.timeline
        after = [moment for moment in timeline if moment.phase == OPTIMISER] or timeline[-1:]
        there = max(sum(moment.by_kind[kind] for kind in kinds) for moment in after)
        sizes = [p.whole_bytes for unit in self.units for p in unit.parameters if p.trained]
        small = min(sum(n_bytes for n_bytes in sizes if n_bytes < ALONE), COPIED)
        return there + self.profile.left_bytes + small + len(sizes) + self.agreed_bytes(ranks)

    def agreed_bytes(self, ranks: int) -> int:
        """What ranks that average gradients have in a step to agree on cells and statistics."""
        return 0 if ranks == 1 else WEIGHT_BYTES + self.statistics_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a person has asked of a pipeline; None leaves it open.

    Attributes:
        model: Ranks of the model axis.
        micro_batches, schedule: As of AMPStrategy.
        ends: One past the last block of every stage.
        again: Patterns of blocks to compute again; left open, as few as are needed to fit.
        chunks: Specs of blocks to run in chunks, by name or pattern; left open, where nothing else fits.
        all_chunks: Left open: all blocks that can be, with the least bytes that do not make them far slower.
        speeds: Of all ranks, by that of the fastest; none: they are alike.
    """

    model: int | None = None
    micro_batches: int | None = None
    schedule: str | None = None
    ends: tuple[int, ...] | None = None
    again: tuple[str, ...] | None = None
    chunks: Mapping[str, ChunkBlock] | None = None
    all_chunks: bool = False
    speeds: tuple[float, ...] = ()


OPEN = Asked()


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What a technique changes: the rule that a plan will have."""

    strategy: str
    fqn: str
    spec: Spec
    why: str
    saves_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A plan in the making: techniques are added to it one after the other, in the order of the library.

    Attributes:
        ranks: D.
        peak_bytes: Predicted peak with what has been added so far.
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
    targets: tuple[Target, ...] = ()
    model: int = 1
    stages: tuple[Stage, ...] = ()
    held_bytes: int | None = None
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
