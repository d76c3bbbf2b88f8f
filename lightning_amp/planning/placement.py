"""Settings of a technique that depend on the mesh and on the other choices, filled in when the rules are made."""

from dataclasses import replace

from lightning_amp.errors import PlanError
from lightning_amp.planning.partition import partition
from lightning_amp.planning.plan import Axes, MeshShape
from lightning_amp.planning.shape import DecoderShape, ModelShape
from lightning_amp.planning.specs import Spec, StrataParallel


def settle(spec: Spec, shape: ModelShape, axes: Axes, mesh: MeshShape) -> Spec:
    """The spec with its open settings decided; one that has none, or has them set, as it is."""
    if not isinstance(spec, StrataParallel) or spec.ends:
        return spec
    assert shape.decoder is not None, "a strategy with a choice needs a decoder, which the policy has checked"
    return replace(spec, ends=",".join(map(str, strata_ends(shape.decoder, ranks=mesh.model))))


def strata_ends(decoder: DecoderShape, *, ranks: int) -> tuple[int, ...]:
    """One past the last stratum of every rank, balanced by the cost of the strata.

    Raises:
        PlanError: More ranks than strata.
    """
    if ranks > len(decoder.distances):
        raise PlanError(
            f"strata was asked for with {ranks!r} ranks on the model axis, and {len(decoder.distances)!r} strata can be"
            f" dealt to {len(decoder.distances)!r} ranks at most; choose a smaller model_parallel_size, or leave"
            " 'strata' out"
        )
    costs = [1.0 if distance else 0.05 for distance in decoder.distances]
    return partition(costs, [1.0] * ranks)
