"""Tables and figures of the ShardTensor paper (Adams et al.) that can be counted or predicted without a GPU.

    python -m benchmarks.domain.paper [--only NAME ...] [--write]

`--write` puts the tables into docs/paper/shardtensor.md. Nothing is run: steps are counted on fake tensors with the
operators that run on CUDA, seconds follow from the data sheet of a B200 (TF32), all ranks in one domain of NVLink as
those of the paper's GB200, no communication hidden. The vision transformer has 16 layers of width 768 over patches of
16 (113 million parameters), as far as the text of the paper says. Three minutes.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import Net, ViT
from benchmarks.page import ROOT, asked_tables, origin, show_tables, table
from lightning_amp.costs.device_rates import rates_for
from lightning_amp.footprint.run.run_settings import BY_ITSELF
from lightning_amp.footprint.target_device import settings_of
from lightning_amp.lightning.profiling.count_evaluation import Batch, Evaluated, EvaluationCount
from lightning_amp.lightning.profiling.dry_steps import DrySteps
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.planning.modules.candidates import as_it_is
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.sequence.row import SequenceParallel

PAGE = ROOT / "docs" / "paper" / "shardtensor.md"
B200 = rates_for("B200", products="tf32").on_nodes_of(16)
MIB = 2**20
LAYERS = 20
TABLE_I = {
    (1, 1024): (80.1, 20),
    (1, 8192): (5120.6, 160),
    (2, 1024): (80.1, 5120),
    (2, 8192): (5120.6, 40_960),
    (3, 1024): (80.1, 1_310_720),
    (3, 8192): (5120.6, 10_485_760),
}
"""Dims of 256 points and features: weights and activations in MB."""
RANKS, LENGTHS = (1, 2, 4, 8, 16), (4096, 32_768, 262_144, 1_048_576)
SIDES = (512, 1024, 1536, 2048, 3072, 4096)
HEADER = ["one sample", "ranks", "a step", "faster than 1 rank", "peak of a rank", "sent by a rank"]


class Linears(Net):
    """Layers of as many inputs as outputs."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(features, features) for _ in range(LAYERS)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The sum, which keeps nothing."""
        total: Tensor = self.layers(batch).sum()
        return total


