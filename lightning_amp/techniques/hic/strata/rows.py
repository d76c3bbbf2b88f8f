"""Define stream, compile and strata: their rows in the table of techniques and the specs of their rules."""

from dataclasses import dataclass

from lightning_amp.techniques.hic.block_sizes import block_cells
from lightning_amp.techniques.technique import Installer, Technique, on_decoder


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeStrata:
    """Nothing of a stratum is kept for the backward pass, where it is computed again."""


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


STREAM = Technique(
    title="stream strata",
    shrinks="K strata to one, computed once",
    specs=(StreamStrata,),
    installers={
        StreamStrata: Installer("lightning_amp.techniques.hic.strata.stream:stream_strata", on_decoder=True)
    },
    targets=on_decoder(
        lambda d: StreamStrata(cells=block_cells(max(d.features), anchors=d.anchors, launched=d.launched))
    ),
    choice=("activations", "stream"),
)
COMPILE = Technique(
    title="compile strata",
    shrinks="kernels of a stratum, by torch.compile",
    specs=(CompileStrata,),
    installers={
        CompileStrata: Installer(
            "lightning_amp.techniques.hic.strata.compile:compile_strata", on_decoder=True
        )
    },
    targets=on_decoder(lambda _: CompileStrata()),
    choice=("kernels", "compiled"),
)
STRATA = Technique(
    title="strata parallel",
    shrinks="K strata to those of a rank",
    specs=(StrataParallel,),
    installers={
        StrataParallel: Installer(
            "lightning_amp.techniques.hic.strata.strata_parallel:share_strata", on_decoder=True
        )
    },
    # the ranks' runs depend on the mesh and on the other choices, and are filled in later
    targets=on_decoder(lambda _: StrataParallel(ends="")),
    choice=("placement", "strata"),
    model_axis=True,
)
