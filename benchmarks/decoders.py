"""Define the decoders that benchmarks measure: their sizes, the FLOP of a step, and the forms of their techniques.

Legend: N anchors, K strata, B cells in a step over all ranks, D channels, w anchors in a bucket of attention.
"""

from dataclasses import dataclass, replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_amp.costs.model_shape import WINDOW_PER_STRATUM, DecoderShape
from lightning_amp.costs.rule import Spec
from lightning_amp.planning.plan.plan import Axes, Plan
from lightning_amp.simulation.models_without_values import DecoderAlone
from lightning_amp.techniques.hic.rows import ChunkedAttention, HiddenParallel


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
