"""Compute the seconds of ring collectives over links whose bandwidth depends on where the ranks are.

A group of G ranks, alpha seconds per message, beta bytes per second to the next rank of the ring:

    all-gather      (G - 1) n / beta + (G - 1) alpha             n = the bytes that each rank contributes
    reduce-scatter  (G - 1) / G n / beta + (G - 1) alpha         n = the bytes that each rank puts in
    all-reduce      2 (G - 1) / G n / beta + 2 (G - 1) alpha     n = the bytes that each rank puts in
    exchange        n / beta + alpha                             n = the bytes to its neighbours that each rank puts in
    all-to-all      the same                                     n = the bytes to all others

These are Eq. 1 to 3 of Singh et al. 2024 (AxoNN), with the latency that their third assumption leaves out: strata send
many small messages. Bandwidth is placement-aware (their Eq. 10). Groups of an axis nest inside those of the next; with
I ranks in the axes nested inside this one, and P ranks per node:

    beta = beta_intra                                       where I G <= P: the group lies in a node
    beta = min(beta_intra, beta_inter / max(min(P, I), A))  elsewhere

In the second case min(P, I) rings leave a node at once and share its A network adapters. A ring uses one adapter, and
is no faster than its slowest link, which may lie inside of a node.

A group of one rank sends nothing. Where `calibrate --links` has measured a collective, alpha is what its rounds take to
start, and beta is multiplied by the share of it that its ring reaches. Known limits: rings only, no overlap with
computation, equal links; libraries that spread a ring over several adapters are faster between nodes than predicted,
where nothing was measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Literal, get_args

from lightning_amp.errors import PlanError

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "exchange", "all_to_all"]
WITHIN, BETWEEN = "within a node", "between nodes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """How devices are connected.

    Attributes:
        intra_bandwidth: Bytes per second between two ranks of a node, one way.
        inter_bandwidth: Bytes per second between two nodes, one way, by all adapters of a node.
        latency: Seconds to start a message.
        adapters: Network adapters of a node.
        collectives: Measured ones, by place ("within a node" or "between nodes") and kind: seconds to start a round,
            and the share of the bandwidth that they reach. Of others these are `latency` and 1.
    """

    intra_bandwidth: float
    inter_bandwidth: float
    latency: float
    ranks_per_node: int
    adapters: int = 1
    collectives: Mapping[str, Mapping[str, list[float]]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Refuse links that cannot be.

        Raises:
            PlanError: A number is out of range.
        """
        speeds = (self.intra_bandwidth, self.inter_bandwidth)
        if not (all(0 < s <= inf for s in speeds) and isfinite(self.latency) and self.latency >= 0):
            raise PlanError(
                f"{self!r} is invalid; bandwidths are above 0 bytes per second, the latency is 0 seconds or more"
            )
        if not all(type(n) is int and n >= 1 for n in (self.ranks_per_node, self.adapters)):
            raise PlanError(f"{self!r}: ranks_per_node and adapters have to be whole numbers of 1 or more")
        of_kinds = [pair for kinds in self.collectives.values() for pair in kinds.items()]
        if not {*self.collectives} <= {WITHIN, BETWEEN} or not all(
            kind in get_args(Kind) and isfinite(start) and start >= 0 and 0 < share < inf
            for kind, (start, share) in of_kinds
        ):
            raise PlanError(
                f"{self!r} is invalid; collectives are by {WITHIN!r} or {BETWEEN!r}, then by one of"
                f" {', '.join(get_args(Kind))}: pairs of seconds, 0 or more, and a share above 0; calibrate again"
            )

    def bandwidth(self, ranks: int, *, inner: int = 1) -> float:
        """Bytes per second between neighbours in a ring.

        Args:
            inner: Ranks in the axes nested inside this group's.
        """
        if inner * ranks <= self.ranks_per_node:
            return self.intra_bandwidth
        rings = min(self.ranks_per_node, inner)
        return min(self.intra_bandwidth, self.inter_bandwidth / max(rings, self.adapters))

    def of_kind(self, kind: Kind, ranks: int, *, inner: int = 1) -> tuple[float, float]:
        """Seconds to start a round of a collective, and its bytes per second; arguments as of `bandwidth`."""
        place = WITHIN if inner * ranks <= self.ranks_per_node else BETWEEN
        start, share = self.collectives.get(place, {}).get(kind, (self.latency, 1.0))
        return start, share * self.bandwidth(ranks, inner=inner)


def rounds(kind: Kind, ranks: int) -> tuple[int, float]:
    """Rounds of a collective, and the part of what a rank contributes that it sends in each."""
    if kind in ("exchange", "all_to_all"):
        return 1, 1.0
    # of a ring, each of which passes on one of G parts; the parts of an all-gather are whole contributions
    return (2 if kind == "all_reduce" else 1) * (ranks - 1), 1.0 if kind == "all_gather" else 1 / ranks


def collective_seconds(kind: Kind, n_bytes: float, ranks: int, links: Links, *, inner: int = 1) -> float:
    """Seconds until every rank of the group has its result.

    Args:
        n_bytes: Contributed by each rank; to an exchange, for all of its neighbours.
        inner: Ranks in the axes nested inside this group's.
    """
    if ranks == 1:
        return 0.0
    start, bandwidth = links.of_kind(kind, ranks, inner=inner)
    times, part = rounds(kind, ranks)
    return times * (n_bytes * part / bandwidth + start)
