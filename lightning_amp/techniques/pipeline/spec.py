"""Define the spec of a pipeline in a plan."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineStages:
    """The blocks of a list are split over the model axis, in runs, and micro-batches pass through them.

    Attributes:
        ends: One past the last block of every stage, separated by commas, such as "2,4,6"; stage s is on rank s mod the
            ranks of the model axis. "" before it is cut.
        schedule: "gpipe", "1f1b" or "interleaved".
        micro_batches: Of a batch, or as many as it has samples where these are fewer.
        stages_per_rank: More than 1 for "interleaved" only.
    """

    ends: str = ""
    schedule: str = "1f1b"
    micro_batches: int = 4
    stages_per_rank: int = 1
