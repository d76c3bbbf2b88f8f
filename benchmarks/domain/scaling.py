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
from typing import Any

import torch

from benchmarks.domain.models import ViT
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
    steps = DrySteps("sequence", SequenceParallel(dims="batch:2"), ranks) if ranks > 1 else None
    step = StepOfModule(module, lambda: batch, around=BY_ITSELF, steps=steps)
    seen = step.profiled(H100)
    return {
        "seconds": as_it_is(seen, 1).seconds,
        "peak": seen.profile.peak_bytes,
        "sent": sum(one.n_bytes for one in steps.sent) if steps is not None else 0,
    }


def main() -> None:
    """Count, and print a table for the docs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--sides", type=int, nargs="*", default=[1024, 2048, 4096])
    parser.add_argument("--volume", type=int, nargs="*", default=[1024])
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    print(
        "| one sample | ranks | a step | faster than 1 rank | peak of a rank | sent by a rank |\n"
        + "|---" * 6
        + "|"
    )
    for side, dims in [*((side, 2) for side in asked.sides), *((side, 3) for side in asked.volume)]:
        one = None
        for ranks in asked.ranks:
            found = counted(side, dims, ranks)
            one = one or found["seconds"] * ranks
            cells = (
                " x ".join([f"{side:,}"] * dims),
                ranks,
                f"{found['seconds']:.3f} s",
                f"{one / found['seconds']:.1f}",
                format_bytes(found["peak"]),
                format_bytes(found["sent"]),
            )
            print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
