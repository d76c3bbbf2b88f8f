"""Define the row of fsdp in the table of techniques: its spec, its prediction, its options.

The predicted seconds are those of fsdp's collectives, which replace one all-reduce of all gradients:

    among S ranks           for every unit two all-gathers of its parameters, one reduce-scatter of their gradients
    between D / S groups    for every unit one all-reduce of a rank's rows of gradients
    rows on the host        copies between host and device: the rows for each gather, and those of gradients back; the
                            optimiser reads rows, gradients and state in host memory; also on one rank, which gathers
                            from its host alone

If the D ranks are on several nodes, groups of a node's ranks gather through the links inside the node, and only 1 / S
of the gradients passes between nodes; one group of all ranks holds less memory.

Known limits: transfers do not overlap with computation; the comparison between ranks before they gather
(ranks/collectives.py) is not counted. Legend: D ranks of the data axis, S of them over which parameters are sharded.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from lightning_amp.costs.device_rates import collective_seconds
from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.footprint.chain.chain import Chain, peak_bytes
from lightning_amp.footprint.module_profile import GRADIENTS, OPTIMISER, PARAMETERS, STATE, ModuleProfile
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.fsdp.bytes_of_ranks import (
    ParameterUnit,
    fsdp_bytes,
    fsdp_held_bytes,
    fsdp_host_bytes,
    fsdp_validation_bytes,
)
from lightning_amp.techniques.host_memory.limit import bounded, host_memory_of, no_room
from lightning_amp.techniques.option_checks import one_of, whole_number
from lightning_amp.techniques.technique import Prediction, Technique


@dataclass(frozen=True, kw_only=True, slots=True)
class FullyShard:
    """Shard parameters, gradients and optimiser state over the ranks that average gradients (mostly the data axis).

    A block's parameters are gathered while it runs.

    Attributes:
        offload: Keep a rank's shards in host memory, and run the optimiser there.
        shard_ranks: Consecutive ranks over which they are sharded; each group of this size has all. None for all ranks.
        host_memory: Most bytes of host memory that a rank's shards take; None for 80 % of what is free.
        host_bytes: Predicted bytes of host memory of a rank.
    """

    splits: ClassVar[bool] = True

    offload: bool = False
    shard_ranks: int | None = None
    host_memory: int | None = None
    host_bytes: int = 0

    @property
    def on_host(self) -> bool:
        """Whether parameters lie in host memory."""
        return self.offload

    @property
    def needs_ranks(self) -> int:
        """Number of ranks that it needs at least: one has all shards, which saves memory on the host only."""
        return 1 if self.offload else 2


MESSAGES = 3
"""Messages of a unit among the ranks over which it is sharded."""
HANDLING_S = 3.3e-3
"""Seconds per message on a CPU, where nothing hides it: torch's hooks, copies to and from send buffers, gloo's threads
in addition to the computation. FSDP2 applied by hand takes 8 to 14 ms more than DDP for each unit of five of the
examples, with three messages each, on two ranks of one core (docs/reports/any_module.md)."""
PASSES = 2
"""Times that a rank's host reads rows, gradients and state in an optimiser's step: Adam, measured on one core."""


def fsdp_seconds(step: ProfiledStep, units: Sequence[ParameterUnit], spec: FullyShard, ranks: int) -> float:
    """Seconds of a step in addition to those of one that averages gradients over D ranks; never below 0."""
    shard, links = spec.shard_ranks or ranks, step.rates.links
    whole = sum(unit.whole_bytes() for unit in units)
    handling = 0.0 if step.rates.launches or shard == 1 else HANDLING_S
    # the step's prediction includes this average, which fsdp does not run
    sent = -collective_seconds("all_reduce", whole, ranks, links)
    for own in filter(None, (unit.whole_bytes() for unit in units)):
        sent += 2 * collective_seconds("all_gather", own / shard, shard, links)
        sent += collective_seconds("reduce_scatter", own, shard, links)
        sent += collective_seconds("all_reduce", own / shard, ranks // shard, links, inner=shard)
        sent += MESSAGES * handling
    if not (spec.offload and step.rates.launches):
        # on a CPU rows are not copied, and the optimiser runs there in any case
        return max(0.0, sent)
    # rows come in both passes, gradients leave
    moved = whole / shard * (2 / step.rates.host.back + 1 / step.rates.host.out)
    return max(0.0, sent) + moved + PASSES * step.held_bytes / shard / step.rates.host.memory


NAME = "fsdp"


def units_in(step: ProfiledStep) -> tuple[ParameterUnit, ...]:
    """Units of parameters of a step; none if the module was not inspected."""
    found: tuple[ParameterUnit, ...] = step.facts.get(NAME, ())
    return found


def variants(step: ProfiledStep, ranks: int) -> Iterator[ProfiledStep]:
    """Yield the step with each way to shard over D ranks: as requested; otherwise over all ranks, or within a node.

    With one rank of a GPU everything is on the host.
    """
    if NAME in step.requested:
        yield step
        return
    yield step.requesting({NAME: FullyShard(offload=ranks == 1 and step.rates.launches)})
    node = step.rates.links.ranks_per_node
    if 1 < node < ranks and ranks % node == 0:
        yield step.requesting({NAME: FullyShard(shard_ranks=node)})


def last_variants(step: ProfiledStep, ranks: int) -> Iterator[ProfiledStep]:
    """Yield the step with the shards of several GPUs on the host, where the user has not requested another way."""
    if NAME not in step.requested and ranks > 1 and step.rates.launches:
        yield step.requesting({NAME: FullyShard(offload=True)})


def add(step: ProfiledStep, draft: Draft, budget: int | None) -> Draft | str:
    """Add fsdp to a draft: each rank has shards of parameters, gradients and optimiser state, and gathers by block."""
    units = units_in(step)
    whole = sum(unit.whole_bytes() for unit in units)
    if not whole:
        return "there are no parameters that can be split"
    ranks, spec = draft.ranks, step.requested.get(NAME, FullyShard())
    assert isinstance(spec, FullyShard), "rules of fsdp have this spec"
    shard = spec.shard_ranks or ranks
    # on a CPU, host memory is the device's memory
    offload = spec.offload and step.rates.launches
    if spec.offload:
        host_bytes = fsdp_host_bytes(step.profile, units, shard, pinned=offload)
        spec = bounded(replace(spec, host_bytes=host_bytes), step)
        if why := no_room("a rank's share of them", spec.host_bytes, spec, step, draft.targets):
            return why
    found = fsdp_bytes(step.profile, units, shard, offload=offload)
    passes, update = (peak + step.agreed_bytes(ranks) for peak in (found.passes, found.update))
    chain = _of_rank(step.chain, found.beyond)
    saved = draft.peak_bytes - max(passes, update)
    why = f"{format_bytes(whole)} of parameters, their gradients and optimiser state are "
    why += f"split over {shard} ranks" if shard > 1 else "on the device where they are used"
    why += f", the same in each of {ranks // shard} groups" if shard < ranks else ""
    why += f", and lie in the host's memory, {format_bytes(spec.host_bytes)}" if offload else ""
    rules = [Rule(strategy=NAME, fqn=unit.fqn, spec=spec, why=why) for unit in units]
    # the saving of the technique in total, shown once
    rules[-1] = replace(rules[-1], saves_bytes=max(0, saved))
    return replace(
        draft,
        peak_bytes=max(passes, update),
        below_one_device_bytes=peak_bytes(chain, ()) - passes,
        floor_bytes=update,
        chain=chain,
        seconds=draft.seconds + fsdp_seconds(step, units, spec, ranks),
        targets=(*draft.targets, *rules),
        held_bytes=fsdp_held_bytes(step.profile, units, shard, offload=offload),
    )


def _of_rank(chain: Chain, more: Mapping[str, int]) -> Chain:
    """Return the blocks of a step with the bytes that a rank has in the passes, which other techniques change.

    The peak of one device is often in the optimiser's step, or where all gradients have come; that of a rank is not.
    """
    others = max(more.values(), default=0)
    passes = (moment for moment in chain.moments if not moment.where.startswith(OPTIMISER))
    moved = (replace(m, n_bytes=max(0, m.n_bytes + more.get(m.where, others))) for m in passes)
    return replace(chain, moments=tuple(moved))


def validation_bytes(step: ProfiledStep, spec: FullyShard, validation: ModuleProfile, ranks: int) -> int:
    """Peak bytes of a rank in the validation of a fit."""
    shard, offload = spec.shard_ranks or ranks, spec.offload and step.rates.launches
    return fsdp_validation_bytes(step.profile, validation, units_in(step), shard, offload=offload)


def _requested_spec(spec: FullyShard, request: Any) -> tuple[FullyShard, bool]:
    """Return the spec with `fsdp_ranks`, `fsdp_offload` and `host_memory` of a request."""
    ranks = getattr(request, "fsdp_ranks", spec.shard_ranks)
    offload = getattr(request, "fsdp_offload", spec.offload)
    whole_number("fsdp_ranks", ranks, least=2)
    one_of("fsdp_offload", offload, (True, False))
    return FullyShard(shard_ranks=ranks, offload=offload, host_memory=host_memory_of(request)), True


ON_HOST = (
    "fsdp_offload saves nothing on a CPU, whose memory is the host's; on a GPU it keeps parameters, gradients and"
    " optimiser state out of the device's"
)


def _contradictions(specs: Sequence[FullyShard], ranks: int) -> Iterator[str]:
    if len(specs) > 1:
        yield f"rules of fsdp have the specs {specs[0]!r} and {specs[1]!r}; all of them must have the same"
    for spec in specs:
        if type(spec.offload) is not bool:
            yield f"offload={spec.offload!r} of fsdp is neither true nor false"
        size = spec.shard_ranks
        if size is None:
            continue
        if type(size) is not int or size < 2 or ranks % size:
            found = "1 rank that averages" if ranks == 1 else f"{ranks} ranks that average"
            allowed = [n for n in range(2, ranks + 1) if ranks % n == 0]
            yield (
                f"fsdp_ranks={size!r} is not supported, found {found} gradients, to be divided into groups of as many"
                f" ranks, 2 or more; choose one of {allowed!r}, or None for one group of all"
            )


def _remark(spec: FullyShard, launches: bool) -> str:
    if spec.host_memory is not None and not spec.offload:
        return "host_memory bounds nothing of fsdp, for without fsdp_offload=True it keeps nothing on the host"
    return ON_HOST if spec.offload and not launches else ""


ROW = Technique(
    title="fully sharded data parallel",
    shrinks="parameters, gradients and optimiser state to those of a rank",
    beside_compiled=True,
    specs=(FullyShard,),
    targets=lambda shape: [(fqn, FullyShard()) for fqn in (*shape.blocks, "")],
    data_axis=True,
    no_decoder="fsdp gathers what a forward needs when it is called, and a decomposed decoder's strata are run in"
    " parts",
    read_step="lightning_amp.techniques.fsdp.look:read_step",
    refusal="lightning_amp.techniques.fsdp.look:refusal",
    option_names=("fsdp_ranks", "fsdp_offload", "host_memory"),
    options=_requested_spec,
    contradictions=_contradictions,
    remark=_remark,
    validation=validation_bytes,
    split_parameters="lightning_amp.techniques.fsdp.install:split_parameters",
    prediction=Prediction(
        add=add,
        kinds=(PARAMETERS, GRADIENTS, STATE),
        limit="what is gathered together is whole while it works",
        order=0,
        needs_ranks=2,
        counted=False,
        variants=variants,
        last_variants=last_variants,
    ),
)
