"""Fill in settings of a technique that depend on the mesh, the device and the other choices."""

from dataclasses import replace

from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.costs.ordered_partition import deal
from lightning_amp.costs.rule import Spec
from lightning_amp.errors import PlanError
from lightning_amp.planning.plan.axes import Axes, MeshShape
from lightning_amp.planning.sizes.rank_sizes import RankSizes
from lightning_amp.planning.time.step_seconds import stratum_seconds
from lightning_amp.techniques.hic.attention.rows import FusedAttention
from lightning_amp.techniques.hic.strata.rows import StrataParallel, StreamStrata
from lightning_amp.techniques.table import STRATEGIES


def settle(strategy: str, spec: Spec, shape: ModelShape, axes: Axes, mesh: MeshShape) -> Spec:
    """The spec with the settings that are decided here; one that has none, or ends that are set, as it is."""
    match spec:
        case StrataParallel(ends=""):
            return replace(spec, ends=",".join(map(str, strata_ends(shape, axes, ranks=mesh.model))))
        case FusedAttention() | StreamStrata():
            assert shape.decoder is not None, (
                "a strategy with a choice needs a decoder, which the policy has checked"
            )
            sizes = RankSizes(decoder=shape.decoder, axes=axes, k=0, cells=shape.batch_size, ranks=mesh.model)
            if isinstance(spec, FusedAttention):
                return replace(spec, keep=sizes.keeps_weights)
            return replace(spec, workers=sizes.side_by_side)
    own = STRATEGIES[strategy].settle
    return spec if own is None else own(spec, shape, mesh.model)


def strata_ends(
    shape: ModelShape, axes: Axes, *, ranks: int, speeds: tuple[float, ...] = ()
) -> tuple[int, ...]:
    """One past the last stratum of every rank of the model axis, balanced by the modelled time of the strata, and by
    the speeds of the ranks where these are not equal.

    Raises:
        PlanError: More ranks than strata.
    """
    assert shape.decoder is not None, "a strategy with a choice needs a decoder, which the policy has checked"
    strata = len(shape.decoder.distances)
    if ranks > strata:
        raise PlanError(
            f"strata got {ranks!r} ranks on the model axis, and {strata!r} strata can be split over"
            f" {strata!r} ranks at most; choose a smaller model_parallel_size, or leave 'strata' out"
        )
    costs, passing = stratum_seconds(shape.decoder, axes, cells=shape.batch_size, ranks=ranks)
    return deal(costs, ranks, speeds, passing)
