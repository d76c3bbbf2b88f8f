"""What other data would need: bin sizes x strata x cells of a step x memories of a device, policy auto beside paper.

Of data, the profile is scaled: anchors and the features of stratum 0 go with 1 / bin size, stratum k has
k * (F_0 - F_1) features fewer, one for every piece of a chromosome, and so does the guidance graph. Of a decoder by
itself, only the anchors. A window that is not asked for is 20 bins per stratum.

    enough      the fewest techniques with which it fits on one device; of as few the fastest
    auto        what policy "auto" takes on one device
    paper       the fewest of 1, 2, 4, ... `MOST_DEVICES` devices on which policy "paper" fits, and its peak there

Known limit: genes, cells and contacts per cell are left as they are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from lightning_amp.costs.device_rates import Rates
from lightning_amp.costs.model_shape import (
    WINDOW_PER_STRATUM,
    DecoderShape,
    ModelShape,
    reference_shape,
)
from lightning_amp.diagnosis.diagnose import diagnose
from lightning_amp.errors import PlanError
from lightning_amp.planning.memory.peak_model import predict
from lightning_amp.planning.plan.decoder_only import profile_of_module, shape_of_decoder
from lightning_amp.planning.plan.plan import Candidate
from lightning_amp.planning.policies.auto import candidates
from lightning_amp.planning.policies.paper import mapped, model_ranks_of
from lightning_amp.planning.policies.request import PlanRequest
from lightning_amp.planning.questions.parse_questions import Questions
from lightning_amp.planning.time.model_seconds import on_device
from lightning_amp.profiling.profile import DecompositionProfile, ModalityProfile, Profile
from lightning_amp.progress import track

SCHEMA = 1
Size = tuple[int | None, int]
"""Bin size in base pairs, where it is known, and anchors."""
MOST_DEVICES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What is asked about, at its own bin size.

    Attributes:
        profile: The data, or what stands for a decoder by itself.
        decoder: The decoder by itself, None for the reference model of the data.
        window: Attention window in bins, None for 20 per stratum.
    """

    profile: Profile
    decoder: DecoderShape | None = None
    latent_dim: int
    window: int | None = None

    @property
    def parts(self) -> DecompositionProfile:
        """How the modality with strata is decomposed."""
        found = [m.decomposition for m in self.profile.modalities if m.decomposition is not None]
        assert found, "checked before anything is asked"
        return found[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What one case needs.

    Attributes:
        bin_bases: Bin size in base pairs, None for a decoder by itself.
        enough: The fewest techniques that fit on one device, None where none do.
        auto: What policy "auto" takes on one device; where nothing fits, what needs the least memory.
        paper_devices: Devices that policy "paper" needs, None where `MOST_DEVICES` are too few.
    """

    bin_bases: int | None
    anchors: int
    strata: int
    batch_size: int
    budget_bytes: int
    enough: Candidate | None
    auto: Candidate
    paper_devices: int | None
    paper_strategies: tuple[str, ...]
    paper_peak_bytes: int


def what_if(source: Source, asked: Questions, *, rates: Rates) -> tuple[Answer, ...]:
    """Answer all questions, in their order; `rates` are those of one device."""
    sizes = [(size, strata) for size in asked.sizes_of(source.parts) for strata in asked.strata]
    most = {size: most_strata(source.parts, anchors=size[1]) for size, _ in sizes}
    _check_strata(sizes, most, named=asked.strata_named)
    cases = list(product([(s, strata) for s, strata in sizes if strata <= most[s]], asked.batch_sizes))
    answers: list[Answer] = []
    for ((bin_bases, anchors), strata), cells in track(cases, description="comparing", total=len(cases)):
        case = _scaled(source, anchors=anchors, strata=strata)
        answers += _answers(case, bin_bases, cells=cells, budgets=asked.budgets, rates=rates)
    return tuple(answers)


def most_strata(parts: DecompositionProfile, *, anchors: int) -> int:
    """Strata that have a feature where there are so many anchors: a piece of a chromosome loses one per distance."""
    first, lost = _first_and_lost(parts, anchors)
    return min(anchors, (first - 1) // lost + 1 if lost > 0 else anchors)


def _check_strata(sizes: list[tuple[Size, int]], most: dict[Size, int], *, named: bool) -> None:
    """Refuse strata that a person named and that are not there; of the usual ones those that are there are answered."""
    wrong = [(size, strata) for size, strata in sizes if strata > most[size]]
    if wrong and (named or len(wrong) == len(sizes)):
        (bin_bases, anchors), strata = wrong[0]
        of_bins = "" if bin_bases is None else f" of {bin_bases:,} bases"
        raise PlanError(
            f"--what-if strata={strata!r} was asked for with {anchors:,} anchors{of_bins}, which have features in"
            f" {most[wrong[0][0]]!r} strata at most; choose fewer strata, or smaller bins"
        )


def to_dict(answers: Sequence[Answer]) -> dict[str, Any]:
    """Plain values for JSON."""
    return {"schema": SCHEMA, "paper_most_devices": MOST_DEVICES, "answers": [asdict(a) for a in answers]}


def _answers(
    case: Source, bin_bases: int | None, *, cells: int, budgets: Sequence[int], rates: Rates
) -> Iterator[Answer]:
    shape = on_device(_shape(case, cells), rates)
    for budget in budgets:
        found = candidates(shape, devices=1, budget=budget, rates=rates)
        fitting = [c for c in found if c.peak_bytes <= budget]
        devices, strategies, peak = _paper(case, shape, budget)
        yield Answer(
            bin_bases=bin_bases,
            anchors=case.parts.anchors,
            strata=case.parts.strata,
            batch_size=cells,
            budget_bytes=budget,
            enough=min(fitting, key=lambda c: (len(c.strategies), c.cell_seconds), default=None),
            auto=found[0],
            paper_devices=devices,
            paper_strategies=strategies,
            paper_peak_bytes=peak,
        )


def _paper(case: Source, shape: ModelShape, budget: int) -> tuple[int | None, tuple[str, ...], int]:
    """Devices, strategies and peak of policy "paper"; on most devices where it fits on none."""
    diagnosis, devices = diagnose(case.profile), 1
    while True:
        request = PlanRequest(diagnosis=diagnosis, shape=shape, devices=devices, budget=budget)
        chosen, _ = mapped(request)
        peak = predict(shape, chosen, model_ranks=model_ranks_of(chosen, request)).peak_bytes
        if peak <= budget:
            return devices, chosen, peak
        if devices == MOST_DEVICES:
            return None, chosen, peak
        devices *= 2


def _shape(case: Source, cells: int) -> ModelShape:
    if case.decoder is not None:
        return shape_of_decoder(case.decoder, batch_size=cells)
    return reference_shape(case.profile, batch_size=cells, latent_dim=case.latent_dim, window=case.window)


def _scaled(source: Source, *, anchors: int, strata: int) -> Source:
    """The same with other anchors and strata."""
    parts = _scaled_parts(source.parts, anchors=anchors, strata=strata)
    decoder = source.decoder
    if decoder is None:
        return replace(source, profile=_scaled_profile(source.profile, parts))
    usual = decoder.window == WINDOW_PER_STRATUM * len(decoder.features)
    decoder = replace(
        decoder,
        anchors=anchors,
        features=parts.features,
        distances=parts.distances,
        window=WINDOW_PER_STRATUM * strata if usual else decoder.window,
    )
    profile = profile_of_module(shape_of_decoder(decoder, batch_size=1))
    return replace(source, decoder=decoder, profile=profile)


def _scaled_parts(parts: DecompositionProfile, *, anchors: int, strata: int) -> DecompositionProfile:
    first, lost = _first_and_lost(parts, anchors)
    return replace(
        parts,
        anchors=anchors,
        features=tuple(first - k * lost for k in range(strata)),
        distances=tuple(range(strata)),
    )


def _first_and_lost(parts: DecompositionProfile, anchors: int) -> tuple[int, int]:
    """F_0, and how many features a stratum has fewer than the one before."""
    lost = parts.features[0] - parts.features[1] if parts.strata > 1 else 1
    return max(1, round(parts.features[0] * anchors / parts.anchors)), lost


def _scaled_profile(profile: Profile, parts: DecompositionProfile) -> Profile:
    before = next(m for m in profile.modalities if m.decomposition is not None)
    assert before.decomposition is not None, "looked for just now"
    graph = profile.graph
    if graph is not None:
        vertices = graph.vertices + parts.anchors - before.decomposition.anchors
        graph = replace(graph, vertices=vertices, edges=round(graph.edges * vertices / graph.vertices))
    sizes = {m.name: sum(parts.features) if m is before else m.features for m in profile.modalities}
    modalities = tuple(
        replace(
            m,
            features=sizes[m.name],
            nonzero=None if m is before else m.nonzero,
            scale=_scale(m, sizes),
            decomposition=parts if m is before else m.decomposition,
        )
        for m in profile.modalities
    )
    return replace(profile, modalities=modalities, graph=graph)


def _scale(modality: ModalityProfile, sizes: dict[str, int]) -> float | None:
    others = [n for name, n in sizes.items() if name != modality.name]
    return sizes[modality.name] / max(others) if others else None
