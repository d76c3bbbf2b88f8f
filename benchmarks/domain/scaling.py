"""Predict a training step of a large vision transformer on 1 to 16 H100, every sample split: seconds and memory.

    python -m benchmarks.domain.scaling [--ranks 1 2 4 8 16] [--sides 1024 2048 4096] [--volume 1024]

The transformer has 16 layers of width 768 over patches of 16 (113 million parameters), as that of Figure 3 of the
ShardTensor paper as far as its text says. Steps are counted on fake tensors in one process; seconds follow from the
operators, with the rates of an H100's data sheet (TF32), and from the collectives, none of them hidden. These are
predictions: nothing was run on a GPU. As in the paper's machine all ranks are in one domain of NVLink; its figures are
of GB200.
"""

import argparse
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.domain.models import ViT
from benchmarks.page import table
from lightning_amp.costs.device_rates import rates_for
from lightning_amp.footprint.inner_run import BY_ITSELF
from lightning_amp.lightning.profiling.dry_steps import DrySteps
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.planning.modules.candidates import as_it_is
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.sequence.row import SequenceParallel

H100 = rates_for("H100", products="tf32").on_nodes_of(16)


def counted(side: int, dims: int, ranks: int) -> dict[str, Any]:
    """Seconds, peak and bytes sent of rank 0; parameters and the batch are on the device "meta"."""
    with torch.device("meta"):
        module, batch = ViT(side, 768, 16, 16, dims, 12), torch.empty(1, 3, *[side] * dims)
    return step_of(module, batch, "batch:2", ranks)


def step_of(module: Any, batch: torch.Tensor, dims: str, ranks: int) -> dict[str, Any]:
    """The same of any module whose batch is split."""
    steps = DrySteps("sequence", SequenceParallel(dims=dims), ranks) if ranks > 1 else None
    step = StepOfModule(module, lambda: batch, around=BY_ITSELF, steps=steps)
    seen = step.profiled(H100)
    return {
        "seconds": as_it_is(seen, 1).seconds,
        "peak": seen.profile.peak_bytes,
        "activations": max(moment.by_kind["activations"] for moment in seen.profile.timeline),
        "sent": sum(one.n_bytes for one in steps.sent) if steps is not None else 0,
    }


HEADER = ["one sample", "ranks", "a step", "faster than 1 rank", "peak of a rank", "sent by a rank"]


def rows(sides: Sequence[int], volumes: Sequence[int], numbers: Sequence[int]) -> Iterator[list[str]]:
    """Of images and of volumes, on numbers of ranks of which the first is 1."""
    for side, dims in [*((side, 2) for side in sides), *((side, 3) for side in volumes)]:
        one = None
        for ranks in numbers:
            found = counted(side, dims, ranks)
            one = one or found["seconds"] * ranks
            yield [
                " x ".join([f"{side:,}"] * dims),
                f"{ranks}",
                f"{found['seconds']:.3f} s",
                f"{one / found['seconds']:.1f}",
                format_bytes(found["peak"]),
                format_bytes(found["sent"]),
            ]


def main() -> None:
    """Count, and print a table for the docs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--sides", type=int, nargs="*", default=[1024, 2048, 4096])
    parser.add_argument("--volume", type=int, nargs="*", default=[1024])
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    for line in table(HEADER, rows(asked.sides, asked.volume, asked.ranks)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
