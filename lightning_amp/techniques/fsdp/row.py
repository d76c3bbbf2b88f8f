"""The row of fsdp: its spec, what it predicts, its options.

Predict the seconds of fsdp's collectives, which replace one average of all gradients.

    among S ranks           of every unit two all-gathers of its parameters, one reduce-scatter of their gradients
    between D / S groups    of every unit one all-reduce of a rank's rows of gradients
    rows on the host        through its link: the rows for each gather, and those of gradients back; the optimiser goes
                            over rows, gradients and state there

Where D ranks are several nodes, groups of a node's ranks gather through the links inside of it, and 1 / S of the
gradients passes between nodes; one group of all ranks holds less.

Known limits: transfers do not overlap with computation; what ranks compare before they gather (ranks/collectives.py) is
not counted. Legend: D ranks of the data axis, S of them among which parameters are split.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_amp.costs.device_rates import CPU_CORE, collective_seconds
from lightning_amp.costs.profiled_step import Draft, ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.footprint.chain.chain import peak_bytes
from lightning_amp.footprint.module_profile import GRADIENTS, PARAMETERS, STATE
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.fsdp.bytes_of_ranks import ParameterUnit, fsdp_held_bytes, fsdp_peak_bytes
from lightning_amp.techniques.option_checks import one_of, whole_number
from lightning_amp.techniques.technique import Prediction, Technique


@dataclass(frozen=True, kw_only=True, slots=True)
class FullyShard:
    """Parameters, gradients and optimiser state are split over the ranks that average gradients, those of the data axis
    in most plans; a block's are gathered while it works.

    Attributes:
        offload: Keep a rank's part in the host's memory, and let the optimiser work there.
        shard_ranks: Consecutive ranks that they are split among; each group of so many has all of them. None for all.
    """

    offload: bool = False
    shard_ranks: int | None = None


MESSAGES = 3
"""Of a unit among the ranks that it is split over."""
HANDLING_S = 3.3e-3
"""Of a message on a CPU, where nothing hides it: torch's hooks, the copies into and out of what is sent, gloo's threads
besides the computation. By hand FSDP2 takes 8 to 14 ms more than ddp for each unit of five of the examples, three
messages each, on two ranks of one core (docs/reports/any_module.md)."""
PASSES = 2
"""Times that a rank's core of the host goes over rows, gradients and state in an optimiser's step: Adam, measured on
one core."""


def fsdp_seconds(step: ProfiledStep, units: Sequence[ParameterUnit], spec: FullyShard, ranks: int) -> float:
    """Seconds of a step beyond those of one that averages gradients over D ranks; never below 0."""
    shard, links = spec.shard_ranks or ranks, step.rates.links
    whole = sum(unit.whole_bytes() for unit in units)
    handling = 0.0 if step.rates.launches or shard == 1 else HANDLING_S
    # The step's prediction has this average already, which fsdp does not do.
    sent = -collective_seconds("all_reduce", whole, ranks, links)
    for own in filter(None, (unit.whole_bytes() for unit in units)):
        sent += 2 * collective_seconds("all_gather", own / shard, shard, links)
        sent += collective_seconds("reduce_scatter", own, shard, links)
        sent += collective_seconds("all_reduce", own / shard, ranks // shard, links, inner=shard)
        sent += MESSAGES * handling
    if not (spec.offload and step.rates.launches):
        # on a CPU rows pass no link, and the optimiser works where it would anyway
        return max(0.0, sent)
    moved, updated = 3 * whole / shard, PASSES * step.held_bytes / shard
    return max(0.0, sent) + moved / step.rates.host_bandwidth + updated / CPU_CORE.memory_bytes


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


def _asked(spec: FullyShard, request: Any) -> tuple[FullyShard, bool]:
    """The spec with `fsdp_ranks` and `fsdp_offload` of a request."""
    ranks = getattr(request, "fsdp_ranks", spec.shard_ranks)
    offload = getattr(request, "fsdp_offload", spec.offload)
    whole_number("fsdp_ranks", ranks, least=2)
    one_of("fsdp_offload", offload, (True, False))
    return FullyShard(shard_ranks=ranks, offload=offload), True


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


ROW = Technique(
    title="fully sharded data parallel",
    shrinks="parameters, gradients and optimiser state to those of a rank",
    specs=(FullyShard,),
    targets=lambda shape: [(fqn, FullyShard()) for fqn in (*shape.blocks, "")],
    data_axis=True,
    no_decoder="fsdp gathers what a forward needs when it is called, and a decomposed decoder's strata are run in"
    " parts",
    read_step="lightning_amp.techniques.fsdp.look:read_step",
    refusal="lightning_amp.techniques.fsdp.look:refusal",
    option_names=("fsdp_ranks", "fsdp_offload"),
    options=_asked,
    contradictions=_contradictions,
    remark=lambda spec, launches: ON_HOST if spec.offload and not launches else "",
    split_parameters="lightning_amp.techniques.fsdp.fully_sharded:split_parameters",
    prediction=Prediction(
        add=add,
        kinds=(PARAMETERS, GRADIENTS, STATE),
        limit="what is gathered together is whole while it works",
        turn=0,
        fewest=2,
        counted=False,
        variants=variants,
    ),
)
