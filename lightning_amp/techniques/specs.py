"""What a rule can ask for: one frozen dataclass per technique; the installers are found by its type."""

from dataclasses import Field, dataclass
from typing import Any, ClassVar, Protocol


class Spec(Protocol):
    """Any frozen dataclass whose fields are numbers, texts, booleans or None, which JSON keeps as they are."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataParallel:
    """S1: every rank of the data axis trains on its share of the cells; gradients are averaged by cells."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareBatchStatistics:
    """Batch normalisation over the cells of all ranks of the data axis."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceCells:
    """Every rank gets the same number of cells and nearly the same number of contacts in a step."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureParallel:
    """S2: the features of every stratum are split over the model axis."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowParallelLinear:
    """S2: a layer that reads all features; its weight, gradient and optimiser state are split over the model axis."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkedAttention:
    """S3: local attention a few buckets at a time.

    Attributes:
        buckets: Buckets of `window` queries in one chunk.
        retain: Keep every chunk's probabilities for the backward pass, as the paper does, instead of
            recomputing them.
    """

    buckets: int
    retain: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyFirstDecode:
    """S4: the keys of a stratum's anchors are selected before the product with the cells."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenParallel:
    """S5: the hidden dimension of the decoder is split over the model axis.

    Attributes:
        gather: Gather keys and values over the ranks before every attention, as the paper does without S4, instead
            of adding up scores.
    """

    gather: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedAttention:
    """Local attention whose scores exist for one chunk of queries only, and whose backward pass is written out.

    Attributes:
        keep: Keep the weights of all queries for the backward pass instead of computing them twice.
    """

    keep: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SdpaAttention:
    """Local attention in torch's fused kernels: no scores, few operators, and 3 to 5 tensors [N, D] kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseLikelihood:
    """Likelihood of all features as if their counts were zero, and a correction for those that are not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DomainParallel:
    """The anchors of the decoder are split over the model axis, in whole buckets of attention.

    Attributes:
        vertices: v comes with the own rows only, from a graph encoder whose vertices are split too.
    """

    vertices: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class VertexParallel:
    """The vertices of the graph are split over the model axis; a rank has its own rows of embedding, noise and v.

    Attributes:
        modality: Whose vertices are the anchors of the decoder that is split.
        window: Anchors of a bucket of its attention.
    """

    modality: str
    window: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeStrata:
    """Nothing of a stratum is kept for the backward pass, where it is computed again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeBlock:
    """Nothing of a block of any module is kept for the backward pass but its inputs; there it is computed again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkBlock:
    """Parts of a block of any module run in chunks, in both passes; or of what a module computes after its blocks.

    Attributes:
        budget_bytes: Most bytes that it may take beyond its arguments and parameters: in training those of its
            forward and backward pass with what is kept between them, else those of its forward pass.
        after: Calls of blocks in a forward pass of the module, where the rule is for what follows the last of them,
            such as head and loss; 0 for a block.
    """

    budget_bytes: int
    after: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamStrata:
    """Forward and backward pass of one stratum after the other, inside the loss; nothing is computed twice.

    Attributes:
        cells: Cells of a batch whose scores of one stratum exist at the same time.
        workers: Strata that a CPU with as many threads computes side by side, and that are alive then.
    """

    cells: int
    workers: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileStrata:
    """A stratum's key and likelihood run through torch.compile.

    Attributes:
        mode: "default", or "reduce-overhead" for CUDA graphs.
    """

    mode: str = "default"


@dataclass(frozen=True, kw_only=True, slots=True)
class StrataParallel:
    """The strata of the decoder are split over the model axis, in runs.

    Attributes:
        ends: One past the last stratum of every rank, separated by commas, such as "14,24,32".
    """

    ends: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineStages:
    """The blocks of a list are split over the model axis, in runs, and micro-batches pass through them.

    Attributes:
        ends: One past the last block of every stage, separated by commas, such as "2,4,6"; stage s is on rank s mod the
            ranks of the model axis.
        schedule: "gpipe", "1f1b" or "interleaved".
        micro_batches: Of a batch, or as many as it has samples where these are fewer.
        stages_per_rank: More than 1 for "interleaved" only.
    """

    ends: str
    schedule: str = "1f1b"
    micro_batches: int = 4
    stages_per_rank: int = 1
