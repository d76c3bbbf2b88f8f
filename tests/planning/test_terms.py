"""Claim: terms that plans share give every plan the numbers that it has by itself, to the last bit; a
term that reads more of a plan than it says fails at once.
"""

from dataclasses import replace

import pytest

from lightning_amp.costs.device_rates import CPU_CORE, rates_for
from lightning_amp.costs.model_shape import DecoderShape, ModelShape, reference_shape, shape_of_decoder
from lightning_amp.planning.memory.peak_model import predict
from lightning_amp.planning.plan.plan import Axes, MeshShape
from lightning_amp.planning.policies.auto import candidates
from lightning_amp.planning.sizes import RankSizes, Strata, Term, same_strata
from lightning_amp.planning.time.step_seconds import decoder_seconds, on_device
from tests.planning.profiles import hic, profile, rna

DECODER = DecoderShape(
    fqn="decoders.hic",
    anchors=997,
    dim=16,
    features=(980, 960, 940, 920, 900),
    distances=(0, 1, 2, 3, 4),
    attention=True,
    window=33,
)


def decoder(**changes: object) -> ModelShape:
    return shape_of_decoder(replace(DECODER, **changes), batch_size=48)


def reference(**sizes: int) -> ModelShape:
    return reference_shape(profile(hic(**sizes), rna()), batch_size=64)


SHAPES = {
    "reference": reference(anchors=1500, strata=6),
    "convolution": reference(anchors=1500, strata=6, attention=False),
    "large": reference(anchors=113_505, strata=4),
    "chained": decoder(chained=True, variant="paper", n_batches=2),
    "full attention": decoder(full=True, window=1, chained=True),
    "chained convolution": decoder(chained=True, attention=False, dim=15),
    "threads": decoder(threads=4, distances=(0, 1, 0, 1, 2), unsupported=("sparse",)),
    "copies": decoder(features=(900, 700, 500, 300, 100), n_batches=3),
}
RATES = rates_for("A100")


@pytest.mark.parametrize("devices", [1, 6])
@pytest.mark.parametrize("name", SHAPES)
def test_every_plan_has_the_numbers_that_it_has_when_it_is_counted_by_itself(name, devices) -> None:
    rates = CPU_CORE if name == "threads" else RATES
    shape = on_device(SHAPES[name], rates)
    found = candidates(shape, devices=devices, budget=2**30, rates=rates, own=frozenset({"S1"}))
    for candidate in found:
        # nothing is remembered of the plans before
        same_strata.cache_clear()
        mesh = MeshShape(data=candidate.data, model=candidate.model)
        seconds = decoder_seconds(shape, Axes.of(candidate.strategies), mesh, rates)
        peak = predict(shape, candidate.strategies, model_ranks=candidate.model).peak_bytes
        assert (candidate.step_seconds, candidate.peak_bytes) == (seconds, peak), candidate.strategies


def test_a_term_sees_the_axes_that_it_names_and_no_others() -> None:
    decoder = replace(DECODER)
    strata = Strata(RankSizes, decoder, cells=4, ranks=1)
    placed = Term(lambda s: s.axes.placement, "placement")
    assert strata.column(placed, Axes(placement="nodes")) == ("nodes",) * 5
    assert strata.column(placed, Axes(placement="strata")) == ("replicated",) * 5, "a stratum is as it is alone"
    with pytest.raises(AttributeError, match="decode"):
        strata.column(Term(lambda s: s.axes.decode, "placement"), Axes())
