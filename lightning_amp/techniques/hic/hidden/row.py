"""Define S5, hidden-dimension parallelism: its row in the table of techniques and the spec of its rules."""

from dataclasses import dataclass

from lightning_amp.diagnosis.diagnosis import HEAVY_DECOMPOSITION
from lightning_amp.techniques.technique import Installer, Technique, on_decoder


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenParallel:
    """S5: the hidden dimension of the decoder is split over the model axis.

    Attributes:
        gather: Gather keys and values over the ranks before every attention, as the paper does without S4, instead
            of adding up scores.
    """

    gather: bool = False

    @property
    def choice(self) -> tuple[str, str] | None:
        """Its choice on an axis of the decoder, where it is not the row's."""
        return ("placement", "hidden-gathered") if self.gather else None


ROW = Technique(
    title="hidden-dimension parallel",
    shrinks="[N, D] to [N, D / R]",
    specs=(HiddenParallel,),
    installers={
        HiddenParallel: Installer("lightning_amp.techniques.hic.hidden.decoder:share_hidden", on_decoder=True)
    },
    targets=on_decoder(lambda _: HiddenParallel()),
    signal=HEAVY_DECOMPOSITION,
    choice=("placement", "hidden"),
    conflicts={
        "fused": "under S5 the scores are sums over the ranks, which fused attention never holds; use S3",
        "sdpa": "under S5 the scores are sums over the ranks, which torch's kernels keep; use S3",
        "compile": "ranks send parts of a stratum while it is computed, which compile does not look into",
        "strata": "both split the decoder over the model axis, which has room for one placement",
        "nodes": "both split the decoder over the model axis, which has room for one placement",
    },
    model_axis=True,
)