class Attention(Net):
    """Attention of 16 heads of 64 channels, with its projections."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(1024, 3072), nn.Linear(1024, 1024)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The mean of squares."""
        q, k, v = (part.unflatten(-1, (16, 64)).transpose(1, 2) for part in self.into(batch).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.out(mixed).square().mean()


class Infers(ViT):
    """The vision transformer, which predicts."""

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The loss, which keeps nothing."""
        return self.loss(batch)


def inferred(side: int, ranks: int) -> Evaluated:
    """Bytes and seconds of rank 0 without gradients, with what it sends."""
    # on one rank torch would compute a layer in one operator, whose temporaries nobody sees
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.device("meta"):
        module, batch = Infers(side, 768, 16, 16, 2, 12), torch.empty(1, 3, side, side)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.strategy._lightning_module = module
    counter = EvaluationCount(trainer, "predict_step", several=False)
    counter.rates = B200
    steps = DrySteps("sequence", SequenceParallel(dims="batch:2"), ranks)
    if ranks > 1:
        steps.put(module)
    with settings_of("cuda"):
        found = counter.count(Batch(0, batch), ())
    return found._replace(seconds=found.seconds + steps.sent_seconds(B200.links))


def counted(side: int, dims: int, ranks: int) -> dict[str, Any]:
    """Seconds, peak and bytes sent of rank 0; parameters and the batch are on the device "meta"."""
    with torch.device("meta"):
        module, batch = ViT(side, 768, 16, 16, dims, 12), torch.empty(1, 3, *[side] * dims)
    return step_of(module, batch, "batch:2", ranks)


def step_of(module: Any, batch: torch.Tensor, dims: str, ranks: int) -> dict[str, Any]:
    """The same of any module whose batch is split."""
    steps = DrySteps("sequence", SequenceParallel(dims=dims), ranks) if ranks > 1 else None
    step = StepOfModule(module, lambda: batch, run_settings=BY_ITSELF, steps=steps)
    with settings_of("cuda"):
        seen = step.profiled(B200)
    return {
        "seconds": as_it_is(seen, 1).seconds,
        "peak": seen.profile.peak_bytes,
        "activations": max(moment.by_kind["activations"] for moment in seen.profile.timeline),
        "sent": sum(one.n_bytes for one in steps.sent) if steps is not None else 0,
    }


def linear_layers() -> Iterator[str]:
    """Table I."""
    made = []
    for (dims, features), (weights, activations) in TABLE_I.items():
        with torch.device("meta"):
            module, batch = Linears(features), torch.empty(1, *[256] * dims, features)
        held = step_of(module, batch, "", 1)
        own = sum(p.nbytes for p in module.parameters()) / MIB
        made.append(
            [
                " x ".join(["256"] * dims) + f", {features:,}",
                f"{weights:,} and {activations:,}",
                f"{own:,.1f} and {held['activations'] / MIB:,.0f}",
            ]
        )
    yield from table(["points, features", "the paper, MB of weights and activations", "counted, MiB"], made)


def ring() -> Iterator[str]:
    """Figure 2."""
    made = []
    for length in LENGTHS:
        with torch.device("meta"):
            module, batch = Attention(), torch.empty(1, length, 1024)
        seconds = [step_of(module, batch, "batch:1", ranks)["seconds"] for ranks in RANKS]
        made.append([f"{length:,}", f"{seconds[0]:.4f} s", *(f"{seconds[0] / one:.1f}" for one in seconds[1:])])
    yield from table(["tokens", "1 rank", *(f"{ranks} ranks, faster" for ranks in RANKS[1:])], made)


def images() -> Iterator[str]:
    """Figure 3."""
    made = []
    for side, dims in ((1024, 2), (2048, 2), (4096, 2), (1024, 3)):
        found = {ranks: counted(side, dims, ranks) for ranks in (1, 4, 8, 16)}
        made += [
            [
                " x ".join([f"{side:,}"] * dims),
                f"{ranks}",
                f"{one['seconds']:.3f} s",
                f"{found[1]['seconds'] / one['seconds']:.1f}",
                format_bytes(one["peak"]),
                format_bytes(one["sent"]),
            ]
            for ranks, one in found.items()
        ]
    yield from table(HEADER, made)


def inference() -> Iterator[str]:
    """Figure 3, inference."""
    made = []
    for side in (1024, 2048, 4096):
        found = {ranks: inferred(side, ranks) for ranks in RANKS}
        times = [f"{found[1].seconds / found[ranks].seconds:.1f}" for ranks in RANKS[1:]]
        peaks = f"{format_bytes(found[1].peak)} and {format_bytes(found[16].peak)}"
        made.append([f"{side:,} x {side:,}", f"{found[1].seconds:.4f} s", *times, peaks])
    columns = ["one sample", "1 rank", *(f"{ranks} ranks, faster" for ranks in RANKS[1:]), "peak of 1 and of 16"]
    yield from table(columns, made)


def memory() -> Iterator[str]:
    """Figure 4: peaks of a rank, and how far they are from a + b side^2."""
    made = []
    for ranks in (1, 4, 16):
        peaks = np.array([counted(side, 2, ranks)["peak"] for side in SIDES]) / 2**30
        terms = np.stack([np.ones(len(SIDES)), np.square(SIDES, dtype=float)], axis=1)
        (base, slope), *_ = np.linalg.lstsq(terms, peaks, rcond=None)
        off = np.abs(terms @ (base, slope) / peaks - 1).max()
        fit = f"{base:.2f} + {slope * MIB:.2f} (side / 1,024)^2"
        made.append([f"{ranks}", *(f"{peak:.1f}" for peak in peaks), fit, f"{off:.1%}"])
    yield from table(["ranks", *(f"{side:,}" for side in SIDES), "GiB, fitted", "furthest from it"], made)


SECTIONS = {
    "Table I, linear layers": linear_layers,
    "Figure 2, ring attention, training": ring,
    "Figure 3, vision transformer, training": images,
    "Figure 3, vision transformer, inference": inference,
    "Figure 4, memory by the side of an image": memory,
}
"""Heading of every part, and its lines."""


def main() -> None:
    """Print or write the tables."""
    asked = asked_tables(__doc__, PAGE, SECTIONS)
    warnings.simplefilter("ignore")
    first = f"Counted or predicted. {origin('python -m benchmarks.domain.paper --write')}"
    show_tables(asked, PAGE, "domain.paper", SECTIONS, first=first)


if __name__ == "__main__":
    main()
