"""Define the spec of fsdp in a plan."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class FullyShard:
    """Parameters, gradients and optimiser state are split over the ranks that average gradients, those of the data axis
    in most plans; a block's are gathered while it works.

    Attributes:
        offload: Keep a rank's part in the host's memory, and let the optimiser work there.
        shard_ranks: Consecutive ranks that they are split among; each group of so many has all of them. None for all.
    """

    offload: bool = False
    shard_ranks: int | None = None

    def no_groups_of(self, ranks: int) -> str:
        """Why so many ranks cannot be divided into such groups; "" where they can be."""
        size = self.shard_ranks
        if size is None or (type(size) is int and size > 1 and ranks % size == 0):
            return ""
        found = "1 rank that averages" if ranks == 1 else f"{ranks} ranks that average"
        allowed = [n for n in range(2, ranks + 1) if ranks % n == 0]
        return (
            f"found {found} gradients, to be divided into groups of as many ranks, 2 or more; choose one of"
            f" {allowed!r}, or None for one group of all"
        )
