"""Define S2, feature parallelism: its row in the table of techniques and the specs of its rules."""

from dataclasses import dataclass

from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.diagnosis.diagnosis import HIGH_INPUT_DIMENSIONALITY
from lightning_amp.techniques.technique import Installer, Target, Technique, on_decoder


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureParallel:
    """S2: the features of every stratum are split over the model axis."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowParallelLinear:
    """S2: a layer that reads all features; its weight, gradient and optimiser state are split over the model axis."""


def _targets(shape: ModelShape) -> list[Target]:
    layers: list[Target] = [(fqn, RowParallelLinear()) for fqn in shape.wide_layers]
    return [*on_decoder(lambda _: FeatureParallel())(shape), *layers]


ROW = Technique(
    title="feature parallel",
    shrinks="[B, F] to [B, F / R]",
    specs=(FeatureParallel, RowParallelLinear),
    installers={
        FeatureParallel: Installer(
            "lightning_amp.techniques.hic.features.decoder:share_features", on_decoder=True
        ),
        RowParallelLinear: Installer("lightning_amp.techniques.hic.features.wide_linear:share_rows"),
    },
    targets=_targets,
    signal=HIGH_INPUT_DIMENSIONALITY,
    choice=("features", "sharded"),
    conflicts={
        "compile": "ranks send parts of a stratum while it is computed, which compile does not look into"
    },
    model_axis=True,
)
