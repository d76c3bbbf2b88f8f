"""Predict the peak and the seconds of a step whose parameters are split over ranks by fsdp."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_amp.costs.chain import peak_bytes
from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.fsdp.bytes_of_ranks import ParameterUnit, fsdp_held_bytes, fsdp_peak_bytes
from lightning_amp.techniques.fsdp.seconds import fsdp_seconds
from lightning_amp.techniques.fsdp.spec import FullyShard

NAME = "fsdp"


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpFacts:
    """What planning needs of a module.

    Attributes:
        units: Parameters that can be gathered together.
        spec: How they are split; None leaves it to the policy.
    """

    units: tuple[ParameterUnit, ...] = ()
    spec: FullyShard | None = None


NOTHING_KNOWN = FsdpFacts()


def facts_of(step: ProfiledStep) -> FsdpFacts:
    """What is known of a step's parameters."""
    found: FsdpFacts = step.facts.get(NAME, NOTHING_KNOWN)
    return found


def split_by(step: ProfiledStep, spec: FullyShard | None) -> ProfiledStep:
    """The step whose parameters are split in this way."""
    return replace(step, facts={**step.facts, NAME: replace(facts_of(step), spec=spec)})


def variants(step: ProfiledStep, ranks: int) -> Iterator[ProfiledStep]:
    """The step with each way to split over D ranks: as requested; else over all, or within a node."""
    if facts_of(step).spec is not None:
        yield step
        return
    yield split_by(step, FullyShard())
    node = step.rates.links.ranks_per_node
    if 1 < node < ranks and ranks % node == 0:
        yield split_by(step, FullyShard(shard_ranks=node))


def add(step: ProfiledStep, draft: Draft, budget: int | None) -> Draft | str:
    """Every rank has a part of parameters, gradients and optimiser state, and gathers a block's when it works."""
    known = facts_of(step)
    whole = sum(unit.whole_bytes() for unit in known.units)
    if not whole:
        return "there are no parameters that can be split"
    ranks, spec = draft.ranks, known.spec or FullyShard()
    shard = spec.shard_ranks or ranks
    # the host's memory is the device's where the device is its processor
    offload = spec.offload and step.rates.launches
    peak = fsdp_peak_bytes(step.profile, known.units, shard, offload=offload) + step.agreed_bytes(ranks)
    saved = draft.peak_bytes - peak
    why = f"{format_bytes(whole)} of parameters, their gradients and optimiser state are split over {shard} ranks"
    why += f", the same in each of {ranks // shard} groups" if shard < ranks else ""
    why += ", and lie in the host's memory" if offload else ""
    rules = [Rule(strategy=NAME, fqn=unit.fqn, spec=spec, why=why) for unit in known.units]
    # of the technique as a whole, shown once
    rules[-1] = replace(rules[-1], saves_bytes=max(0, saved))
    return replace(
        draft,
        peak_bytes=peak,
        relief_bytes=peak_bytes(step.chain, ()) - peak,
        floor_bytes=0,
        seconds=draft.seconds + fsdp_seconds(step, known.units, spec, ranks),
        targets=(*draft.targets, *rules),
        held_bytes=fsdp_held_bytes(step.profile, known.units, shard, offload=offload),
    )
