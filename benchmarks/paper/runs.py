"""The AMP paper's configurations as decoders and plans."""

from dataclasses import dataclass, replace

from benchmarks.decoders import in_forms
from lightning_amp.costs.model_shape import DecoderShape, profile_of_module
from lightning_amp.installing.describe_module import describe
from lightning_amp.planning.memory.peak_model import estimate
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.profiling.profile import Profile
from lightning_amp.simulation.models_without_values import decoder_subject

GIB = 2**30
BUDGET = "24GiB"
WINDOW = 320
"""Anchors per bucket; the paper does not state its own. Half of HiGLUE's default, 960 keys per query: the form that
keeps all probabilities then grows by 0.61 GiB per stratum on 8 ranks, the paper by 0.56 GB. Nothing else was fitted."""

GENES = 2_000
"""Features of the RNA modality beside it."""

ALL = "S1,S2,S3,S4,S5"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A data set of the paper as a decoder."""

    name: str
    anchors: int
    features: int
    strata: int = 32
    dim: int = 128
    window: int = WINDOW

    def decoder(self) -> DecoderShape:
        """Its decoder."""
        return DecoderShape(
            fqn="decoder",
            anchors=self.anchors,
            dim=self.dim,
            features=(self.features,) * self.strata,
            distances=tuple(range(self.strata)),
            attention=True,
            window=self.window,
        )


COARSE = Setting(name="500 kb, 32 strata", anchors=113_505, features=4_700)
"""113,505 vertices of the guidance graph (Section 4.2). The first layer's 77 MB (Section 4.2) are 150 thousand
features of 128 hidden channels, 4,700 per stratum."""
FINE = Setting(name="100 kb, 32 strata", anchors=113_505 - 5_400 + 27_000, features=27_000)
"""The paper has 27 thousand bins in place of 5.4 thousand (Section 4.4); the rest of the graph is taken as the same."""
LIGHT_COARSE = replace(COARSE, name="500 kb, 10 strata", strata=10)
LIGHT_FINE = replace(FINE, name="100 kb, 10 strata", strata=10)


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a plan is carried out: ours, or with what the paper keeps and gathers."""

    retain: bool = False
    gather: bool = False


OURS = Form()


def beside_rna(profile: Profile) -> Profile:
    """The same Hi-C modality next to an RNA one, which decides whether its input counts as high-dimensional."""
    (hic,) = profile.modalities
    return replace(profile, modalities=(replace(hic, scale=hic.features / GENES),))


def make_plan(setting: Setting, strategies: str | None, devices: int, form: Form) -> Plan:
    """A plan with the strategies named, or with those of the policy."""
    subject = decoder_subject(setting.decoder(), batch_size=1)
    shape = describe(subject.module, batch_size=1)
    made = plan(
        beside_rna(profile_of_module(shape)),
        devices=devices,
        device_memory=BUDGET,
        policy="paper",
        strategies=strategies,
        batch_size=1,
        shape=shape,
    )
    made = in_forms(made, [*["retain"] * form.retain, *["gather"] * form.gather])
    assert shape.decoder is not None, "the module is a decoder"
    # as it is simulated
    on_gpu = replace(shape, decoder=replace(shape.decoder, launched=True))
    predicted = estimate(on_gpu, made.axes, model_ranks=made.mesh.model)
    return replace(made, predicted_peak_bytes=predicted.peak_bytes, strata_bytes=predicted.strata_bytes)


def without(strategy: str) -> str:
    """All strategies but one."""
    return ",".join(s for s in ALL.split(",") if s != strategy)
