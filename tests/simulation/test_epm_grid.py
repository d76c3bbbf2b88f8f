"""The EPM, from shapes alone, is within 5 % of simulated steps for S1 to S5: peak and bytes after each stratum."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from benchmarks.decoders import in_forms
from lightning_amp.costs.model_shape import DecoderShape, profile_of_module
from lightning_amp.errors import PlanError
from lightning_amp.footprint.live_bytes import tensors_of
from lightning_amp.installing.describe_module import describe
from lightning_amp.planning.memory.peak_model import predict
from lightning_amp.planning.plan.plan import Axes, Plan
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.profiling.profile import GraphProfile, Profile
from lightning_amp.simulation.models_without_values import decoder_subject, reference_subject
from lightning_amp.simulation.simulate import simulate_plan
from tests.each import FEW
from tests.planning.profiles import hic, profile, rna
from tests.planning.work_cases import shape

WITHIN = 0.05
ALL = "S1,S2,S3,S4,S5"


decoder = partial(shape, anchors=300, dim=32)
PAPER, CHAINED, CONVOLUTION = {"variant": "paper"}, {"chained": True}, {"attention": False}
FULL = {"full": True, "window": 1, "anchors": 900}
SPREAD = {"features": (150, 150, 120, 100)}
"""Features whose anchors are no run, as on several chromosomes: S4 copies their keys."""

Row = tuple[str, int, int, dict[str, Any]]
CASES: list[Row] = [
    ("S1,S3,S4", 1, 8, SPREAD | CHAINED | {"window": 100}),
    ("S1,S3 retain", 1, 8, {}),
    ("S1,S3,S4 retain", 1, 1, PAPER | CHAINED),
    ("S1,S2", 3, 64, {"features": (299, 290, 100, 20)}),
    ("S1,S2,S4", 2, 64, SPREAD | PAPER),
    ("S1,S5", 4, 8, PAPER | CHAINED),
    ("S1,S4,S5", 4, 64, SPREAD),
    ("S1,S2,S5", 4, 64, {"dim": 16}),
    (ALL, 8, 1, PAPER | CHAINED | {"window": 100}),
    (f"{ALL} gather retain", 4, 8, {"anchors": 600}),
    (f"{ALL} gather", 4, 64, CHAINED),
    # shapes in which other moments of a step are the highest
    ("S1,S2,S4,S5", 4, 1, CONVOLUTION | {"features": (290, 290, 290), "dim": 64}),
    ("S1,S5 gather", 8, 8, PAPER | {"strata": 2, "window": 8}),
    ("S1,S3,S5 gather", 2, 1, {"strata": 5, "anchors": 600, "window": 8}),
    # beyond the paper
    ("S2,S4,stream", 2, 8, {}),
    ("S5,stream", 4, 1, {}),
    (f"{ALL},stream", 2, 8, {"anchors": 900}),
    ("fused,S4", 1, 8, PAPER | {"anchors": 900}),
    ("fused,S4,stream", 1, 1, PAPER | CHAINED | {"anchors": 2000, "dim": 64}),
    ("sdpa,sparse", 1, 8, CHAINED | {"anchors": 900, "window": 400}),
    ("sdpa,S4,stream", 1, 1, PAPER | CHAINED | {"anchors": 2000, "dim": 64}),
    ("sdpa,S4,sparse,recompute", 1, 8, {"anchors": 2000, "dim": 64}),
    ("nodes,S3", 2, 8, {"anchors": 960}),
    ("nodes,fused,S4,sparse,stream", 3, 64, {"anchors": 2000, "dim": 64}),
    ("nodes,sdpa,S4,sparse,stream", 3, 64, {"anchors": 2000, "dim": 64}),
    ("S2,S4", 2, 8, FULL | PAPER),
    ("recompute", 1, 8, FULL),
    ("S4,sparse,stream", 1, 64, FULL | CHAINED | PAPER),
    ("strata,stream", 2, 8, FULL),
    ("nodes", 2, 8, FULL),
    ("nodes,S4", 3, 1, FULL | PAPER),
    ("nodes,S4,sparse,stream", 3, 8, FULL | CHAINED | {"dim": 64}),
    ("strata", 2, 8, {}),
    ("strata,recompute", 3, 8, CHAINED | {"strata": 7}),
]


def compare(decoder: DecoderShape, asked: str, *, ranks: int, batch_size: int) -> tuple[float, list[float]]:
    """Predicted over simulated bytes of one step: of the peak, and after every stratum.

    `asked` are strategies, and after a space the forms "retain" and "gather" of their rules.
    """
    subject = decoder_subject(decoder, batch_size=batch_size)
    batch_bytes = sum(t.nbytes for t in tensors_of(subject.batch))
    known = describe(subject.module, batch_size=batch_size, base_activation_bytes=batch_bytes)
    strategies, *forms = asked.split()
    usual = plan(profile_of_module(known), devices=ranks, strategies=strategies, batch_size=batch_size, shape=known)
    made = in_forms(usual, forms)
    predicted = predict(known, made.strategies, model_ranks=made.mesh.model, axes=made.axes)
    step = simulate_plan(lambda: decoder_subject(decoder, batch_size=batch_size), made)
    held = known.parameter_bytes * (2 + known.optimizer_slots) + known.buffer_bytes + batch_bytes
    pairs = zip(predicted.strata_bytes, step.strata_bytes, strict=True)
    strata = [(ours - held) / (theirs - held) for ours, theirs in pairs]
    return predicted.peak_bytes / max(step.peak_bytes), strata


@pytest.mark.full
@pytest.mark.long
@pytest.mark.parametrize("few", FEW)
def test_decoder_alone(few: bool) -> None:
    for asked, ranks, cells, sizes in CASES:
        if few and sizes.get("anchors", 0) > 1000:
            continue
        peak, strata = compare(decoder(**sizes), asked, ranks=ranks, batch_size=cells)
        case = f"{asked} {ranks} {cells} {sizes}"
        if "recompute" in asked:  # its forward pass, of which nothing is kept, is counted as any other
            assert 1 - WITHIN < peak < 1 + 2 * WITHIN, case
        else:
            assert peak == pytest.approx(1, abs=WITHIN), case
            assert strata == pytest.approx([1] * len(strata), abs=WITHIN), case


def data(*, anchors: int, strata: int, genes: int, attention: bool = True) -> Profile:
    edges = GraphProfile(file="g", vertices=anchors + genes, edges=3 * (anchors + genes))
    modalities = (hic(anchors=anchors, strata=strata, attention=attention), replace(rna(), features=genes))
    return Profile(data_dir="d", modalities=modalities, graph=edges)


@pytest.mark.long
@pytest.mark.parametrize(
    ("known", "cells", "strategies", "ranks"),
    [
        (data(anchors=1000, strata=4, genes=20_000), 64, "S1", 2),
        (data(anchors=1000, strata=4, genes=20_000), 64, "S2,S4,S5", 4),
        (data(anchors=2000, strata=1, genes=2000, attention=False), 64, "S2,S4,S5", 4),
        # S2 leaves the decoder's features alone where strata are split, not the encoders' layers
        (data(anchors=1000, strata=4, genes=20_000), 64, "S2,S4,strata,stream", 2),
    ],
)
def test_reference_model(known: Profile, cells: int, strategies: str, ranks: int) -> None:
    made = plan(known, devices=ranks, strategies=strategies, batch_size=cells)
    step = simulate_plan(lambda: reference_subject(known, batch_size=cells, latent_dim=64, window=None), made)
    assert made.predicted_peak_bytes == pytest.approx(max(step.peak_bytes), rel=WITHIN)
    assert "strata" in strategies or made.strata_bytes == pytest.approx(step.worst.strata_bytes, rel=WITHIN)


def test_a_form_of_a_rule_is_a_choice_that_the_plan_states() -> None:
    usual = plan(profile(), devices=2, strategies=ALL, batch_size=8)
    made = in_forms(usual, ["retain", "gather"])
    expected = replace(usual.axes, attention="chunked-retained", placement="hidden-gathered")
    assert made.axes == Axes.of(ALL.split(","), (rule.spec for rule in made.rules)) == expected
    assert Plan.from_json(made.to_json()) == made
    with pytest.raises(PlanError, match="axes.attention='chunked', with these strategies it is 'chunked-ret"):
        replace(made, axes=usual.axes)
    with pytest.raises(PlanError, match="axes.placement='hidden-gathered', with these strategies it is 'hid"):
        replace(usual, axes=replace(usual.axes, placement="hidden-gathered"))
