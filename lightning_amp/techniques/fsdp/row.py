"""Define the row of fsdp in the table of techniques."""

from collections.abc import Iterator, Sequence
from typing import Any

from lightning_amp.footprint.module_profile import GRADIENTS, PARAMETERS, STATE
from lightning_amp.techniques.fsdp.predict import add, variants
from lightning_amp.techniques.fsdp.spec import FullyShard
from lightning_amp.techniques.option_checks import one_of, whole_number
from lightning_amp.techniques.technique import Prediction, Technique


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
        if why := spec.no_groups_of(ranks):
            yield f"fsdp_ranks={spec.shard_ranks!r} is not supported, {why}"


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
    split_parameters="lightning_amp.techniques.fsdp.install:split_parameters",
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
