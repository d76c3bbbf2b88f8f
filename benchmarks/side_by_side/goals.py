"""The goals: what is to be reached, what was found, and whether it is."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from benchmarks.decoders import Size
from benchmarks.side_by_side.cases import EAGER, OURS_ALONE, OURS_NODES, OURS_STRATA, PAPER_FORM, Case, Method
from benchmarks.side_by_side.fresh_process import Measured
from benchmarks.side_by_side.simulated import Simulated
from benchmarks.side_by_side.suite import PAPER_GPUS, Suite
from lightning_amp.quantities import format_bytes

GIB = 2**30
NOT_RUN = "not run"
WRONG_FROM = 1e-4
"""Relative difference from the eager decoder, in float32, from which a row that should be exact is wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """All that was found.

    Attributes:
        suite: What was run.
        measured: By case; of a case that failed, what it said.
        simulated: The same.
        matmul_rate: FLOP/s of products of matrices, by threads.
        flops: FLOP of one step of the eager decoder, by size.
    """

    suite: Suite
    measured: Mapping[Case, Measured | str]
    simulated: Mapping[Case, Simulated | str]
    matmul_rate: Mapping[int, float]
    flops: Mapping[Size, int]

    def of(self, case: Case) -> Measured | None:
        """What was measured of a case, None where nothing was."""
        found = self.measured.get(case)
        return found if isinstance(found, Measured) else None

    def simulation(self, case: Case) -> Simulated | None:
        """What was simulated of a case, None where nothing was."""
        found = self.simulated.get(case)
        return found if isinstance(found, Simulated) else None

    def share_of_peak(self, case: Case) -> float | None:
        """Useful FLOP/s over those of products of matrices: what a method computes twice does not count."""
        found, work = self.of(case), self.flops.get(case.size)
        if found is None or work is None:
            return None
        return work / found.seconds / (self.matmul_rate[case.threads] * case.ranks)

    def off_by(self, case: Case) -> float | None:
        """Relative difference of loss or gradient from the eager decoder's, or from ours on one device where that was
        not run; None where there is neither.
        """
        found = self.of(case)
        eager, ours = self.suite.alone(case.size, EAGER), self.suite.split_over(case.size, OURS_ALONE, 1)
        right = self.of(eager) or self.of(ours)
        if found is None or right is None:
            return None
        losses = abs(found.loss - right.loss) / abs(right.loss)
        return max(losses, abs(found.along - right.along) / right.norm)

    def wrong(self) -> list[Case]:
        """Cases that should be exact and are not."""
        return [case for case in self.measured if (self.off_by(case) or 0) > WRONG_FROM]


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """One goal.

    Attributes:
        what: Of what.
        target: In words.
        found: In words.
        reached: None where it was not run.
    """

    what: str
    target: str
    found: str
    reached: bool | None

    @property
    def answer(self) -> str:
        """The words yes, no or not run."""
        return NOT_RUN if self.reached is None else "yes" if self.reached else "**no**"


def goals(results: Results) -> list[Goal]:
    """All goals, with the sizes at which they were looked at."""
    return [*_large(results), *_against_eager(results), *_over_ranks(results)]


def _large(results: Results) -> Iterator[Goal]:
    suite = results.suite
    simulated = results.simulation(Case(size=suite.simulated, method=OURS_ALONE))
    yield _goal(
        f"{suite.simulated}, one device: peak of a training step, simulated",
        "at most 1.0 GiB",
        simulated and (format_bytes(simulated.peak_bytes), simulated.peak_bytes <= GIB),
    )
    run = results.of(suite.alone(suite.large, OURS_ALONE)) if suite.large else None
    yield _goal(
        f"{suite.large or suite.simulated}, one device: memory above start, really run",
        "at most 1.5 GB",
        run and (f"{run.peak_bytes / 1e9:.2f} GB, {run.seconds:.0f} s", run.peak_bytes <= 1.5e9),
    )
    sizes = suite.simulated_by_strata()
    few, many = (results.simulation(Case(size=s, method=OURS_ALONE)) for s in (sizes[0], sizes[-1]))
    grown = many.decoder_bytes / few.decoder_bytes if few and many else None
    yield _goal(
        f"{sizes[0]}: the decoder's part at K {sizes[-1].strata} over that at K {sizes[0].strata}, simulated",
        "at most 1.05",
        grown and (f"{grown:.3f}", grown <= 1.05),
    )


