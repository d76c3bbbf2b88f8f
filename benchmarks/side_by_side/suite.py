"""Which cases are measured and which are simulated: all of them, or few and small ones.

The measured ones of a comparison that a goal is about run in several rounds, the others once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.side_by_side.cases import (
    CHECKPOINT,
    DDP,
    EAGER,
    FSDP,
    FSDP_CHECKPOINT,
    OURS_ALONE,
    OURS_NODES,
    OURS_STRATA,
    PAPER_ALONE,
    PAPER_FORM,
    PAPER_RANKS,
    SUBSAMPLE,
    Case,
    Method,
    Size,
)

ALONE = (EAGER, CHECKPOINT, SUBSAMPLE, PAPER_ALONE, OURS_ALONE)
TWO_RANKS = (DDP, FSDP, FSDP_CHECKPOINT, PAPER_RANKS, OURS_STRATA)
SPLIT = (PAPER_RANKS, OURS_STRATA, OURS_NODES)
PAPER_GPUS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """Sizes of one run of the benchmark.

    Attributes:
        base: Of the comparison with the eager decoder.
        cells: Other B of it.
        strata: Other K.
        anchors: Other N.
        over_strata: Where strata are split over two ranks against one.
        over_nodes: Where anchors are split over two ranks against one.
        simulated: The base of what is simulated; K and N of it vary.
        simulated_methods: Ours last.
        simulated_strata: Other K.
        simulated_anchors: Other N.
        split: What is simulated on several ranks.
        ranks: How many.
        millions: Where the peak of two ranks that split the anchors is compared with one; None to leave it out.
        sent: Where communication is compared with the paper's.
        large: What is run once, for minutes.
        rounds: Of cases that goals are about.
        steps: In one process, one of them not timed.
    """

    base: Size
    cells: tuple[int, ...]
    strata: tuple[int, ...]
    anchors: tuple[int, ...]
    over_strata: Size
    over_nodes: Size
    simulated: Size
    simulated_methods: tuple[Method, ...]
    simulated_strata: tuple[int, ...]
    simulated_anchors: tuple[int, ...]
    split: Size
    ranks: tuple[int, ...]
    millions: Size | None
    sent: tuple[Size, ...]
    large: Size | None
    rounds: int
    steps: int

    @property
    def most_cells(self) -> Size:
        """The base with the most cells."""
        return replace(self.base, cells=max(self.cells))

    def alone(self, size: Size, method: Method) -> Case:
        """A method on one device with two threads."""
        # the decoder of a part is a smaller one with the same buckets
        window = size.decoder().window if method.part < 1 else size.window
        size = replace(size, anchors=int(size.anchors * method.part), window=window)
        return Case(size=size, method=method, steps=self.steps)

    def split_over(self, size: Size, method: Method, ranks: int) -> Case:
        """A method on some ranks of one thread."""
        return Case(size=size, method=method, ranks=ranks, threads=1, steps=self.steps)

    def varied_strata(self) -> list[Size]:
        """Measured sizes by K."""
        return [replace(self.base, strata=k) for k in sorted({*self.strata, self.base.strata})]

    def varied_anchors(self) -> list[Size]:
        """Measured sizes by N."""
        return [replace(self.base, anchors=n) for n in sorted({*self.anchors, self.base.anchors})]

    def varied_cells(self) -> list[Size]:
        """Measured sizes by B."""
        return [replace(self.base, cells=b) for b in sorted({*self.cells, self.base.cells})]

    def simulated_by_strata(self) -> list[Size]:
        """Simulated sizes by K."""
        found = {*self.simulated_strata, self.simulated.strata}
        return [replace(self.simulated, strata=k) for k in sorted(found)]

    def simulated_by_anchors(self) -> list[Size]:
        """Simulated sizes by N."""
        found = {*self.simulated_anchors, self.simulated.anchors}
        return [replace(self.simulated, anchors=n) for n in sorted(found)]

    def measured(self) -> list[tuple[Case, int]]:
        """Cases and their rounds, goals first."""
        both = [self.alone(size, m) for size in (self.base, self.most_cells) for m in (EAGER, OURS_ALONE)]
        pairs = ((self.over_strata, OURS_STRATA), (self.over_nodes, OURS_NODES))
        for size, method in pairs:
            both += [self.split_over(size, OURS_ALONE, 1), self.split_over(size, method, 2)]
        others = [*self._others(), *([self.alone(self.large, OURS_ALONE)] if self.large else [])]
        found = dict.fromkeys(others, 1) | dict.fromkeys(both, self.rounds)
        return [(replace(case, steps=1) if case.size == self.large else case, n) for case, n in found.items()]

    def simulations(self) -> list[Case]:
        """Cases to simulate."""
        sizes = [*self.simulated_by_strata(), *self.simulated_by_anchors()]
        cases = [Case(size=size, method=method) for size in sizes for method in self.simulated_methods]
        cases += [Case(size=self.split, method=OURS_ALONE)]
        cases += [Case(size=self.split, method=m, ranks=r) for r in self.ranks for m in SPLIT]
        for size in self.sent:
            cases += [Case(size=size, method=m, ranks=PAPER_GPUS) for m in (PAPER_FORM, OURS_STRATA)]
            cases.append(Case(size=size, method=OURS_ALONE))
        if self.millions:
            for graph in (True, False):
                cases += [
                    Case(size=self.millions, method=OURS_ALONE, graph=graph),
                    Case(size=self.millions, method=OURS_NODES, ranks=2, graph=graph),
                ]
        return list(dict.fromkeys(cases))

    def _others(self) -> Iterator[Case]:
        yield from (self.alone(self.base, method) for method in ALONE)
        for size in (*self.varied_cells(), *self.varied_strata(), *self.varied_anchors()):
            yield from (self.alone(size, method) for method in (EAGER, OURS_ALONE))
        yield self.split_over(self.base, EAGER, 1)
        yield from (self.split_over(self.base, method, 2) for method in TWO_RANKS)


_PAPER = Size(anchors=113_505, strata=32, cells=1)
_PAPER_TABLES = replace(_PAPER, window=320, features=4_700)
"""As benchmarks/paper/tables takes what the paper leaves open."""

FULL = Suite(
    base=Size(anchors=5_400, strata=32, cells=8),
    cells=(256,),
    strata=(8,),
    anchors=(2_700,),
    over_strata=Size(anchors=5_400, strata=32, cells=8),
    over_nodes=Size(anchors=27_000, strata=10, cells=8),
    simulated=_PAPER,
    simulated_methods=(EAGER, CHECKPOINT, PAPER_ALONE, OURS_ALONE),
    simulated_strata=(8, 16, 64),
    simulated_anchors=(5_400, 27_000),
    split=Size(anchors=27_000, strata=10, cells=8),
    ranks=(2, 4, 8),
    millions=Size(anchors=1_000_000, strata=4, cells=1),
    sent=(_PAPER, _PAPER_TABLES),
    large=_PAPER,
    rounds=2,
    steps=2,
)
QUICK = Suite(
    # one stratum has no key: of 9 two ranks have four each that cost something
    base=Size(anchors=2_700, strata=9, cells=8),
    cells=(256,),
    strata=(),
    anchors=(),
    over_strata=Size(anchors=2_700, strata=9, cells=8),
    over_nodes=Size(anchors=5_400, strata=9, cells=8),
    simulated=_PAPER,
    simulated_methods=(EAGER, CHECKPOINT, OURS_ALONE),
    simulated_strata=(8, 64),
    simulated_anchors=(27_000,),
    split=Size(anchors=2_700, strata=8, cells=8),
    ranks=(2, 4),
    millions=None,
    sent=(Size(anchors=5_400, strata=8, cells=1),),
    large=None,
    rounds=1,
    steps=3,
)
