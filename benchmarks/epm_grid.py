"""The memory model against simulated steps, at real sizes: ratio predicted / simulated of peak and strata.

    python -m benchmarks.epm_grid

Sizes are those of 500 kb and 100 kb data, and of the ablation of Zhang et al. (2026), whose 113,505 anchors run with
one cell. Column `strata` is the ratio of the stratum that is farthest off, of the bytes above those that are there
before the decoder runs. Takes about 17 minutes on one core that others use too.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from lightning_amp.footprint.live_bytes import tensors_of
from lightning_amp.parallel.describe_module import describe
from lightning_amp.planning.memory.peak_model import Estimate, predict
from lightning_amp.planning.plan.axes import Axes
from lightning_amp.planning.plan.decoder_only import profile_of_module
from lightning_amp.planning.plan.model_shape import WINDOW_PER_STRATUM, DecoderShape
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.plan.specs import ChunkedAttention, HiddenParallel, Spec
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.quantities import format_bytes
from lightning_amp.simulation.models_without_values import decoder_subject
from lightning_amp.simulation.simulate import simulate_plan

DATA = ((5400, 64), (27_000, 64), (113_505, 1))
"""Anchors, and cells per rank."""
MODELS = ((10, 64, 4), (32, 128, 8))
"""Strata, channels, and ranks of the plans that need several."""
ALL = "S1,S2,S3,S4,S5"
ONE_RANK = ("S1", "S1,S3", "S1,S3,S4")
MORE_RANKS = ("S1,S2,S4", "S1,S3,S5", ALL, f"{ALL} retain", "S1,S3,S5 gather")
LINE = "{:>7} {:>2} {:>3} {:>2} {:>1}  {:<22} {:>11} {:>6} {:>6} {:>4}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Predicted over simulated bytes.

    Attributes:
        peak_bytes: The simulated peak of the worst rank.
        peak: Ratio of the peaks.
        strata: Ratio after every stratum, of the bytes above those that are there before the decoder runs.
    """

    peak_bytes: int
    peak: float
    strata: tuple[float, ...]

    @property
    def worst_stratum(self) -> float:
        """The ratio that is farthest from 1."""
        return max(self.strata, key=lambda ratio: abs(ratio - 1))


def compare(decoder: DecoderShape, asked: str, *, ranks: int, batch_size: int) -> Comparison:
    """Predict and simulate one step of a decoder by itself.

    Args:
        decoder: Its sizes.
        asked: Strategies, and after a space the forms "retain" and "gather" of their rules.
        ranks: Devices.
        batch_size: Cells per rank.
    """
    subject = decoder_subject(decoder, batch_size=batch_size)
    batch_bytes = sum(t.nbytes for t in tensors_of(subject.batch))
    shape = describe(subject.module, batch_size=batch_size, base_activation_bytes=batch_bytes)
    strategies, *forms = asked.split()
    usual = plan(
        profile_of_module(shape), devices=ranks, strategies=strategies, batch_size=batch_size, shape=shape
    )
    made = in_forms(usual, forms)
    predicted = predict(shape, made.strategies, model_ranks=made.mesh.model, axes=made.axes)
    simulation = simulate_plan(lambda: decoder_subject(decoder, batch_size=batch_size), made)
    held = shape.parameter_bytes * (2 + shape.optimizer_slots) + shape.buffer_bytes + batch_bytes
    return _ratios(predicted, max(simulation.peak_bytes), simulation.strata_bytes, held)


def in_forms(usual: Plan, forms: list[str]) -> Plan:
    """A plan with the forms "retain" and "gather" of its rules."""

    def form(spec: Spec) -> Spec:
        if isinstance(spec, ChunkedAttention):
            return replace(spec, retain="retain" in forms)
        return replace(spec, gather="gather" in forms) if isinstance(spec, HiddenParallel) else spec

    rules = tuple(replace(rule, spec=form(rule.spec)) for rule in usual.rules)
    return replace(usual, rules=rules, axes=Axes.of(usual.strategies, (rule.spec for rule in rules)))


def _ratios(predicted: Estimate, peak: int, strata: tuple[int, ...], held: int) -> Comparison:
    pairs = zip(predicted.strata_bytes, strata, strict=True)
    return Comparison(
        peak_bytes=peak,
        peak=predicted.peak_bytes / peak,
        strata=tuple((ours - held) / (theirs - held) for ours, theirs in pairs),
    )


def cases() -> Iterator[tuple[int, int, int, int, int, str]]:
    """Anchors, strata, channels, cells, ranks and strategies."""
    for (anchors, cells), (strata, dim, ranks) in product(DATA, MODELS):
        yield from ((anchors, strata, dim, cells, 1, asked) for asked in ONE_RANK)
        yield from ((anchors, strata, dim, cells, ranks, asked) for asked in MORE_RANKS)


def main() -> None:
    """Print a line per step."""
    start, found = time.perf_counter(), []
    print(LINE.format("anchors", "K", "D", "B", "R", "strategies", "peak", "ratio", "strata", "s"))
    for anchors, strata, dim, cells, ranks, asked in cases():
        decoder = DecoderShape(
            fqn="decoder",
            anchors=anchors,
            dim=dim,
            features=tuple(anchors - k for k in range(strata)),
            distances=tuple(range(strata)),
            attention=True,
            window=WINDOW_PER_STRATUM * strata,
        )
        begin = time.perf_counter()
        result = compare(decoder, asked, ranks=ranks, batch_size=cells)
        found.append(result)
        peak, ratios = format_bytes(result.peak_bytes), (f"{result.peak:.3f}", f"{result.worst_stratum:.3f}")
        seconds = f"{time.perf_counter() - begin:.0f}"
        print(LINE.format(anchors, strata, dim, cells, ranks, asked, peak, *ratios, seconds), flush=True)
    worst = max((r.peak for r in found), key=lambda ratio: abs(ratio - 1))
    stratum = max((r.worst_stratum for r in found), key=lambda ratio: abs(ratio - 1))
    seconds = f"{time.perf_counter() - start:.0f}"
    print(f"{len(found)} steps in {seconds} s; worst peak {worst:.3f}, worst stratum {stratum:.3f}")


if __name__ == "__main__":
    main()