def _against_eager(results: Results) -> Iterator[Goal]:
    suite = results.suite
    for size, part, faster in ((suite.base, 8, 2), (suite.most_cells, 12, 5)):
        ours, eager = (results.of(suite.alone(size, method)) for method in (OURS_ALONE, EAGER))
        memory = eager.peak_bytes / ours.peak_bytes if ours and eager else None
        yield _goal(
            f"{size}, one device: memory against the eager decoder",
            f"at most 1/{part}",
            memory and ours and (f"1/{memory:.1f}, {format_bytes(ours.peak_bytes)}", memory >= part),
        )
        speed = eager.seconds / ours.seconds if ours and eager else None
        yield _goal(
            f"{size}, one device: forward and backward pass against the eager decoder",
            f"at least {faster} times as fast",
            speed and ours and (f"{speed:.2f} times, {ours.seconds:.2f} s", speed >= faster),
        )


def _over_ranks(results: Results) -> Iterator[Goal]:
    suite = results.suite
    yield _speedup(results, suite.over_strata, OURS_STRATA, 1.85)
    for size in suite.sent:
        cases = (Case(size=size, method=m, ranks=PAPER_GPUS) for m in (PAPER_FORM, OURS_STRATA))
        theirs, ours = (results.simulation(case) for case in cases)
        less = theirs.sent_bytes / ours.sent_bytes if theirs and ours else None
        yield _goal(
            f"{size}, w {size.decoder().window}, {PAPER_GPUS} ranks: bytes communicated, strata against S5",
            "at most 1/300",
            less and ours and (f"1/{less:.0f}, {format_bytes(ours.sent_bytes)}", less >= 300),
        )
    yield _speedup(results, suite.over_nodes, OURS_NODES, 1.8)
    size = suite.millions or replace(suite.simulated, anchors=1_000_000, strata=4)
    part, given = (_part_over_nodes(results, size, graph=graph) for graph in (True, False))
    yield _goal(
        f"{size}, graph and anchors over 2 ranks: peak of a rank over that of one device, simulated",
        "at most 0.55",
        part and (f"{part:.3f} ({given or 0:.3f} where v is given whole)", part <= 0.55),
    )


def _part_over_nodes(results: Results, size: Size, *, graph: bool) -> float | None:
    """Peak of one of two ranks with own anchors over that of one device, the graph's encoder counted or not."""
    one = results.simulation(Case(size=size, method=OURS_ALONE, graph=graph))
    two = results.simulation(Case(size=size, method=OURS_NODES, ranks=2, graph=graph))
    return two.peak_bytes / one.peak_bytes if one and two else None


def _speedup(results: Results, size: Size, method: Method, target: float) -> Goal:
    cases = (results.suite.split_over(size, m, ranks) for m, ranks in ((OURS_ALONE, 1), (method, 2)))
    one, two = map(results.of, cases)
    speed = one.seconds / two.seconds if one and two else None
    return _goal(
        f"{size}, {method.name}: 2 ranks against 1, one thread each",
        f"at least {target} times as fast",
        speed and two and (f"{speed:.2f} times, {two.seconds:.2f} s", speed >= target),
    )


def _goal(what: str, target: str, found: tuple[str, bool] | float | None) -> Goal:
    text, reached = found if isinstance(found, tuple) else ("", None)
    return Goal(what=what, target=target, found=text, reached=reached)
