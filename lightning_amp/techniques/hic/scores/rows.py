"""Define key-first decode (S4) and the sparse likelihood: their rows in the table of techniques, and specs."""

from dataclasses import dataclass

from lightning_amp.diagnosis.diagnosis import HIGH_INPUT_DIMENSIONALITY
from lightning_amp.techniques.technique import Installer, Technique, on_decoder


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyFirstDecode:
    """S4: the keys of a stratum's anchors are selected before the product with the cells."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseLikelihood:
    """Likelihood of all features as if their counts were zero, and a correction for those that are not."""


S4 = Technique(
    title="key-first decode",
    shrinks="[B, N] to [B, F_k]",
    specs=(KeyFirstDecode,),
    installers={
        KeyFirstDecode: Installer("lightning_amp.techniques.hic.scores.s4_key_first:decode_key_first")
    },
    targets=on_decoder(lambda _: KeyFirstDecode(), "decode"),
    signal=HIGH_INPUT_DIMENSIONALITY,
    choice=("decode", "key-first"),
)
SPARSE = Technique(
    title="sparse likelihood",
    shrinks="tensors [B, F_k] of the likelihood to its gradients",
    specs=(SparseLikelihood,),
    installers={
        SparseLikelihood: Installer("lightning_amp.techniques.hic.scores.s4_key_first:likelihood_of_nonzeros")
    },
    targets=on_decoder(lambda _: SparseLikelihood(), "likelihood"),
    choice=("likelihood", "sparse"),
)
