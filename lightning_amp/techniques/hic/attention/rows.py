"""Define chunked (S3), fused and sdpa attention: their rows in the table of techniques and the specs of their rules."""

from dataclasses import dataclass

from lightning_amp.diagnosis.diagnosis import ATTENTION_DECODER
from lightning_amp.techniques.hic.block_sizes import chunk_buckets
from lightning_amp.techniques.technique import Installer, Technique, on_decoder


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

    @property
    def choice(self) -> tuple[str, str] | None:
        """Its choice on an axis of the decoder, where it is not the row's."""
        return ("attention", "chunked-retained") if self.retain else None


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


INSTALL = "lightning_amp.techniques.hic.attention.install"

S3 = Technique(
    title="chunked attention",
    shrinks="[N, 3 w] to [C, 3 w]",
    specs=(ChunkedAttention,),
    installers={ChunkedAttention: Installer(f"{INSTALL}:chunked")},
    targets=on_decoder(lambda d: ChunkedAttention(buckets=chunk_buckets(d.window)), "key.attention"),
    signal=ATTENTION_DECODER,
    choice=("attention", "chunked"),
    conflicts={
        "fused": "both say how attention is computed; fused needs less memory and is faster",
        "sdpa": "both say how attention is computed",
        "recompute": "chunks keep what they are computed from; use stream, or fused",
    },
)
FUSED = Technique(
    title="fused attention",
    shrinks="[N, 3 w] to [C, 3 w], and all copies of keys and values",
    specs=(FusedAttention,),
    installers={FusedAttention: Installer(f"{INSTALL}:fused")},
    targets=on_decoder(lambda _: FusedAttention(), "key.attention"),
    choice=("attention", "fused"),
    conflicts={"sdpa": "both say how attention is computed"},
)
SDPA = Technique(
    title="sdpa attention",
    shrinks="[N, 3 w] to nothing, in torch's fused kernels",
    specs=(SdpaAttention,),
    installers={SdpaAttention: Installer(f"{INSTALL}:sdpa")},
    targets=on_decoder(lambda _: SdpaAttention(), "key.attention"),
    choice=("attention", "sdpa"),
)
