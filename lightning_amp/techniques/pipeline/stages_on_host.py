"""Let what autograd keeps of every micro-batch wait on the host: the passes of such a step, and the rule of a plan."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lightning_amp.costs.profiled_step import ProfiledStep
from lightning_amp.costs.rule import Rule, Spec
from lightning_amp.errors import PlanError
from lightning_amp.footprint.chain.passes import Passes
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.host_memory.limit import room_of
from lightning_amp.techniques.offload.row import NAME, Offload, least_of
from lightning_amp.techniques.offload.tiers import link_of
from lightning_amp.techniques.pipeline.schedule.host_bytes import host_bytes
from lightning_amp.techniques.pipeline.schedule.stage_bytes import Pipeline
from lightning_amp.techniques.pipeline.stage_facts import stages_of

ON_HOST = NAME
OPEN = Offload(least_bytes=0)
"""Requested, before the least bytes of a storage that leaves are chosen."""


def decided_in(rules: Sequence[Rule]) -> Offload | None:
    """Return the spec that a plan has decided."""
    return next((rule.spec for rule in rules if isinstance(rule.spec, Offload)), None)


def chosen(seen: ProfiledStep, spec: Spec, part: Passes) -> Offload:
    """Return the spec with the request's host memory, and with the least bytes for a micro-batch."""
    assert isinstance(spec, Offload), "the request of a pipeline has it"
    if spec.least_bytes:
        return spec
    asked = seen.requested.get(NAME, spec)
    assert isinstance(asked, Offload), "the request has its spec"
    return replace(asked, least_bytes=least_of(part.n_bytes[np.unique(part.uses[:, 0])].sum()))


def away(seen: ProfiledStep, spec: Offload, passes: Passes) -> Passes:
    """Return the passes of a step in which storages leave, with the seconds of their copies."""
    passes = replace(passes, away=spec.least_bytes)
    saved, first = np.unique(passes.uses[:, 0], return_index=True)
    large = passes.may_leave()[saved]
    saved, first = saved[large], passes.uses[first[large]]
    link, seconds = link_of(seen, 0), passes.seconds.copy()
    np.add.at(seconds, np.maximum(passes.birth[saved], passes.first[first[:, 1]]), passes.n_bytes[saved] / link.out)
    read = first[:, 4] >= 0
    np.add.at(seconds, first[read, 4], passes.n_bytes[saved[read]] / link.back)
    return replace(passes, seconds=seconds)


def smaller(seen: ProfiledStep, spec: Offload, micro_batches: int) -> Passes | None:
    """Return the passes of micro-batches with fewer samples than the largest; None if all have as many.

    Raises:
        PlanError: They cannot be counted.
    """
    passes, whole = stages_of(seen).passes, stages_of(seen).whole()
    if passes is None or isinstance(whole, str) or whole.rows % micro_batches == 0:
        return None
    found = passes(whole.rows // micro_batches)
    if isinstance(found, str):
        raise PlanError(f"pipeline together with {NAME}: {found}; leave one of them out")
    return away(seen, spec, found)


def targets_on_host(seen: ProfiledStep, pipeline: Pipeline, spec: Offload | None) -> tuple[Rule, ...]:
    """Return the rule of a plan, with the bytes of the rank that has most on the host; none without a spec.

    Raises:
        PlanError: The host has no room for them.
    """
    if spec is None:
        return ()
    small = smaller(seen, spec, 1 + max(now.micro_batch for now in pipeline.orders[0]))
    of_ranks = [host_bytes(pipeline, rank, small, pinned=seen.rates.launches) for rank in range(len(pipeline.orders))]
    most, moved = (max(numbers) for numbers in zip(*of_ranks, strict=True))
    room = room_of(spec, seen)
    if room is not None and most > room:
        raise PlanError(
            f"pipeline together with {NAME}: what stages keep takes {format_bytes(most)} of a rank's host memory, and"
            f" may take {format_bytes(room)}; raise host_memory=, or leave one of them out"
        )
    why = (
        f"predicted: what stages keep of micro-batches waits on the host, which takes {_listed(of_ranks, 0)} there, by"
        f" rank; {_listed(of_ranks, 1)} leave in a step"
    )
    return (Rule(strategy=NAME, fqn="", spec=replace(spec, host_bytes=most, moved_bytes=moved), why=why),)


def _listed(of_ranks: Sequence[tuple[int, int]], place: int) -> str:
    return ", ".join(format_bytes(one[place]) for one in of_ranks)
