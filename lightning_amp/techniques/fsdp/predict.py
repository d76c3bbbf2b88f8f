"""Predict the peak and the seconds of a step whose parameters are split over ranks by fsdp."""

from collections.abc import Iterator
from dataclasses import replace

from lightning_amp.costs.chain import peak_bytes
from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.fsdp.bytes_of_ranks import ParameterUnit, fsdp_held_bytes, fsdp_peak_bytes
from lightning_amp.techniques.fsdp.seconds import fsdp_seconds
from lightning_amp.techniques.fsdp.spec import FullyShard

NAME = "fsdp"


def units_in(step: ProfiledStep) -> tuple[ParameterUnit, ...]:
    """Parameters of a step that can be gathered together; none where the module was not looked at."""
    found: tuple[ParameterUnit, ...] = step.facts.get(NAME, ())
    return found


def variants(step: ProfiledStep, ranks: int) -> Iterator[ProfiledStep]:
    """The step with each way to split over D ranks: as requested; else over all, or within a node."""
    if NAME in step.requested:
        yield step
        return
    yield step.requesting({NAME: FullyShard()})
    node = step.rates.links.ranks_per_node
    if 1 < node < ranks and ranks % node == 0:
        yield step.requesting({NAME: FullyShard(shard_ranks=node)})


def add(step: ProfiledStep, draft: Draft, budget: int | None) -> Draft | str:
    """Every rank has a part of parameters, gradients and optimiser state, and gathers a block's when it works."""
    units = units_in(step)
    whole = sum(unit.whole_bytes() for unit in units)
    if not whole:
        return "there are no parameters that can be split"
    ranks, spec = draft.ranks, step.requested.get(NAME, FullyShard())
    assert isinstance(spec, FullyShard), "rules of fsdp have this spec"
    shard = spec.shard_ranks or ranks
    # the host's memory is the device's where the device is its processor
    offload = spec.offload and step.rates.launches
    peak = fsdp_peak_bytes(step.profile, units, shard, offload=offload) + step.agreed_bytes(ranks)
    saved = draft.peak_bytes - peak
    why = f"{format_bytes(whole)} of parameters, their gradients and optimiser state are split over {shard} ranks"
    why += f", the same in each of {ranks // shard} groups" if shard < ranks else ""
    why += ", and lie in the host's memory" if offload else ""
    rules = [Rule(strategy=NAME, fqn=unit.fqn, spec=spec, why=why) for unit in units]
    # of the technique as a whole, shown once
    rules[-1] = replace(rules[-1], saves_bytes=max(0, saved))
    return replace(
        draft,
        peak_bytes=peak,
        relief_bytes=peak_bytes(step.chain, ()) - peak,
        floor_bytes=0,
        seconds=draft.seconds + fsdp_seconds(step, units, spec, ranks),
        targets=(*draft.targets, *rules),
        held_bytes=fsdp_held_bytes(step.profile, units, shard, offload=offload),
    )
