"""What is compared: sizes, ways to run a decoder (methods), and cases, which are both together on some ranks.

Legend: N anchors, K strata, B cells in a step over all ranks, D channels, w anchors in a bucket of attention.
"""

from dataclasses import dataclass, replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_amp.costs.device_rates import CPU_CORE
from lightning_amp.costs.model_shape import WINDOW_PER_STRATUM, DecoderShape, profile_of_module
from lightning_amp.costs.rule import Spec
from lightning_amp.installing.describe_module import describe
from lightning_amp.planning.plan.plan import Axes, Plan
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.simulation.models_without_values import DecoderAlone, decoder_subject
from lightning_amp.techniques.hic.rows import ChunkedAttention, HiddenParallel

OURS = ("S4", "fused", "sparse", "stream")
"""Strategies of our rows on one device."""
PAPER = ("S2", "S3", "S4", "S5")
"""Strategies of the policy `paper`, with S1, where its budget is exceeded; S2 and S5 need ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A decoder and its batch.

    Attributes:
        anchors: N.
        strata: K.
        cells: B, over all ranks.
        dim: D.
        window: w; HiGLUE's default of 20 K if 0.
        features: Features of every stratum; those of one chromosome, N - k, if 0.
    """

    anchors: int
    strata: int
    cells: int
    dim: int = 128
    window: int = 0
    features: int = 0

    def decoder(self) -> DecoderShape:
        """The decoder."""
        return DecoderShape(
            fqn="decoder",
            anchors=self.anchors,
            dim=self.dim,
            features=tuple(self.features or self.anchors - k for k in range(self.strata)),
            distances=tuple(range(self.strata)),
            attention=True,
            window=self.window or WINDOW_PER_STRATUM * self.strata,
        )

    def __str__(self) -> str:
        return f"N {self.anchors:,}, K {self.strata}, B {self.cells}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A way to run a decoder.

    Attributes:
        name: In tables.
        strategies: What is installed.
        package: Whether attention is that of the `local-attention` package; simulated is the reference's own, which
            computes the same.
        wrapper: What a decoder is wrapped in on several ranks, a name in `training.WRAPPERS`; "" for nothing.
        part: Share of the anchors that is decoded; below 1 it is another computation.
    """

    name: str
    strategies: tuple[str, ...] = ()
    package: bool = False
    wrapper: str = ""
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
    """

    size: Size
    method: Method
    ranks: int = 1
    threads: int = 2

    def small(self) -> "Case":
        """The same with few anchors, to load what a first step loads; the plan is the same."""
        return replace(self, size=replace(self.size, anchors=160 * self.ranks, window=64, features=0))


def plan_of(case: Case, *, launched: bool = False) -> Plan:
    """By the package's own planner, all ranks on the model axis; no rules where the method is none of ours.

    Args:
        case: What is planned.
        launched: As for a device that has its operators launched.
    """
    meta = decoder_subject(case.size.decoder(), batch_size=case.size.cells).module
    shape = describe(meta, batch_size=case.size.cells)
    assert shape.decoder is not None, "the subject is a decoder"
    shape = replace(shape, decoder=replace(shape.decoder, threads=case.threads))
    strategies = case.method.strategies
    # ranks of a wrapper are not the plan's
    ranks = case.ranks if strategies and not case.method.wrapper else 1
    return plan(
        profile_of_module(shape),
        devices=ranks,
        strategies=["S1", *strategies],
        batch_size=case.size.cells,
        shape=shape,
        rates=replace(CPU_CORE, launches=launched),
    )


def in_forms(usual: Plan, forms: list[str]) -> Plan:
    """A plan with the forms "retain" and "gather" of its rules."""

    def form(spec: Spec) -> Spec:
        if isinstance(spec, ChunkedAttention):
            return replace(spec, retain="retain" in forms)
        return replace(spec, gather="gather" in forms) if isinstance(spec, HiddenParallel) else spec

    rules = tuple(replace(rule, spec=form(rule.spec)) for rule in usual.rules)
    return replace(usual, rules=rules, axes=Axes.of(usual.strategies, (rule.spec for rule in rules)))


def flops(size: Size) -> int:
    """FLOP of the products of matrices in one step of the eager decoder."""
    with torch.device("meta"):
        module = DecoderAlone(size.decoder())
        u, v = (torch.empty(n, size.dim, requires_grad=True) for n in (size.cells, size.anchors))
        x = torch.empty(size.cells, sum(size.decoder().features))
        cells = {"batch": torch.empty(size.cells, dtype=torch.int64), "library": torch.empty(size.cells, 1)}
        with FlopCounterMode(display=False) as counter:
            module.decoder(u, v, x=x, **cells).backward()
    return counter.get_total_flops()
