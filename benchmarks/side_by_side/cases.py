"""What is compared: sizes, ways to run a decoder (methods), and cases, which are both together on some ranks.

Legend: N anchors, K strata, B cells in a step over all ranks, D channels, w anchors in a bucket of attention.
"""

import json
from dataclasses import asdict, dataclass, field, replace

from benchmarks.decoders import Size

OURS = ("S4", "fused", "sparse", "stream")
"""Strategies of our rows on one device."""
PAPER = ("S2", "S3", "S4", "S5")
"""Strategies of the policy `paper` beside S1 where its budget is exceeded; S2 and S5 need ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A way to run a decoder.

    Attributes:
        name: In tables and pictures.
        strategies: What is installed.
        package: Whether attention is that of the `local-attention` package; simulated is the reference's own, which
            computes the same.
        wrapper: What a decoder is wrapped in on several ranks, a name in `wrappers.WRAPPERS`; "" for nothing.
        retain: Whether S3 keeps its probabilities, as the paper does.
        part: Share of the anchors that is decoded; below 1 it is another computation.
    """

    name: str
    strategies: tuple[str, ...] = ()
    package: bool = False
    wrapper: str = ""
    retain: bool = False
    part: float = 1.0


EAGER = Method(name="eager", package=True)
CHECKPOINT = Method(name="checkpointed strata (HiGLUE)", strategies=("recompute",), package=True)
SUBSAMPLE = Method(name="a quarter of the anchors (HiGLUE), not exact", package=True, part=0.25)
PAPER_ALONE = Method(name="S3 + S4, one device", strategies=("S3", "S4"))
OURS_ALONE = Method(name="ours, one device", strategies=OURS)
DDP = Method(name="DDP", package=True, wrapper="ddp")
FSDP = Method(name="FSDP2", package=True, wrapper="fsdp")
FSDP_CHECKPOINT = Method(name="FSDP2 + checkpointing", package=True, wrapper="fsdp-checkpoint")
PAPER_RANKS = Method(name="policy paper, S1-S5", strategies=PAPER)
PAPER_FORM = Method(name="policy paper, S1-S5, in the paper's form", strategies=PAPER, retain=True)
OURS_STRATA = Method(name="ours, strata over ranks", strategies=(*OURS, "strata"))
OURS_NODES = Method(name="ours, anchors over ranks", strategies=(*OURS, "nodes"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A method at a size.

    Attributes:
        size: The size.
        method: The method.
        ranks: Processes.
        threads: Threads of each; does not matter where a case is simulated.
        steps: Steps in one process; of several the first is not timed.
        graph: Whether the anchors' latents come from a graph that is trained too; simulated only.
    """

    size: Size
    method: Method
    ranks: int = 1
    threads: int = 2
    steps: int = field(default=2, compare=False)
    graph: bool = False

    def small(self) -> "Case":
        """The same with few anchors, to load what a first step loads; the plan is the same."""
        size = replace(self.size, anchors=160 * self.ranks, window=64, features=0)
        return replace(self, size=size, steps=1)

    def to_json(self) -> str:
        """As text for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Case":
        """What `to_json` wrote."""
        plain = json.loads(text)
        method = plain["method"] | {"strategies": tuple(plain["method"]["strategies"])}
        return cls(**plain | {"size": Size(**plain["size"]), "method": Method(**method)})
